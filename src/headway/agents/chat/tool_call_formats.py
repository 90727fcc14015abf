"""The forms in which models write tool calls: what stands in the text of an answer, not yet checked against any tool.

hermes          <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, any number of them, text between
llama3_json     {"name": "add", "parameters": {"a": 1}}, the whole answer; several are parted by ;
mistral         [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, …], or [TOOL_CALLS]add{"a": 1}
qwen3_coder     <tool_call><function=add><parameter=a>1</parameter></function></tool_call>, a line each
glm             <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
deepseek        <｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>, or the name behind
                the separator and the arguments in a fence
kimi            <|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>
harmony         <|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>: gpt-oss; thinking is a channel
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headway.errors import shown


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call as it was written, or why it cannot be read."""

    name: str = ""
    arguments: dict[str, Any] | None = None
    """None where the call cannot be read."""
    problem: str = ""
    """Why it cannot be read."""
    as_text: bool = False
    """The arguments are texts, whose types are those of the tool's schema."""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer: its text without calls, if all of them can be read, and the calls in order."""

    content: str
    calls: tuple[WrittenCall, ...] = ()
    reasoning: str = ""
    """Thinking, where the form has it apart from the text."""


def hermes(text: str) -> ParsedAnswer:
    """Read calls between ``<tool_call>`` and ``</tool_call>``. The last one's end may be missing."""
    opening, closing = "<tool_call>", "</tool_call>"
    calls, kept, at = [], [], 0
    while (start := text.find(opening, at)) >= 0:
        kept.append(text[at:start])
        call, end = _read(text, start + len(opening), read_call)
        at = text.find(closing, end)
        at = len(text) if at < 0 else at + len(closing)
        if call.arguments is not None and (rest := text[end:at].removesuffix(closing).strip()):
            call = WrittenCall(problem=f"there is more after it, before {closing}: {shown(rest, 40)}")
        calls.append(call)
    return ParsedAnswer("".join([*kept, text[at:]]), tuple(calls))


_LLAMA_TAG = "<|python_tag|>"
_LLAMA_CALL = re.compile(r'\{\s*("type"\s*:\s*"function"\s*,\s*)?"(name|function)"\s*:')


def llama3_json(text: str) -> ParsedAnswer:
    """Read an answer that is nothing but calls; other JSON is text."""
    body = text.strip()
    tagged = body.startswith(_LLAMA_TAG)
    body = body.removeprefix(_LLAMA_TAG).lstrip()
    if not (_LLAMA_CALL.match(body) or (tagged and body.startswith("{"))):
        return ParsedAnswer(text)
    calls, at = [], 0
    while at < len(body):
        call, end = _read(body, at, read_call)
        rest = body[end:].lstrip()
        if call.arguments is not None and rest and not rest.startswith((";", "{")):
            call = WrittenCall(problem=f"there is more after it: {shown(rest, 40)}")
        calls.append(call)
        if call.arguments is None:  # where the next one begins cannot be told
            break
        at = len(body) - len(rest.removeprefix(";").lstrip())
    return ParsedAnswer("", tuple(calls))


_MISTRAL_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")


def mistral(text: str) -> ParsedAnswer:
    """Read the calls after ``[TOOL_CALLS]``: a list of them, one, or names each followed by its arguments."""
    content, *parts = text.split("[TOOL_CALLS]")
    calls: list[WrittenCall] = []
    for part in parts:
        if match := _MISTRAL_NAME.match(part):
            arguments, end = _read(part, match.end(), _read_arguments)
            read = [replace(arguments, name=match.group(1))]
        else:
            read, end = _read_list(part)
        if (rest := part[end:].strip()) and all(call.arguments is not None for call in read):
            read = [WrittenCall(problem=f"there is more after it: {shown(rest, 40)}")]
        calls += read
    return ParsedAnswer(content, tuple(calls))


_CODER_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*|$)", re.DOTALL)
_CODER_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>\s*", re.DOTALL)
_GLM_NAME = re.compile(r"\s*([^\s<]+)\s*")
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def qwen3_coder(text: str) -> ParsedAnswer:
    """Read functions between ``<tool_call>`` and ``</tool_call>``, or alone. The last one's ends may be missing."""
    if "<tool_call>" not in text:  # models leave it out at times
        return _in_tags(text, "<function=", "</function>", lambda body: _coder_call(f"<function={body}"))
    return _in_tags(text, "<tool_call>", "</tool_call>", _coder_call)


def _coder_call(body: str) -> WrittenCall:
    if (function := _CODER_FUNCTION.fullmatch(body)) is None:
        return WrittenCall(problem=f"it is {shown(body.strip(), 40)}, expected <function=NAME> and its parameters")
    return _text_arguments(function[1].strip(), function[2], _CODER_PARAMETER, "<parameter=NAME>…</parameter>")


def glm(text: str) -> ParsedAnswer:
    """Read calls between ``<tool_call>`` and ``</tool_call>``: a name, then keys and values in tags."""
    return _in_tags(text, "<tool_call>", "</tool_call>", _glm_call)


def _glm_call(body: str) -> WrittenCall:
    if (name := _GLM_NAME.match(body)) is None:
        return WrittenCall(problem="it has no name")
    return _text_arguments(name[1], body[name.end() :], _GLM_ARGUMENT, "<arg_key>…</arg_key><arg_value>…</arg_value>")


_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_CALL = re.compile(
    r"\s*(?:function\s*<｜tool▁sep｜>)?\s*([\w.-]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```(?:json)?)?\s*(?=\{)"
)
_KIMI_BEGIN, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_CALL = re.compile(r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*(?=\{)")


def deepseek(text: str) -> ParsedAnswer:
    """Read the calls of DeepSeek's V3, R1 (arguments in a fence) and V3.1."""
    outer = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    return _in_tags(text, _DEEPSEEK_BEGIN, _DEEPSEEK_END, lambda body: _named(body, _DEEPSEEK_CALL, "```"), outer)


def kimi(text: str) -> ParsedAnswer:
    """Read the calls of Kimi K2, whose ids have the names."""
    outer = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    return _in_tags(text, _KIMI_BEGIN, _KIMI_END, lambda body: _named(body, _KIMI_CALL), outer)


HARMONY_MARK = "<|channel|>"
"""A part of every answer of gpt-oss."""
_HARMONY = re.compile(
    r"(?:<\|start\|>)?(?P<role>[^<]*)<\|channel\|>(?P<channel>[^<]*)(?:<\|constrain\|>[^<]*)?<\|message\|>"
    r"(?P<body>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|$)",
    re.DOTALL,
)
_HARMONY_TO = re.compile(r"to=(?:functions\.)?([\w.-]+)")


def harmony(text: str) -> ParsedAnswer:
    """Read gpt-oss's channels: ``analysis`` is thinking, ``commentary`` to a function its call, all else text."""
    calls, said, thoughts, at = [], [], [], 0
    for part in _HARMONY.finditer(text):
        said.append(text[at : part.start()])
        at = part.end()
        if to := _HARMONY_TO.search(f"{part['role']} {part['channel']}"):
            read, end = _read(part["body"], 0, _read_arguments)
            if read.arguments is not None and (rest := part["body"][end:].strip()):
                read = WrittenCall(problem=f"there is more after it: {shown(rest, 40)}")
            calls.append(replace(read, name=to[1]))
        elif part["channel"].strip() == "analysis":
            thoughts.append(part["body"].strip())
        else:
            said.append(part["body"])
    return ParsedAnswer("".join([*said, text[at:]]), tuple(calls), "\n\n".join(thoughts))


FORMATS: Mapping[str, Callable[[str], ParsedAnswer]] = {
    one.__name__: one for one in (hermes, llama3_json, mistral, qwen3_coder, glm, deepseek, kimi, harmony)
}
"""Every form by its name."""


def _in_tags(
    text: str,
    opening: str,
    closing: str,
    read: Callable[[str], WrittenCall],
    outer: tuple[str, str] = ("", ""),
) -> ParsedAnswer:
    """Read what stands between each ``opening`` and its ``closing``; the last one's end may be missing.

    ``outer``: tags around all calls, which are no text.
    """
    content, *parts = text.split(opening)
    kept, calls = [content], []
    for part in parts:
        body, _, rest = part.partition(closing)
        calls.append(read(body))
        kept.append(rest)
    said = "".join(kept)
    for tag in outer if calls else ():
        said = said.replace(tag, "") if tag else said
    return ParsedAnswer(said, tuple(calls))


def _text_arguments(name: str, body: str, argument: re.Pattern[str], expected: str) -> WrittenCall:
    """The call of ``name`` with the arguments in ``body``, as text."""
    arguments: dict[str, Any] = {}
    at = 0
    while at < len(body) and (found := argument.match(body, at)):
        arguments[found[1].strip()] = found[2].removeprefix("\n").removesuffix("\n")
        at = found.end()
    if rest := body[at:].strip():
        return WrittenCall(name, problem=f"there is {shown(rest, 40)}, expected {expected}")
    return WrittenCall(name, arguments, as_text=True)


def _named(body: str, head: re.Pattern[str], fence: str = "") -> WrittenCall:
    """The call whose name is in ``head``, and whose arguments are the JSON behind it."""
    if (found := head.match(body)) is None:
        return WrittenCall(problem=f"it is {shown(body.strip(), 40)}, expected a name and an object with arguments")
    call, end = _read(body, found.end(), _read_arguments)
    rest = body[end:].strip()
    if call.arguments is not None and (rest := rest.removesuffix(fence).strip() if fence else rest):
        return WrittenCall(found[1], problem=f"there is more after it: {shown(rest, 40)}")
    return replace(call, name=found[1])


def read_call(value: Any) -> WrittenCall:
    """The call that a JSON value stands for: a name, and arguments by either of their names."""
    if _nested(value):
        return WrittenCall(problem=_TOO_DEEP)
    if not isinstance(value, dict):
        return WrittenCall(problem=f"it is {shown(value, 40)}, expected an object with name and arguments")
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name", value.get("function"))
    if not isinstance(name, str) or not name:
        return WrittenCall(problem="it has no name")
    return replace(_read_arguments(value.get("arguments", value.get("parameters", {}))), name=name)


def _read_arguments(value: Any) -> WrittenCall:
    if isinstance(value, str):  # JSON in JSON
        call, _ = _read(value, 0, _read_arguments)
        return call
    if not isinstance(value, dict):
        return WrittenCall(problem=f"its arguments are {shown(value, 40)}, expected an object")
    return WrittenCall(arguments=value)


def _read_list(text: str) -> tuple[list[WrittenCall], int]:
    try:
        value, end = _read_value(text, 0)
    except ValueError as cause:
        return [WrittenCall(problem=str(cause))], len(text)
    return [read_call(one) for one in (value if isinstance(value, list) else [value])], end


def _read(text: str, at: int, make: Callable[[Any], WrittenCall]) -> tuple[WrittenCall, int]:
    """The call that ``make`` makes of the JSON value at ``at``, and where that ends, or began where it is none."""
    try:
        value, end = _read_value(text, at)
    except ValueError as cause:
        return WrittenCall(problem=str(cause)), at
    return make(value), end


def _read_value(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at ``at``, and where it ends. Raises `ValueError` for what is none."""
    start = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it always matches
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as cause:
        raise ValueError(f"it is no valid JSON: {cause.msg} at character {cause.pos - start}") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError as cause:
        raise ValueError(f"it is no valid JSON: {cause}") from None
    if _nested(value):
        raise ValueError(_TOO_DEEP)
    return value, end


def _nested(value: Any) -> bool:
    """Tell whether ``value`` is nested more deeply than those who render and check it can bear."""
    level = [value]
    for _ in range(_MOST_NESTED):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent if isinstance(parent, list) else ())
        ]
        if not level:
            return False
    return True


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no value of JSON")


_MOST_NESTED = 50
_TOO_DEEP = f"it is nested more than {_MOST_NESTED} levels deep"
_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
