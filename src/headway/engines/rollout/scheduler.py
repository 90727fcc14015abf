"""Scheduler of an engine: the open requests, their states, the randomness of their tokens. No tensor, no clock.

RequestState: waiting ─▶ decoding ─▶ finished
                 ▲          │
                 └──────────┘  parked, by an interrupt or for want of memory: keys and values are dropped, the tokens
                               of the partial answer stay in `RequestState.written`, each with its version

Scheduler:  RUNNING ──pause(drain)──▶ DRAINING ──nothing left──▶ PAUSED ──resume──▶ RUNNING
               └────pause(interrupt | keep)──────────────────────▶┘

Waiting calls start in order of submission, validation before training; those that were decoding before resume first.
While draining, what is submitted is held back; it joins the queue when the drain is over.

The uniform number of a token is a pure function of (run seed, trajectory id, call key, position in the call). The
trajectory's fields and the call's key are folded into a 64-bit key, and position ``t`` is output ``t`` of a SplitMix64
generator whose state starts at that key (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014). No generator state has to survive interrupts, replicas or restarts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.data.interfaces.rollout import Completion, GenerateRequest, OnUpdate, Priority, SamplingParams
from headway.data.types import FinishReason, SampledTokens, TrajectoryId, version_spans
from headway.errors import DataError, NonFinite

_GAMMA = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _mix(z: Any) -> Any:
    """Mix the bits of a number, or of each in an array of uint64."""
    z = ((z ^ (z >> 30)) * _MIX1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX2) & _MASK
    return z ^ (z >> 31)


def trajectory_key(seed: int, trajectory: TrajectoryId, call: int = 0) -> int:
    """The 64-bit key of the uniforms of one call of a trajectory. Injective in each field while the others are fixed.

    ``call``: `headway.data.interfaces.rollout.GenerateRequest.key`, of which 64 bits count. Calls of key 0 take the
    trajectory's own key.
    """
    key: int = _mix((seed + _GAMMA) & _MASK)
    for part in trajectory if call == 0 else (*trajectory, call):
        key = _mix((key + _GAMMA * (part + 1)) & _MASK)
    return key


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """[A] uniforms in [0, 1) with 53 random bits, one for each (key, position in the call)."""
    z = _mix(keys + np.uint64(_GAMMA) * (positions.astype(np.uint64) + np.uint64(1)))
    bits: NDArray[np.uint64] = z >> np.uint64(11)  # 53 bits: with more a float64 could round up to 1
    return np.ldexp(bits.astype(np.float64), -53)


NOTHING = SampledTokens.nothing()
"""Tokens of a request before its first one. All requests share it: nothing writes into these arrays."""


@dataclass(slots=True, eq=False)
class RequestState:
    """State of one request in the engine, from submission to its end; it outlives pauses and updates."""

    request: GenerateRequest
    client: Hashable
    """The client that submitted the call; results and commands go by it and the call's number."""
    serial: int
    """Place in the order of submission."""
    key: int
    """The key of the call's uniform numbers."""
    limit: int
    """Most tokens that may be sampled: ``max_tokens``, or fewer if the context leaves less room."""
    written: SampledTokens = field(default_factory=lambda: NOTHING)
    """Tokens sampled so far, with log-probs and versions. Up to date only while the request is not decoding."""
    started: float | None = None
    """The time at which its first token was sampled; None before."""
    oldest_version: int | None = None
    """Version that sampled the call's first token; None before."""
    cached: int = 0
    """Number of tokens of the call's own context that were found in a prefix cache when it started."""

    @property
    def trains(self) -> bool:
        """True for a call of training, false for one of validation."""
        return self.request.priority is Priority.TRAINING

    @property
    def length(self) -> int:
        """The length of its `context`, in tokens."""
        return len(self.request.input_ids) + len(self.written.ids)

    @property
    def context(self) -> NDArray[np.int64]:
        """Return the input [P + T] of the next token: the call's ids and the tokens sampled since."""
        given = self.request.input_ids.astype(np.int64)
        return given if self.started is None else np.concatenate([given, self.written.ids.astype(np.int64)])


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
    p = params
    counts = p.max_tokens >= 1 and 0 <= p.min_tokens <= p.max_tokens and p.top_k >= 0
    filters = p.temperature >= 0 and 0 < p.top_p <= 1 and 0 <= p.min_p <= 1
    biases = all(0 <= token < vocabulary and math.isfinite(bias) for token, bias in p.logit_bias)
    if not (counts and filters and biases and 0 < p.repetition_penalty < math.inf and all(p.stop)):
        raise DataError(
            "sampling needs max_tokens ≥ 1, 0 ≤ min_tokens ≤ max_tokens, temperature ≥ 0, 0 < top_p ≤ 1, top_k ≥ 0, "
            "0 ≤ min_p ≤ 1, repetition_penalty > 0, stop strings that are not empty, and a finite logit_bias of tokens "
            f"below {vocabulary} (to forbid one, -1e4); got {p}"
        )


def not_finite(name: str, version: int) -> NonFinite:
    """The error for logits that are not finite, which give no distribution to sample from."""
    why = (
        "the weights have diverged (lower actor.optim.lr, or look at the gradient norm)"
        if version
        else "look at the weights that it started from, and at rollout.dtype"
    )
    return NonFinite(f"rollout engine {name}: the model's logits are not finite under version {version}; {why}")


class Mode(StrEnum):
    RUNNING = "running"
    DRAINING = "draining"
    PAUSED = "paused"


class Scheduler:
    """The open calls of an engine by their client and its number for them, their queues and the pause state.

    Example:
        >>> scheduler = Scheduler(seed=0, max_context=2048, vocabulary=32000)
        >>> scheduler.pause(OnUpdate.DRAIN)  # what decodes may finish, nothing else starts
        >>> scheduler.mode.value
        'draining'
        >>> scheduler.drained()
        >>> scheduler.resume()
        >>> scheduler.mode.value
        'running'
    """

    def __init__(self, *, seed: int, max_context: int, vocabulary: int) -> None:
        """``seed``: of the run. Contexts have at most ``max_context`` tokens, of so large a vocabulary."""
        self.mode = Mode.RUNNING
        self.vocabulary = vocabulary
        self._seed, self._max_context = seed, max_context
        self._open: dict[Hashable, dict[int, RequestState]] = {}
        """Open calls by client, then by number: those that wait and those that decode."""
        self._serial = 0
        self._queues: dict[Priority, deque[RequestState]] = {Priority.VALIDATION: deque(), Priority.TRAINING: deque()}
        self._held: list[RequestState] = []

    # ------------------------------------------------------------------------------------- open calls

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def submit(self, client: Hashable, calls: Sequence[GenerateRequest]) -> list[RequestState]:
        """Queue all of ``calls`` in order, or none: `DataError` for one that cannot be served, or an open call's
        number."""
        opened = self._open.get(client, {})
        runs: dict[int, RequestState] = {}
        before: GenerateRequest | None = None
        for serial, call in enumerate(calls, self._serial):
            # What a call has in common with the one before it is right.
            if before is None or call.sampling is not before.sampling:
                check_sampling(call.sampling, self.vocabulary)
            if before is None or call.input_ids is not before.input_ids:
                check_context(call, self._max_context, self.vocabulary)
            seed = self._seed if call.sampling.seed is None else call.sampling.seed
            limit = min(call.sampling.max_tokens, self._max_context - len(call.input_ids))
            key = trajectory_key(seed, call.trajectory, call.key)
            runs[call.number] = RequestState(call, client, serial, key, limit)
            before = call
        if len(runs) < len(calls) or not opened.keys().isdisjoint(runs):
            raise DataError(f"client {client} submitted a call under a number that another of its open calls has")
        self._serial += len(calls)  # after all were checked: a refused batch takes no numbers
        self._open.setdefault(client, opened).update(runs)
        self._enqueue(runs.values())
        return list(runs.values())

    def finish(self, run: RequestState, reason: FinishReason, now: float) -> Completion:
        """Forget a call whose ``written`` is up to date, and return its result."""
        del self._open[run.client][run.request.number]
        return Completion(
            number=run.request.number,
            length=len(run.written.ids),
            version_spans=version_spans(run.written.versions),
            finish_reason=reason,
            started=now if run.started is None else run.started,
            finished=now,
            tokens=run.written,
            cached=run.cached,
        )

    def find(self, client: Hashable, numbers: Iterable[int]) -> list[RequestState]:
        """Calls of ``client`` with one of ``numbers``; unknown numbers are ignored."""
        opened = self._open.get(client, {})
        # Each number once: a call that is named twice would be ended twice.
        return [opened[number] for number in dict.fromkeys(numbers) if number in opened]

    def of(self, client: Hashable) -> list[RequestState]:
        """Calls of ``client``, in order of submission."""
        return list(self._open.get(client, {}).values())

    def older_than(self, version: int) -> list[RequestState]:
        """Training calls with a token of an older version."""
        runs = [run for opened in self._open.values() for run in opened.values() if run.trains]
        return [run for run in runs if run.oldest_version is not None and run.oldest_version < version]

    def forget(self, client: Hashable) -> None:
        """Forget all calls of ``client``, which has left."""
        self._open.pop(client, None)

    def clear(self) -> None:
        """Forget all calls: none will be finished any more."""
        self._open.clear()

    # ------------------------------------------------------------------------------------- queues

    def take(self, free: int, admits: Callable[[RequestState], bool] = lambda _: True) -> list[RequestState]:
        """Remove and return the next calls to start: at most ``free``, until ``admits`` refuses one.

        No call overtakes another: if the next call has to wait, so do all later ones.
        """
        taken: list[RequestState] = []
        for queue in () if self.mode is Mode.PAUSED else self._queues.values():
            while queue and len(taken) < free:
                if not admits(queue[0]):
                    return taken
                taken.append(queue.popleft())
        return taken

    def put_back(self, runs: Iterable[RequestState]) -> None:
        """Park calls that were decoding, ahead of everything that has not started."""
        # The youngest first: each goes to the front of the queue, and the oldest has to resume first.
        for run in sorted(runs, key=lambda run: -run.serial):
            self._queues[run.request.priority].appendleft(run)

    def remove(self, runs: Collection[RequestState]) -> list[RequestState]:
        """Remove the waiting calls among ``runs``, and return them in order of submission."""
        wanted = frozenset(runs)
        removed: list[RequestState] = []
        for queue in (*self._queues.values(), self._held) if wanted else ():
            if waiting := [run for run in queue if run in wanted]:
                removed.extend(waiting)
                kept = [run for run in queue if run not in wanted]
                queue.clear()
                queue.extend(kept)
        return sorted(removed, key=lambda run: run.serial)

    @property
    def waiting(self) -> int:
        """Number of calls yet to start or resume, held ones included."""
        return self.queued + len(self._held)

    @property
    def queued(self) -> int:
        """Calls that may start as soon as a slot is free."""
        return sum(map(len, self._queues.values()))

    # ------------------------------------------------------------------------------------- pauses

    def pause(self, policy: OnUpdate) -> None:
        """Start draining, or stop at once. A pause never weakens one that is in force."""
        if policy is not OnUpdate.DRAIN:
            self._change(Mode.PAUSED)
        elif self.mode is Mode.RUNNING:
            self._change(Mode.DRAINING)

    def drained(self) -> None:
        """End the drain, once its last call has finished: from now on the scheduler is paused."""
        self._change(Mode.PAUSED)

    def resume(self) -> None:
        self._change(Mode.RUNNING)

    def _change(self, mode: Mode) -> None:
        self.mode = mode
        if mode is not Mode.DRAINING:  # also when paused: held calls then wait in the queue
            held, self._held = self._held, []
            self._enqueue(held)

    def _enqueue(self, runs: Iterable[RequestState]) -> None:
        for run in runs:
            queue = self._held if self.mode is Mode.DRAINING else self._queues[run.request.priority]
            queue.append(run)
