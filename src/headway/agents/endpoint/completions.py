"""Turns without chat messages: OpenAI's ``POST /v1/completions``, and vLLM's ``POST /inference/v1/generate``.

A prompt is text or token ids; nothing is added to it: no template, and no token at its beginning. `renderers` and
`verifiers` ask for turns in vLLM's form.

Fields: https://platform.openai.com/docs/api-reference/completions, and ``GenerateRequest`` and ``GenerateResponse`` in
vllm/entrypoints/serve/disagg/protocol.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from headway.agents.endpoint.dialect import (
    Body,
    Dialect,
    ParsedRequest,
    Positive,
    Setting,
    TextCodec,
    TokenId,
    alternatives,
    ends,
    openai_events,
    read_body,
    token_logprobs,
    usage,
    wrong,
)
from headway.agents.endpoint.turns import MadeTurn
from headway.agents.interface.program_messages import TurnRequest


class _Completion(Body):
    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: int | None = Positive
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    logprobs: int | None = Field(default=None, ge=0)
    echo: bool | None = None
    suffix: str | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    response_format: Setting = None


class Completions(Dialect):
    """The dialect of completions."""

    path = "/v1/completions"

    def read(self, body: bytes, texts: TextCodec) -> ParsedRequest:
        asked = read_body(_Completion, body)
        if asked.echo:
            raise wrong("echo", True, "false: an answer is what the policy sampled; put the prompt before it yourself")
        if asked.suffix:
            raise wrong("suffix", asked.suffix, "none: the policy writes on, and does not fill in")
        request = TurnRequest(
            [],
            max_tokens=asked.max_tokens,
            token_ids=_one_prompt(asked.prompt, texts),
            **ends(asked.stop, asked.stop_token_ids),
        )
        sampling = asked.sampling() | alternatives("logprobs", asked.logprobs)
        return ParsedRequest(request, asked.model, bool(asked.stream), sampling, asked, texts)

    def answer(self, wanted: ParsedRequest, turn: MadeTurn, id: str) -> dict[str, Any]:
        return {
            **_head(wanted, id),
            "choices": [_choice(wanted, turn, turn.answer.text, turn.answer.finish_reason)],
            "usage": usage(turn),
        }

    def events(self, wanted: ParsedRequest, turn: MadeTurn, id: str) -> Iterator[bytes]:
        choice = _choice(wanted, turn, turn.answer.text, turn.answer.finish_reason)
        return openai_events(_head(wanted, id), [choice], wanted, turn)


def _one_prompt(
    prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]], texts: TextCodec
) -> tuple[int, ...]:
    """The token ids of the prompt: one, though a list of prompts is a request, too."""
    if not isinstance(prompt, str) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise wrong("prompt", prompt, "one prompt: an answer is one turn; send the others by themselves")
        return _one_prompt(prompt[0], texts)
    return tuple(texts.encode(prompt) if isinstance(prompt, str) else prompt)  # type: ignore[arg-type]


def _choice(wanted: ParsedRequest, turn: MadeTurn, text: str, finish_reason: str) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    if wanted.body.logprobs is not None:
        tokens = token_logprobs(wanted, turn)
        choice["logprobs"] = {
            "tokens": [one["token"] for one in tokens],
            "token_logprobs": [one["logprob"] for one in tokens],
            "top_logprobs": [{one["token"]: one["logprob"]} for one in tokens],
            "text_offset": list(accumulate((len(one["token"]) for one in tokens[:-1]), initial=0))[: len(tokens)],
        }
    if wanted.body.return_token_ids:
        choice["token_ids"] = turn.sampled.ids.tolist()
        choice["prompt_token_ids"] = list(wanted.request.token_ids or ())
    return choice


def _head(wanted: ParsedRequest, id: str) -> dict[str, Any]:
    model = wanted.model or "policy"
    return {"id": f"cmpl-{id}", "object": "text_completion", "created": int(time.time()), "model": model}


class _SamplingBody(Body):
    max_tokens: int | None = Positive
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    logprobs: int | None = None


class _GenerateBody(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str | None = None
    request_id: str | None = None
    token_ids: list[TokenId]
    sampling_params: _SamplingBody
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    features: Any = None
    content_parts: Any = None


class TokenGenerate(Dialect):
    """The dialect of turns by token ids."""

    path = "/inference/v1/generate"

    def read(self, body: bytes, texts: TextCodec) -> ParsedRequest:
        asked = read_body(_GenerateBody, body)
        for name in ("features", "content_parts"):
            if getattr(asked, name):
                raise wrong(name, getattr(asked, name), "none: the policy reads text alone, no images or files")
        params = asked.sampling_params
        sampling = params.sampling() | alternatives("logprobs", params.logprobs)
        request = TurnRequest(
            [],
            max_tokens=params.max_tokens,
            token_ids=tuple(asked.token_ids),
            **ends(params.stop, params.stop_token_ids),
        )
        return ParsedRequest(request, asked.model, bool(asked.stream), sampling, asked, texts)

    def answer(self, wanted: ParsedRequest, turn: MadeTurn, id: str) -> dict[str, Any]:
        answer = {"request_id": _request_id(wanted, id), "choices": [_token_choice(wanted, turn)], "usage": usage(turn)}
        if wanted.body.return_token_ids:
            answer["prompt_token_ids"] = wanted.body.token_ids
        return answer

    def events(self, wanted: ParsedRequest, turn: MadeTurn, id: str) -> Iterator[bytes]:
        head = {"request_id": _request_id(wanted, id)}
        return openai_events(head, [_token_choice(wanted, turn)], wanted, turn)


def _token_choice(wanted: ParsedRequest, turn: MadeTurn) -> dict[str, Any]:
    ids = turn.sampled.ids.tolist()
    choice = {"index": 0, "token_ids": ids, "logprobs": None, "finish_reason": turn.answer.finish_reason}
    if wanted.body.sampling_params.logprobs is not None:
        pairs = zip(ids, turn.sampled.logprobs.tolist(), strict=True)
        tokens = [
            {"token": f"token_id:{id}", "logprob": logprob, "bytes": None, "top_logprobs": []} for id, logprob in pairs
        ]
        choice["logprobs"] = {"content": tokens}
    return choice


def _request_id(wanted: ParsedRequest, id: str) -> str:
    return wanted.body.request_id or f"gen-{id}"
