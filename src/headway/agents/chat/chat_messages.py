"""Chat messages: plain copies, keys for comparison, and marks that show where an answer ends.

messages = plain_messages([{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}], "name": None}])
assert messages == [{"role": "user", "content": "2 + 2?"}]
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import xxhash

from headway.agents.interface.program_messages import Message, finite, message_problem, said
from headway.errors import UserCodeError, shown

MARK = "hWqXanswerZ"
"""Beginning of all marks: only letters, so that no template trims, splits or escapes it."""
THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Tags that models put around their thinking."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which a message has its thinking apart from its text."""


def plain_messages(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Copy ``messages`` in the form for templates: without None values, text in one piece, arguments as objects.

    Raises:
        UserCodeError: one of them is not a chat message, or there are none.
    """
    plain = [_plain(message) for message in messages]
    if not plain:
        raise UserCodeError("there are no chat messages to answer; give at least one")
    return plain


def normalise(message: Message) -> Message:
    """Normalise a plain message for comparison with messages of other clients.

    The thinking of an answer goes to ``reasoning_content``, also if it stood in the text, between tags or before the
    closing tag. White space around the parts does not count, nor do the ids of calls.
    """
    if message["role"] != "assistant":
        return message
    content, reasoning = message.get("content", ""), reasoning_of(message)
    if isinstance(content, str):
        if not reasoning:
            thinking, content = split_thinking(content)
            reasoning = untagged(thinking)
        content = content.strip()
    calls = [_function(call) for call in message.get("tool_calls", [])]
    return {**said("assistant", content), "reasoning_content": reasoning.strip(), "tool_calls": calls}


def message_key(message: Message) -> str:
    """Return the text by which a plain message is compared with others."""
    return json.dumps(normalise(message), sort_keys=True, default=str)


def split_thinking(text: str, opening: str | None = None) -> tuple[str, str]:
    """Split an answer into the thinking at its beginning, with its tags, and the rest.

    ``opening``: text with which the prompt opens the answer; thinking may begin there. None: it is unknown, and a
    closing tag alone marks thinking. Thinking without an end is the whole answer.
    """
    for start, end in THINKING:
        begun = text.lstrip().startswith(start) or (opening is not None and opening.rstrip().endswith(start))
        if begun or (opening is None and end in text):
            thinking, found, rest = text.partition(end)
            return thinking + found, rest
    return "", text


def untagged(thinking: str) -> str:
    """Return the thinking that `split_thinking` found, without its tags."""
    text = thinking.strip()
    for start, end in THINKING:
        text = text.removeprefix(start).removesuffix(end)
    return text.strip()


def reasoning_of(message: Message) -> str:
    """Return the thinking that ``message`` has apart from its text; empty if none."""
    return next((str(message[name]) for name in _REASONING if message.get(name)), "")


def without_reasoning(message: Mapping[str, Any]) -> Message:
    """Copy ``message`` without the thinking that it has apart from its text."""
    return {name: value for name, value in message.items() if name not in _REASONING}


@dataclass(frozen=True, slots=True)
class MarkedAnswer:
    """A copy of an answer with marks."""

    message: Message
    text: str | None
    """Mark behind the text; None if the answer has only calls, or its content is not text."""
    calls: tuple[str, ...]
    """Marks that replace the arguments, one for each call."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks, in the order in which templates write them."""
        return ((self.text,) if self.text is not None else ()) + self.calls


def marked(message: Message, index: int) -> MarkedAnswer:
    """Mark an answer, the plain message at ``index`` of its chat."""
    content, calls = message.get("content", ""), message.get("tool_calls", [])
    copy, text = dict(message), None
    if isinstance(content, str) and (content.strip() or not calls):
        text = f"{MARK}{index}n0z"
        copy["content"] = content + text
    arguments = tuple(f"{MARK}{index}n{n}z" for n in range(1, len(calls) + 1))
    if calls:
        copy["tool_calls"] = [_calling(call, {"x": mark}) for call, mark in zip(calls, arguments, strict=True)]
    return MarkedAnswer(copy, text, arguments)


def _plain(message: Mapping[str, Any]) -> Message:
    if (problem := message_problem(message)) is not None:
        raise UserCodeError(problem)
    plain = {name: value for name, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        plain["content"] = "".join(str(part.get("text", "")) for part in content)
    calls = plain.pop("tool_calls", None) or []
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) and _function(call) for call in calls):
        raise UserCodeError(
            f"tool_calls of a chat message are {shown(calls)}; expected a list of dicts like "
            '{"id": "…", "type": "function", "function": {"name": "…", "arguments": {…}}}'
        )
    if calls:
        plain["tool_calls"] = [_calling(call, _function(call).get("arguments", {})) for call in calls]
    return plain


def _function(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the name and the arguments of a call; empty if it is not a call."""
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return {}
    return {"name": function["name"], "arguments": finite(function.get("arguments", {}))}


def _calling(call: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    """Copy a call with other ``arguments``. JSON text, as OpenAI's clients have it, becomes a value."""
    if isinstance(arguments, str):
        with suppress(ValueError):  # a template may take text, too
            arguments = json.loads(arguments)
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": {**function, "arguments": arguments}}
    return {**call, "arguments": arguments}


def digest_of(text: str | bytes, before: bytes = b"") -> bytes:
    """Return the digest [16 bytes] of ``text`` after a text with the digest ``before``."""
    digest = xxhash.xxh3_128(before)
    # Programs' texts may have lone surrogates, which UTF-8 cannot encode.
    digest.update(text.encode(errors="surrogatepass") if isinstance(text, str) else text)
    return digest.digest()
