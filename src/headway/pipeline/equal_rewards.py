"""Rewards that are all equal: nothing can be learned from them. Where a filter takes such groups out, it tells.

a group's rewards ─▶ the same for all its answers?  (the same as in the groups before it, too?)
                           └─▶ so many groups in a row: one warning
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

VERSIONS = 4
"""As many groups as so many versions train, in a row: enough for a warning."""
SHOWN = 3
"""Different rewards that the warning counts."""


class EqualRewards:
    """Warns once, after ``limit`` groups in a row that nothing can be learned from."""

    def __init__(self, limit: int, *, within_groups: bool) -> None:
        """``within_groups``: an answer is compared with the others of its group alone, so a group without variance
        teaches nothing. False: with those of other groups, too, so all groups must have the same reward.
        """
        self._limit = limit
        self._within_groups = within_groups
        self._in_row: Counter[float] = Counter()
        """The one reward of each group without variance → such groups since the last one with variance."""
        self._warned = False

    def look(self, rewards: NDArray[np.float32]) -> str | None:
        """The warning, when ``rewards`` [n] (a baseline's among them) are those of the group that was one too many."""
        if self._warned:
            return None
        reward = float(rewards[0])
        if rewards.min() != rewards.max():
            self._in_row.clear()
            return None
        if not self._within_groups and reward not in self._in_row:
            self._in_row.clear()
        self._in_row[reward] += 1
        if (count := self._in_row.total()) < self._limit:
            return None
        self._warned = True
        found = ", ".join(f"{times}× all {value:g}" for value, times in self._in_row.most_common(SHOWN))
        return (
            f"in {count} groups in a row all answers got the same reward ({found}): there is nothing to learn from "
            "them. Check the reward on a few samples, or make the task easier or harder"
        )
