"""Turns by token ids: ``POST /inference/v1/generate``, as vLLM has it, and `renderers` and `verifiers` ask it.

Fields: vllm/entrypoints/serve/disagg/protocol.py, ``GenerateRequest`` and ``GenerateResponse``
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict

from headway.agents.endpoint.answer_parts import DONE, event, usage, with_usage
from headway.agents.endpoint.dialect import (
    Body,
    Positive,
    TextCodec,
    TokenId,
    Wanted,
    alternatives,
    ends,
    openai_error,
    read_body,
)
from headway.agents.endpoint.normalise import wrong
from headway.agents.endpoint.turns import MadeTurn
from headway.agents.interface.program_messages import TurnRequest


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


class TokenGenerate:
    """`headway.agents.endpoint.dialect.Dialect` of turns by token ids."""

    path = "/inference/v1/generate"
    counts: str | None = None
    error = staticmethod(openai_error)

    def read(self, body: bytes, texts: TextCodec) -> Wanted:
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
        return Wanted(request, asked.model, bool(asked.stream), sampling, asked, texts)

    def answer(self, wanted: Wanted, turn: MadeTurn, id: str) -> dict[str, Any]:
        answer = {"request_id": _request_id(wanted, id), "choices": [_choice(wanted, turn)], "usage": usage(turn)}
        if wanted.body.return_token_ids:
            answer["prompt_token_ids"] = wanted.body.token_ids
        return answer

    def events(self, wanted: Wanted, turn: MadeTurn, id: str) -> Iterator[bytes]:
        yield event({"request_id": _request_id(wanted, id), "choices": [_choice(wanted, turn)]})
        if with_usage(wanted.body.stream_options):
            yield event({"request_id": _request_id(wanted, id), "choices": [], "usage": usage(turn)})
        yield DONE


def _choice(wanted: Wanted, turn: MadeTurn) -> dict[str, Any]:
    ids = turn.sampled.ids.tolist()
    choice = {"index": 0, "token_ids": ids, "logprobs": None, "finish_reason": turn.answer.finish_reason}
    if wanted.body.sampling_params.logprobs is not None:
        pairs = zip(ids, turn.sampled.logprobs.tolist(), strict=True)
        tokens = [
            {"token": f"token_id:{id}", "logprob": logprob, "bytes": None, "top_logprobs": []} for id, logprob in pairs
        ]
        choice["logprobs"] = {"content": tokens}
    return choice


def _request_id(wanted: Wanted, id: str) -> str:
    return wanted.body.request_id or f"gen-{id}"
