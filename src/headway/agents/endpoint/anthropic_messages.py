"""Dialect of Anthropic's messages: ``POST /v1/messages``, with tools, streamed or not.

Fields: https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import Field

from headway.agents.endpoint.dialect import (
    Body,
    Dialect,
    ParsedRequest,
    bad_body,
    event,
    made_calls,
    name_of,
    role_of,
    text_of,
    wrong,
)
from headway.agents.interface.program_messages import MadeTurn, Message, said, tool_call

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_UNTHREADED = "thread_unsupported_request"
"""Error code after which Anthropic's clients send all messages of a conversation, not only a thread's new ones."""
_SIGNATURE = "headway"
"""Signature of thinking blocks, which clients send back. It is not checked."""


class _MessagesBody(Body):
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[Any] | None = None
    stop: str | list[str] | None = Field(default=None, alias="stop_sequences")
    thread: Any = None


class Messages(Dialect):
    """Dialect of Anthropic's messages."""

    path = "/v1/messages"
    counts = "/v1/messages/count_tokens"
    body = _MessagesBody
    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("mcp_servers", "compaction"), "none: the policy answers, and the server does nothing besides"
    )

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        details = {"details": {"error_code": code}} if code == _UNTHREADED else {}
        return {"type": "error", "error": {"type": _ERRORS.get(status, "api_error"), "message": message, **details}}

    def messages(self, asked: _MessagesBody) -> list[Message]:
        if asked.thread is not None:
            raise bad_body("thread: threads are not kept here; send all messages, without it", _UNTHREADED)
        messages = [said("system", system)] if (system := text_of(asked.system, "system")) else []
        for n, message in enumerate(asked.messages):
            messages += _plain(message, f"messages.{n}")
        if messages[-1]["role"] == "assistant":
            where = f"messages.{len(asked.messages) - 1}.role"
            raise wrong(where, "assistant", "user: the policy begins its answers, and does not go on with yours")
        return messages

    def answer(self, wanted: ParsedRequest, turn: MadeTurn, id: str) -> dict[str, Any]:
        return {
            **_head(wanted, id),
            "content": _blocks(turn),
            **_stop(wanted, turn),
            "usage": {"input_tokens": turn.prompt_tokens, "output_tokens": len(turn.sampled.ids)},
        }

    def events(self, wanted: ParsedRequest, turn: MadeTurn, id: str) -> Iterator[bytes]:
        begun = {"input_tokens": turn.prompt_tokens, "output_tokens": 1}
        head = {**_head(wanted, id), "content": [], "stop_reason": None, "stop_sequence": None, "usage": begun}
        yield _event("message_start", message=head)
        for n, block in enumerate(_blocks(turn)):
            empty, deltas = _pieces(block)
            yield _event("content_block_start", index=n, content_block=empty)
            for kind, delta in deltas:
                yield _event("content_block_delta", index=n, delta={"type": kind, **delta})
            yield _event("content_block_stop", index=n)
        yield _event(
            "message_delta", delta=_stop(wanted, turn), usage={**begun, "output_tokens": len(turn.sampled.ids)}
        )
        yield _event("message_stop")


# ------------------------------------------------------------------------------------------------- requests


def _plain(message: dict[str, Any], where: str) -> list[Message]:
    """Return the chat messages of one message: tool results are separate messages."""
    role, content = role_of(message, where), message.get("content")
    if not isinstance(content, list):
        return [said(role, text_of(content, f"{where}.content"))]
    if role == "assistant":
        return [_answer(content, f"{where}.content")]
    plain: list[Message] = []
    for n, block in enumerate(content):
        at = f"{where}.content.{n}"
        if isinstance(block, dict) and block.get("type") == "tool_result":
            text = text_of(block.get("content"), f"{at}.content")
            # Chat templates have no place for the flag: the text must say it.
            if block.get("is_error") is True and not text.lower().startswith("error"):
                text = f"Error: {text}"
            plain.append({**said("tool", text), "tool_call_id": name_of(block, "tool_use_id", at)})
            continue
        text = text_of([block], at)
        if plain and plain[-1]["role"] == role:
            plain[-1]["content"] += text
        else:
            plain.append(said(role, text))
    return plain or [said(role, "")]


def _answer(content: list[Any], where: str) -> Message:
    """Return the chat message of an answer's blocks."""
    texts, thoughts, calls = [], [], []
    for n, block in enumerate(content):
        at, kind = f"{where}.{n}", block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            thoughts.append(name_of(block, "thinking", at) if block.get("thinking") else "")
        elif kind == "tool_use":
            if not isinstance(block.get("input"), dict):
                raise wrong(f"{at}.input", block.get("input"), "an object")
            calls.append(tool_call(name_of(block, "id", at), name_of(block, "name", at), block["input"]))
        elif kind != "redacted_thinking":
            texts.append(text_of([block], at))
    message = said("assistant", "".join(texts))
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


# ------------------------------------------------------------------------------------------------- answers


def _head(wanted: ParsedRequest, id: str) -> dict[str, Any]:
    return {"id": f"msg-{id}", "type": "message", "role": "assistant", "model": wanted.body.model or "policy"}


def _blocks(turn: MadeTurn) -> list[dict[str, Any]]:
    """Return the content of a turn: at least one block of text, even if empty."""
    message, calls = turn.answer.with_reasoning_apart, made_calls(turn)
    blocks = []
    if thoughts := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thoughts, "signature": _SIGNATURE})
    if message["content"] or not calls:
        blocks.append({"type": "text", "text": message["content"]})
    return blocks + [{"type": "tool_use", "id": id, "name": name, "input": given} for id, name, given in calls]


def _stop(wanted: ParsedRequest, turn: MadeTurn) -> dict[str, Any]:
    """Return the reason why the turn ended."""
    if turn.answer.message.get("tool_calls"):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if turn.answer.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    behind = wanted.texts.decode(turn.sampled.ids.tolist())[len(turn.answer.text) :] if wanted.request.stop else ""
    found = next((one for one in wanted.request.stop if behind.startswith(one)), None)
    return {"stop_reason": "end_turn" if found is None else "stop_sequence", "stop_sequence": found}


def _pieces(block: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    """Return a block as it begins in a stream, and the deltas that complete it."""
    match block["type"]:
        case "text":
            return {**block, "text": ""}, [("text_delta", {"text": block["text"]})]
        case "thinking":
            thinking = ("thinking_delta", {"thinking": block["thinking"]})
            signature = ("signature_delta", {"signature": block["signature"]})
            return {**block, "thinking": "", "signature": ""}, [thinking, signature]
        case _:
            return {**block, "input": {}}, [("input_json_delta", {"partial_json": json.dumps(block["input"])})]


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
