"""Outcome of each group, one line a group: the newest groups, and those whose samples are kept.

GroupAdmitted, TrajectoryFinished, GroupRewarded, FetchTaken, GroupSettled ─▶ `GroupLog` ─▶ lines
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from headway.events import (
    Event,
    FetchTaken,
    GroupAdmitted,
    GroupRewarded,
    GroupSettled,
    TrajectoryFinished,
    UpdateFinished,
)
from headway.reports.metrics.group_tally import IN_FLIGHT
from headway.reports.metrics.run_metrics import RunMetrics
from headway.reports.samples.samples_file import Sample, mean_of

MOST_GROUPS = 4_000
"""Most groups that are kept of a run, and beside them most sampled ones."""
LINE = ("group", "version", "source", "fate", "reason", "reward", "length", "lag")
"""Names of the entries of `GroupLine.values`."""


@dataclass(slots=True)
class GroupLine:
    """One group: ``version`` is the trainer's when it was taken or settled, and before that when it was admitted.

    ``serial`` is that of its last change, `GroupLog.serial` then.
    """

    number: int
    source: str
    version: int
    fate: str = IN_FLIGHT
    reason: str | None = None
    reward: float | None = None
    lag: int | None = None
    tokens: int = 0
    answers: int = 0
    serial: int = 0

    def values(self) -> list[Any]:
        """The line as JSON, in the order of `LINE`: mean reward, mean length in tokens."""
        reward = None if self.reward is None else round(self.reward, 4)
        length = round(self.tokens / self.answers, 1) if self.answers else None
        return [self.number, self.version, self.source, self.fate, self.reason, reward, length, self.lag]


@dataclass(slots=True)
class GroupLog:
    """Accumulates a line for each group. Of more than ``most`` the oldest are forgotten, ``sampled`` ones later."""

    sampled: Container[int] = frozenset()
    serial: int = 0
    """Number of changes so far."""
    version: int = 0
    most: int = MOST_GROUPS
    _lines: dict[int, GroupLine] = field(default_factory=dict)
    _kept: dict[int, GroupLine] = field(default_factory=dict)
    """Lines of sampled groups that are older than those in ``_lines``."""

    def on_event(self, event: Event) -> None:
        match event:
            case GroupAdmitted():
                self._admit(event)
            case TrajectoryFinished(baseline=False, failure=None):
                if (line := self._changed(event.number)) is not None:
                    line.tokens += event.tokens
                    line.answers += 1
            case GroupRewarded(rewards=[_, *_] as rewards):
                if (line := self._changed(event.number)) is not None:
                    line.reward = sum(rewards) / len(rewards)
            case FetchTaken():
                for number in event.numbers:
                    if (line := self._changed(number)) is not None:
                        line.version = event.version
            case GroupSettled():
                self._settle(event)
            case UpdateFinished():
                self.version = max(self.version, event.version)

    def _admit(self, event: GroupAdmitted) -> None:
        self._lines[event.number] = GroupLine(event.number, event.source, self.version)
        self._changed(event.number)
        if len(self._lines) > self.most:
            _move_oldest(self._lines, self._kept, self.sampled)
        if len(self._kept) > self.most:
            del self._kept[next(iter(self._kept))]

    def _settle(self, event: GroupSettled) -> None:
        if (line := self._changed(event.number)) is not None:
            line.fate, line.reason, line.lag = event.fate, event.reason, event.lag
            if event.fate != "trained":
                line.version = self.version

    def add_sampled(self, sample: Sample) -> None:
        """Add the line of a group whose sample is kept, where it is older than what was read."""
        number, episodes = sample["group"], sample["episodes"]
        if number not in self._lines and number not in self._kept:
            line = GroupLine(number, sample["source"], sample["version"], sample["fate"], sample["reason"])
            line.reward, line.lag = mean_of(episodes, "reward"), sample["lag"]
            line.tokens, line.answers = sum(episode["length"] for episode in episodes), len(episodes)
            self._kept[number] = line
            self.touch(number)

    def touch(self, number: int) -> None:
        """Note that something else about the group ``number`` has changed."""
        self._changed(number)

    def _changed(self, number: int) -> GroupLine | None:
        line = self._lines.get(number) or self._kept.get(number)
        if line is not None:
            self.serial += 1
            line.serial = self.serial
        return line

    def lines(self, since: int = 0) -> Iterator[GroupLine]:
        """The lines that have changed after the serial number ``since``, by group; all that are kept for 0."""
        return (line for line in chain(self._kept.values(), self._lines.values()) if line.serial > since)


def _move_oldest(lines: dict[int, GroupLine], kept: dict[int, GroupLine], sampled: Container[int]) -> None:
    oldest = lines.pop(next(iter(lines)))
    if oldest.number in sampled:
        kept[oldest.number] = oldest


def ledger(metrics: RunMetrics) -> dict[str, Any]:
    """Return where all groups and episodes are, their fates with reasons, and whether each has exactly one."""
    finished, where = metrics.finished, metrics.tally.whereabouts()
    return {
        "groups": metrics.tally.counts(),
        "episodes": metrics.tally.episode_counts(),
        "reasons": {fate: dict(reasons.most_common(20)) for fate, reasons in metrics.tally.reasons.items()},
        "failures": dict(metrics.tally.failures.most_common(20)),
        "where": {"generating": where.generating, "queued": where.queued, "training": where.training},
        "balanced": metrics.tally.balances(
            finished.groups if finished else None, finished.episodes if finished else None
        ),
    }
