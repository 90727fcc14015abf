"""Dialects for turns by chat messages, OpenAI's ``POST /v1/chat/completions``, and by text or token ids: OpenAI's
``POST /v1/completions``, and vLLM's ``POST /inference/v1/generate``.

A prompt of ids is used unchanged. One of text gets no template, only the tokens before a text, such as BOS. `renderers`
and `verifiers` use vLLM's form.

Fields: https://platform.openai.com/docs/api-reference, and ``GenerateRequest`` and ``GenerateResponse`` in
vllm/entrypoints/serve/disagg/protocol.py
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

from pydantic import Field

from headway.agents.endpoint.dialect import (
    Body,
    Dialect,
    ParsedRequest,
    TextCodec,
    TokenId,
    event,
    made_calls,
    name_of,
    role_of,
    text_of,
    token_logprobs,
    usage,
    wrong,
)
from headway.agents.interface.program_messages import MadeTurn, Message, tool_call


class _ChatBody(Body):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None


class ChatCompletions(Dialect):
    """Dialect of chat completions."""

    path = "/v1/chat/completions"
    body = _ChatBody
    refused: ClassVar[Mapping[str, str]] = {
        "functions": "tools, the form that followed it",
        "continue_final_message": "a last message of another role: the policy begins its answers",
    }

    def params(self, asked: _ChatBody) -> Body:
        return asked.model_copy(update={"max_tokens": asked.max_completion_tokens or asked.max_tokens})

    def messages(self, asked: _ChatBody) -> list[Message]:
        return [_message(message, f"messages.{n}") for n, message in enumerate(asked.messages)]

    def answer(self, wanted: ParsedRequest, turn: MadeTurn, id: str) -> dict[str, Any]:
        message = {**_openai_message(turn), "refusal": None}
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "finish_reason": _finish_reason(turn),
            "logprobs": None,
            **_chat_logprobs(wanted, turn),
        }
        head = _head(wanted, f"chatcmpl-{id}", "chat.completion")
        return {**head, "choices": [choice], "usage": usage(turn)}

    def events(self, wanted: ParsedRequest, turn: MadeTurn, id: str) -> Iterator[bytes]:
        message = _openai_message(turn)
        calls = message.pop("tool_calls", [])
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
        deltas += [{"tool_calls": [{"index": n, **call}]} for n, call in enumerate(calls)]
        choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in [*deltas, {}]]
        choices[-1] |= {"finish_reason": _finish_reason(turn), **_chat_logprobs(wanted, turn)}
        return _events(_head(wanted, f"chatcmpl-{id}", "chat.completion.chunk"), choices, wanted, turn)


def _message(message: dict[str, Any], where: str) -> Message:
    """Return the plain message of a client's message: fields that mean nothing to the policy are left out."""
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
    id = given["id"] if isinstance(given.get("id"), str) else ""
    return tool_call(id, name_of(function, "name", where), function.get("arguments") or {})


def _openai_message(turn: MadeTurn) -> Message:
    """Return the policy's answer in the form of OpenAI's clients: arguments of calls are JSON text."""
    message = dict(turn.answer.with_reasoning_apart)
    if calls := made_calls(turn):
        message["content"] = message["content"] or None
        message["tool_calls"] = [tool_call(id, name, json.dumps(arguments)) for id, name, arguments in calls]
    return message


def _finish_reason(turn: MadeTurn) -> str:
    """Return ``stop``, ``length`` or ``tool_calls``."""
    return "tool_calls" if turn.answer.message.get("tool_calls") else turn.answer.finish_reason


def _chat_logprobs(wanted: ParsedRequest, turn: MadeTurn) -> dict[str, Any]:
    asked = wanted.body.logprobs
    return {"logprobs": {"content": token_logprobs(wanted, turn), "refusal": None}} if asked else {}


def _head(wanted: ParsedRequest, id: str, kind: str) -> dict[str, Any]:
    return {"id": id, "object": kind, "created": int(time.time()), "model": wanted.body.model or "policy"}


def _events(
    head: dict[str, Any], choices: Iterable[dict[str, Any]], wanted: ParsedRequest, turn: MadeTurn
) -> Iterator[bytes]:
    """Make the stream of an answer, with token counts if they are asked for."""
    for choice in choices:
        yield event({**head, "choices": [choice]})
    if (wanted.body.stream_options or {}).get("include_usage"):
        yield event({**head, "choices": [], "usage": usage(turn)})
    yield b"data: [DONE]\n\n"


class _Completion(Body):
    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    logprobs: int | None = Field(default=None, ge=0)
    return_token_ids: bool | None = None


class Completions(Dialect):
    """Dialect of completions."""

    path = "/v1/completions"
    body = _Completion
    refused: ClassVar[Mapping[str, str]] = {
        "echo": "false: an answer is what the policy sampled; put the prompt before it yourself",
        "suffix": "none: the policy writes on, and does not fill in",
    }

    def token_ids(self, asked: _Completion, texts: TextCodec) -> tuple[int, ...]:
        return _one_prompt(asked.prompt, texts)

    def answer(self, wanted: ParsedRequest, turn: MadeTurn, id: str) -> dict[str, Any]:
        head = _head(wanted, f"cmpl-{id}", "text_completion")
        return {**head, "choices": [_choice(wanted, turn)], "usage": usage(turn)}

    def events(self, wanted: ParsedRequest, turn: MadeTurn, id: str) -> Iterator[bytes]:
        return _events(_head(wanted, f"cmpl-{id}", "text_completion"), [_choice(wanted, turn)], wanted, turn)


def _one_prompt(
    prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]], texts: TextCodec
) -> tuple[int, ...]:
    """Return the token ids of the prompt. A list of prompts is accepted if it has only one."""
    if not isinstance(prompt, str) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise wrong("prompt", prompt, "one prompt: an answer is one turn; send the others by themselves")
        return _one_prompt(prompt[0], texts)
    return tuple(texts.encode(prompt) if isinstance(prompt, str) else prompt)  # type: ignore[arg-type]


def _choice(wanted: ParsedRequest, turn: MadeTurn) -> dict[str, Any]:
    answer = turn.answer
    choice: dict[str, Any] = {"index": 0, "text": answer.text, "logprobs": None, "finish_reason": answer.finish_reason}
    if wanted.body.logprobs is not None:
        tokens = token_logprobs(wanted, turn)
        choice["logprobs"] = {
            "tokens": [one["token"] for one in tokens],
            "token_logprobs": [one["logprob"] for one in tokens],
            "top_logprobs": [{one["token"]: one["logprob"]} for one in tokens],
            # An answer without tokens has no offset, but `accumulate` gives one.
            "text_offset": list(accumulate((len(one["token"]) for one in tokens[:-1]), initial=0))[: len(tokens)],
        }
    if wanted.body.return_token_ids:
        choice["token_ids"] = turn.sampled.ids.tolist()
        choice["prompt_token_ids"] = list(wanted.request.token_ids or ())
    return choice


class _SamplingBody(Body):
    logprobs: int | None = None


class _GenerateBody(Body):
    request_id: str | None = None
    token_ids: list[TokenId]
    sampling_params: _SamplingBody
    return_token_ids: bool | None = None


class TokenGenerate(Dialect):
    """Dialect of turns by token ids."""

    path = "/inference/v1/generate"
    body = _GenerateBody
    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("features", "content_parts"), "none: the policy reads text alone, no images or files"
    )

    def params(self, asked: _GenerateBody) -> Body:
        return asked.sampling_params

    def token_ids(self, asked: _GenerateBody, texts: TextCodec) -> tuple[int, ...]:
        return tuple(asked.token_ids)

    def answer(self, wanted: ParsedRequest, turn: MadeTurn, id: str) -> dict[str, Any]:
        answer = {**_request_id(wanted, id), "choices": [_token_choice(wanted, turn)], "usage": usage(turn)}
        if wanted.body.return_token_ids:
            answer["prompt_token_ids"] = wanted.body.token_ids
        return answer

    def events(self, wanted: ParsedRequest, turn: MadeTurn, id: str) -> Iterator[bytes]:
        return _events(_request_id(wanted, id), [_token_choice(wanted, turn)], wanted, turn)


def _token_choice(wanted: ParsedRequest, turn: MadeTurn) -> dict[str, Any]:
    ids = turn.sampled.ids.tolist()
    choice = {"index": 0, "token_ids": ids, "logprobs": None, "finish_reason": turn.answer.finish_reason}
    if wanted.body.sampling_params.logprobs is not None:
        tokens = zip(token_logprobs(wanted, turn), ids, strict=True)
        choice["logprobs"] = {"content": [{**one, "token": f"token_id:{id}", "bytes": None} for one, id in tokens]}
    return choice


def _request_id(wanted: ParsedRequest, id: str) -> dict[str, Any]:
    return {"request_id": wanted.body.request_id or f"gen-{id}"}
