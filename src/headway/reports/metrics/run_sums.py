"""Sums of what happens all through a run, and one way to thin what is kept of each version.

updates ─▶ `UpdateSums`   over the run, and up to the last optimizer step
batches ─▶ `Pace`         the last two versions, for the remaining time: early versions say little about late ones
series  ─▶ `thinned`      of many values the first, the last, and of each stretch the extremes
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
class Stalls:
    """Seconds that updates cost each side, added up."""

    updates: int = 0
    trainer: float = 0.0
    rollout: float = 0.0
    validation: float = 0.0
    moving_weights: float = 0.0

    def add(self, event: UpdateFinished, phases: PhaseTimes) -> None:
        self.updates += 1
        self.trainer += event.trainer_stall_s
        self.rollout += event.rollout_stall_s
        self.validation += event.validation_stall_s
        self.moving_weights += phases.critical_path_s()


@dataclass(slots=True)
class UpdateSums:
    """Sums over all updates of the run."""

    stalls: Stalls = field(default_factory=Stalls)
    before_last_step: Stalls = field(default_factory=Stalls)
    """Stalls of the updates that had finished when the last optimizer step, and the wall time with it, ended."""
    phases: Counter[str] = field(default_factory=Counter)
    """Phase of updates → its seconds, added up."""

    def add(self, event: UpdateFinished, phases: PhaseTimes) -> None:
        self.stalls.add(event, phases)
        self.phases.update(phases.totals())

    def stepped(self) -> None:
        """Note that an optimizer step ended."""
        self.before_last_step = replace(self.stalls)


def thinned(values: Sequence[float], most: int) -> list[int]:
    """Indices of at most ``most`` of the ``values``, ascending: the first, the last, and of each stretch the extremes.

    ``most`` is 4 or more.
    """
    count = len(values)
    if count <= most:
        return list(range(count))
    stretches = (most - 2) // 2
    kept = {0, count - 1}
    for stretch in range(stretches):
        part = range(stretch * count // stretches, (stretch + 1) * count // stretches)
        kept |= {min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    return sorted(kept)
