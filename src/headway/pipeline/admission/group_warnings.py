"""Rewards that are all equal: nothing can be learned from them. Warns where they train, and where filters drop them.

a group's rewards ─▶ the same for all its answers?  (the same as in the other groups, too?)
                           └─▶ no filter:  nearly all groups of the last four versions ─▶ one warning
                           └─▶ a filter:   nearly all of the last ``window`` groups    ─▶ a warning; again if much worse
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from math import ceil, inf, sqrt

import numpy as np
from numpy.typing import NDArray

VERSIONS = 4
"""Number of versions whose groups are looked at, where no filter drops groups with equal rewards."""
USUAL, DEVIATIONS = 0.7, 2.6
"""Usual share of groups with equal rewards late in a run, and the number of standard deviations by which a window's
share must exceed it: that occurs by chance once in 200 windows."""
MOST_OF_THEM = 0.75
"""Share of the groups with equal rewards from which on one common reward decides the advice."""
SHOWN = 3
"""Number of different rewards, or reasons, that a warning lists with their counts."""

FILTERED_FROM = 0.8
"""Share of groups without variance from which on the user is warned: at 0.8 one group of five teaches something."""
MUCH_WORSE, LONGER = 4, 8
"""Factors from which on the warning of filtered groups is given again: 4 times fewer groups pass the filter, out of 8
times as many. Among few groups, fewer could pass by chance."""
WINDOW_VERSIONS, LEAST_WINDOW, LONGEST_WINDOW = 2, 128, 2**14
"""Window of the share of filtered groups: as many as two versions train, at least 128, and a limit on how far it grows.
Where 70% are filtered, as is usual late in a run, 128 groups reach the limit by chance once in 200 times, 64 groups
once in 33. A window that grew for ever would hold the whole run."""

TOO_HARD = "The task is too hard for the model: take easier prompts, a larger rollout.n, or reward parts of it"
TOO_EASY = "The task is too easy for the model: take harder prompts, or end the run, which has little left to learn"
CHECK = "check the reward on a few samples, as headway eval shows them"
OTHERS_ALONE = ". With algorithm.filter_groups.enable=true only the other groups are trained on"


class EqualRewards:
    """Warns once, when nothing can be learned from nearly all groups of the last `VERSIONS` versions."""

    def __init__(self, groups_per_version: int, *, within_groups: bool) -> None:
        """Watch groups. ``within_groups``: an answer is compared within its group alone, so a group without variance
        teaches nothing. False: with those of other groups, too, so such groups must also have the same reward.
        """
        self.window = VERSIONS * groups_per_version
        self.limit = fewest(self.window)
        """Number of groups with equal rewards in a window that is enough for a warning."""
        self._within_groups = within_groups
        self._groups: deque[float | None] = deque(maxlen=self.window)
        """Common reward of each of the last groups; None for a group whose answers have different ones."""
        self._range = RewardRange()
        self._warned = False

    def look(self, rewards: NDArray[np.float32]) -> str | None:
        """Count a group by its ``rewards`` [n], a baseline's among them. Returns a warning if that makes it due."""
        if self._warned:
            return None
        low, high = self._range.look(rewards)
        self._groups.append(low if low == high else None)
        if low != high or len(self._groups) < self.window:
            return None  # one with different rewards makes no warning due
        equal = Counter(reward for reward in self._groups if reward is not None)
        alike = equal if self._within_groups else Counter(dict(equal.most_common(1)))
        if alike.total() < self.limit:
            return None
        self._warned = True
        found = ", ".join(f"{times}× all {value:g}" for value, times in alike.most_common(SHOWN))
        others = OTHERS_ALONE if self._within_groups and alike.total() < self.window else ""
        return (
            f"in {alike.total()} of the last {self.window} groups ({alike.total() / self.window:.0%}) all answers got "
            f"the same reward ({found}): there is nothing to learn from them. "
            f"{_advice_on_equal(alike, self._range)}{others}"
        )


@dataclass(slots=True)
class RewardRange:
    """Lowest and highest reward seen so far."""

    low: float = inf
    high: float = -inf

    def look(self, rewards: NDArray[np.float32]) -> tuple[float, float]:
        """Widen the range by ``rewards`` [n]. Returns the lowest and highest of these."""
        low, high = float(rewards.min()), float(rewards.max())
        self.low, self.high = min(low, self.low), max(high, self.high)
        return low, high


def fewest(window: int) -> int:
    """Return how many of ``window`` groups with equal rewards are more than the usual share and chance explain."""
    by_chance = USUAL + DEVIATIONS * sqrt(USUAL * (1 - USUAL) / window)
    return ceil(window * min(max(FILTERED_FROM, by_chance), 1.0))


def _advice_on_equal(alike: Counter[float], seen: RewardRange) -> str:
    """Return advice. ``alike`` counts groups of equal rewards by their reward; all rewards were in ``seen``."""
    (value, times), *_ = alike.most_common(1)
    if seen.low == seen.high:
        return (
            f"Every answer of the run got {value:g}: {CHECK}. If it is right, the prompts are all too hard, or too easy"
        )
    if times < MOST_OF_THEM * alike.total():
        return (
            "Some prompts are too easy for the model, others too hard: take such of a difficulty between, a larger "
            "rollout.n or a higher rollout.temperature, so that answers to one prompt differ"
        )
    if value == seen.low:
        return TOO_HARD
    if value == seen.high:
        return TOO_EASY
    return f"The reward gives nearly all of them {value:g}, out of {seen.low:g} to {seen.high:g}: {CHECK}"


class FilteredGroups:
    """Warns when nearly all groups are filtered: what is generated is hardly trained on, and versions take for ever.

    Looks at the last ``max(2·B, 128)`` groups, and after each warning at new ones alone, eight times as many, up to
    `LONGEST_WINDOW`.
    """

    def __init__(self, groups_per_version: int) -> None:
        self.window = max(WINDOW_VERSIONS * groups_per_version, LEAST_WINDOW)
        self._groups: deque[tuple[str | None, float]] = deque()
        """Pairs (reason for filtering or None, mean reward) of the last groups since the last warning."""
        self._reasons: Counter[str | None] = Counter()
        self._sum = 0.0
        """Numbers of reasons, and sum of mean rewards, of these groups: to count them anew for each group is slow."""
        self._best: float | None = None
        """Highest mean reward of a window in which most groups passed the filter; None before the first."""
        self._range = RewardRange()
        self._told: float | None = None
        """Share of the groups that passed the filter at the last warning; None before the first."""

    def look(self, rewards: NDArray[np.float32], reason: str | None) -> str | None:
        """Count a group with ``rewards`` [n], filtered for ``reason`` if any. Returns a warning if one is due."""
        self._groups.append((reason, float(rewards.mean(dtype=np.float64))))
        self._reasons[reason] += 1
        self._sum += self._groups[-1][1]
        self._range.look(rewards)
        if len(self._groups) < self.window:
            return None
        if len(self._groups) > self.window:
            before, its_mean = self._groups.popleft()
            self._reasons[before] -= 1
            self._sum -= its_mean
        mean, filtered = self._sum / self.window, self.window - self._reasons[None]
        if filtered < FILTERED_FROM * self.window:
            self._best = mean if self._best is None else max(self._best, mean)
            return None
        passed = 1 - filtered / self.window
        if self._told is not None and (self._told == 0 or passed * MUCH_WORSE > self._told):
            return None
        self._told = passed
        text = self._warning(Counter({why: times for why, times in self._reasons.items() if why and times}), mean)
        self.window = min(self.window * LONGER, LONGEST_WINDOW)
        self._groups, self._reasons, self._sum = deque(), Counter(), 0.0
        return text

    def _warning(self, reasons: Counter[str], mean: float) -> str:
        filtered = reasons.total()
        counted = ", ".join(f"{times}× {reason}" for reason, times in reasons.most_common(SHOWN))
        passed = self.window - filtered
        costs = f"{self.window / passed:.0f} are generated for each one that trains" if passed else "none trains"
        return (
            f"of the last {self.window} groups {filtered} ({filtered / self.window:.0%}) were filtered, as all their "
            f"answers got the same reward ({counted}): {costs}. {_advice(mean, self._best, self._range)}"
        )


def _advice(mean: float, best: float | None, seen: RewardRange) -> str:
    """Return advice. ``mean``: the last groups' reward; ``best``: the best window's before; all were in ``seen``."""
    low, high = seen.low, seen.high
    if best is not None and mean - low < (best - low) / 2:
        return (
            f"The mean reward was {best:.3g}, and is {mean:.3g}: what the model had learned is lost. Stop the run, and "
            "go back to a checkpoint from before that with a lower actor.optim.lr: training on, or resuming the newest "
            "checkpoint as it is, goes on from here"
        )
    if low < high and mean - low < (high - low) / 4:
        return TOO_HARD
    if low < high and high - mean < (high - low) / 4:
        return TOO_EASY
    return "Check the reward on a few samples, take prompts of another difficulty, or a larger rollout.n"
