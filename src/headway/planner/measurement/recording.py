"""The costs that a run's events tell of, collected in one pass over them.

    GroupAdmitted, TrajectoryFinished, GroupRewarded, GroupSettled ─▶ groups
    ReplicaActivity ─▶ decode and prefill steps, busy spans
    everything that the trainer does ─▶ `TrainingRecord`
    everything about updates and shared devices ─▶ `UpdatesRecord`

Everything before the run's first parameter update is warm-up (caches, memory, compilation): it is left out of the costs
wherever something was measured after it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, TypeVar

from headway.data.types import Sample, TrajectoryId
from headway.events import (
    Event,
    GroupAdmitted,
    GroupRewarded,
    GroupSettled,
    ReplicaActivity,
    ReplicaHalted,
    RunStarted,
    Span,
    TrajectoryFinished,
    ValidationFinished,
    WorkerDescribed,
)
from headway.planner.measurement.record_training import TrainingRecord
from headway.planner.measurement.record_updates import UpdatesRecord
from headway.planner.profiles.division import Division
from headway.reports.metrics.intervals import IntervalUnion

KEPT_FATES = frozenset({"trained", "filtered"})


class Timed(Protocol):
    @property
    def began(self) -> float: ...


K = TypeVar("K", bound=Timed)


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """The record of an episode that a program made, and that did not fail."""

    turns: int
    environment_s: float
    """Seconds of all of its steps."""
    step_tokens: float
    """Number of tokens that its steps added to contexts."""
    forks: float


@dataclass(slots=True)
class RecordedGroup:
    """The record of one admitted group, as far as it got."""

    admitted: float = 0.0
    replica: str = ""
    """The replica that finished the group's last trajectory."""
    prompt_tokens: int = 0
    answer_tokens: dict[int, int] = field(default_factory=dict)
    """Tokens of each answer, by its k. Those of an episode are all that it sampled."""
    episodes: dict[int, EpisodeRecord] = field(default_factory=dict)
    """Episodes that a program made, by k; empty for single answers."""
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

    def samples(self, number: int) -> list[Sample]:
        """The group's trajectories as a training step takes them, without contents; ``number`` is the group's."""
        read = {k: round(episode.step_tokens) for k, episode in self.episodes.items()}
        return [
            Sample(None, k, self.prompt_tokens, tokens + read.get(k, 0), TrajectoryId(0, number, 0, k))
            for k, tokens in self.answer_tokens.items()
        ]

    @property
    def delivery_s(self) -> float:
        """Seconds from the group's last token until the driver had the group."""
        return self.arrived - self.sampled


class Recording:
    """Everything that a profile needs from a run's events. Filled by `recording_of`."""

    def __init__(self, mini_batch: int, ranks: int) -> None:
        self.workers: list[WorkerDescribed] = []
        self.started: RunStarted | None = None
        self.groups: defaultdict[int, RecordedGroup] = defaultdict(RecordedGroup)
        self.activity: list[ReplicaActivity] = []
        self.validations: list[ValidationFinished] = []
        self.training = TrainingRecord(mini_batch, self._samples_of, Division(ranks))
        self.updates = UpdatesRecord()
        self._busy: defaultdict[str, IntervalUnion] = defaultdict(IntervalUnion)
        self._resumed: defaultdict[str, list[float]] = defaultdict(list)
        """Replica → times at which it went on after a halt, in order."""

    @property
    def versions(self) -> int:
        """Number of parameter updates that finished."""
        return self.updates.versions

    def _samples_of(self, number: int) -> list[Sample]:
        return self.groups[number].samples(number) if number in self.groups else []

    def add(self, event: Event) -> None:
        match event:
            case WorkerDescribed():
                self.workers.append(event)
            case RunStarted():
                self.started = event
            case GroupAdmitted():
                self.groups[event.number].admitted = event.time
            case TrajectoryFinished():
                group = self.groups[event.number]
                group.replica, group.prompt_tokens = event.replica, event.prompt_tokens
                group.sampled, group.arrived = max(group.sampled, event.finished), event.time
                if event.failure is not None:
                    group.failed += 1
                else:
                    group.answer_tokens[event.k] = event.tokens
                    if (episode := _episode(event)) is not None:
                        group.episodes[event.k] = episode
            case GroupRewarded():
                self.groups[event.number].rewarded = event.time
            case GroupSettled():
                self.groups[event.number].fate = event.fate
            case ReplicaActivity():
                self.activity.append(event)
                for span in event.busy:
                    self._busy[event.replica].add(span)
            case ValidationFinished():
                self.validations.append(event)
            case ReplicaHalted():
                self._resumed[event.replica].append(event.span[1])
                self.updates.add(event)
            case _:
                self.training.add(event)
                self.updates.add(event)

    def warm(self, measured: Iterable[K]) -> list[K]:
        """The items of ``measured`` that began after the warm-up; all of them if none did."""
        items = list(measured)
        return [item for item in items if item.began >= self.updates.warm_at] or items

    def recorded_groups(self) -> list[RecordedGroup]:
        """Groups that were trained or filtered, in order of admission: their answers are as long as they would be."""
        return [group for _, group in sorted(self.groups.items()) if group.fate in KEPT_FATES and group.answer_tokens]

    @property
    def replicas(self) -> list[str]:
        """Names of the replicas that ever computed."""
        return list(self._busy)

    def busy_within(self, replica: str, window: Span) -> float:
        """Seconds of ``window`` in which ``replica`` computed."""
        return self._busy[replica].within(window)

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
            for seconds in _until_busy(sorted(times), self._resumed[replica], self._busy[replica].spans)
        ]

    def warm_activity(self, name: str) -> list[ReplicaActivity]:
        """Reports whose field ``name`` is not empty: those from after the warm-up, or all if there are none."""
        reports = [report for report in self.activity if getattr(report, name)]
        return [report for report in reports if report.busy and report.busy[0][0] >= self.updates.warm_at] or reports


def recording_of(events: Iterable[Event], *, mini_batch: int, ranks: int = 1) -> Recording:
    """Collect ``events`` into a recording. ``mini_batch`` is ``actor.ppo_mini_batch_size``; ``ranks``: number of data
    ranks of the trainer.
    """
    recording = Recording(mini_batch, ranks)
    for event in events:
        recording.add(event)
    return recording


def _episode(event: TrajectoryFinished) -> EpisodeRecord | None:
    """Return the record of an episode that a program made; None for a single answer."""
    metrics = event.metrics
    if "environment_s" not in metrics or not event.turns:
        return None
    return EpisodeRecord(
        event.turns, metrics["environment_s"], metrics.get("step_tokens", 0.0), metrics.get("forks", 0.0)
    )


def _until_busy(admissions: Sequence[float], resumed: Sequence[float], busy: Sequence[Span]) -> Iterator[float]:
    """Seconds from the first admission of each gap between busy spans, or the last time in it that the replica went on,
    until the gap's end. All in order of time.
    """
    for (_, idle_from), (start, _) in pairwise(busy):
        first = bisect_right(admissions, idle_from)
        if first < len(admissions) and admissions[first] < start:
            last = bisect_right(resumed, start)
            yield start - max(admissions[first], resumed[last - 1] if last else -math.inf)
