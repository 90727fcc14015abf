"""Dialect of OpenAI's responses: ``POST /v1/responses``, with function tools, streamed or not.

Responses are not stored: clients send all items of a conversation with each request, as agents do.

Fields: https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from headway.agents.endpoint.dialect import (
    TEXTS,
    Body,
    Dialect,
    ParsedRequest,
    event,
    made_calls,
    name_of,
    role_of,
    text_of,
    token_logprobs,
    wrong,
)
from headway.agents.interface.program_messages import MadeTurn, Message, said, tool_call

_LOGPROBS = "message.output_text.logprobs"
_THOUGHTS = {**TEXTS, "reasoning_text": "text"}


class _ResponsesBody(Body):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_tokens: int | None = Field(default=None, ge=1, alias="max_output_tokens")
    include: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None


class Responses(Dialect):
    """Dialect of responses."""

    path = "/v1/responses"
    counts = "/v1/responses/input_tokens"
    body = _ResponsesBody
    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("previous_response_id", "conversation", "prompt", "background"),
        "none: responses are not kept here; send all items of the conversation as input",
    )

    def messages(self, asked: _ResponsesBody) -> list[Message]:
        first = [said("system", asked.instructions)] if asked.instructions else []
        return first + ([said("user", asked.input)] if isinstance(asked.input, str) else _messages(asked.input))

    def answer(self, wanted: ParsedRequest, turn: MadeTurn, id: str) -> dict[str, Any]:
        return _response(wanted, turn, id, int(time.time()), _items(wanted, turn, id))

    def events(self, wanted: ParsedRequest, turn: MadeTurn, id: str) -> Iterator[bytes]:
        created = int(time.time())
        items = _items(wanted, turn, id)
        begun = _response(wanted, turn, id, created, None)
        whole = _response(wanted, turn, id, created, items)
        told: list[tuple[str, dict[str, Any]]] = [
            ("created", {"response": begun}),
            ("in_progress", {"response": begun}),
        ]
        for n, item in enumerate(items):
            told += [(kind, {"output_index": n, **fields}) for kind, fields in _told(item)]
        told.append(("completed" if whole["status"] == "completed" else "incomplete", {"response": whole}))
        for n, (kind, fields) in enumerate(told):
            name = f"response.{kind}"
            yield event({"type": name, "sequence_number": n, **fields}, name)


# ------------------------------------------------------------------------------------------------- requests


def _messages(items: Sequence[dict[str, Any]]) -> list[Message]:
    """Return the chat messages of input items. Thinking, text and calls of one answer become one message."""
    messages: list[Message] = []
    begun = False  # the last message is an answer that further items may belong to
    for n, item in enumerate(items):
        where, kind = f"input.{n}", item.get("type") or "message"
        if kind == "message":
            role, text = role_of(item, where), text_of(item.get("content"), f"{where}.content")
            # Thinking is an item before its answer's text: both are one message.
            if begun and role == "assistant" and not messages[-1]["content"] and "tool_calls" not in messages[-1]:
                messages[-1]["content"] = text
            else:
                messages.append(said(role, text))
            begun = role == "assistant"
        elif kind == "reasoning":
            thoughts = text_of(item.get("content"), f"{where}.content", _THOUGHTS)
            messages.append({**said("assistant", ""), "reasoning_content": thoughts})
            begun = True
        elif kind == "function_call":
            if not begun:
                messages.append(said("assistant", ""))
            arguments = name_of(item, "arguments", where) if item.get("arguments") != "" else "{}"
            made = tool_call(name_of(item, "call_id", where), name_of(item, "name", where), arguments)
            messages[-1].setdefault("tool_calls", []).append(made)
            begun = True
        elif kind == "function_call_output":
            text = text_of(item.get("output"), f"{where}.output")
            messages.append({**said("tool", text), "tool_call_id": name_of(item, "call_id", where)})
            begun = False
        else:
            raise wrong(
                f"{where}.type", kind, "message, function_call, function_call_output or reasoning: no others are read"
            )
    return messages


# ------------------------------------------------------------------------------------------------- answers


def _items(wanted: ParsedRequest, turn: MadeTurn, id: str) -> list[dict[str, Any]]:
    """Return the output items of a turn."""
    message, calls = turn.answer.with_reasoning_apart, made_calls(turn)
    status = "incomplete" if turn.answer.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if thoughts := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thoughts}]
        items.append({"type": "reasoning", "id": f"rs-{id}", "summary": [], "content": content, "status": status})
    if message["content"] or not calls:
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        if _LOGPROBS in (wanted.body.include or ()):
            part["logprobs"] = token_logprobs(wanted, turn)
        items.append({"type": "message", "id": f"msg-{id}", "role": "assistant", "content": [part], "status": status})
    for n, (call_id, name, arguments) in enumerate(calls):
        called = {"call_id": call_id, "name": name, "arguments": json.dumps(arguments)}
        items.append({"type": "function_call", "id": f"fc-{id}-{n}", **called, "status": "completed"})
    return items


def _response(
    wanted: ParsedRequest, turn: MadeTurn, id: str, created: int, items: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """Return the response with ``items``, or as it is at its beginning."""
    asked: _ResponsesBody = wanted.body
    sampled = len(turn.sampled.ids)
    cut_off = items is not None and turn.answer.finish_reason == "length"
    return {
        "id": f"resp-{id}",
        "object": "response",
        "created_at": created,
        "status": "in_progress" if items is None else "incomplete" if cut_off else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_tokens,
        "metadata": {},
        "model": wanted.body.model or "policy",
        "output": items or [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "text": {"format": {"type": "text"}},
        "tool_choice": "none" if asked.tool_choice == "none" else "auto",
        "tools": [{"strict": None, **tool} for tool in asked.tools or ()],
        "truncation": "disabled",
        "usage": None
        if items is None
        else {
            "input_tokens": turn.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.prompt_tokens + sampled,
        },
    }


def _told(item: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the stream events of one output item: the kind and the fields of each."""
    of = {"item_id": item["id"]}
    if item["type"] == "function_call":
        begun = {**item, "arguments": "", "status": "in_progress"}
        pieces = [
            ("function_call_arguments.delta", {**of, "delta": item["arguments"]}),
            ("function_call_arguments.done", {**of, "name": item["name"], "arguments": item["arguments"]}),
        ]
    else:
        (part,) = item["content"]
        of |= {"content_index": 0}
        begun = {**item, "content": [], "status": "in_progress"}
        kind, logprobs = "reasoning_text", {}
        if item["type"] == "message":
            kind, logprobs = "output_text", {"logprobs": part["logprobs"]}
        pieces = [
            ("content_part.added", {**of, "part": {**part, "text": ""}}),
            (f"{kind}.delta", {**of, "delta": part["text"], **logprobs}),
            (f"{kind}.done", {**of, "text": part["text"], **logprobs}),
            ("content_part.done", {**of, "part": part}),
        ]
    return [("output_item.added", {"item": begun}), *pieces, ("output_item.done", {"item": item})]
