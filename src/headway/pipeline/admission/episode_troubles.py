"""Troubles of programs' episodes that cost what is learned or how fast: failures, time-outs that select, forks.

an episode ─▶ the last ``window`` of them ─▶ many failed?                       ─▶ a warning; again if twice as many
                                          ─▶ long ones failed, and short ones not? ─▶ one warning
                                          ─▶ many turns forked?                    ─▶ one warning
           ─▶ most of a version's ended by a limit?                                ─▶ one warning
           ─▶ its program was run again?                                           ─▶ a warning; again if twice as many
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from math import sqrt

from headway.data.types import FinishReason, Trajectory

LEAST_WINDOW, LONGEST_WINDOW = 64, 2**12
"""Bounds of the window: as many episodes as two versions train lie between."""
FAILED_FROM, WORSE = 0.2, 2
"""Share of failed episodes from which on the user is warned, and the factor from which on it is told again."""
SELECTS_FROM, MORE_OFTEN = 0.1, 3.0
"""Failed share of the longer half of the episodes from which on failures may select by length, and how many times more
often than in the shorter half they must occur."""
TOLD_AGAIN = 10
"""Factor from which on the user is told again of what agents did not get of the endpoint."""
DEVIATIONS = 3.0
"""Standard deviations by which the shares of the two halves must differ: by chance they do so once in 700 windows."""
FORKED_FROM = 0.2
"""Share of forked turns, those that open an episode not counted, from which on the user is warned."""
LIMITED_FROM = 0.5
"""Share of episodes that a limit ended from which on the user is warned."""
LEAST_LIMITED = 16
"""Fewest episodes of which that is said."""
SHOWN = 3
"""Number of different reasons that a warning lists with their counts."""

ADVICE = {
    "turns": "raise agent.max_turns, or add turns to agent.train_on_limit",
    "tokens": "raise data.max_response_length, or add tokens to agent.train_on_limit",
    "step": "raise agent.step_timeout_s, or make the environment's steps faster",
    "time": "raise agent.episode_timeout_s, or make the environment's steps faster",
    None: "What programs raised and printed is in logs/*-programs.log in the run's directory",
}
"""What to do, by the limit that ended most of the failed episodes; None for episodes that no limit ended."""


LONGER = {
    "turns": "raise agent.max_turns",
    "tokens": "raise data.max_response_length, which all turns and what the environment says share",
    "step": ADVICE["step"],
    "time": ADVICE["time"],
}
"""What to do where a limit ends most episodes."""

NOTES = {
    "refused_requests": (
        "made requests that the endpoint refused, such as",
        "Change the agent, or the setting that the reason names",
    ),
    "overridden_sampling": (
        "asked for other sampling than the run's, which holds, such as",
        "Leave it out in the agent; agent.sampling=strict refuses such requests",
    ),
}
"""What is said of each kind of `Trajectory.notes`, and what to do."""


class EpisodeTroubles:
    """Looks at the episodes of a run in the order in which their groups finish."""

    def __init__(self, episodes_per_version: int) -> None:
        self._version = max(episodes_per_version, LEAST_LIMITED)
        self._new = 0
        """Number of episodes since the last look at limits."""
        self.window = min(max(2 * episodes_per_version, LEAST_WINDOW), LONGEST_WINDOW)
        self._episodes: deque[Trajectory] = deque(maxlen=self.window)
        self._since_look = 0
        """Number of episodes since the window was last looked through."""
        self._told: float | None = None
        """Failed share at the last warning; None before the first."""
        self._selection_told = self._forks_told = self._limits_told = False
        self._run_again = self._run_again_told = 0
        """Number of episodes whose program was run again, now and at the last warning."""
        self._noted: Counter[str] = Counter()
        """Kind of what agents did not get of the endpoint → number of episodes."""
        self._noted_told: Counter[str] = Counter()

    def look(self, episodes: Sequence[Trajectory]) -> list[str]:
        """Count the episodes of a finished group. Returns the warnings that are due: of programs that were run again at
        once, others at most once in a half window.
        """
        ended = [episode for episode in episodes if episode.finish_reason is not FinishReason.ABORTED]
        self._episodes += ended
        again = [*self._again(episodes), *self._notes(episodes), *self._limits(len(ended))]
        self._since_look += len(ended)
        if len(self._episodes) < self.window or 2 * self._since_look < self.window:
            return again
        self._since_look = 0
        return [*again, *(text for text in (self._failures(), self._selection(), self._forks()) if text is not None)]

    def _again(self, episodes: Sequence[Trajectory]) -> list[str]:
        reasons = [episode.again for episode in episodes if episode.again is not None]
        self._run_again += len(reasons)
        if not reasons or self._run_again < WORSE * self._run_again_told:
            return []
        self._run_again_told = self._run_again
        were = "1 episode was" if self._run_again == 1 else f"{self._run_again} episodes were"
        return [f"{were} begun again so far, the last one since {reasons[-1]}. {ADVICE[None]}"]

    def _notes(self, episodes: Sequence[Trajectory]) -> list[str]:
        """Tell of what agents did not get of the endpoint: at the first episode, and at ten times as many."""
        said = []
        for episode in episodes:
            for kind, reason in episode.notes.items():
                self._noted[kind] += 1
                if self._noted[kind] >= TOLD_AGAIN * self._noted_told[kind]:
                    self._noted_told[kind] = self._noted[kind]
                    what, advice = NOTES[kind]
                    agents = "1 episode" if self._noted[kind] == 1 else f"{self._noted[kind]} episodes"
                    said.append(f"the agents of {agents} so far {what}: {reason}. {advice}")
        return said

    def _limits(self, new: int) -> list[str]:
        """Tell of limits that end most episodes, once in a run, at the end of a version of them."""
        self._new += new
        if self._limits_told or self._new < self._version:
            return []
        self._new = 0
        last = list(self._episodes)[-self._version :]
        limits = Counter(episode.limit for episode in last if episode.limit is not None)
        if limits.total() <= LIMITED_FROM * len(last):
            return []
        self._limits_told = True
        (limit, _), *_ = limits.most_common(1)
        by = ", ".join(f"{count} by {name}" for name, count in limits.most_common())
        return [
            f"of the last {len(last)} episodes {limits.total()} ({limits.total() / len(last):.0%}) ended by a limit "
            f"({by}), and not by themselves. {_sentence(LONGER[limit])}"
        ]

    def _failures(self) -> str | None:
        failed = [episode for episode in self._episodes if episode.failure is not None]
        share = len(failed) / self.window
        if share < max(FAILED_FROM, WORSE * (self._told or 0.0)):
            return None
        self._told = share
        counted = Counter(str(episode.failure) for episode in failed).most_common(SHOWN)
        reasons = "; ".join(f"{times}× {why}" for why, times in counted)
        (limit, _), *_ = Counter(episode.limit for episode in failed).most_common(1)
        return (
            f"of the last {self.window} episodes {len(failed)} ({share:.0%}) failed ({reasons}): what they cost is "
            f"lost, and they are not trained on. {_sentence(ADVICE[limit])}"
        )

    def _selection(self) -> str | None:
        """Tell of limits that take out the long episodes, where there are such."""
        if self._selection_told:
            return None
        by_length = sorted(self._episodes, key=lambda episode: (episode.turns, episode.length))
        half = self.window // 2
        short, long = _failed_at_limits(by_length[:half]) / half, _failed_at_limits(by_length[-half:]) / half
        mean = (short + long) / 2
        by_chance = DEVIATIONS * sqrt(2 * mean * (1 - mean) / half)
        if long < max(SELECTS_FROM, MORE_OFTEN * short, short + by_chance):
            return None
        self._selection_told = True
        (limit, _), *_ = Counter(e.limit for e in by_length[-half:] if _failed_at_limit(e)).most_common(1)
        return (
            f"time-outs and limits take out long episodes: of the last {self.window}, {long:.0%} of the longer half "
            f"failed at one, and {short:.0%} of the shorter half. The policy is trained on short ones, and learns to "
            f"be short. {_sentence(ADVICE[limit])}"
        )

    def _forks(self) -> str | None:
        if self._forks_told:
            return None
        further = sum(max(episode.turns - 1, 0) for episode in self._episodes)
        forks = sum(episode.metrics.get("forks", 0.0) for episode in self._episodes)
        if not further or forks < FORKED_FROM * further:
            return None
        self._forks_told = True
        return (
            f"of the last {further} turns that went on with an episode {forks:.0f} ({forks / further:.0%}) forked: "
            "their prompts did not begin with the ids of the turns before. Each is prefilled from where it differs, "
            "and begins a further sample. Where the chat template changes the history, as a line at the start of the "
            "run says, give the tokenizer one that only appends; else see that the program only appends to its "
            "messages. Several conversations in one episode fork, too, and are meant to"
        )


def _failed_at_limit(episode: Trajectory) -> bool:
    return episode.failure is not None and episode.limit is not None


def _failed_at_limits(episodes: Sequence[Trajectory]) -> int:
    return sum(map(_failed_at_limit, episodes))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
