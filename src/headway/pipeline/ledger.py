"""Every admitted group, and the one fate that it met."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
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
    """Only at the end of a run: admitted, and the run ended first."""


@dataclass(frozen=True, slots=True)
class Settled:
    fate: Fate
    reason: str | None = None


class Ledger:
    """Admitted groups are open until they are settled, once. Holds the prompts of the open ones."""

    def __init__(self) -> None:
        self.admitted = 0
        self._open: dict[int, Prompt] = {}
        self._fates: Counter[Fate] = Counter()
        self._reasons: Counter[str] = Counter()

    def admit(self, prompt: Prompt) -> int:
        """Returns the group's number."""
        number = self.admitted
        self.admitted += 1
        self._open[number] = prompt
        return number

    def prompt(self, number: int) -> Prompt:
        return self._open[number]

    def settle(self, number: int, fate: Fate, reason: str | None = None) -> Settled:
        """Raises `LedgerImbalance` if the group was never admitted or already met a fate."""
        if self._open.pop(number, None) is None:
            raise LedgerImbalance(f"group {number} cannot end as {fate}: it is not open (admitted: {self.admitted})")
        self._fates[fate] += 1
        if reason is not None:
            self._reasons[f"{fate}: {reason}"] += 1
        return Settled(fate, reason)

    @property
    def open_numbers(self) -> list[int]:
        return sorted(self._open)

    def balance(self) -> dict[str, int]:
        """Counts by fate, with open groups as ``in_flight``. The fates add up to ``admitted``, or it raises."""
        counts = {fate.value: self._fates[fate] for fate in Fate}
        counts[Fate.IN_FLIGHT.value] += len(self._open)
        if sum(counts.values()) != self.admitted:
            raise LedgerImbalance(f"the ledger does not balance: admitted {self.admitted}, fates {counts}")
        return {"admitted": self.admitted, **counts}

    def reasons(self) -> dict[str, int]:
        """How often each reason was given, most frequent first."""
        return dict(self._reasons.most_common())

    def state(self) -> dict[str, Any]:
        """For the checkpoint: counts, and which rows are open."""
        return {
            "admitted": self.admitted,
            "fates": {fate.value: count for fate, count in sorted(self._fates.items())},
            "open": [[n, p.epoch, p.row, p.attempt] for n, p in sorted(self._open.items())],
        }
