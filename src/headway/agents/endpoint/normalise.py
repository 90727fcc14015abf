"""Messages and tools of all dialects in one form: that of plain chat messages, which the policy's template takes.

A conversation is the same in whatever dialect it is carried on, and what the policy answered is known again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headway.agents.endpoint.dialect import RequestRefused
from headway.agents.interface.program_messages import Message, ToolSchema
from headway.errors import shown

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles of messages, and what templates call them."""
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that are text, and the field that has it."""


def wrong(where: str, given: Any, expected: str) -> RequestRefused:
    """Make the error for what stands at ``where`` in a request's body."""
    return RequestRefused(400, "invalid_request", f"the request's body: {where} is {shown(given)}; expected {expected}")


def role_of(message: Mapping[str, Any], where: str) -> str:
    """The role of a message, as templates know it. Raises `RequestRefused` for one that there is not."""
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    return ROLES[role]


def text_of(content: Any, where: str) -> str:
    """The text of a message's content: text, parts of text, or nothing. Raises `RequestRefused` for anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(where, content, "text, or a list of parts of type text")
    texts = []
    for n, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(_TEXTS[kind]) if isinstance(kind, str) and kind in _TEXTS else None
        if not isinstance(text, str):
            raise wrong(f"{where}.{n}", part, "a part of type text: the policy reads text alone, no images or files")
        texts.append(text)
    return "".join(texts)


def name_of(fields: Mapping[str, Any], name: str, where: str) -> str:
    """The field ``name``, which is text that is not empty. Raises `RequestRefused` for anything else."""
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise wrong(f"{where}.{name}", value, "text")
    return value


def call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Make a tool call of a message. ``arguments``: an object, or JSON text of one."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_tools(tools: Iterable[tuple[str, Any, Any, Any]]) -> list[ToolSchema] | None:
    """Make the schemas of tools, each given as where it stands, its name, description and parameters; None of none.

    Raises:
        Refused: one has no name or no schema, or there are two of a name.
    """
    schemas: dict[str, ToolSchema] = {}
    for where, name, description, parameters in tools:
        if not isinstance(name, str) or not name:
            raise wrong(f"{where}.name", name, "the function's name")
        if name in schemas:
            raise RequestRefused(
                400, "invalid_request", f"the request's body: {where}: there is a tool named {name!r} already"
            )
        if parameters is not None and not isinstance(parameters, dict):
            raise wrong(f"{where}.parameters", parameters, 'a JSON schema such as {"type": "object", "properties": {}}')
        schemas[name] = {
            "type": "function",
            "function": {
                "name": name,
                "description": description if isinstance(description, str) else "",
                "parameters": parameters or {"type": "object", "properties": {}},
            },
        }
    return list(schemas.values()) or None


def named(messages: Sequence[Message]) -> list[Message]:
    """Give results of tools the names of their tools, from the calls before them: some templates write these."""
    names: dict[Any, str] = {}
    result = []
    for message in messages:
        for one in message.get("tool_calls", ()):
            names[one["id"]] = one["function"]["name"]
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            result.append({**message, "name": names[message["tool_call_id"]]})
        else:
            result.append(message)
    return result
