"""One call of the policy while it is being answered, the randomness of its tokens, and the inbox of its client.

CallRun:  waiting ─▶ decoding ─▶ finished
             ▲          │
             └──────────┘  parked, by an interrupt or for want of memory: tokens kept, keys and values dropped

The uniform number of a token is a pure function of (run seed, trajectory id, call key, position in the call). The
trajectory's fields and the call's key are folded into a 64-bit key, and position ``t`` is output ``t`` of a SplitMix64
generator whose state starts at that key (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014). No generator state has to survive interrupts, replicas or restarts.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.data.interfaces.rollout import FinishedCall, GenerateRequest, Priority, SamplingParams
from headway.data.types import FinishReason, SampledTokens, TrajectoryId, version_spans
from headway.errors import ClientGone, DataError, HeadwayError, NonFinite, RunError

_GAMMA = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX2) & _MASK
    return z ^ (z >> 31)


def trajectory_key(seed: int, trajectory: TrajectoryId, call: int = 0) -> int:
    """The 64-bit key of the uniforms of one call of a trajectory. Injective in each field while the others are fixed.

    ``call``: `headway.data.interfaces.rollout.GenerateRequest.key`, of which 64 bits count. Calls of key 0 take the
    trajectory's own key.
    """
    key = _mix((seed + _GAMMA) & _MASK)
    for part in trajectory if call == 0 else (*trajectory, call):
        key = _mix((key + _GAMMA * (part + 1)) & _MASK)
    return key


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """[A] uniforms in [0, 1) with 53 random bits, one for each (key, position in the call)."""
    z = keys + np.uint64(_GAMMA) * (positions.astype(np.uint64) + np.uint64(1))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX2)
    z ^= z >> np.uint64(31)
    bits: NDArray[np.uint64] = z >> np.uint64(11)
    return np.ldexp(bits.astype(np.float64), -53)


@dataclass(slots=True, eq=False)
class CallRun:
    """State of one call in the engine, from submission to its end."""

    call: GenerateRequest
    client: str
    """The name under which the call was submitted; results and commands go by it and the call's number."""
    serial: int
    """Place in the order of submission."""
    key: int
    """The key of the call's uniform numbers."""
    limit: int
    """Most tokens that may be sampled: ``max_tokens``, or what the context leaves."""
    written: SampledTokens = field(default_factory=SampledTokens.nothing)
    """Up to date only while the call is not decoding."""
    started: float | None = None
    """The time at which its first token was sampled."""
    oldest_version: int | None = None
    """The version that sampled its first token."""
    cached: int = 0
    """Tokens of the call's own context that were found in a prefix cache when it started."""

    @classmethod
    def of(
        cls,
        call: GenerateRequest,
        client: str,
        *,
        seed: int,
        serial: int,
        max_context: int,
        vocabulary: int,
        like: CallRun | None = None,
    ) -> CallRun:
        """Check a call, the ``serial``-th of an engine, and set it up. What it has in common with ``like`` is right.

        Raises `DataError` for a context that is empty, leaves no room for a token or has tokens that the model does not
        know, and for sampling parameters that make no sense.
        """
        sampling, ids = call.sampling, call.input_ids
        if like is None or like.call.sampling is not sampling:
            check_sampling(sampling, vocabulary)
        room = max_context - len(ids)
        if like is None or like.call.input_ids is not ids:
            check_context(call, max_context, vocabulary)
        key = trajectory_key(seed if sampling.seed is None else sampling.seed, call.trajectory, call.key)
        return cls(call, client, serial, key, min(sampling.max_tokens, room))

    @property
    def fresh(self) -> bool:
        """True before the first token is sampled."""
        return len(self.written.ids) == 0

    @property
    def trains(self) -> bool:
        """True for a call of training, false for one of validation."""
        return self.call.priority is Priority.TRAINING

    @property
    def length(self) -> int:
        """The length of its `context`, in tokens."""
        return len(self.call.input_ids) + len(self.written.ids)

    @property
    def context(self) -> NDArray[np.int64]:
        """[P + T] input of the next token: the call's ids, and what was sampled since."""
        given = self.call.input_ids.astype(np.int64)
        return given if self.fresh else np.concatenate([given, self.written.ids.astype(np.int64)])

    def begin(self, now: float, version: int) -> None:
        """Note that a token is sampled ``now`` by ``version``: the first one counts."""
        if self.started is None:
            self.started, self.oldest_version = now, version

    def finish(self, reason: FinishReason, finished: float) -> FinishedCall:
        """The result of the call, whose ``written`` is up to date."""
        return FinishedCall(
            number=self.call.number,
            length=len(self.written.ids),
            version_spans=version_spans(self.written.versions),
            finish_reason=reason,
            started=finished if self.started is None else self.started,
            finished=finished,
            tokens=self.written,
            cached=self.cached,
        )


def check_context(call: GenerateRequest, max_context: int, vocabulary: int) -> None:
    """Raise `DataError` if a call's context is empty, too long or outside the vocabulary."""
    ids = call.input_ids
    if not 0 < len(ids) < max_context:
        raise DataError(
            f"row {call.trajectory.row} asks for an answer to a prompt of {len(ids)} tokens; the engine needs a "
            f"prompt, and room for a token in its context of {max_context} (shorten the prompt, or raise "
            "data.max_prompt_length or data.max_response_length)"
        )
    if (lowest := int(ids.min())) < 0 or int(ids.max()) >= vocabulary:
        raise DataError(
            f"the prompt of row {call.trajectory.row} has token ids from {lowest} to {ids.max()}, but the model "
            f"knows 0 to {vocabulary - 1}; do tokenizer and model belong together?"
        )


def check_sampling(params: SamplingParams, vocabulary: int) -> None:
    """Raise `DataError` if ``params`` cannot be sampled from by a model of so many tokens."""
    if params.max_tokens < 1:
        raise DataError(f"sampling needs max_tokens ≥ 1, got {params.max_tokens}")
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise DataError(f"sampling needs 0 ≤ min_tokens ≤ max_tokens={params.max_tokens}, got {params.min_tokens}")
    if params.temperature < 0 or not 0 < params.top_p <= 1 or params.top_k < 0 or not 0 <= params.min_p <= 1:
        raise DataError(
            "sampling needs temperature ≥ 0, 0 < top_p ≤ 1, top_k ≥ 0 and 0 ≤ min_p ≤ 1, got "
            f"temperature {params.temperature}, top_p {params.top_p}, top_k {params.top_k}, min_p {params.min_p}"
        )
    if not 0 < params.repetition_penalty < math.inf:
        raise DataError(f"sampling needs a repetition_penalty above 0, got {params.repetition_penalty}")
    if unknown := [token for token, _ in params.logit_bias if not 0 <= token < vocabulary]:
        raise DataError(f"logit_bias names token {unknown[0]}, but the model knows 0 to {vocabulary - 1}")
    if not all(math.isfinite(bias) for _, bias in params.logit_bias):
        raise DataError("logit_bias must be finite; to forbid a token, give it -1e4")
    if any(not text for text in params.stop):
        raise DataError("an empty stop string ends every answer before it begins; drop it")


def not_finite(name: str, version: int) -> NonFinite:
    """The error for logits that are not finite, which give no distribution to sample from."""
    why = (
        "the weights have diverged (lower actor.optim.lr, or look at the gradient norm)"
        if version
        else "look at the weights that it started from, and at rollout.dtype"
    )
    return NonFinite(f"rollout engine {name}: the model's logits are not finite under version {version}; {why}")


@dataclass(slots=True, eq=False)
class CallInbox:
    """The inbox of one client: batches of its finished calls, or the engine's end.

    Made and read on the client's event loop, ``loop``; filled through it, from another thread.
    """

    client: str
    loop: asyncio.AbstractEventLoop
    batches: asyncio.Queue[Sequence[FinishedCall] | HeadwayError] = field(default_factory=asyncio.Queue)

    async def next(self) -> Sequence[FinishedCall]:
        """All calls that are done by now, one at least. Raises what the engine ended with, once they are returned."""
        done: list[FinishedCall] = []
        while not done or not self.batches.empty():
            batch = await self.batches.get()
            if isinstance(batch, HeadwayError):
                if not done:
                    raise batch
                self.batches.put_nowait(batch)  # the last thing in the inbox, for the next time
                break
            done += batch
        return done


class Inboxes:
    """The inboxes of one engine, by client. Each is there from the client's first word until it leaves."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._of: dict[str, CallInbox] = {}
        self._read: set[str] = set()

    def __len__(self) -> int:
        return len(self._of)

    def of(self, client: str) -> CallInbox:
        """The inbox of ``client``; a new one, on the running loop, where it has none."""
        inbox = self._of.get(client)
        if inbox is None:
            inbox = self._of[client] = CallInbox(client, asyncio.get_running_loop())
        return inbox

    def end(self, client: str) -> CallInbox | None:
        """Remove the inbox of ``client``, which is gone, and return it, if any; its reader gets an error."""
        inbox = self._of.pop(client, None)
        if inbox is not None:
            inbox.batches.put_nowait(ClientGone(f"rollout engine {self._engine}: {client!r} is gone"))
        return inbox

    @contextmanager
    def reading(self, client: str) -> Iterator[CallInbox]:
        """Context in which the inbox of ``client`` is read; there is none behind it.

        Raises `RunError` where it is read already: each batch comes once.
        """
        if client in self._read:
            raise RunError(f"rollout engine {self._engine}: finished({client!r}) is iterated over already")
        inbox = self.of(client)
        self._read.add(client)
        try:
            yield inbox
        finally:
            self._read.discard(client)
            self._of.pop(client, None)
