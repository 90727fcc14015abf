"""The forms in which models write tool calls: what stands in the text of an answer, not yet checked against any tool.

hermes          <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, any number of them, text between
llama3_json     {"name": "add", "parameters": {"a": 1}}, the whole answer; several are parted by ;
mistral         [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, …], or [TOOL_CALLS]add{"a": 1}
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


@dataclass(frozen=True, slots=True)
class Written:
    """An answer: its text without calls, if all of them can be read, and the calls in order."""

    content: str
    calls: tuple[WrittenCall, ...] = ()
    reasoning: str = ""
    """Thinking, where the form has it apart from the text."""


def hermes(text: str) -> Written:
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
    return Written("".join([*kept, text[at:]]), tuple(calls))


_LLAMA_TAG = "<|python_tag|>"
_LLAMA_CALL = re.compile(r'\{\s*("type"\s*:\s*"function"\s*,\s*)?"(name|function)"\s*:')


def llama3_json(text: str) -> Written:
    """Read an answer that is nothing but calls; other JSON is text."""
    body = text.strip()
    tagged = body.startswith(_LLAMA_TAG)
    body = body.removeprefix(_LLAMA_TAG).lstrip()
    if not (_LLAMA_CALL.match(body) or (tagged and body.startswith("{"))):
        return Written(text)
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
    return Written("", tuple(calls))


_MISTRAL_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")


def mistral(text: str) -> Written:
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
    return Written(content, tuple(calls))


FORMATS: Mapping[str, Callable[[str], Written]] = {"hermes": hermes, "llama3_json": llama3_json, "mistral": mistral}
"""Every form by its name."""


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
