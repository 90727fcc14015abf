"""Parts of answers that several dialects have."""

from __future__ import annotations

import json
from typing import Any

from headway.agents.endpoint.dialect import Wanted
from headway.agents.endpoint.turns import MadeTurn

DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's and vLLM's streams."""


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """Make a server-sent event."""
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def usage(turn: MadeTurn) -> dict[str, int]:
    """Numbers of tokens of a turn, as OpenAI's chat completions and vLLM name them."""
    sampled = len(turn.sampled.ids)
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": turn.prompt_tokens + sampled,
    }


def with_usage(options: dict[str, Any] | None) -> bool:
    """Tell whether a stream ends with the numbers of tokens, from its request's ``stream_options``."""
    return bool((options or {}).get("include_usage"))


def token_logprobs(wanted: Wanted, turn: MadeTurn) -> list[dict[str, Any]]:
    """Log-probs (nats) of the sampled tokens under the policy that sampled them, by their texts."""
    content = []
    for id, logprob in zip(turn.sampled.ids.tolist(), turn.sampled.logprobs.tolist(), strict=True):
        text = wanted.texts.decode([id])
        content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return content
