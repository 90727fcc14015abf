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
    """The fate of a group that was admitted, where the run ended first."""


class Ledger:
    """Admitted groups are open until they are settled, once. Holds the prompts of the open ones."""

    def __init__(self) -> None:
        self.admitted = 0
        self._open: dict[int, Prompt] = {}
        self._fates: Counter[Fate] = Counter()

    def admit(self, prompt: Prompt) -> int:
        """Returns the group's number."""
        number = self.admitted
        self.admitted += 1
        self._open[number] = prompt
        return number

    def is_open(self, number: int) -> bool:
        return number in self._open

    def prompt(self, number: int) -> Prompt:
        return self._open[number]

    @property
    def open_prompts(self) -> list[Prompt]:
        """Prompts of open groups, by number."""
        return [prompt for _, prompt in sorted(self._open.items())]

    def settle(self, number: int, fate: Fate) -> None:
        """Record the fate of group ``number``. Raises `LedgerImbalance` if it was never admitted or already has one."""
        if self._open.pop(number, None) is None:
            raise LedgerImbalance(f"group {number} cannot end as {fate}: it is not open (admitted: {self.admitted})")
        self._fates[fate] += 1

    @property
    def open_numbers(self) -> list[int]:
        return sorted(self._open)

    def counts(self) -> dict[str, int]:
        """``admitted`` and the groups of each fate, which add up to it; open ones count as ``in_flight``."""
        counts = {fate.value: self._fates[fate] for fate in Fate}
        counts[Fate.IN_FLIGHT.value] += len(self._open)
        return {"admitted": self.admitted, **counts}

    def state(self) -> dict[str, Any]:
        """The ledger's part of a checkpoint: counts, and which rows are open."""
        return {
            "admitted": self.admitted,
            "fates": {fate.value: count for fate, count in sorted(self._fates.items())},
            "open": [[n, p.epoch, p.row, p.attempt] for n, p in sorted(self._open.items())],
        }

    def restore(self, state: Mapping[str, Any], open_prompts: Mapping[int, Prompt]) -> None:
        """Go on from what `state` gave. ``open_prompts``: by number, the prompts of the groups that were open then."""
        self.admitted = state["admitted"]
        self._fates = Counter({Fate(fate): count for fate, count in state["fates"].items()})
        self._open = dict(open_prompts)
