"""Replicas, which serve calls: how they are paused and updated, and what they tell of themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from headway.data.interfaces.generation import FinishedCall, GenerateRequest
from headway.data.interfaces.weights import PolicyReceiver
from headway.data.types import TrajectoryId
from headway.events import DecodeSteps, PrefillSteps, Span


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


@dataclass(frozen=True, slots=True, kw_only=True)
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
    """Sums over the steps that prefilled nothing, by number of active sequences. Empty where it is not measured."""
    prefill_steps: dict[int, PrefillSteps] = field(default_factory=dict)
    """Sums over the steps that prefilled something, by the size of their prefills (`events.add_prefill`)."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Abilities of an engine; a start is refused when the configuration asks for more."""

    on_update: frozenset[OnUpdate]
    reproducible: bool
    """True where (seed, trajectory id, position, weights) alone decide a token: not slots, order or replicas."""
    sleep: bool = False
    double_buffered: bool = True
    """True where the engine receives weights while it decodes. False: `stage_weights` overwrites the weights that are
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

    def finished(self, client: str) -> AsyncIterator[Sequence[FinishedCall]]:
        """Yield the finished calls of ``client``: each time all that are finished by then, one at least.

        One iterator for each client. It ends with the engine, by raising; leaving it drops the client's other calls:
        nothing more is sampled for them. Aborted calls are yielded too, with finish reason ``aborted``.
        """

    async def abort(self, client: str, numbers: Sequence[int]) -> None:
        """End these calls of ``client`` as they are. Numbers of finished calls are ignored."""

    async def drop(self, client: str) -> None:
        """Drop all calls of ``client``, which is gone without leaving `finished`: that raises `ClientGone`."""

    async def release(self, trajectories: Sequence[TrajectoryId]) -> None:
        """Give up what is kept for further calls of these episodes: they are over."""

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
