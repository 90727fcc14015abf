"""Calls of the policy, and the replicas that serve them: pausing, updates, and statistics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headway.data.interfaces.weights import PolicyReceiver
from headway.data.types import FinishReason, SampledTokens, TrajectoryId
from headway.events import DecodeSteps, PrefillSteps, Span
from headway.records import pickled_by_fields, record


class Priority(StrEnum):
    """Purpose of a call. Waiting calls start in this order: validation first.

    An update waits for a validation of single answers, and at η = 0 for one of programs. At η > 0 nothing waits for a
    validation of programs. It still has priority: if training calls filled all slots, its episodes would time out.
    """

    VALIDATION = "validation"
    TRAINING = "training"


@pickled_by_fields
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings, applied in this order: logits ▶ bias, ``min_tokens`` ▶ penalty ▶ temperature ▶ min-p ▶ top-k ▶
    top-p.

    The order is vLLM's. The log-prob of a token is that of the distribution at the end of this chain.
    """

    max_tokens: int
    temperature: float = 1.0
    """Temperature of sampling. 0 is greedy: log-probs are then those of temperature 1, and filters have no effect."""
    top_p: float = 1.0
    """Probability mass of the most likely tokens that are sampled from; 1 is off."""
    top_k: int = 0
    """Number of the most likely tokens that are sampled from; 0 is off."""
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    """Minimum probability of a token that may be sampled, as a share of the most likely token's; 0 is off."""
    repetition_penalty: float = 1.0
    """Penalty on tokens that already occur in the prompt or the answer: positive logits are divided by it, negative
    ones multiplied (Keskar et al. 2019, arXiv:1909.05858); 1 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token and the value added to its logit."""
    min_tokens: int = 0
    """Number of tokens before which no stop token is sampled, and no stop string is looked for."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer at the token that completes one; the answer's text includes the string."""
    seed: int | None = None
    """Seed of this request; None for the run's seed."""


@record
class GenerateRequest:
    """One call of the policy: a context and sampling settings.

    The tokens depend only on (run seed, ``trajectory``, ``key``, position in the call, weights).
    """

    number: int
    """Number of the call, unique for its client; the result has the same number."""
    trajectory: TrajectoryId
    input_ids: NDArray[np.int32]
    """[P] the context."""
    sampling: SamplingParams
    key: int = 0
    """Key that distinguishes the calls of one episode; 0 for the first one."""
    priority: Priority = Priority.TRAINING
    goes_on: bool = False
    """True if the episode may call again with this context and its answer as a prefix, before it is released."""
    together: int = 1
    """Number of the group's calls with the same context that are submitted at once, this one included."""


@record
class Completion:
    """The result of one call."""

    number: int
    """Number of the call."""
    length: int
    """Number of sampled tokens, end-of-sequence included."""
    version_spans: list[list[int]]
    """``[[start, version], …]`` of the tokens."""
    finish_reason: FinishReason
    started: float
    """Time on the event clock at which the first token was sampled."""
    finished: float
    tokens: SampledTokens | None = None
    """The tokens; None if they are only simulated."""
    cached: int = 0
    """Number of context tokens that needed no prefill: the prefix cache or another call's prefill provided them."""


class OnUpdate(StrEnum):
    """Policy for trajectories in flight when new weights arrive."""

    DRAIN = "drain"
    """Let all submitted calls finish; start nothing that is submitted later."""
    INTERRUPT = "interrupt"
    """Stop between two steps; keep tokens and log-probs, drop the KV cache; prefill again after `resume`."""
    KEEP = "keep"
    """Stop between two steps; continue in place with the old KV cache."""


@dataclass(frozen=True, slots=True)
class Paused:
    """Result of a pause. ``interrupted``: number of trajectories with at least one token that this pause cut off."""

    interrupted: int = 0


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Activity of an engine since the last call. Spans are on the event clock."""

    busy: list[Span] = field(default_factory=list)
    """Union of the spans in which at least one sequence was in prefill or decoding."""
    slot_seconds: float = 0.0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    """Number of context tokens that needed no prefill: the prefix cache or another call's prefill provided them."""
    preempted: int = 0
    """Number of times that an answer was preempted because memory for keys and values ran short."""
    unpinned: int = 0
    """Number of times that an open episode lost the cache kept for its next call, because memory ran short."""
    running: int = 0
    waiting: int = 0
    version: int = 0
    decode_steps: dict[int, DecodeSteps] = field(default_factory=dict)
    """Sums over the steps without prefill, by number of active sequences. Empty if not measured."""
    prefill_steps: dict[int, PrefillSteps] = field(default_factory=dict)
    """Sums over the steps with prefill, by the size of their prefills (`events.add_prefill`)."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Abilities of an engine. A run is refused at its start if its configuration asks for more."""

    on_update: frozenset[OnUpdate]
    reproducible: bool
    """True if a token depends only on (seed, trajectory id, position, weights), not on slots, order or replicas."""
    sleep: bool = False
    double_buffered: bool = True
    """True if the engine receives weights while it decodes. False: `stage_weights` overwrites the served weights, and
    the engine must be paused for it."""


class RolloutEngine(PolicyReceiver, Protocol):
    """One replica, which serves single sequences. Tokens in, tokens out.

        await engine.submit("me", calls)                # these start together, in order
        async for batch in engine.finished("me"):       # what one step has finished, until somebody leaves
            ...
        await engine.pause(OnUpdate.INTERRUPT)          # nothing decodes; tokens so far stay
        await engine.activate(3)
        await engine.resume()                           # what was cut goes on under version 3

    Contract: each sampled token carries its log-prob under the distribution that it was sampled from and the version
    of the weights that sampled it; randomness is keyed by (run seed, trajectory id, call key, position), never by
    arrival order; `pause` loses nothing; no token is ever sampled from a mixture of two versions' weights. A call
    counts a version only if a token was sampled under it. Keys and values of a context that calls share are computed
    once while memory lasts, and never shared between versions, except under `OnUpdate.KEEP`.
    """

    capabilities: Capabilities
    slots: int
    """Maximum number of calls that decode at once (``rollout.max_concurrent``); further ones wait in the engine."""

    async def submit(self, client: str, calls: Sequence[GenerateRequest]) -> None:
        """Take all of ``calls`` in one step, or none.

        Validation calls start before waiting training calls. Raises `DataError` for a context that does not fit, or
        invalid parameters.
        """

    def finished(self, client: str) -> AsyncIterator[Sequence[Completion]]:
        """Yield the finished calls of ``client``: each time all that have finished since, at least one.

        One iterator per client. It ends with the engine, by raising. Leaving it drops the client's other calls: no more
        of their tokens are sampled. Aborted calls are yielded too, with finish reason ``aborted``.
        """

    async def abort(self, client: str, numbers: Sequence[int]) -> None:
        """End these calls of ``client`` with their tokens so far. Numbers of finished calls are ignored."""

    async def drop(self, client: str) -> None:
        """Drop all calls of ``client``, which ended without leaving `finished`; its iterator raises `ClientGone`."""

    async def release(self, trajectories: Sequence[TrajectoryId]) -> None:
        """Free the cache kept for further calls of these episodes, which are over."""

    async def abort_older_than(self, version: int) -> None:
        """End, between two steps, the unfinished training calls that have a token of a version below ``version``."""

    async def pause(self, policy: OnUpdate) -> Paused:
        """Pause decoding by ``policy``; returns when nothing decodes any more. Requests submitted later wait."""

    async def resume(self) -> None: ...

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Free the KV cache on the device, and the weights, which are kept elsewhere or, without ``keep_weights``,
        lost.

        Call it only when paused; interrupted calls are prefilled again. A sleeping engine still takes requests and
        weights (`stage_weights`, `activate`), but computes nothing. Without weights it must get new ones before it
        resumes.
        """

    async def wake(self) -> None:
        """Take the device back after `sleep`. The engine stays paused."""

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...
