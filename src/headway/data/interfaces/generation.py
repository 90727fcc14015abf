"""Calls of the policy: what is asked of a replica, by which sampling, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from headway.data.types import FinishReason, SampledTokens, TrajectoryId
from headway.runtime.pickling import pickled_by_fields


class Priority(StrEnum):
    """Purpose of a call. Waiting calls start in this order: validation first.

    An update waits for a validation of single answers, and at η = 0 for one of programs. At η > 0 nothing waits for
    the latter. It is first all the same: behind training that fills all slots, its episodes would reach their time
    limit.
    """

    VALIDATION = "validation"
    TRAINING = "training"


@pickled_by_fields
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings by which tokens are sampled: logits ▶ bias, ``min_tokens`` ▶ penalty ▶ temperature ▶ min-p ▶ top-k ▶
    top-p.

    The order is vLLM's. The log-prob of a token is that of the distribution at the end of this chain.
    """

    max_tokens: int
    temperature: float = 1.0
    """Temperature of sampling. 0 is greedy; log-probs are then those of temperature 1, and filters do not count."""
    top_p: float = 1.0
    """Probability mass of the most likely tokens that are sampled from; 1 is off."""
    top_k: int = 0
    """Number of the most likely tokens that are sampled from; 0 is off."""
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    """Smallest probability of a token that may be sampled, as a share of the most likely token's; 0 is off."""
    repetition_penalty: float = 1.0
    """Penalty on tokens that the prompt or the answer has already: a positive logit is divided by it, a negative one
    multiplied (Keskar et al. 2019, arXiv:1909.05858); 1 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token and the value added to its logit."""
    min_tokens: int = 0
    """Number of tokens before which no stop token is sampled, and no stop string looked for."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer, with the token that completes one; the answer's text includes it."""
    seed: int | None = None
    """Seed of this request; None for the run's seed."""


@pickled_by_fields
@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One call of the policy: a context and sampling settings.

    The tokens depend on (run seed, ``trajectory``, ``key``, position in the call, weights) alone.
    """

    number: int
    """Number that the client chose, once for each of its calls; the result has it, too."""
    trajectory: TrajectoryId
    input_ids: NDArray[np.int32]
    """[P] the context."""
    sampling: SamplingParams
    key: int = 0
    """Key that tells the calls of one episode apart: 0 for its first one."""
    priority: Priority = Priority.TRAINING
    goes_on: bool = False
    """The episode may call again with this context and its continuation as a prefix, until it is released."""
    together: int = 1
    """Number of calls that have the same context and are asked for beside this one, which counts, too: a group's."""


@pickled_by_fields
@dataclass(frozen=True, slots=True)
class FinishedCall:
    """The result of one call."""

    number: int
    """The call's."""
    length: int
    """Tokens that were sampled, end-of-sequence included."""
    version_spans: list[list[int]]
    """``[[start, version], …]`` of the tokens."""
    finish_reason: FinishReason
    started: float
    """Seconds on the event clock: when the first token was sampled."""
    finished: float
    tokens: SampledTokens | None = None
    """The tokens; None where they are only simulated."""
    cached: int = 0
    """Tokens of the context that needed no prefill: the prefix cache had them, or another call brought them."""
