"""Remaining time of a run, by how fast it took groups lately: early versions say little about late ones.

    ── begun ──┬── a fetch ──┬── a fetch ──┬ … ┬── a fetch ──┬── now
               └── the last two versions, 8 fetches at least ┘ └─ overdue: slower than that, by what is known

A fetch that takes longer than the ones before shows in the estimate while it is waited for, not only when it came.
"""

from __future__ import annotations

from collections import deque

VERSIONS, FETCHES = 2, 8
"""Least numbers of versions and of fetches over which the pace is measured, so that it includes the updates and
validations between fetches."""


class Pace:
    """The pace of a run: its last marks of (event clock in seconds, groups taken into fetches until then)."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    def begin(self, time: float) -> None:
        """Start counting at ``time``, with no groups taken."""
        self._marks.append((time, 0))

    def took(self, time: float, groups: int, per_version: int) -> None:
        """Note that a fetch of ``groups`` was taken; a version has ``per_version``."""
        marks = self._marks
        taken = (marks[-1][1] if marks else 0) + groups
        marks.append((time, taken))
        while len(marks) > FETCHES + 1 and marks[1][1] <= taken - VERSIONS * per_version:
            marks.popleft()

    def seconds_left(self, now: float, total: int) -> float | None:
        """Seconds until ``total`` groups are taken and the last fetch is trained; None before the first fetch."""
        if len(self._marks) < 2:
            return None
        (begun, before), (_, last_but_one), (last, taken) = self._marks[0], self._marks[-2], self._marks[-1]
        if taken <= before or last <= begun:
            return None
        fetch, waited = taken - last_but_one, max(now - last, 0.0)
        per_group = (last - begun) / (taken - before)
        left = max(total - taken, 0)
        if not left or waited <= fetch * per_group:
            return max((left + fetch) * per_group - waited, 0.0)
        # The next fetch is overdue. If it came now, this would be the pace: it cannot be quicker.
        return left * (now - begun) / (taken - before + fetch)
