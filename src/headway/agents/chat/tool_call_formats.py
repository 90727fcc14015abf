"""Forms of tool calls in the text of models' answers: they are read here, and not checked against any tool.

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
    """A call as it was written, or the reason why it cannot be read."""

    name: str = ""
    arguments: dict[str, Any] | None = None
    """Arguments by name; None if the call cannot be read."""
    problem: str = ""
    """Reason why the call cannot be read; empty if it can."""
    as_text: bool = False
    """True if the arguments are texts, whose types the tool's schema gives."""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer: its text without calls, if all of them can be read, and the calls in order."""

    content: str
    calls: tuple[WrittenCall, ...] = ()
    reasoning: str = ""
    """Thinking, if the form has it apart from the text."""


Reader = Callable[[str, int], tuple[WrittenCall, int]]
"""Function from a text and the start of a call to the call and its end."""


def hermes(text: str) -> ParsedAnswer:
    """Read calls between ``<tool_call>`` and ``</tool_call>``."""
    return _in_tags(text, "<tool_call>", "</tool_call>", lambda text, at: _read(text, at, read_call))


_LLAMA_TAG = "<|python_tag|>"
_LLAMA_CALL = re.compile(r'\{\s*("type"\s*:\s*"function"\s*,\s*)?"(name|function)"\s*:')


def llama3_json(text: str) -> ParsedAnswer:
    """Read an answer that is nothing but calls; other JSON is text."""
    body = text.strip()
    tagged = body.startswith(_LLAMA_TAG)
    body = body.removeprefix(_LLAMA_TAG).lstrip()
    if not (_LLAMA_CALL.match(body) or (tagged and body.startswith("{"))):
        return ParsedAnswer(text)
    calls: list[WrittenCall] = []
    while body and (not calls or calls[-1].arguments is not None):  # after an unreadable call nothing can be read
        call, end = _read(body, 0, read_call)
        body = body[end:].lstrip()
        calls.append(call if body.startswith((";", "{")) else _alone(call, body))
        body = body.removeprefix(";").lstrip()
    return ParsedAnswer("", tuple(calls))


_MISTRAL_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")


def mistral(text: str) -> ParsedAnswer:
    """Read the calls after ``[TOOL_CALLS]``: a list of calls, one call, or names each followed by its arguments."""
    content, *parts = text.split("[TOOL_CALLS]")
    calls: list[WrittenCall] = []
    for part in parts:
        if _MISTRAL_NAME.match(part):
            call, end = _named(part, 0, _MISTRAL_NAME)
            read = [call]
        else:
            try:
                value, end = _value(part, 0)
                read = [read_call(one) for one in (value if isinstance(value, list) else [value])]
            except ValueError as cause:
                read, end = [WrittenCall(problem=str(cause))], len(part)
        calls += [_alone(call, part[end:]) for call in read]
    return ParsedAnswer(content, tuple(calls))


_CODER_NAME = re.compile(r"\s*(?:<function=)?([^<>\n]+)>")
_CODER_ARGUMENT = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>\s*", re.DOTALL)
_GLM_NAME = re.compile(r"\s*([^\s<]+)\s*")
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def qwen3_coder(text: str) -> ParsedAnswer:
    """Read functions between ``<tool_call>`` and ``</tool_call>``, or without these."""
    tags = ("<tool_call>", "</tool_call>") if "<tool_call>" in text else ("<function=", "</function>")
    expected = "<function=NAME> and <parameter=NAME>…</parameter>"
    return _in_tags(text, *tags, lambda text, at: _text_call(text, at, tags[1], _CODER_NAME, _CODER_ARGUMENT, expected))


def glm(text: str) -> ParsedAnswer:
    """Read calls between ``<tool_call>`` and ``</tool_call>``: a name, then keys and values in tags."""
    tags = ("<tool_call>", "</tool_call>")
    expected = "a name and <arg_key>…</arg_key><arg_value>…</arg_value>"
    return _in_tags(text, *tags, lambda text, at: _text_call(text, at, tags[1], _GLM_NAME, _GLM_ARGUMENT, expected))


_DEEPSEEK_CALL = re.compile(
    r"\s*(?:function\s*<｜tool▁sep｜>)?\s*([\w.-]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```(?:json)?)?\s*(?=\{)"
)
_KIMI_CALL = re.compile(r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*(?=\{)")


def deepseek(text: str) -> ParsedAnswer:
    """Read the calls of DeepSeek's V3, R1 (arguments in a fence) and V3.1."""
    tags, outer = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"), ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    return _in_tags(text, *tags, lambda text, at: _named(text, at, _DEEPSEEK_CALL), outer)


def kimi(text: str) -> ParsedAnswer:
    """Read the calls of Kimi K2, whose ids contain the names."""
    tags = ("<|tool_call_begin|>", "<|tool_call_end|>")
    outer = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    return _in_tags(text, *tags, lambda text, at: _named(text, at, _KIMI_CALL), outer)


HARMONY_MARK = "<|channel|>"
"""Text that every answer of gpt-oss contains."""
_HARMONY = re.compile(
    r"(?:<\|start\|>)?(?P<role>[^<]*)<\|channel\|>(?P<channel>[^<]*)(?:<\|constrain\|>[^<]*)?<\|message\|>"
    r"(?P<body>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|$)",
    re.DOTALL,
)
_HARMONY_TO = re.compile(r"to=(?:functions\.)?([\w.-]+)")


def harmony(text: str) -> ParsedAnswer:
    """Read gpt-oss's channels: ``analysis`` is thinking, ``commentary`` to a function is a call, all else is text."""
    calls, said, thoughts, at = [], [], [], 0
    for part in _HARMONY.finditer(text):
        said.append(text[at : part.start()])
        at = part.end()
        if to := _HARMONY_TO.search(f"{part['role']} {part['channel']}"):
            call, end = _read(part["body"], 0, _read_arguments)
            calls.append(replace(_alone(call, part["body"][end:]), name=to[1]))
        elif part["channel"].strip() == "analysis":
            thoughts.append(part["body"].strip())
        else:
            said.append(part["body"])
    return ParsedAnswer("".join([*said, text[at:]]), tuple(calls), "\n\n".join(thoughts))


FORMATS: Mapping[str, Callable[[str], ParsedAnswer]] = {
    one.__name__: one for one in (hermes, llama3_json, mistral, qwen3_coder, glm, deepseek, kimi, harmony)
}
"""Name of a form → its reader."""


def _in_tags(text: str, opening: str, closing: str, read: Reader, outer: tuple[str, ...] = ()) -> ParsedAnswer:
    """Read a call after each ``opening``, up to its ``closing``, which the last call may lack.

    ``outer``: tags around all calls, which are not text.
    """
    calls, kept, at = [], [], 0
    while (start := text.find(opening, at)) >= 0:
        kept.append(text[at:start])
        call, end = read(text, start + len(opening))
        # From the end of the call: an argument may contain the closing tag.
        at = text.find(closing, end)
        calls.append(_alone(call, text[end : at if at >= 0 else None]))
        at = at + len(closing) if at >= 0 else len(text)
    said = "".join([*kept, text[at:]])
    for tag in outer if calls else ():
        said = said.replace(tag, "")
    return ParsedAnswer(said, tuple(calls))


def _alone(call: WrittenCall, rest: str) -> WrittenCall:
    """Return the call; an unreadable one if there is a ``rest`` after it."""
    if call.arguments is None or not rest.strip():
        return call
    return WrittenCall(call.name, problem=f"there is more after it: {shown(rest.strip(), 40)}")


def _text_call(
    text: str, at: int, closing: str, name: re.Pattern[str], argument: re.Pattern[str], expected: str
) -> tuple[WrittenCall, int]:
    """Return the call with a name and arguments as text, up to ``closing``."""
    end = text.find(closing, at)
    end = len(text) if end < 0 else end
    body = text[at:end].rstrip().removesuffix("</function>")
    if (found := name.match(body)) is None:
        return WrittenCall(problem=f"it is {shown(body.strip(), 40)}, expected {expected}"), end
    arguments: dict[str, Any] = {}
    place = found.end()
    while one := argument.match(body, place):
        arguments[one[1].strip()] = one[2].removeprefix("\n").removesuffix("\n")
        place = one.end()
    if rest := body[place:].strip():
        return WrittenCall(found[1].strip(), problem=f"there is {shown(rest, 40)}, expected {expected}"), end
    return WrittenCall(found[1].strip(), arguments, as_text=True), end


_FENCE = re.compile(r"\s*(?:```)?")


def _named(text: str, at: int, head: re.Pattern[str]) -> tuple[WrittenCall, int]:
    """Return the call whose name is in ``head``, and whose arguments are the JSON after it."""
    if (found := head.match(text, at)) is None:
        given = shown(text[at:].strip(), 40)
        return WrittenCall(problem=f"it is {given}, expected a name and an object with arguments"), at
    call, end = _read(text, found.end(), _read_arguments)
    return replace(call, name=found[1]), _FENCE.match(text, end).end()  # type: ignore[union-attr]  # it always matches


def read_call(value: Any) -> WrittenCall:
    """Return the call in a JSON value: a name, and arguments under one of their two keys."""
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
    if _nested(value, _MOST_NESTED):
        return WrittenCall(problem=_TOO_DEEP)
    if not isinstance(value, dict):
        return WrittenCall(problem=f"its arguments are {shown(value, 40)}, expected an object")
    return WrittenCall(arguments=value)


def _read(text: str, at: int, make: Callable[[Any], WrittenCall]) -> tuple[WrittenCall, int]:
    """Return the call that ``make`` makes of the JSON value at ``at``, and its end; ``at`` if there is no value."""
    try:
        value, end = _value(text, at)
    except ValueError as cause:
        return WrittenCall(problem=str(cause)), at
    return make(value), end


def _value(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value at ``at``, and its end. Raises `ValueError` if there is none."""
    start = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it always matches
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as cause:
        raise ValueError(f"it is no valid JSON: {cause.msg} at character {cause.pos - start}") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError as cause:
        raise ValueError(f"it is no valid JSON: {cause}") from None


def _nested(value: Any, levels: int) -> bool:
    """Tell whether ``value`` is nested too deeply for the code that renders and checks it."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_nested(one, levels - 1) for one in inner)


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no value of JSON")


_MOST_NESTED = 50
_TOO_DEEP = f"it is nested more than {_MOST_NESTED} levels deep"
_SPACE = re.compile(r"\s*")
# Python's json reads NaN and Infinity, which are not JSON: other readers of the call would refuse them.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
