"""Rewards that are all equal: nothing can be learned from them. Told where they train, and where they are filtered.

a group's rewards ─▶ the same for all its answers?  (the same as in the groups before it, too?)
                           └─▶ no filter:  so many groups in a row                ─▶ one warning
                           └─▶ a filter:   nearly all of the last ``window`` groups ─▶ a warning; again if much worse
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
from numpy.typing import NDArray

VERSIONS = 4
"""As many groups as so many versions train, in a row: enough for a warning."""
SHOWN = 3
"""Different rewards, or reasons, that a warning counts."""

FILTERED_FROM = 0.8
"""The share of filtered groups that is told: five groups are generated for each one that is trained."""
MUCH_WORSE, LONGER = 4, 8
"""It is told again when 4 times fewer groups pass the filter, of 8 times as many: where few of few groups pass, it is
soon chance that fewer do."""
WINDOW_VERSIONS, LEAST_WINDOW = 2, 128
"""The share is that of as many groups as two versions train, at least of 128. Where 70% are filtered, as is usual late
in a run, 128 groups reach the limit by chance once in 200 times, and 64 once in 33."""


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


class FilteredGroups:
    """Warns when nearly all groups are filtered: what is generated is hardly trained on, and versions take for ever.

    It looks at the last ``max(2·B, 128)`` groups, and after each warning at new ones alone, eight times as many.
    """

    def __init__(self, groups_per_version: int) -> None:
        self.window = max(WINDOW_VERSIONS * groups_per_version, LEAST_WINDOW)
        self._groups: deque[tuple[str | None, float]] = deque()
        """(why it was filtered, mean reward) of the last ones since the last warning."""
        self._reasons: Counter[str] = Counter()
        """Of those among them that were filtered."""
        self._sum = 0.0
        """Of their mean rewards."""
        self._best: float | None = None
        """The highest mean reward of a window that was not filtered so far."""
        self._range: tuple[float, float] | None = None
        """The lowest and highest reward that were seen."""
        self._told: float | None = None
        """The share that passed the filter when it was told last."""

    def look(self, rewards: NDArray[np.float32], reason: str | None) -> str | None:
        """The warning, when there is one to give after a group with ``rewards`` [n], filtered for ``reason``."""
        mean = float(rewards.mean(dtype=np.float64))
        self._see(reason, mean)
        low, high = float(rewards.min()), float(rewards.max())
        self._range = (low, high) if self._range is None else (min(low, self._range[0]), max(high, self._range[1]))
        if len(self._groups) < self.window:
            return None
        window_mean = self._sum / self.window
        filtered = self._reasons.total()
        if filtered < FILTERED_FROM * self.window:
            self._best = window_mean if self._best is None else max(self._best, window_mean)
            return None
        passed = 1 - filtered / self.window
        if self._told is not None and (self._told == 0 or passed * MUCH_WORSE > self._told):
            return None
        self._told = passed
        text = self._warning(filtered, window_mean, self._best, self._range)
        self._groups.clear()
        self._reasons.clear()
        self._sum = 0.0
        self.window *= LONGER
        return text

    def _see(self, reason: str | None, mean: float) -> None:
        self._groups.append((reason, mean))
        self._sum += mean
        if reason is not None:
            self._reasons[reason] += 1
        if len(self._groups) > self.window:
            left, its_mean = self._groups.popleft()
            self._sum -= its_mean
            if left is not None:
                self._reasons[left] -= 1
                if not self._reasons[left]:  # rewards may be of any number of values
                    del self._reasons[left]

    def _warning(self, filtered: int, mean: float, best: float | None, seen: tuple[float, float]) -> str:
        reasons = ", ".join(f"{times}× {reason}" for reason, times in self._reasons.most_common(SHOWN))
        passed = self.window - filtered
        costs = f"{self.window / passed:.0f} are generated for each one that trains" if passed else "none trains"
        return (
            f"of the last {self.window} groups {filtered} ({filtered / self.window:.0%}) were filtered, as all their "
            f"answers got the same reward ({reasons}): {costs}. {_advice(mean, best, *seen)}"
        )


def _advice(mean: float, best: float | None, low: float, high: float) -> str:
    """``mean`` is the reward of the last groups, ``best`` that of the best ones before; all were in [low, high]."""
    if best is not None and mean - low < (best - low) / 2:
        return (
            f"The mean reward was {best:.3g}, and is {mean:.3g}: what the model had learned is lost. Stop the run, and "
            "go back to a checkpoint from before that with a lower actor.optim.lr: training on, or resuming the newest "
            "checkpoint as it is, goes on from here"
        )
    if low < high and mean - low < (high - low) / 4:
        return "The task is too hard for the model: take easier prompts, a larger rollout.n, or reward parts of it"
    if low < high and high - mean < (high - low) / 4:
        return "The task is too easy for the model: take harder prompts, or end the run, which has little left to learn"
    return "Check the reward on a few samples, take prompts of another difficulty, or a larger rollout.n"
