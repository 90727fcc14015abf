"""OpenAI's chat completions: ``POST /v1/chat/completions``, with tools, streamed or not.

Fields: https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field

from headway.endpoint.dialect import Body, Positive, Refused, Texts, Wanted, openai_error, read_body, strings
from headway.endpoint.turns import MadeTurn
from headway.errors import shown
from headway.programs.messages import Message, ToolSchema, TurnRequest


class _Chat(Body):
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    max_tokens: int | None = Positive
    max_completion_tokens: int | None = Positive
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    stream_options: dict[str, Any] | None = None


class ChatCompletions:
    """`headway.endpoint.dialect.Dialect` of chat completions."""

    path = "/v1/chat/completions"
    error = staticmethod(openai_error)

    def read(self, body: bytes, texts: Texts) -> Wanted:
        chat = read_body(_Chat, body)
        sampling = chat.sampling()
        if chat.response_format is not None and chat.response_format.get("type") != "text":
            sampling["response_format"] = chat.response_format.get("type")
        tools = None if chat.tool_choice == "none" else function_tools(chat.tools)
        if chat.tool_choice not in (None, "auto", "none"):
            sampling["tool_choice"] = chat.tool_choice
        request = TurnRequest(
            chat.messages,
            tools or None,
            chat.max_completion_tokens or chat.max_tokens,
            stop=strings(chat.stop),
        )
        return Wanted(request, chat.model, bool(chat.stream), sampling, chat, texts)

    def answer(self, wanted: Wanted, turn: MadeTurn, id: str) -> dict[str, Any]:
        return {
            **_head(wanted, id, "chat.completion"),
            "choices": [
                {
                    "index": 0,
                    "message": openai_message(turn.answer.message),
                    "logprobs": logprobs(wanted, turn) if wanted.body.logprobs else None,
                    "finish_reason": finish_reason(turn),
                }
            ],
            "usage": usage(turn),
        }

    def events(self, wanted: Wanted, turn: MadeTurn, id: str) -> Iterator[bytes]:
        head = _head(wanted, id, "chat.completion.chunk")
        message = openai_message(turn.answer.message)
        calls = message.pop("tool_calls", [])
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
        deltas += [{"tool_calls": [{"index": n, **call}]} for n, call in enumerate(calls)]
        for n, delta in enumerate([*deltas, {}]):
            last = n == len(deltas)
            choice = {"index": 0, "delta": delta, "finish_reason": finish_reason(turn) if last else None}
            if last and wanted.body.logprobs:
                choice["logprobs"] = logprobs(wanted, turn)
            yield event({**head, "choices": [choice]})
        if (wanted.body.stream_options or {}).get("include_usage"):
            yield event({**head, "choices": [], "usage": usage(turn)})
        yield b"data: [DONE]\n\n"


def function_tools(tools: Sequence[dict[str, Any]] | None) -> list[ToolSchema]:
    """Check that ``tools`` are functions with names of their own. Raises `Refused` where they are not."""
    names: set[str] = set()
    for n, tool in enumerate(tools or ()):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if tool.get("type") != "function" or not isinstance(name, str) or not name:
            raise Refused(
                400,
                "invalid_request",
                f"the request's body: tools.{n}: type {shown(tool.get('type'))} with no function's name is no tool for "
                'the policy; expected {"type": "function", "function": {"name": …, "parameters": …}}',
            )
        if name in names:
            raise Refused(
                400, "invalid_request", f"the request's body: tools.{n}: there is a tool named {name!r} already"
            )
        names.add(name)
    return list(tools or ())


def openai_message(message: Message) -> Message:
    """The policy's answer as OpenAI's clients read it: arguments of calls as JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    return {
        **message,
        "content": message["content"] or None,
        "tool_calls": [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ],
    }


def finish_reason(turn: MadeTurn) -> str:
    """``stop``, ``length`` or ``tool_calls``."""
    return "tool_calls" if turn.answer.message.get("tool_calls") else turn.answer.finish_reason


def usage(turn: MadeTurn) -> dict[str, int]:
    """Numbers of tokens of a turn."""
    sampled = len(turn.sampled.ids)
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": turn.prompt_tokens + sampled,
    }


def logprobs(wanted: Wanted, turn: MadeTurn) -> dict[str, Any]:
    """Log-probs (nats) of the sampled tokens under the policy that sampled them."""
    assert wanted.texts is not None
    content = []
    for id, logprob in zip(turn.sampled.ids.tolist(), turn.sampled.logprobs.tolist(), strict=True):
        text = wanted.texts.decode([id])
        content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content}


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """Make a server-sent event."""
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def _head(wanted: Wanted, id: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{id}", "object": kind, "created": int(time.time()), "model": wanted.model or "policy"}
