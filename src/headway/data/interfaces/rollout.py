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
    validation of programs. It still has priority: behind training calls in all slots, its episodes would time out.
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
    """Minimum number of tokens before a stop token or stop string may end the answer."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer, with the token that completes one; the answer's text includes it."""
    seed: int | None = None
    """Seed of this request; None for the run's seed."""


@record
class GenerateRequest:
    """One call of the policy: a context and sampling settings.

    The tokens depend on (run seed, ``trajectory``, ``key``, position in the call, weights) alone.
    """

    number: int
    """Number of the call, unique for its client; the result has it, too."""
    trajectory: TrajectoryId
    input_ids: NDArray[np.int32]
    """[P] the context."""
    sampling: SamplingParams
    key: int = 0
    """Key that distinguishes the calls of one episode; 0 for the first one."""
    priority: Priority = Priority.TRAINING
    goes_on: bool = False
    """True if the episode may call again with this context and its answer as a prefix, until it is released."""
    together: int = 1
    """Number of the group's calls with the same context that are submitted together, this one included."""


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
    """Number of context tokens without prefill: the prefix cache had them, or another call's prefill gave them."""


class OnUpdate(StrEnum):
    """Policy for trajectories in flight when new weights arrive."""

    DRAIN = "drain"
    """Let everything that was submitted finish; start nothing that is submitted later."""
    INTERRUPT = "interrupt"
    """Stop between two steps; keep tokens and log-probs, drop the KV cache; prefill again after `resume`."""
    KEEP = "keep"
    """Stop between two steps; go on in place with the old KV cache."""


@dataclass(frozen=True, slots=True)
class Paused:
    """Result of a pause. ``interrupted`` counts trajectories with at least one token that this pause cut."""

    interrupted: int = 0


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Activity of an engine since the last call. Spans are on the event clock."""

    busy: list[Span] = field(default_factory=list)
    """Union of the spans in which at least one sequence was prefilled or decoded."""
    slot_seconds: float = 0.0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of contexts that needed no prefill: the prefix cache had them, or another call brought them."""
    preempted: int = 0
    """Number of times that an answer was parked because memory for keys and values ran short."""
    unpinned: int = 0
    """Number of times that an open episode lost what was kept for its next call, because memory ran short."""
    running: int = 0
    waiting: int = 0
    version: int = 0
    decode_steps: dict[int, DecodeSteps] = field(default_factory=dict)
    """Sums over the steps that prefilled nothing, by number of active sequences. Empty if it is not measured."""
    prefill_steps: dict[int, PrefillSteps] = field(default_factory=dict)
    """Sums over the steps that prefilled something, by the size of their prefills (`events.add_prefill`)."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Abilities of an engine; a start is refused when the configuration asks for more."""

    on_update: frozenset[OnUpdate]
    reproducible: bool
    """True if only (seed, trajectory id, position, weights) determine a token: not slots, order or replicas."""
    sleep: bool = False
    double_buffered: bool = True
    """True if the engine receives weights while it decodes. False: `stage_weights` overwrites the weights that are
    served, and the engine must be paused for it."""


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
    """Calls that decode at once (``rollout.max_concurrent``); more wait inside the engine."""

    async def submit(self, client: str, calls: Sequence[GenerateRequest]) -> None:
        """Take all of ``calls`` in one step, or none.

        Calls of validation start before waiting ones of training. Raises `DataError` for a context that does not fit,
        or parameters that make no sense.
        """

    def finished(self, client: str) -> AsyncIterator[Sequence[Completion]]:
        """Yield the finished calls of ``client``: each time all that are finished by then, one at least.

        One iterator for each client. It ends with the engine, by raising; leaving it drops the client's other calls:
        nothing more is sampled for them. Aborted calls are yielded too, with finish reason ``aborted``.
        """

    async def abort(self, client: str, numbers: Sequence[int]) -> None:
        """End these calls of ``client`` as they are. Numbers of finished calls are ignored."""

    async def drop(self, client: str) -> None:
        """Drop all calls of ``client``, which vanished without leaving `finished`; its iterator raises `ClientGone`."""

    async def release(self, trajectories: Sequence[TrajectoryId]) -> None:
        """Free what is kept for further calls of these episodes, which are over."""

    async def abort_older_than(self, version: int) -> None:
        """End, between two steps, the unfinished training calls with a token of an older version."""

    async def pause(self, policy: OnUpdate) -> Paused:
        """Returns when nothing decodes any more under ``policy``. Requests may still be submitted; they wait."""

    async def resume(self) -> None: ...

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Free the KV cache on the device, and the weights: kept elsewhere or, without ``keep_weights``, lost.

        Call it only when paused; what was cut is prefilled again. Asleep, an engine still takes requests and weights
        (`stage_weights`, `activate`), and computes nothing. Without weights it cannot resume before it has new ones.
        """

    async def wake(self) -> None:
        """Take the device back after `sleep`; the engine is still paused."""

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...
