"""When a simulated replica computed, and how much of it."""

from __future__ import annotations

from headway.events import Span


class Activity:
    """Busy spans, slot-time and prefilled tokens since the last report."""

    def __init__(self) -> None:
        self.slot_seconds = 0.0
        self.prefilled_tokens = 0
        self._busy: list[Span] = []
        self._since: float | None = None

    def computes(self, now: float, busy: bool) -> None:
        """From ``now`` on the replica computes, or does not. Spans that touch are one."""
        if busy == (self._since is not None):
            return
        if not busy:
            self._close(now)
            self._since = None
        elif self._busy and self._busy[-1][1] == now:
            self._since = self._busy.pop()[0]
        else:
            self._since = now

    def take(self, now: float) -> tuple[list[Span], float, int]:
        """(busy spans, slot-seconds, prefilled tokens) up to ``now``, which starts the next report."""
        if self._since is not None:
            self._close(now)
            self._since = now
        report = self._busy, self.slot_seconds, self.prefilled_tokens
        self._busy, self.slot_seconds, self.prefilled_tokens = [], 0.0, 0
        return report

    def _close(self, now: float) -> None:
        if self._since is not None and now > self._since:
            self._busy.append((self._since, now))
