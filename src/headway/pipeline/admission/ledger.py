"""The ledger: records every admitted group and its one fate.

Also here: the errors of a run that ends because nothing is left to train on. The advice depends on how the groups
ended: a reward that fails has to be mended, one that is the same for all answers has to be made to differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headway.data.types import Prompt
from headway.errors import LedgerImbalance, NothingToTrain
from headway.pipeline.admission.sample_collector import DrawnGroup
from headway.runtime.user_code import by_fault


class Fate(StrEnum):
    TRAINED = "trained"
    FILTERED = "filtered"
    DROPPED = "dropped"
    FAILED = "failed"
    IN_FLIGHT = "in_flight"
    """Fate of an admitted group that was open when the run ended."""


@dataclass(slots=True)
class LedgerEntry:
    """An admitted group that has no fate yet."""

    prompt: Prompt
    episodes: int
    """Number of the group's episodes. May differ between groups: a resumed run may have another ``rollout.n``."""
    failed: int = 0
    made: bool = False
    """True once the group's episodes were reported."""
    scored: bool = False
    """True once the group's rewards were reported."""
    drawn: DrawnGroup | None = None
    """Contents so far of the group's sample; None if the group leaves no sample."""


class Ledger:
    """Record of admitted groups. Each is open until it is settled, exactly once.

    A second account counts episodes: each has the fate of its group, unless it failed earlier.

    Example:
        >>> ledger = Ledger(episodes=2)
        >>> number = ledger.admit("the prompt")
        >>> ledger.settle(number, Fate.TRAINED)
        >>> ledger.counts()["trained"], ledger.episode_counts()["trained"], ledger.open
        (1, 2, {})
        >>> ledger.settle(number, Fate.DROPPED)
        Traceback (most recent call last):
        ...
        headway.errors.LedgerImbalance: group 0 cannot end as dropped: it is not open (admitted: 1)
    """

    def __init__(self, episodes: int = 1) -> None:
        """Open an empty ledger. ``episodes``: number of each group's episodes, the baseline's included."""
        self.admitted = 0
        self.episodes = episodes
        """Number of episodes of each group admitted from now on."""
        self.open: dict[int, LedgerEntry] = {}
        """Number -> open group, in the order of admission."""
        self._fates: Counter[Fate] = Counter()
        self._episode_fates: Counter[Fate] = Counter()

    def admit(self, prompt: Prompt) -> int:
        """Open a new group for ``prompt``. Returns the group's number."""
        number = self.admitted
        self.admitted += 1
        self.open[number] = LedgerEntry(prompt, self.episodes)
        return number

    def settle(self, number: int, fate: Fate) -> None:
        """Record the fate of group ``number``. Raises `LedgerImbalance` if it was never admitted or already has one."""
        if (group := self.open.pop(number, None)) is None:
            raise LedgerImbalance(f"group {number} cannot end as {fate}: it is not open (admitted: {self.admitted})")
        self._fates[fate] += 1
        self._episode_fates[fate] += group.episodes - group.failed
        self._episode_fates[Fate.FAILED] += group.failed

    def episodes_failed(self, number: int, count: int) -> None:
        """Record that ``count`` episodes of the open group ``number`` have failed. Raises `LedgerImbalance` if the
        group has fewer that have not failed yet, or is not open.
        """
        group = self.open.get(number)
        if group is None or group.failed + count > group.episodes:
            has = "is not open" if group is None else f"has {group.episodes}, and {group.failed} failed before"
            raise LedgerImbalance(f"group {number} cannot have {count} more failed episodes: it {has}")
        group.failed += count

    def episode_counts(self) -> dict[str, int]:
        """Return the numbers of ``admitted`` episodes and, adding up to it, of each fate."""
        counts = {fate.value: self._episode_fates[fate] for fate in Fate}
        failed = sum(group.failed for group in self.open.values())
        counts[Fate.FAILED.value] += failed
        counts[Fate.IN_FLIGHT.value] += sum(group.episodes for group in self.open.values()) - failed
        return {"admitted": sum(counts.values()), **counts}

    def counts(self) -> dict[str, int]:
        """Return the numbers of ``admitted`` groups and, adding up to it, of each fate; open ones are ``in_flight``."""
        counts = {fate.value: self._fates[fate] for fate in Fate}
        counts[Fate.IN_FLIGHT.value] += len(self.open)
        return {"admitted": self.admitted, **counts}

    def state(self) -> dict[str, Any]:
        """Return the ledger's part of a checkpoint: its counts and the rows of the open groups."""
        groups = sorted(self.open.items())
        return {
            "admitted": self.admitted,
            "fates": {fate.value: count for fate, count in sorted(self._fates.items())},
            "episode_fates": {fate.value: count for fate, count in sorted(self._episode_fates.items())},
            "open": [[n, *group.prompt.group_id] for n, group in groups],
            "open_episodes": [[n, group.episodes, group.failed] for n, group in groups],
        }

    def restore(self, state: Mapping[str, Any], open_prompts: Mapping[int, Prompt]) -> None:
        """Restore what `state` returned. ``open_prompts``: number -> prompt of each group that was open then."""
        self.admitted = state["admitted"]
        self._fates = Counter({Fate(fate): count for fate, count in state["fates"].items()})
        self._episode_fates = Counter({Fate(fate): count for fate, count in state["episode_fates"].items()})
        for number, size, failed in state["open_episodes"]:
            if number in open_prompts:  # `balance` counts groups without their prompts, and gives none
                self.open[number] = LedgerEntry(open_prompts[number], size, failed)


DISCARDED_VERSIONS = 10
"""Number of versions whose groups, discarded in a row, end the run."""
FAILED_AT_FIRST = 32
"""Number of first groups that end the run if none of them could be scored. It does not depend on B. A reward that fails
for four groups of five still scores at least one of 32 with a probability of 1 − 0.8³² = 99.9%."""
FAILED_AT_VALIDATION = 8
"""Number of held-out problems at which the first validation ends the run if none of them could be scored. With a reward
that fails for every second problem this happens by chance in one run of 256. If all failures are timeouts, this many of
them end the run without waiting for the rest."""
SHOWN = 5
"""Number of different reasons that a message lists with their counts. Further ones are summed up."""
WORTH_ADVICE = 0.1
"""Smallest share of the groups with one fate at which the message gives advice on that fate."""

EPISODE_FAILED = "episode failed"
"""Prefix of an episode's failure where it is the reason why a group or problem ended."""

_FAILED = (
    "What it raised and printed is in {}, in the run's directory; headway eval shows it at single answers. "
    "Where it took too long, raise {}, or make it faster"
)
REWARD_ADVICE = _FAILED.format("logs/reward.log", "reward.timeout_s")
EPISODE_ADVICE = _FAILED.format("logs/*-programs.log", "the limit that is named")
ADVICE = {
    Fate.FILTERED: (
        "Check the reward on a few samples, or make the task easier or harder: when all answers to a prompt get the "
        "same reward there is no gradient. If it had been higher before, the model has collapsed: resume with a lower "
        "actor.optim.lr, and from a checkpoint before that, or it ends here again"
    ),
    Fate.DROPPED: (
        "They were too old before they could be trained: raise async_training.max_lag, or set "
        "async_training.on_overdue=wait"
    ),
}
"""Fate of the groups that did not fail -> advice, when nothing is left to train on."""

Ends = Counter[tuple[Fate, str]]
"""Number of groups by (fate, reason)."""


def all_discarded(ends: Ends) -> NothingToTrain:
    """Return the error for `DISCARDED_VERSIONS` · B groups discarded in a row, counted in ``ends``."""
    reasons = counted(f"{fate}: {why}" for fate, why in ends.elements())
    fates = Counter(fate for fate, _ in ends.elements()).most_common()
    to_do = ADVICE | {Fate.FAILED: _on_failures(why for fate, why in ends if fate is Fate.FAILED)}
    advice = ". ".join(to_do[fate] for fate, times in fates if times >= WORTH_ADVICE * ends.total())
    return NothingToTrain(
        f"{ends.total()} groups in a row were discarded, nothing is left to train on ({reasons}). {advice}"
    )


def cannot_be_scored(what: str, reasons: list[str]) -> str:
    """Return the message for scores that all failed: one sentence on the failure, and one of advice."""
    of_programs = all(reason.startswith(EPISODE_FAILED) for reason in reasons)
    failed = "no episode could be made of" if of_programs else "the reward failed for all of"
    return f"{failed} {what} ({counted(reasons)}). {_on_failures(reasons)}"


def _on_failures(reasons: Iterable[str]) -> str:
    advice = (EPISODE_ADVICE if reason.startswith(EPISODE_FAILED) else REWARD_ADVICE for reason in reasons)
    return ". ".join(dict.fromkeys(advice))


def timed_out(reason: str) -> bool:
    """Return True if a score failed because the reward took too long."""
    return "timeout after" in reason


def counted(reasons: Iterable[str]) -> str:
    """Return the most frequent reasons with their counts. Those that differ only by an error's message are one."""
    faults = by_fault(Counter(reasons))
    text = "; ".join(f"{times}× {why}" for why, times in faults[:SHOWN])
    rest = sum(times for _, times in faults[SHOWN:])
    return f"{text}; {rest}× something else" if rest else text
