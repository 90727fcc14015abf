"""Scripted machinery behind the pipeline's protocols, on whatever clock the running loop has.

The fakes keep the protocols' contracts to the letter and fail loudly when the pipeline does not: weights that are
activated while something decodes, or before they were staged, are assertion errors.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.data.types import Column, FinishReason, Group, Prompt, Sample, Trajectory, TrajectoryId
from headway.errors import ScoringFailed
from headway.events import Event, Span
from headway.interfaces import (
    Capabilities,
    EngineStats,
    FinishedGroup,
    GenerateRequest,
    OnUpdate,
    Paused,
    Priority,
    ReceiveReport,
    SendReport,
    StepReport,
)

SECONDS_PER_TOKEN = 0.125
"""A power of two, so that times on the virtual clock are exact."""

Lengths = Callable[[TrajectoryId], int]
"""Tokens that a trajectory will have."""


def now() -> float:
    return asyncio.get_running_loop().time()


def seeded_lengths(seed: int, low: int = 4, high: int = 40) -> Lengths:
    """Uniform on [low, high], a function of (seed, trajectory id) alone."""
    return lambda trajectory: random.Random(f"{seed} {tuple(trajectory)}").randint(low, high)


class Recorder:
    """An observer that keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.on: Callable[[Event], None] = lambda _: None
        """Called with each event; for scripts that act at a certain one."""

    def on_event(self, event: Event) -> None:
        self.events.append(event)
        self.on(event)

    def close(self) -> None: ...


class FakeSource:
    """``rows`` prompts an epoch; ``epochs`` None goes on for ever. Validation problems are rows of epoch -1."""

    def __init__(self, rows: int = 1000, epochs: int | None = None) -> None:
        self._rows = rows
        self._epochs = epochs
        self.given = 0

    def next(self) -> Prompt | None:
        epoch, row = divmod(self.given, self._rows)
        if self._epochs is not None and epoch >= self._epochs:
            return None
        self.given += 1
        return prompt(epoch, row)

    def again(self, prompt_: Prompt) -> Prompt:
        return prompt(prompt_.epoch, prompt_.row, prompt_.attempt + 1)

    def state(self) -> dict[str, Any]:
        return {"given": self.given}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.given = state["given"]


def prompt(epoch: int, row: int, attempt: int = 0) -> Prompt:
    text = f"problem {epoch}/{row}/{attempt}"
    return Prompt(epoch, row, attempt, "fake", text, np.arange(3, dtype=np.int32), answer=row)


def validation_prompts(count: int) -> list[Prompt]:
    return [prompt(-1, row) for row in range(count)]


# ---------------------------------------------------------------------------------------------- rewards


class FakeReward:
    """Scores ``seconds`` after it was asked. ``rewards`` gives the scores, or raises what the reward should raise."""

    def __init__(
        self,
        rewards: Callable[[Prompt], Sequence[float]] | None = None,
        seconds: Callable[[Prompt], float] = lambda _: 0.25,
    ) -> None:
        self._rewards = rewards
        self._seconds = seconds

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> NDArray[np.float32]:
        await asyncio.sleep(self._seconds(prompt))
        rewards = self._rewards(prompt) if self._rewards else [float(k % 2) for k in range(len(responses))]
        return np.resize(np.asarray(rewards, np.float32), len(responses))

    async def close(self) -> None: ...


def fails(why: str) -> Sequence[float]:
    raise ScoringFailed(why)


def zero_advantages(groups: Sequence[Group]) -> list[list[NDArray[np.float32]]]:
    return [[np.zeros(t.length, np.float32) for t in group.trajectories] for group in groups]


def without_variance(rewards: NDArray[np.float32]) -> str | None:
    return "zero variance" if rewards.max() == rewards.min() else None


# ---------------------------------------------------------------------------------------------- weights


class Wire:
    """Carries weights from the trainer to all replicas: whoever comes waits for everybody else, like a collective."""

    def __init__(self, receivers: int) -> None:
        self._receivers = receivers
        self._arrived: dict[int, int] = {}
        self._complete: dict[int, asyncio.Event] = {}

    async def meet(self, version: int) -> None:
        complete = self._complete.setdefault(version, asyncio.Event())
        self._arrived[version] = self._arrived.get(version, 0) + 1
        if self._arrived[version] == self._receivers + 1:
            complete.set()
        await complete.wait()


def checksum(version: int) -> int:
    return 0xC0FFEE + version


# ---------------------------------------------------------------------------------------------- rollout


@dataclass(slots=True, eq=False)
class _Decoding:
    """One trajectory inside the engine."""

    request: GenerateRequest
    id: TrajectoryId
    length: int
    answer: _Answer
    seq: int
    tokens: int = 0
    spans: list[list[int]] = field(default_factory=list)
    started: float | None = None
    since: float = 0.0
    """When the running segment's first step began."""
    end: float = 0.0
    """When its last step ends, if nothing comes between."""
    timer: asyncio.TimerHandle | None = None

    @property
    def rank(self) -> tuple[bool, int]:
        """Place in the waiting line: validation first, then order of submission."""
        return self.request.priority is not Priority.VALIDATION, self.seq


@dataclass(slots=True, eq=False)
class _Answer:
    """A request's trajectories as they finish; ``outbox`` belongs to the `generate` call that brought the request."""

    request: GenerateRequest
    outbox: asyncio.Queue[FinishedGroup | BaseException]
    done: dict[int, Trajectory] = field(default_factory=dict)


class FakeRollout:
    """A replica that samples one token every ``SECONDS_PER_TOKEN`` for each trajectory in a slot."""

    def __init__(
        self,
        name: str = "rollout-0",
        *,
        wire: Wire,
        lengths: Lengths,
        slots: int = 8,
        prefill_s: float = 0.125,
        recv_s: float = 0.25,
        load_s: float = 0.125,
    ) -> None:
        self.name = name
        self.slots = slots
        self.capabilities = Capabilities(frozenset(OnUpdate), reproducible=True)
        self.version = 0
        self.cut = 0
        """Trajectories with tokens that a pause stopped, over the whole run."""
        self.wrong_checksum_at: int | None = None
        self.never_receives = False
        self.hangs_on_stats = False
        self.loads: list[tuple[int, float]] = []
        """(version, time) of every activation."""
        self.submitted: list[tuple[float, tuple[int, ...], Priority]] = []
        """(time, numbers, priority) of every call of `generate`."""
        self._wire = wire
        self._lengths = lengths
        self._prefill_s = prefill_s
        self._recv_s = recv_s
        self._load_s = load_s
        self._waiting: list[_Decoding] = []
        self._running: list[_Decoding] = []
        self._cut: list[_Decoding] = []
        """Stopped by the pause that holds; they keep their slots."""
        self._held: list[_Decoding] = []
        """Submitted after a pause began: they start after `resume`."""
        self._outboxes: list[asyncio.Queue[FinishedGroup | BaseException]] = []
        self._pausing: OnUpdate | None = None
        self._idle = asyncio.Event()
        self._staged: int | None = None
        self._seq = 0
        self._died: BaseException | None = None
        self._stats = _Activity()

    # ---------------------------------------------------------------- generate

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[FinishedGroup]:
        self._check_alive()
        outbox: asyncio.Queue[FinishedGroup | BaseException] = asyncio.Queue()
        self._outboxes.append(outbox)
        self.submitted.append((now(), tuple(r.number for r in requests), requests[0].priority))
        line = self._waiting if self._pausing is None else self._held
        for request in requests:
            answer = _Answer(request, outbox)
            for k in range(request.n):
                id_ = request.prompt.trajectory_id(k)
                line.append(_Decoding(request, id_, self._lengths(id_), answer, self._seq))
                self._seq += 1
        self._fill_slots()
        for _ in requests:
            finished = await outbox.get()
            if isinstance(finished, BaseException):
                raise finished
            yield finished

    def _fill_slots(self) -> None:
        """Start what waits, as far as slots allow. A drain, too: it lets all that was submitted finish."""
        if self._pausing in (OnUpdate.INTERRUPT, OnUpdate.KEEP) or self._died:
            return
        self._waiting.sort(key=lambda decoding: decoding.rank)
        while self._waiting and len(self._running) < self.slots:
            self._start(self._waiting.pop(0), prefill_s=self._prefill_s)
        if not self._running:
            self._idle.set()

    def _start(self, decoding: _Decoding, prefill_s: float) -> None:
        self._idle.clear()
        self._stats.started(len(self._running))
        self._running.append(decoding)
        decoding.since = now() + prefill_s
        if decoding.tokens == 0:
            decoding.started = decoding.since + SECONDS_PER_TOKEN
        decoding.end = decoding.since + (decoding.length - decoding.tokens) * SECONDS_PER_TOKEN
        decoding.timer = asyncio.get_running_loop().call_at(decoding.end, self._finish, decoding)

    def _stop(self, decoding: _Decoding) -> None:
        """Out of its slot, between two steps: only whole steps have sampled a token."""
        assert decoding.timer is not None
        decoding.timer.cancel()
        self._running.remove(decoding)
        left = decoding.length - decoding.tokens
        steps = left if now() >= decoding.end else max(0, int((now() - decoding.since) / SECONDS_PER_TOKEN))
        if steps and (not decoding.spans or decoding.spans[-1][1] != self.version):
            decoding.spans.append([decoding.tokens, self.version])
        decoding.tokens += steps
        self._stats.stopped(len(self._running))

    def _finish(self, decoding: _Decoding, reason: FinishReason = FinishReason.STOP) -> None:
        self._stop(decoding)
        self._deliver(decoding, reason)
        self._fill_slots()

    def _deliver(self, decoding: _Decoding, reason: FinishReason) -> None:
        assert reason is FinishReason.ABORTED or decoding.tokens == decoding.length
        answer, k = decoding.answer, decoding.id.k
        answer.done[k] = Trajectory(
            id=decoding.id,
            replica=self.name,
            text=f"answer {k} to {decoding.request.prompt.text}",
            prompt_length=len(decoding.request.prompt.token_ids),
            length=decoding.tokens,
            finish_reason=reason,
            version_spans=decoding.spans,
            started=decoding.started if decoding.started is not None else now(),
            finished=now(),
        )
        if len(answer.done) == answer.request.n:
            trajectories = tuple(answer.done[k] for k in range(answer.request.n))
            answer.outbox.put_nowait(FinishedGroup(answer.request.number, trajectories, tokens=None))

    async def abort(self, numbers: Sequence[int]) -> None:
        for line in (self._running, self._cut, self._waiting, self._held):
            for decoding in [d for d in line if d.request.number in numbers and d.rank[0]]:
                if line is self._running:
                    self._stop(decoding)
                else:
                    line.remove(decoding)
                self._deliver(decoding, FinishReason.ABORTED)
        self._fill_slots()

    async def in_flight(self) -> list[int]:
        everything = [*self._running, *self._cut, *self._waiting, *self._held]
        return sorted({d.request.number for d in everything if d.request.priority is Priority.TRAINING})

    # ---------------------------------------------------------------- pause and update

    async def pause(self, policy: OnUpdate) -> Paused:
        self._check_alive()
        assert self._pausing is None, f"{self.name} was paused twice"
        self._pausing = policy
        if policy is OnUpdate.DRAIN:
            self._fill_slots()
            await self._idle.wait()
            self._check_alive()
            return Paused()
        cut = list(self._running)
        for decoding in cut:
            self._stop(decoding)
        for decoding in cut:
            if decoding.tokens == decoding.length:
                self._deliver(decoding, FinishReason.STOP)
        self._cut = [decoding for decoding in cut if decoding.tokens < decoding.length]
        interrupted = sum(decoding.tokens > 0 for decoding in self._cut)
        self.cut += interrupted
        return Paused(interrupted)

    async def resume(self) -> None:
        self._check_alive()
        assert self._pausing is not None, f"{self.name} was resumed without a pause"
        policy, self._pausing = self._pausing, None
        # What was cut held slots, and takes them back before anything else.
        for decoding in self._cut:
            self._start(decoding, prefill_s=0.0 if policy is OnUpdate.KEEP else self._prefill_s)
        self._waiting += self._held
        self._cut, self._held = [], []
        self._fill_slots()

    async def stage_weights(self, version: int) -> ReceiveReport:
        self._check_alive()
        if self.never_receives:
            await asyncio.Event().wait()
        await self._wire.meet(version)
        await asyncio.sleep(self._recv_s)
        self._check_alive()
        self._staged = version
        wrong = version == self.wrong_checksum_at
        return ReceiveReport(self._recv_s, 0.0, nbytes=1000, checksum=checksum(version) ^ wrong)

    async def activate(self, version: int) -> float:
        self._check_alive()
        assert self._staged == version, f"{self.name}: version {version} is not staged, {self._staged} is"
        assert self._pausing is not None and not self._running, f"{self.name}: loads while it decodes"
        await asyncio.sleep(self._load_s)
        self._check_alive()
        self.version, self._staged = version, None
        self.loads.append((version, now()))
        return self._load_s

    # ---------------------------------------------------------------- the rest

    def die(self, error: BaseException) -> None:
        """From now on every call raises ``error``, those under way included."""
        self._died = error
        for decoding in list(self._running):
            self._stop(decoding)
        self._idle.set()
        for outbox in self._outboxes:
            outbox.put_nowait(error)

    def _check_alive(self) -> None:
        if self._died is not None:
            raise self._died

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def stats(self) -> EngineStats:
        self._check_alive()
        if self.hangs_on_stats:
            await asyncio.Event().wait()
        return self._stats.report(len(self._running), len(self._waiting) + len(self._held), self.version)

    async def close(self) -> None: ...


class _Activity:
    """Busy spans and slot-time since the last report."""

    def __init__(self) -> None:
        self._busy: list[Span] = []
        self._slot_seconds = 0.0
        self._since = 0.0
        self._running = 0

    def started(self, running_before: int) -> None:
        self._advance(running_before + 1)

    def stopped(self, running_after: int) -> None:
        self._advance(running_after)

    def report(self, running: int, waiting: int, version: int) -> EngineStats:
        self._advance(running)
        tokens = int(self._slot_seconds / SECONDS_PER_TOKEN)
        stats = EngineStats(self._busy, self._slot_seconds, tokens, 0, running, waiting, version)
        self._busy, self._slot_seconds = [], 0.0
        return stats

    def _advance(self, running: int) -> None:
        if self._running and now() > self._since:
            self._busy.append((self._since, now()))
            self._slot_seconds += self._running * (now() - self._since)
        self._since, self._running = now(), running


# ---------------------------------------------------------------------------------------------- training


class FakeTrainer:
    """Takes ``step_s(step)`` for each optimizer step; ``skips(step)`` says whether it was not finite."""

    def __init__(
        self,
        wire: Wire,
        *,
        step_s: Callable[[int], float] = lambda _: 1.0,
        skips: Callable[[int], bool] = lambda _: False,
        forward_s: float = 0.5,
        gather_s: float = 0.25,
        save_s: float = 0.5,
    ) -> None:
        self.raises_at: dict[int, BaseException] = {}
        """Step → what `train_step` raises there."""
        self.steps: list[list[Sample]] = []
        self.forwards: list[tuple[float, int]] = []
        """(time, samples) of every `forward_logprobs`."""
        self.saved: list[tuple[Path, dict[str, Any]]] = []
        self._wire = wire
        self._step_s = step_s
        self._skips = skips
        self._forward_s = forward_s
        self._gather_s = gather_s
        self._save_s = save_s
        self._computing = False

    async def forward_logprobs(self, samples: Sequence[Sample]) -> list[Column]:
        self.forwards.append((now(), len(samples)))
        await self._compute(self._forward_s)
        return [Column(None, index) for index in range(len(samples))]

    async def train_step(self, samples: Sequence[Sample]) -> StepReport:
        step = len(self.steps)
        self.steps.append(list(samples))
        if step in self.raises_at:
            raise self.raises_at[step]
        await self._compute(self._step_s(step))
        return StepReport(skipped=self._skips(step), metrics={"loss": 0.0})

    async def send_weights(self, version: int) -> SendReport:
        await self._compute(self._gather_s)
        await self._wire.meet(version)
        return SendReport(self._gather_s, 0.0, nbytes=1000, checksum=checksum(version))

    async def save(self, path: Path, driver_state: Mapping[str, Any]) -> None:
        await self._compute(self._save_s)
        self.saved.append((path, dict(driver_state)))

    async def load(self, path: Path) -> dict[str, Any]:
        return next(state for saved, state in self.saved if saved == path)

    async def export(self, path: Path) -> None: ...

    async def close(self) -> None: ...

    async def _compute(self, seconds: float) -> None:
        with self._alone():
            await asyncio.sleep(seconds)

    def _alone(self) -> _Alone:
        return _Alone(self)


class _Alone:
    """The trainer's ranks do one thing at a time: two models driven at once would interleave their collectives."""

    def __init__(self, trainer: FakeTrainer) -> None:
        self._trainer = trainer

    def __enter__(self) -> None:
        assert not self._trainer._computing, "the trainer's ranks were asked to do two things at once"
        self._trainer._computing = True

    def __exit__(self, *_: object) -> None:
        self._trainer._computing = False


class FakeReference:
    """A reference policy with ranks of its own."""

    def __init__(self, seconds: float = 0.5) -> None:
        self._seconds = seconds
        self.batches: list[int] = []

    async def forward_logprobs(self, samples: Sequence[Sample]) -> list[Column]:
        self.batches.append(len(samples))
        await asyncio.sleep(self._seconds)
        return [Column(None, index) for index in range(len(samples))]
