"""Samples that a tracker has taken and not sent yet: none holds up a row, and each that is lost is counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headway.errors import said_by
from headway.reports.trackers.tracker_tables import table


class HeldSamples:
    """Samples that wait in a tracker's process for the next metrics row, under whose version they are shown."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        """Rows of the table of samples."""
        self._count = 0
        self._dropped = 0
        self._why = ""

    def put(self, sample: Mapping[str, Any]) -> None:
        self.rows += table(sample)
        self._count += 1

    def send(self, send: Callable[[list[list[Any]]], object]) -> None:
        """Send what waits; what ``send`` raises costs these samples, and nothing else."""
        if self.rows:
            try:
                send(self.rows)
            except Exception as cause:  # a place for files that cannot be reached, where metrics are taken all the same
                self.drop(cause)
                return
        self.sent()

    def sent(self) -> None:
        self.rows, self._count = [], 0

    def drop(self, cause: Exception) -> None:
        self._dropped, self._why = self._dropped + self._count, said_by(cause)
        self.sent()

    def account(self) -> dict[str, Any]:
        """Return how many samples wait, how many were dropped since the last account, and why."""
        dropped, self._dropped = self._dropped, 0
        return {"held": self._count, "dropped": dropped, "why": self._why}
