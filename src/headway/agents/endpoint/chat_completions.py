"""OpenAI's chat completions: ``POST /v1/chat/completions``, with tools, streamed or not.

Fields: https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field

from headway.agents.endpoint.dialect import (
    Body,
    Dialect,
    ParsedRequest,
    Positive,
    Setting,
    TextCodec,
    TokenId,
    call,
    ends,
    function_tools,
    name_of,
    named,
    openai_events,
    read_body,
    role_of,
    text_of,
    token_logprobs,
    usage,
    wrong,
)
from headway.agents.endpoint.turns import MadeTurn
from headway.agents.interface.program_messages import Message, ToolSchema, TurnRequest, finite


class _ChatBody(Body):
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    max_tokens: int | None = Positive
    max_completion_tokens: int | None = Positive
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    logprobs: bool | None = None
    stream_options: dict[str, Any] | None = None
    top_logprobs: Setting = None
    modalities: Setting = None
    audio: Setting = None
    reasoning_effort: Setting = None
    verbosity: Setting = None
    web_search_options: Setting = None
    chat_template: Setting = None
    add_generation_prompt: Setting = None
    documents: Setting = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: list[Any] | None = None
    continue_final_message: bool | None = None


class ChatCompletions(Dialect):
    """The dialect of chat completions."""

    path = "/v1/chat/completions"

    def read(self, body: bytes, texts: TextCodec) -> ParsedRequest:
        chat = read_body(_ChatBody, body)
        if chat.functions:
            raise wrong("functions", chat.functions, "tools, the form that followed it")
        if chat.continue_final_message:
            raise wrong("continue_final_message", True, "a last message of another role: the policy begins its answers")
        sampling = chat.sampling()
        if chat.response_format is not None and chat.response_format.get("type") != "text":
            sampling["response_format"] = chat.response_format.get("type")
        if chat.chat_template_kwargs:
            sampling["chat_template_kwargs"] = chat.chat_template_kwargs
        if chat.tool_choice is not None and chat.tool_choice != "none":
            sampling["tool_choice"] = chat.tool_choice
        tools = _tools(chat.tools)
        request = TurnRequest(
            named([_message(message, f"messages.{n}") for n, message in enumerate(chat.messages)]),
            None if chat.tool_choice == "none" else tools,
            chat.max_completion_tokens or chat.max_tokens,
            **ends(chat.stop, chat.stop_token_ids),
        )
        return ParsedRequest(request, chat.model, bool(chat.stream), sampling, chat, texts)

    def answer(self, wanted: ParsedRequest, turn: MadeTurn, id: str) -> dict[str, Any]:
        return {
            **_head(wanted, id, "chat.completion"),
            "choices": [
                {
                    "index": 0,
                    "message": {**_openai_message(turn.answer.with_reasoning_apart), "refusal": None},
                    "logprobs": _logprobs(wanted, turn) if wanted.body.logprobs else None,
                    "finish_reason": _finish_reason(turn),
                }
            ],
            "usage": usage(turn),
        }

    def events(self, wanted: ParsedRequest, turn: MadeTurn, id: str) -> Iterator[bytes]:
        head = _head(wanted, id, "chat.completion.chunk")
        message = _openai_message(turn.answer.with_reasoning_apart)
        calls = message.pop("tool_calls", [])
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
        deltas += [{"tool_calls": [{"index": n, **call}]} for n, call in enumerate(calls)]
        choices = []
        for n, delta in enumerate([*deltas, {}]):
            last = n == len(deltas)
            choice = {"index": 0, "delta": delta, "finish_reason": _finish_reason(turn) if last else None}
            if last and wanted.body.logprobs:
                choice["logprobs"] = _logprobs(wanted, turn)
            choices.append(choice)
        return openai_events(head, choices, wanted, turn)


def _message(message: dict[str, Any], where: str) -> Message:
    """The plain message of one that a client sent: fields that say nothing to the policy are left out."""
    if message.get("role") == "function" or message.get("function_call"):
        raise wrong(where, message, "tool_calls and messages of role tool, the form that followed function_call")
    plain: Message = {"role": role_of(message, where), "content": text_of(message.get("content"), f"{where}.content")}
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking"):
        if message.get(name) is not None:
            plain[name] = name_of(message, name, where) if message[name] != "" else ""
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list) or plain["role"] != "assistant":
            raise wrong(f"{where}.tool_calls", calls, "a list, in a message of role assistant")
        plain["tool_calls"] = [_call(one, f"{where}.tool_calls.{n}") for n, one in enumerate(calls)]
    return plain


def _call(given: Any, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments", ""), str | dict):
        raise wrong(where, given, '{"id": …, "type": "function", "function": {"name": …, "arguments": "{…}"}}')
    id = given.get("id")
    return call(id if isinstance(id, str) else "", name_of(function, "name", where), function.get("arguments") or {})


def _tools(tools: Sequence[dict[str, Any]] | None) -> list[ToolSchema] | None:
    given = []
    for n, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise wrong(f"tools.{n}", tool, '{"type": "function", "function": {"name": …, "parameters": …}}')
        given.append((f"tools.{n}", function.get("name"), function.get("description"), function.get("parameters")))
    return function_tools(given)


def _openai_message(message: Message) -> Message:
    """The policy's answer as OpenAI's clients read it: arguments of calls as JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    return {
        **message,
        "content": message["content"] or None,
        "tool_calls": [
            {**call, "function": {**call["function"], "arguments": json.dumps(finite(call["function"]["arguments"]))}}
            for call in calls
        ],
    }


def _finish_reason(turn: MadeTurn) -> str:
    """``stop``, ``length`` or ``tool_calls``."""
    return "tool_calls" if turn.answer.message.get("tool_calls") else turn.answer.finish_reason


def _logprobs(wanted: ParsedRequest, turn: MadeTurn) -> dict[str, Any]:
    return {"content": token_logprobs(wanted, turn), "refusal": None}


def _head(wanted: ParsedRequest, id: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{id}", "object": kind, "created": int(time.time()), "model": wanted.model or "policy"}
