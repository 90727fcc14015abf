"""What a run's events say about costs, in one pass over them.

    TrajectoryFinished, GroupRewarded, GroupSettled ─▶ groups
    FetchTaken, TrainerBusy, OptimizerStepped ─▶ training
    ReplicaActivity ─▶ decode and start steps
    TrainerBusy, UpdatePhase, UpdateFinished ─▶ updates

Everything before the run's first parameter update is warm-up (caches, memory, compilation): it is left out of the costs
wherever something was measured after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol, TypeVar

from headway.events import (
    Event,
    FetchTaken,
    GroupRewarded,
    GroupSettled,
    OptimizerStepped,
    ReplicaActivity,
    RunFinished,
    RunStarted,
    StartStep,
    TrainerBusy,
    TrajectoryFinished,
    UpdateFinished,
    UpdatePhase,
    ValidationFinished,
)
from headway.simulate.fitting import DecodeSample

KEPT_FATES = frozenset({"trained", "filtered"})


class Timed(Protocol):
    @property
    def began(self) -> float: ...


K = TypeVar("K", bound=Timed)


@dataclass(slots=True)
class GroupRecord:
    """One admitted group, as far as it got."""

    prompt_tokens: int = 0
    answer_tokens: dict[int, int] = field(default_factory=dict)
    """k → tokens."""
    sampled: float = 0.0
    """When its last token was."""
    arrived: float = 0.0
    """When the driver had its last answer."""
    rewarded: float | None = None
    fate: str | None = None

    @property
    def began(self) -> float:
        return self.arrived

    @property
    def tokens(self) -> int:
        """Prompt and answer of every trajectory: what a training step runs over."""
        return len(self.answer_tokens) * self.prompt_tokens + sum(self.answer_tokens.values())


@dataclass(frozen=True, slots=True)
class TrainerWork:
    """A forward pass over a fetch, or one optimizer step."""

    began: float
    seconds: float
    tokens: int


@dataclass(slots=True)
class UpdateRecord:
    """One parameter update. Seconds of each phase: the slowest replica's, where several had it."""

    began: float = 0.0
    transfer_s: float = 0.0
    """From the begin of gather until every replica had received; known for synchronous updates."""
    phases: dict[str, float] = field(default_factory=dict)
    nbytes: int = 0
    halted_s: float = 0.0
    """A replica decoded nothing for so long; the mean over replicas."""


@dataclass(slots=True)
class Recording:
    """Everything that a profile needs. Fill it with `recording_of`."""

    mini_batch: int
    started: RunStarted | None = None
    finished: RunFinished | None = None
    groups: defaultdict[int, GroupRecord] = field(default_factory=lambda: defaultdict(GroupRecord))
    steps: list[TrainerWork] = field(default_factory=list)
    forwards: list[TrainerWork] = field(default_factory=list)
    updates: defaultdict[int, UpdateRecord] = field(default_factory=lambda: defaultdict(UpdateRecord))
    activity: list[ReplicaActivity] = field(default_factory=list)
    validations: list[ValidationFinished] = field(default_factory=list)
    versions: int = 0
    """Parameter updates that finished."""
    warm_at: float = float("inf")
    """When the first of them did."""
    _fetch: list[int] = field(default_factory=list)
    _steps_of_fetch: int = 0
    _busy: TrainerBusy | None = None

    def add(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.started = event
            case TrajectoryFinished():
                group = self.groups[event.number]
                group.prompt_tokens = event.prompt_tokens
                group.answer_tokens[event.k] = event.tokens
                group.sampled, group.arrived = max(group.sampled, event.finished), event.time
            case GroupRewarded():
                self.groups[event.number].rewarded = event.time
            case GroupSettled():
                self.groups[event.number].fate = event.fate
            case FetchTaken():
                self._fetch, self._steps_of_fetch = event.numbers, 0
            case TrainerBusy():
                self._trainer_busy(event)
            case OptimizerStepped():
                self._stepped()
            case UpdatePhase():
                update = self.updates[event.version]
                update.phases[event.phase] = max(update.phases.get(event.phase, 0.0), event.seconds)
                update.nbytes = max(update.nbytes, event.nbytes)
            case UpdateFinished():
                self.versions += 1
                self.warm_at = min(self.warm_at, event.time)
                self.updates[event.version].halted_s = event.rollout_stall_s
            case ReplicaActivity():
                self.activity.append(event)
            case ValidationFinished():
                self.validations.append(event)
            case RunFinished():
                self.finished = event

    def warm(self, measured: Iterable[K]) -> list[K]:
        """What began after the warm-up; everything if nothing did."""
        items = list(measured)
        return [item for item in items if item.began >= self.warm_at] or items

    def recorded_groups(self) -> list[GroupRecord]:
        """Those that were trained or filtered, in order of admission: their answers are as long as they would be."""
        return [group for _, group in sorted(self.groups.items()) if group.fate in KEPT_FATES and group.answer_tokens]

    def delivery_s(self) -> float:
        """Seconds from a group's last token until the driver had it: the median over groups."""
        return median(group.arrived - group.sampled for group in self.groups.values() if group.answer_tokens)

    def decode_samples(self) -> list[DecodeSample]:
        """One for each report of a replica and number of active sequences."""
        return [
            DecodeSample(active, steps, seconds / steps, cached / steps)
            for report in self._warm_activity("decode_steps")
            for active, (steps, seconds, cached) in report.decode_steps.items()
        ]

    def start_steps(self) -> list[StartStep]:
        return [step for report in self._warm_activity("start_steps") for step in report.start_steps]

    def _warm_activity(self, name: str) -> list[ReplicaActivity]:
        reports = [report for report in self.activity if getattr(report, name)]
        return [report for report in reports if report.busy and report.busy[0][0] >= self.warm_at] or reports

    def _trainer_busy(self, event: TrainerBusy) -> None:
        start, end = event.span
        if event.what == "forward":
            self.forwards.append(TrainerWork(start, end - start, self._tokens(self._fetch)))
        elif event.what == "gather":
            update = self.updates[event.version]
            update.began, update.transfer_s = start, event.time - start
        elif event.what == "step":
            self._busy = event

    def _stepped(self) -> None:
        """The step that `TrainerBusy` told before. A fetch is split by group into mini-batches, epoch after epoch."""
        if self._busy is None:
            return
        start, end = self._busy.span
        self._busy = None
        batches = [self._fetch[i : i + self.mini_batch] for i in range(0, len(self._fetch), self.mini_batch)]
        numbers = batches[self._steps_of_fetch % len(batches)] if batches else []
        self._steps_of_fetch += 1
        self.steps.append(TrainerWork(start, end - start, self._tokens(numbers)))

    def _tokens(self, numbers: Iterable[int]) -> int:
        groups: Mapping[int, GroupRecord] = self.groups
        return sum(groups[number].tokens for number in numbers)


def recording_of(events: Iterable[Event], *, mini_batch: int) -> Recording:
    """``mini_batch`` is ``actor.ppo_mini_batch_size``."""
    recording = Recording(mini_batch)
    for event in events:
        recording.add(event)
    return recording
