"""Tool calls of an answer: read from its text and checked against the tools, without exceptions.

    parser = choose_parser(renderer, "auto")            # one for a run; raises ConfigError if none fits
    answer = parser.parse(renderer.text(sampled), tools)
    chats.answered(prompt, sampled, answer.message)
    texts = [call.error or (await by_name[call.name].call(call.arguments)).text for call in answer.calls]
    messages += [answer.message, *answer.results(texts)]

A call that cannot be made has a ``problem``, to be counted, and an ``error``, the message for the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.exceptions import UnknownType, best_match
from jsonschema.validators import extend
from referencing import Registry

from headway.agents.chat.chat_messages import reasoning_of, split_thinking
from headway.agents.chat.chat_template import KIMI_ID, NUMBERED_ID, ChatRenderer, probe_tool
from headway.agents.chat.tool_call_formats import FORMATS, ParsedAnswer, WrittenCall, read_call
from headway.agents.interface.program_messages import CallProblem, ToolCall, ToolSchema, TurnAnswer, calls_made, said
from headway.errors import ConfigError, cut, said_by

AUTO, TEMPLATE = "auto", "template"
PARSER_NAMES = (TEMPLATE, *FORMATS)
"""Names of the parsers: the tokenizer's response template, and the known forms."""


@dataclass(frozen=True, slots=True)
class ToolParser:
    """Parser of answers."""

    name: str
    read: Callable[[str, Sequence[ToolSchema]], ParsedAnswer] = field(repr=False)
    """Function from an answer's text and the tools to the parsed answer."""
    opening: str = ""
    """Text with which the template opens an answer; thinking may begin there."""
    call_id: str = NUMBERED_ID
    """Format of call ids, from their number and name."""

    def parse(self, text: str, tools: Sequence[ToolSchema], first_id: int = 0) -> TurnAnswer:
        """Read the answer ``text`` with its calls to ``tools``; without tools all of it is text.

        ``first_id``: number of its first call. Give the number of calls so far, so that ids differ in a conversation.
        """
        if not tools:
            return TurnAnswer(text, text, said("assistant", text))
        thinking, rest = ("", text) if self.name == TEMPLATE else split_thinking(text, self.opening)
        written = self.read(rest, tools)
        ids = [self.call_id.format(number=first_id + n, name=call.name) for n, call in enumerate(written.calls)]
        calls = tuple(_checked(call, id, tools) for id, call in zip(ids, written.calls, strict=True))
        # One unreadable call keeps all as text: with calls taken out, the text would render otherwise than was sampled.
        if any(call.problem is CallProblem.UNREADABLE for call in calls):
            return TurnAnswer(text, text, said("assistant", text), calls)
        content = thinking + written.content
        message = said("assistant", content)
        if calls:
            content = content.rstrip()
            message = calls_made(content, [(call.id, call.name, call.arguments) for call in calls])
        if written.reasoning:
            message["reasoning_content"] = written.reasoning
        return TurnAnswer(text, content, message, calls)


def choose_parser(renderer: ChatRenderer, choice: str = AUTO) -> ToolParser:
    """Return the parser named ``choice``, or for ``auto`` the one that fits the tokenizer.

    ``auto`` takes its response template if it has one, else the form that reads a call written by its chat template.

    Raises:
        ConfigError: there is no parser of that name, or none fits.
    """
    names = ", ".join(PARSER_NAMES)
    if choice not in (AUTO, *PARSER_NAMES):
        raise ConfigError(f"agent.tool_parser={choice}: there is no such parser; there are {names}, and auto")
    has_template = getattr(renderer.tokenizer, "response_template", None) is not None
    if choice == TEMPLATE and not has_template:
        raise ConfigError(
            "agent.tool_parser=template: the model's tokenizer has no response template (response_template in "
            f"tokenizer_config.json); give it one, or name one of {', '.join(FORMATS)}"
        )
    if choice == TEMPLATE or (choice == AUTO and has_template):
        return ToolParser(TEMPLATE, _by_template(renderer), renderer.generation_prompt)
    if choice != AUTO:
        return _by_form(choice, renderer)
    arguments = {"x": "seven", "n": 7}
    written = renderer.example_call("look_up", arguments)
    # By the template's output, not by the model's name: fine-tuned models keep templates and change names.
    for name in FORMATS if written is not None else ():
        parser = _by_form(name, renderer)
        found = parser.read(split_thinking(written or "", parser.opening)[1], [probe_tool("look_up")]).calls
        as_text = any(call.as_text for call in found)
        expected = {name: str(value) if as_text else value for name, value in arguments.items()}
        if [(call.name, call.arguments) for call in found] == [("look_up", expected)]:
            return parser
    raise ConfigError(
        "there are tools, but no parser reads the calls that the model's chat template writes"
        + (f", such as {written.strip()!r}" if written else "")
        + f"; name one in agent.tool_parser ({names}), or give the tokenizer a response template"
    )


def _by_form(name: str, renderer: ChatRenderer) -> ToolParser:
    form = FORMATS[name]
    call_id = KIMI_ID if name == "kimi" else NUMBERED_ID
    return ToolParser(name, lambda text, tools: form(text), renderer.generation_prompt, call_id)


def _by_template(renderer: ChatRenderer) -> Callable[[str, Sequence[ToolSchema]], ParsedAnswer]:
    """Return a reader by the tokenizer's own response template."""

    def read(text: str, tools: Sequence[ToolSchema]) -> ParsedAnswer:
        try:
            message = renderer.tokenizer.parse_response(
                text, prefix=renderer.generation_prompt, tools=[dict(tool) for tool in tools]
            )
            calls = tuple(read_call(call) for call in _flat(message.get("tool_calls")))
            content = message.get("content")
            return ParsedAnswer(content if isinstance(content, str) else "", calls, reasoning_of(message))
        except Exception as cause:  # templates are the user's, and may raise anything
            return ParsedAnswer(text, (WrittenCall(problem=f"the answer cannot be read: {said_by(cause)}"),))

    return read


def _flat(calls: Any) -> list[Any]:
    """Flatten calls: a field of a response template may repeat, hold a list, or both."""
    if not isinstance(calls, list):
        return [] if calls is None else [calls]
    return [one for call in calls for one in _flat(call)]


_CONSTANTS = {"True": True, "False": False, "None": None}


def _typed(arguments: Mapping[str, str], schema: Any) -> dict[str, Any]:
    """Convert arguments written as text to the types that ``schema`` gives them; text stays text if it is allowed."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    typed: dict[str, Any] = dict(arguments)
    for name, text in arguments.items():
        kind = properties.get(name) if isinstance(properties, Mapping) else None
        if isinstance(kind, Mapping) and not any("string" in _types(one) for one in (kind, *kind.get("anyOf", ()))):
            try:
                typed[name] = json.loads(text)
            except (ValueError, RecursionError):  # a value of another type is reported to the model
                typed[name] = _CONSTANTS.get(text, text)
    return typed


def _types(kind: Any) -> list[Any]:
    types = kind.get("type", []) if isinstance(kind, Mapping) else []
    return types if isinstance(types, list) else [types]


def _checked(call: WrittenCall, id: str, tools: Sequence[ToolSchema]) -> ToolCall:
    """Return the call as it can be made, or the reason why it cannot be made."""
    if call.arguments is None:
        return ToolCall(
            id, call.name, {}, CallProblem.UNREADABLE, f"Error: the tool call cannot be read: {call.problem}"
        )
    parameters = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    arguments = _typed(call.arguments, parameters.get(call.name)) if call.as_text else call.arguments
    if call.name not in parameters:
        error = f"Error: there is no tool {call.name!r}; there are: {', '.join(parameters)}"
        return ToolCall(id, call.name, arguments, CallProblem.UNKNOWN_TOOL, error)
    try:
        return ToolCall(id, call.name, fitted(arguments, parameters[call.name] or {}))
    except Misfit as misfit:
        error = f"Error: the arguments of {call.name} do not fit: {misfit}"
        return ToolCall(id, call.name, arguments, CallProblem.BAD_ARGUMENTS, error)
    except Exception:  # an agent's invalid schema: its arguments cannot be checked
        return ToolCall(id, call.name, arguments)


class Misfit(ValueError):
    """Arguments that do not fit a schema; the message is for the model."""


def fitted(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Check ``arguments`` against ``schema``, of type object; return them, with whole floats for integers as integers.

        fitted({"a": 2.0}, {"type": "object", "properties": {"a": {"type": "integer"}}})   # {"a": 2}

    Arguments that the schema does not name are refused, unless it allows them.

    Raises:
        Misfit: they do not fit; says which, what was given, and what is expected.
    """
    # Ours first: a schema that allows further properties keeps that.
    validator = _Validator({"additionalProperties": False, **schema}, registry=Registry())
    if (error := best_match(validator.iter_errors(arguments))) is not None:
        where = error.json_path.removeprefix("$").removeprefix(".")
        raise Misfit(cut(f"{where}: {error.message}" if where else error.message, 200))
    whole: dict[str, Any] = _whole(dict(arguments), schema)
    return whole


def _whole(value: Any, schema: Any) -> Any:
    """Return ``value``, which fits ``schema``, with whole floats as integers where the schema wants integers."""
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, float) and _types(schema) in (["integer"], ["integer", "null"]):
        return int(value)
    if isinstance(value, list):
        return [_whole(one, schema.get("items")) for one in value]
    if isinstance(value, dict):
        known, other = schema.get("properties") or {}, schema.get("additionalProperties")
        return {name: _whole(one, known.get(name, other)) for name, one in value.items()}
    return value


def _nullable(name: str) -> Callable[..., Iterator[ValidationError]]:
    """Return JSON Schema's check ``name``. None passes it if `transformers.utils.get_json_schema` wrote ``nullable``;
    anything passes it if the type is not one of JSON's.
    """
    check = Draft202012Validator.VALIDATORS[name]

    def checked(validator: Any, value: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
        if not (instance is None and schema.get("nullable")):
            with suppress(UnknownType):
                yield from check(validator, value, instance, schema)

    return checked


# A server's pattern could take for ever on a model's text; references are not looked up.
_Validator = extend(
    Draft202012Validator, {"pattern": None, **{name: _nullable(name) for name in ("type", "enum", "anyOf", "oneOf")}}
)
