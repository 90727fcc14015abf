"""Recording: a run's costs, collected from its events in one pass.

    GroupAdmitted, TrajectoryFinished, GroupRewarded, GroupSettled ─▶ groups
    ReplicaActivity ─▶ decode and prefill steps, busy spans
    everything that the trainer does ─▶ `TrainingRecord`
    everything about updates and shared devices ─▶ `UpdatesRecord`

Everything before the run's first parameter update is warm-up (caches, memory, compilation): it is left out of the costs
wherever something was measured after it.

`TrainingRecord`, batch by batch:

    BatchTaken ──▶ forward ──▶ step ──▶ step ──▶ gather, or the next BatchTaken's wait
          └─ gap ─┘      └ gap ┘  └ gap ┘  └ gap ┘           gaps: the driver's own work, the batch's latency

On shared devices a batch first waits until the trainer has the devices: its latency counts from then.

`UpdatesRecord`, phase by phase:

gather ▶ send ║ recv ▶ register ─▶ pause: what is in flight drains ─▶ load ─▶ resume ─▶ finished
└──────── transfer ─────────────┘  └ latency ┘     └ not a cost ┘             └ latency ┘
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from headway import events
from headway.data.types import TrainSample, TrajectoryId
from headway.events import Event, Span
from headway.planner.profiles.costs import Division
from headway.reports.metrics.intervals import IntervalUnion


@dataclass(frozen=True, slots=True)
class TrainerWork:
    """A forward pass over a batch, or one optimizer step."""

    began: float
    seconds: float
    tokens: int
    """Tokens, prompts and answers, that all data ranks would have had if each had as many as the one with most."""


@dataclass(slots=True)
class BatchRecord:
    began: float
    latency_s: float = 0.0
    """Seconds in which the trainer neither computed nor waited for groups, devices or an update."""


@dataclass(slots=True)
class TrainingRecord:
    """Collects the trainer's work from the events of a run, which `add` takes in order."""

    mini_batch: int
    samples_of: Callable[[int], Sequence[TrainSample]]
    """Function from a group's number to its trajectories; to none where the group is not on record."""
    division: Division
    """Division of each batch over the trainer's data ranks."""
    steps: list[TrainerWork] = field(default_factory=list)
    forwards: list[TrainerWork] = field(default_factory=list)
    batches: list[BatchRecord] = field(default_factory=list)
    """Batches whose training ended, in order."""
    _numbers: list[int] = field(default_factory=list)
    """Groups of the batch; none where one of them is not on record, and no step's tokens are known."""
    _batch: BatchRecord | None = None
    _reached: float = 0.0
    """The time up to which the batch is accounted for."""
    _steps_of_batch: int = 0
    _step: events.TrainerBusy | None = None
    """The trainer's last span, as long as no `OptimizerStepped` has identified it as an optimizer step."""

    def add(self, event: Event) -> None:
        match event:
            case events.BatchTaken(waited=(asked, _)):
                self._end_batch(asked)
                known = all(map(self.samples_of, event.numbers))
                # After `_end_batch`, which needs the steps of the previous batch.
                self._numbers, self._steps_of_batch = event.numbers if known else [], 0
                self.division.begin([self._samples(numbers) for numbers in self._mini_batches()])
                self._batch, self._reached = BatchRecord(event.time), event.time
            case events.LeaseChanged(holder="train"):
                self._reached = event.time
            case events.TrainerBusy(what="forward", span=(start, end)):
                self._pass_to(start, end)
                self.forwards.append(TrainerWork(start, end - start, self._tokens(self._numbers)))
            case events.TrainerBusy(what="step", span=(start, end)):
                self._pass_to(start, end)
                self._step = event
            case events.TrainerBusy(what="gather", span=(start, _)):
                self._end_batch(start)
            case events.OptimizerStepped():
                self._stepped()

    def _pass_to(self, start: float, end: float) -> None:
        if self._batch is not None:
            self._batch.latency_s += start - self._reached
        self._reached = end

    def _end_batch(self, at: float) -> None:
        """End the batch, which has no end event: the trainer's next work or wait begins at ``at``."""
        if self._batch is not None and self._steps_of_batch:
            self._pass_to(at, at)
            self.batches.append(self._batch)
        self._batch = None

    def _stepped(self) -> None:
        """Record an optimizer step and its tokens. A batch is split by group into mini-batches, epoch after epoch."""
        if self._step is None:
            return
        start, end = self._step.span
        self._step = None
        batches = self._mini_batches()
        numbers = batches[self._steps_of_batch % len(batches)] if batches else []
        self._steps_of_batch += 1
        self.steps.append(TrainerWork(start, end - start, self._tokens(numbers)))

    def _mini_batches(self) -> list[list[int]]:
        size = self.mini_batch
        return [self._numbers[i : i + size] for i in range(0, len(self._numbers), size)]

    def _samples(self, numbers: Iterable[int]) -> list[TrainSample]:
        return [sample for number in numbers for sample in self.samples_of(number)]

    def _tokens(self, numbers: Iterable[int]) -> int:
        samples = self._samples(numbers)
        return self.division.tokens(samples) if samples else 0


@dataclass(slots=True)
class UpdateRecord:
    """One parameter update. Seconds of each phase: the slowest replica's, where several had it."""

    began: float = 0.0
    transfer_s: float = 0.0
    """Seconds from the begin of gather until every replica had received; known for synchronous updates."""
    phases: dict[str, float] = field(default_factory=dict)
    nbytes: int = 0
    halted_s: float = 0.0
    """Seconds for which a replica decoded nothing: the mean over replicas."""
    finished: float | None = None
    superseded: bool = False
    loads: dict[str, Span] = field(default_factory=dict)
    """Time span of each replica, by name, from when it stood still until it had loaded."""

    def recv_s(self, *, synchronous: bool) -> float:
        """Seconds of the receive phase. In a synchronous update a replica's report includes its wait for gather: there
        it is what the transfer took after gather and besides register. Sending goes on at the same time."""
        if not synchronous:
            return self.phases.get("recv", 0.0)
        return max(0.0, self.transfer_s - self.phases.get("gather", 0.0) - self.phases.get("register", 0.0))

    @property
    def load_s(self) -> float:
        """Seconds of the load phase, with the way to the replica and back where that is known."""
        if not self.loads:
            return max(self.phases.get("load", 0.0), self.halted_s)
        return max(loaded - stopped for stopped, loaded in self.loads.values())

    def latency_s(self, busy: Mapping[str, IntervalUnion], *, synchronous: bool) -> float | None:
        """Seconds of the update beside its phases and beside what replicas finished before they stood still; None where
        other updates were under way, or it is not known when replicas stood still. ``busy``: when each computed.
        """
        if self.finished is None or self.superseded or not self.loads:
            return None
        name, (stopped, loaded) = max(self.loads.items(), key=lambda load: load[1][1])
        gather_s, register_s = self.phases.get("gather", 0.0), self.phases.get("register", 0.0)
        transferred = self.began + gather_s + self.recv_s(synchronous=synchronous) + register_s
        drained = busy[name].within((transferred, stopped))
        return max(0.0, stopped - transferred - drained) + self.finished - loaded


@dataclass(slots=True)
class UpdatesRecord:
    """Collects the updates from the events of a run, which `add` takes in order."""

    updates: defaultdict[int, UpdateRecord] = field(default_factory=lambda: defaultdict(UpdateRecord))
    versions: int = 0
    """Number of updates that finished."""
    warm_at: float = float("inf")
    """The time at which the first update ended."""
    to_train_s: list[float] = field(default_factory=list)
    """Seconds from when replicas stood still until the trainer had their devices."""
    to_generate_s: list[float] = field(default_factory=list)
    _loaded: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Replica → (version, time) of its load, while it is still halted."""
    _leased: float = 0.0
    """The time at which the trainer was given the devices that it has, or had last."""
    _stood: list[float] = field(default_factory=list)
    """Times at which replicas stopped for the latest lease, of those that have resumed."""

    def add(self, event: Event) -> None:
        match event:
            case events.TrainerBusy(what="gather", span=(start, _)):
                update = self.updates[event.version]
                update.began, update.transfer_s = start, event.time - start
            case events.UpdatePhase():
                self._phase(event)
            case events.ReplicaHalted():
                self._halted(event)
            case events.UpdateSuperseded():
                self.updates[event.version].superseded = True
            case events.UpdateFinished():
                self.versions += 1
                self.warm_at = min(self.warm_at, event.time)
                update = self.updates[event.version]
                update.halted_s, update.finished = event.rollout_stall_s, event.time
            case events.LeaseChanged(holder="train"):
                self._leased = event.time
            case events.LeaseChanged(holder="generate"):
                if self._stood:
                    self.to_train_s.append(self._leased - max(self._stood))
                    self.to_generate_s.append(event.time - event.asked)
                self._stood = []

    def _phase(self, event: events.UpdatePhase) -> None:
        update = self.updates[event.version]
        update.phases[event.phase] = max(update.phases.get(event.phase, 0.0), event.seconds)
        update.nbytes = max(update.nbytes, event.nbytes)
        if event.phase == "load":
            self._loaded[event.where] = event.version, event.time

    def _halted(self, event: events.ReplicaHalted) -> None:
        """Record a halt, whose event is emitted at its end."""
        loaded = self._loaded.pop(event.replica, None)
        if event.reason == "load" and loaded is not None:
            version, at = loaded
            self.updates[version].loads[event.replica] = event.span[0], at
        elif event.reason == "lease":
            self._stood.append(event.span[0])


T = TypeVar("T")

KEPT_FATES = frozenset({"trained", "filtered"})


@dataclass(slots=True)
class RecordedGroup:
    """The record of one admitted group, as far as it got."""

    admitted: float = 0.0
    replica: str = ""
    """The replica that finished the group's last trajectory."""
    prompt_tokens: int = 0
    answer_tokens: dict[int, int] = field(default_factory=dict)
    """Tokens of each answer, by its k. Those of an episode are all that it sampled."""
    episodes: dict[int, events.TrajectoryFinished] = field(default_factory=dict)
    """Episodes that a program made and that did not fail, by k; empty for single answers."""
    failed: int = 0
    """Number of episodes that failed; no other field has them."""
    sampled: float = 0.0
    """The time at which the group's last token was sampled."""
    arrived: float = 0.0
    """The time at which the driver had the group's last answer."""
    rewarded: float | None = None
    fate: str | None = None

    @property
    def began(self) -> float:
        return self.arrived

    def samples(self, number: int) -> list[TrainSample]:
        """The group's trajectories as a training step takes them, without contents; ``number`` is the group's."""
        read = {k: round(episode.metrics.get("step_tokens", 0.0)) for k, episode in self.episodes.items()}
        return [
            TrainSample(None, k, self.prompt_tokens, tokens + read.get(k, 0), TrajectoryId(0, number, 0, k))
            for k, tokens in self.answer_tokens.items()
        ]

    @property
    def delivery_s(self) -> float:
        """Seconds from the group's last token until the driver had the group."""
        return self.arrived - self.sampled


class Recording:
    """Everything that a profile needs from a run's events. Filled by `recording_of`."""

    def __init__(self, mini_batch: int, ranks: int) -> None:
        self.workers: list[events.WorkerDescribed] = []
        self.started: events.RunStarted | None = None
        self.lost_ranks = False
        """True where a role went on with fewer ranks: its times are of two numbers of ranks."""
        self.groups: defaultdict[int, RecordedGroup] = defaultdict(RecordedGroup)
        self.activity: list[events.ReplicaActivity] = []
        self.validations: list[events.ValidationFinished] = []
        self.training = TrainingRecord(mini_batch, self._samples_of, Division(ranks))
        self.updates = UpdatesRecord()
        self.busy: defaultdict[str, IntervalUnion] = defaultdict(IntervalUnion)
        """Times in which each replica computed."""
        self._resumed: defaultdict[str, list[float]] = defaultdict(list)
        """Replica → times at which it went on after a halt, in order."""

    def _samples_of(self, number: int) -> list[TrainSample]:
        return self.groups[number].samples(number) if number in self.groups else []

    def add(self, event: Event) -> None:
        match event:
            case events.WorkerDescribed():
                self.workers.append(event)
            case events.RanksRestarted():
                self.lost_ranks |= event.ranks < event.of
            case events.RunStarted():
                self.started = event
            case events.GroupAdmitted():
                self.groups[event.number].admitted = event.time
            case events.TrajectoryFinished():
                group = self.groups[event.number]
                group.replica, group.prompt_tokens = event.replica, event.prompt_tokens
                group.sampled, group.arrived = max(group.sampled, event.finished), event.time
                if event.failure is not None:
                    group.failed += 1
                else:
                    group.answer_tokens[event.k] = event.tokens
                    if event.turns and "environment_s" in event.metrics:
                        group.episodes[event.k] = event
            case events.GroupRewarded():
                self.groups[event.number].rewarded = event.time
            case events.GroupSettled():
                self.groups[event.number].fate = event.fate
            case events.ReplicaActivity():
                self.activity.append(event)
                for span in event.busy:
                    self.busy[event.replica].add(span)
            case events.ValidationFinished():
                self.validations.append(event)
            case events.ReplicaHalted():
                self._resumed[event.replica].append(event.span[1])
                self.updates.add(event)
            case _:
                self.training.add(event)
                self.updates.add(event)

    def warm(self, measured: Iterable[T]) -> list[T]:
        """The items of ``measured`` that ``began`` after the warm-up; all of them if none did."""
        items: list[Any] = list(measured)
        return [item for item in items if item.began >= self.updates.warm_at] or items

    def recorded_groups(self) -> list[RecordedGroup]:
        """Groups that were trained or filtered, in order of admission: their answers are as long as they would be."""
        return [group for _, group in sorted(self.groups.items()) if group.fate in KEPT_FATES and group.answer_tokens]

    def submissions_s(self) -> list[float]:
        """Seconds, for each time that an idle replica was given groups, from the first one's admission until it
        computed.

        A replica that was halted then takes none before it goes on: from that moment.
        """
        admissions: defaultdict[str, list[float]] = defaultdict(list)
        for group in self.warm(self.groups.values()):
            admissions[group.replica].append(group.admitted)
        return [
            seconds
            for replica, times in admissions.items()
            for seconds in _until_busy(sorted(times), self._resumed[replica], self.busy[replica].spans)
        ]

    def warm_activity(self, name: str) -> list[events.ReplicaActivity]:
        """Return the reports whose field ``name`` is not empty: those after the warm-up, or all if there are none."""
        reports = [report for report in self.activity if getattr(report, name)]
        return [report for report in reports if report.busy and report.busy[0][0] >= self.updates.warm_at] or reports


def recording_of(history: Iterable[Event], *, mini_batch: int, ranks: int = 1) -> Recording:
    """Collect the events of ``history`` into a recording. ``mini_batch`` is ``actor.ppo_mini_batch_size``; ``ranks``:
    number of data ranks of the trainer.
    """
    recording = Recording(mini_batch, ranks)
    for event in history:
        recording.add(event)
    return recording


def _until_busy(admissions: Sequence[float], resumed: Sequence[float], busy: Sequence[Span]) -> Iterator[float]:
    """Yield, for each gap between ``busy`` spans, the seconds from its first admission to its end; from the replica's
    last resumption in the gap, if that is later. All arguments are in order of time.
    """
    for (_, idle_from), (start, _) in pairwise(busy):
        first = bisect_right(admissions, idle_from)
        if first < len(admissions) and admissions[first] < start:
            last = bisect_right(resumed, start)
            yield start - max(admissions[first], resumed[last - 1] if last else -math.inf)
