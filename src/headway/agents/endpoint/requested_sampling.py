"""Differences between the sampling that an agent asks for and its run's, which holds.

Training needs the distribution that tokens were sampled from, and reckons with the run's. What only ends an answer, as
``max_tokens`` and ``stop`` do, changes no distribution, and is the agent's to choose; so is a ``seed``, which has no
effect: the run's seed decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.data.interfaces.generation import SamplingParams
from headway.errors import shown

_ANY = object()


def differences(asked: Mapping[str, Any], sampling: SamplingParams) -> list[str]:
    """Say of each setting of ``asked`` that is another one than ``sampling``'s what was asked for, and what holds."""
    found = []
    for name, value in asked.items():
        ours = _of_the_run(name, sampling)
        if not (value == ours or (name == "top_k" and {value, ours} <= {-1, 0})):
            held = "not done" if ours is _ANY else f"here {shown(ours)}"
            found.append(f"{name}={shown(value)} ({held})")
    return found


def _of_the_run(name: str, sampling: SamplingParams) -> Any:
    match name:
        case "temperature" | "top_p" | "top_k" | "min_p" | "repetition_penalty" | "min_tokens":
            return getattr(sampling, name)
        case "logit_bias":
            return {str(token): bias for token, bias in sampling.logit_bias}
        case "n" | "best_of":
            return 1
        case "presence_penalty" | "frequency_penalty":
            return 0.0
        case "tool_choice":
            return "auto"
        case "top_logprobs":  # engines tell the log-probs of sampled tokens alone
            return 0
        case "logprobs":
            return 1
        case "modalities":
            return ["text"]
        case "verbosity" | "text.verbosity":
            return "medium"
        case "thinking":  # as the policy likes
            return "adaptive"
        case "truncation":
            return "disabled"
        case "add_generation_prompt":
            return True
        case "typical_p":
            return 1.0
        case "parallel_tool_calls":
            return True
        case "ignore_eos" | "use_beam_search":
            return False
        case "bad_words":
            return []
        case _:
            return _ANY
