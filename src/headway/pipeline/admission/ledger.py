"""The ledger: counts every admitted group and its one fate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from headway.data.types import Prompt
from headway.errors import LedgerImbalance


class Fate(StrEnum):
    TRAINED = "trained"
    FILTERED = "filtered"
    DROPPED = "dropped"
    FAILED = "failed"
    IN_FLIGHT = "in_flight"
    """Fate of a group that was admitted and had not ended when the run did."""


class Ledger:
    """Record of admitted groups: each is open until it is settled, once. Holds the prompts of the open ones.

    A second account has the groups' episodes: each has the fate of its group, or failed before.

    Example:
        >>> ledger = Ledger(episodes=2)
        >>> number = ledger.admit("the prompt")
        >>> ledger.settle(number, Fate.TRAINED)
        >>> ledger.counts()["trained"], ledger.episode_counts()["trained"], ledger.open_numbers
        (1, 2, [])
        >>> ledger.settle(number, Fate.DROPPED)
        Traceback (most recent call last):
        ...
        headway.errors.LedgerImbalance: group 0 cannot end as dropped: it is not open (admitted: 1)
    """

    def __init__(self, episodes: int = 1) -> None:
        """``episodes``: of each group, its baseline included."""
        self.admitted = 0
        self.episodes = episodes
        """Number of episodes of each group that is admitted from now on."""
        self._open: dict[int, Prompt] = {}
        self._sizes: dict[int, int] = {}
        """Number of episodes of each open group. A resumed run may have begun with another ``rollout.n``."""
        self._fates: Counter[Fate] = Counter()
        self._episodes_admitted = 0
        self._failed: Counter[int] = Counter()
        """Failed episodes of open groups, by the group's number."""
        self._episode_fates: Counter[Fate] = Counter()

    def admit(self, prompt: Prompt) -> int:
        """Open a new group for ``prompt``. Returns the group's number."""
        number = self.admitted
        self.admitted += 1
        self._open[number] = prompt
        self._sizes[number] = self.episodes
        self._episodes_admitted += self.episodes
        return number

    def is_open(self, number: int) -> bool:
        return number in self._open

    @property
    def open_prompts(self) -> list[Prompt]:
        """Prompts of the open groups, in order of the groups' numbers."""
        return [prompt for _, prompt in sorted(self._open.items())]

    def settle(self, number: int, fate: Fate) -> None:
        """Record the fate of group ``number``. Raises `LedgerImbalance` if it was never admitted or already has one."""
        if self._open.pop(number, None) is None:
            raise LedgerImbalance(f"group {number} cannot end as {fate}: it is not open (admitted: {self.admitted})")
        self._fates[fate] += 1
        failed = self._failed.pop(number, 0)
        self._episode_fates[fate] += self._sizes.pop(number) - failed
        self._episode_fates[Fate.FAILED] += failed

    def episodes_failed(self, number: int, count: int) -> None:
        """Record that ``count`` episodes of the open group ``number`` have failed. Raises `LedgerImbalance` for more
        than it has, or a group that is not open.
        """
        self._failed[number] += count
        size = self._sizes.get(number)
        if size is None or self._failed[number] > size:
            has = "is not open" if size is None else f"has {size}"
            raise LedgerImbalance(f"group {number} cannot have {self._failed[number]} failed episodes: it {has}")

    def episode_counts(self) -> dict[str, int]:
        """Return the numbers of ``admitted`` episodes and, adding up to it, of each fate."""
        counts = {fate.value: self._episode_fates[fate] for fate in Fate}
        failed = self._failed.total()
        counts[Fate.FAILED.value] += failed
        counts[Fate.IN_FLIGHT.value] += sum(self._sizes.values()) - failed
        return {"admitted": self._episodes_admitted, **counts}

    @property
    def open_numbers(self) -> list[int]:
        return sorted(self._open)

    def counts(self) -> dict[str, int]:
        """Return the numbers of ``admitted`` groups and, adding up to it, of each fate; open ones are ``in_flight``."""
        counts = {fate.value: self._fates[fate] for fate in Fate}
        counts[Fate.IN_FLIGHT.value] += len(self._open)
        return {"admitted": self.admitted, **counts}

    def state(self) -> dict[str, Any]:
        """Return the ledger's part of a checkpoint: its counts, and which rows are open."""
        return {
            "admitted": self.admitted,
            "fates": {fate.value: count for fate, count in sorted(self._fates.items())},
            "episode_fates": {fate.value: count for fate, count in sorted(self._episode_fates.items())},
            "open": [[n, p.epoch, p.row, p.attempt] for n, p in sorted(self._open.items())],
            "open_episodes": [[n, size, self._failed[n]] for n, size in sorted(self._sizes.items())],
        }

    def restore(self, state: Mapping[str, Any], open_prompts: Mapping[int, Prompt]) -> None:
        """Restore what `state` returned. ``open_prompts``: number → prompt of each group that was open then."""
        self.admitted = state["admitted"]
        self._fates = Counter({Fate(fate): count for fate, count in state["fates"].items()})
        self._episode_fates = Counter({Fate(fate): count for fate, count in state["episode_fates"].items()})
        self._sizes = {number: size for number, size, _ in state["open_episodes"]}
        self._failed = Counter({number: failed for number, _, failed in state["open_episodes"] if failed})
        self._episodes_admitted = self._episode_fates.total() + sum(self._sizes.values())
        self._open = dict(open_prompts)
