"""Sums of what happens all through a run, and one way to thin what is kept of each version.

updates ─▶ `UpdateSums`   over the run, and up to the last optimizer step
batches ─▶ `Pace`         over the last two versions, for the remaining time: early versions say little about late ones
series  ─▶ `Series`, `thinned`  the first and the last of many values, and the extremes of each stretch
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from headway.events import UpdateFinished
from headway.reports.metrics.version_row import PhaseTimes

VERSIONS, BATCHES = 2, 8
"""Least numbers of versions and of batches over which the pace is measured, so that it includes the updates and
validations between batches."""


class Pace:
    """The pace of a run: its last marks of (event clock in seconds, groups taken into batches until then).

    Example:
        >>> pace = Pace()
        >>> pace.begin(0.0)
        >>> pace.took(10.0, groups=8, per_version=8)
        >>> pace.seconds_left(10.0, total=24)  # two more batches, and the training of the last one
        30.0
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    def begin(self, time: float) -> None:
        """Start counting at ``time``, with no groups taken."""
        self._marks.append((time, 0))

    def took(self, time: float, groups: int, per_version: int) -> None:
        """Note that a batch of ``groups`` was taken; a version has ``per_version``."""
        marks = self._marks
        taken = (marks[-1][1] if marks else 0) + groups
        marks.append((time, taken))
        while len(marks) > BATCHES + 1 and marks[1][1] <= taken - VERSIONS * per_version:
            marks.popleft()

    def seconds_left(self, now: float, total: int) -> float | None:
        """Seconds until ``total`` groups are taken and the last batch is trained; None before the first batch."""
        if len(self._marks) < 2:
            return None
        (begun, before), (_, last_but_one), (last, taken) = self._marks[0], self._marks[-2], self._marks[-1]
        if taken <= before or last <= begun:
            return None
        batch, waited = taken - last_but_one, max(now - last, 0.0)
        per_group = (last - begun) / (taken - before)
        left = max(total - taken, 0)
        if not left or waited <= batch * per_group:
            return max((left + batch) * per_group - waited, 0.0)
        # The next batch is overdue. If it came now, this would be the pace: it cannot be quicker.
        return left * (now - begun) / (taken - before + batch)


@dataclass(slots=True)
class UpdateSums:
    """Seconds of updates, added up: what they cost each side, and their phases."""

    updates: int = 0
    trainer: float = 0.0
    rollout: float = 0.0
    validation: float = 0.0
    moving_weights: float = 0.0
    phases: Counter[str] = field(default_factory=Counter)

    def add(self, event: UpdateFinished, phases: PhaseTimes) -> None:
        self.updates += 1
        self.trainer += event.trainer_stall_s
        self.rollout += event.rollout_stall_s
        self.validation += event.validation_stall_s
        self.moving_weights += phases.critical_path_s()
        self.phases.update(phases.totals())


T = TypeVar("T")


class Series(Generic[T]):
    """Items of a run with a value each, in order. Few are kept: the first, the last, and those with the extreme values
    of each stretch. All stretches are equally long, and their length doubles when they become too many.

    Example:
        >>> series = Series(most=4)
        >>> for version in range(9):
        ...     series.append(version, value=0.5 if version == 5 else 0.1)
        >>> series.count, series.items
        (9, [0, 5, 8])
    """

    def __init__(self, most: int) -> None:
        """``most``: number of items that are kept, 4 or more. Of up to half as many, all are kept."""
        self.count = 0
        """Number of items that came."""
        self._most, self._length = most // 2 - 1, 1  # two items a stretch, and the two ends
        self._stretches: list[tuple[tuple[float, int, T], ...]] = []
        """Lowest and highest item of each stretch, as (value, place, item)."""
        self._ends: tuple[tuple[float, int, T], ...] = ()

    def append(self, item: T, value: float) -> None:
        """Add an item."""
        last = (value, self.count, item)
        self._ends = (*self._ends[:1], last)
        begun = self._stretches.pop() if self.count % self._length else ()
        self._stretches.append(_extremes((*begun, last)))
        self.count += 1
        if len(self._stretches) > self._most:
            # Of an odd number the last one is joined with nothing.
            pairs = zip(self._stretches[::2], [*self._stretches[1::2], ()], strict=False)
            self._stretches = [_extremes((*one, *other)) for one, other in pairs]
            self._length *= 2

    @property
    def items(self) -> list[T]:
        """The items that are kept, in order."""
        kept = {place: item for stretch in (*self._stretches, self._ends) for _, place, item in stretch}
        return [item for _, item in sorted(kept.items(), key=lambda one: one[0])]


def _extremes(items: tuple[tuple[float, int, T], ...]) -> tuple[tuple[float, int, T], ...]:
    # Of equal ones the first and the last, so that a stretch without a course has its ends.
    low, high = min(items, key=lambda one: one[0]), max(reversed(items), key=lambda one: one[0])
    return (low,) if low is high else (low, high)


def thinned(values: Sequence[float], most: int) -> list[int]:
    """Indices of at most ``most`` of the ``values``, ascending: the first, the last, and of each stretch the extremes.

    ``most`` is 4 or more.
    """
    series: Series[int] = Series(most)
    for place, value in enumerate(values):
        series.append(place, value)
    return list(range(len(values))) if len(values) <= most else series.items
