"""Warnings about wasted training: groups with equal rewards, and episodes of agent programs in trouble.

a group's rewards ─▶ nearly all of the last groups had equal ones, or were filtered for it?   ─▶ one warning
an episode        ─▶ the last ``window`` of them ─▶ many failed?                     ─▶ again if twice as many
                                                 ─▶ most ended by a limit?           ─▶ one warning
                                                 ─▶ long ones failed, and short ones not? ─▶ one warning
                                                 ─▶ many turns forked?               ─▶ one warning
                  ─▶ it was begun again, or its agent did not get what it asked for? ─▶ again if ten times as many
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from math import ceil, sqrt

import numpy as np
from numpy.typing import NDArray

from headway.data.types import FinishReason, Trajectory
from headway.pipeline.admission.ledger import counted

SHOWN = 3
"""Number of different rewards, or reasons of a filter, that a warning lists with their counts."""

VERSIONS, LEAST_FILTERED = 4, 128
"""Number of versions in the window of groups, and fewest groups in it if a filter drops groups with equal rewards."""
EQUAL_FROM, USUAL, DEVIATIONS = 0.8, 0.7, 2.6
"""Share of groups with equal rewards at which the user is warned: at 0.8 one group of five teaches something. In a
small window it must also exceed the usual share late in a run, 0.7, by 2.6 standard deviations, which happens by chance
once in 200 windows."""


class EqualRewards:
    """Warns once, when nearly all groups of the last `VERSIONS` versions teach nothing."""

    def __init__(self, groups_per_version: int, *, within_groups: bool, filters: bool = False) -> None:
        """Create the watch, with an empty window.

        Args:
            within_groups: True if an answer is compared within its group alone, so that a group without variance
            teaches nothing. False if answers are compared across groups: then such groups must also share the same
            reward.
            filters: True if a filter drops groups. Warnings then count the filter's reasons.
        """
        self.window = max(VERSIONS * groups_per_version, LEAST_FILTERED if filters else 1)
        self.limit = fewest(self.window)
        """Number of groups with equal rewards in a window at which a warning is due."""
        self._within_groups, self._filters = within_groups or filters, filters
        self._groups: deque[str | None] = deque(maxlen=self.window)
        """Common reward of each of the last groups or, with ``filters``, why it was dropped; None without."""
        self._warned = False

    def look(self, rewards: NDArray[np.float32], filtered: str | None = None) -> str | None:
        """Count a group by its ``rewards`` [n], the baseline's included. Returns the warning if it is due now, else
        None. ``filtered``: reason why a filter dropped the group; None if it was not dropped.
        """
        equal = f"all {rewards[0]:g}" if rewards.min() == rewards.max() else None
        self._groups.append(filtered if self._filters else equal)
        if self._warned or len(self._groups) < self.window or self._groups[-1] is None:
            return None
        counts = Counter(group for group in self._groups if group is not None)
        found = counts.most_common() if self._within_groups else counts.most_common(1)
        count = sum(times for _, times in found)
        if count < self.limit:
            return None
        self._warned = True
        told = ", ".join(f"{times}× {what}" for what, times in found[:SHOWN])
        text = (
            f"in {count} of the last {self.window} groups ({count / self.window:.0%}) all answers got the same reward "
            f"({told}): there is nothing to learn from them. All at the lowest reward: the task is too hard (take "
            "easier prompts, a larger rollout.n, or reward parts of it); at the highest: too easy, or the reward is "
            "wrong (headway eval shows samples). If the mean reward was higher before, the model has collapsed: resume "
            "an earlier checkpoint with a lower actor.optim.lr"
        )
        if self._within_groups and not self._filters and count < self.window:
            text += ". With algorithm.filter_groups.enable=true only the other groups are trained on"
        return text


def fewest(window: int) -> int:
    """Return the smallest number of groups with equal rewards, out of ``window``, at which a warning is due."""
    by_chance = USUAL + DEVIATIONS * sqrt(USUAL * (1 - USUAL) / window)
    return ceil(window * min(max(EQUAL_FROM, by_chance), 1.0))


LEAST_WINDOW, LONGEST_WINDOW = 64, 2**12
"""Bounds of the window, in episodes. Within them it is as long as two versions."""
FAILED_FROM, WORSE = 0.2, 2.0
"""Share of failed episodes at which the user is warned, and its growth, as a factor, at which the warning is
repeated."""
LIMITED_FROM = 0.5
"""Share of episodes ended by a limit at which the user is warned."""
SELECTS_FROM, MORE_OFTEN, BY_CHANCE = 0.1, 3.0, 3.0
"""Conditions for a warning that failures select by length: the failed share of the longer half of the episodes, its
ratio to that of the shorter half, and their difference in standard deviations."""
FORKED_FROM = 0.2
"""Share of forked turns at which the user is warned. An episode's first turn is not counted."""
TOLD_AGAIN = 10.0
"""Growth of a count of single episodes, as a factor, at which its warning is repeated."""

LOGS = "What programs raised and printed is in logs/*-programs.log in the run's directory"
ADVICE = {
    "turns": "Raise agent.max_turns",
    "tokens": "Raise data.max_response_length, which all turns share",
    "step": "Raise agent.step_timeout_s, or make the environment's steps faster",
    "time": "Raise agent.episode_timeout_s, or make the environment's steps faster",
    None: LOGS,
}
"""Limit that ended most of the episodes -> advice to the user; the key None is for episodes that no limit ended."""
NOTES = {
    "again": ("begun again", LOGS),
    "refused_requests": (
        "with requests that the endpoint refused",
        "Change the agent, or the setting that the reason names",
    ),
    "overridden_sampling": (
        "whose agents asked for other sampling than the run's, which holds",
        "Leave it out in the agent; agent.sampling=strict refuses such requests",
    ),
}
"""Kind of a single episode (``again``, or a key of `Trajectory.notes`) -> its description and the advice to the
user."""


class EpisodeTroubles:
    """Warns of failed, limited and forked episodes. Takes episodes in the order in which their groups finish."""

    def __init__(self, episodes_per_version: int) -> None:
        self.window = min(max(2 * episodes_per_version, LEAST_WINDOW), LONGEST_WINDOW)
        self._episodes: deque[Trajectory] = deque(maxlen=self.window)
        self._since_look = 0
        """Number of episodes since the window was last examined."""
        self._counts: Counter[str] = Counter()
        """Kind of a single episode (a key of `NOTES`) -> number of such episodes."""
        self._told: dict[str, float] = {}
        """Kind of warning -> share, or number, of episodes at the last one."""

    def look(self, episodes: Sequence[Trajectory]) -> list[str]:
        """Count the episodes of a finished group. Returns the warnings that are due: those of single episodes at once,
        others at most once per half window.
        """
        texts = [text for episode in episodes for text in self._single(episode)]
        # Aborted episodes are ended by the run: they say nothing about limits or the program.
        ended = [episode for episode in episodes if episode.finish_reason is not FinishReason.ABORTED]
        self._episodes += ended
        self._since_look += len(ended)
        # The window is full, and at least half of it is new since the last examination.
        if len(self._episodes) == self.window <= 2 * self._since_look:
            self._since_look = 0
            texts += filter(None, (self._failures(), self._limits(), self._selection(), self._forks()))
        return texts

    def _is_due(self, kind: str, found: float, least: float, factor: float | None = None) -> bool:
        """Return True if ``found`` is at least ``least``, and at least ``factor`` times the value at the last warning.
        With ``factor`` None, each kind is warned of once.
        """
        before = self._told.get(kind)
        if found < least or (before is not None and (factor is None or found < factor * before)):
            return False
        self._told[kind] = found
        return True

    def _single(self, episode: Trajectory) -> Iterable[str]:
        reasons = {**({} if episode.again is None else {"again": episode.again}), **episode.notes}
        for kind, reason in reasons.items():
            self._counts[kind] += 1
            if self._is_due(kind, self._counts[kind], 1, TOLD_AGAIN):
                what, advice = NOTES[kind]
                yield f"episodes {what}: {self._counts[kind]} so far, the last one since {reason}. {advice}"

    def _failures(self) -> str | None:
        failed = [episode for episode in self._episodes if episode.failure is not None]
        if not self._is_due("failures", len(failed) / self.window, FAILED_FROM, WORSE):
            return None
        reasons = counted(str(episode.failure) for episode in failed)
        return (
            f"of the last {self.window} episodes {len(failed)} ({len(failed) / self.window:.0%}) failed ({reasons}): "
            f"what they cost is lost, and they are not trained on. {_advice(failed)}"
        )

    def _limits(self) -> str | None:
        limited = [episode for episode in self._episodes if episode.limit is not None]
        if not self._is_due("limits", len(limited) / self.window, LIMITED_FROM):
            return None
        by = ", ".join(f"{count} by {limit}" for limit, count in _by_limit(limited))
        return f"of the last {self.window} episodes {len(limited)} were ended by a limit ({by}). {_advice(limited)}"

    def _selection(self) -> str | None:
        """Return a warning if limits remove mostly long episodes, else None."""
        by_length = sorted(self._episodes, key=lambda episode: (episode.turns, episode.length))
        half = self.window // 2
        lost = [episode for episode in by_length[-half:] if episode.failure is not None and episode.limit is not None]
        short = sum(one.failure is not None and one.limit is not None for one in by_length[:half]) / half
        long, mean = len(lost) / half, (short + len(lost) / half) / 2
        by_chance = BY_CHANCE * sqrt(2 * mean * (1 - mean) / half)
        if not self._is_due("selection", long, max(SELECTS_FROM, MORE_OFTEN * short, short + by_chance)):
            return None
        return (
            f"time-outs and limits take out long episodes: of the last {self.window}, {long:.0%} of the longer half "
            f"failed at one, and {short:.0%} of the shorter half. The policy is trained on short ones, and learns to "
            f"be short. {_advice(lost)}"
        )

    def _forks(self) -> str | None:
        further = sum(max(episode.turns - 1, 0) for episode in self._episodes)
        forks = sum(episode.metrics.get("forks", 0.0) for episode in self._episodes)
        if not further or not self._is_due("forks", forks / further, FORKED_FROM):
            return None
        return (
            f"of the last {further} turns that went on with an episode {forks:.0f} ({forks / further:.0%}) forked: "
            "their prompts did not begin with the ids of the turns before. Each is prefilled from where it differs, "
            "and begins a further sample. Where the chat template changes the history, as a line at the start of the "
            "run says, give the tokenizer one that only appends; else see that the program only appends to its messages"
        )


def _by_limit(episodes: Iterable[Trajectory]) -> list[tuple[str | None, int]]:
    return Counter(episode.limit for episode in episodes).most_common()


def _advice(episodes: Iterable[Trajectory]) -> str:
    """Return the advice for the limit that ended most of ``episodes``."""
    return ADVICE[_by_limit(episodes)[0][0]]
