"""The record of a simulated replica's work: when it computed, how much, and in which steps."""

from __future__ import annotations

from headway.events import DecodeSteps, PrefillSteps, Span, add_prefill

ROUNDING = 1e-6
"""Tolerance for rounding: the part of a step that may be missing from a whole one."""


class SimulatedActivity:
    """Busy spans, slot-time, tokens prefilled and found, and steps since the last report.

    Decoding is continuous here, so steps come in parts: what is left of a whole step is kept for the next report. A
    prefill and the step after it are one, as in an engine that does both in one go.
    """

    def __init__(self) -> None:
        self.slot_seconds = 0.0
        self.prefilled_tokens = 0
        self.found_tokens = 0
        """Tokens that were in the prefix cache."""
        self._busy: list[Span] = []
        self._since: float | None = None
        self._decoded: dict[int, list[float]] = {}
        """Active sequences → sums of [steps, seconds, cached tokens]; negative if a prefill took a later step."""
        self._prefilled: dict[int, PrefillSteps] = {}

    def computes(self, now: float, busy: bool) -> None:
        """Note that the replica computes, or stops computing, from ``now`` on. Spans that touch become one."""
        if busy == (self._since is not None):
            return
        if not busy:
            self._close(now)
            self._since = None
        elif self._busy and self._busy[-1][1] == now:
            self._since = self._busy.pop()[0]
        else:
            self._since = now

    def decoded(self, active: int, steps: float, seconds: float, cached: float) -> None:
        """Count ``steps`` decode steps. ``cached`` tokens are cached before the first of them; each adds ``active``."""
        total = self._decoded.setdefault(active, [0.0, 0.0, 0.0])
        total[0] += steps
        total[1] += seconds
        total[2] += steps * (cached + active * (steps - 1) / 2)

    def prefilled(self, active: int, tokens: int, prefill_s: float, step_s: float, cached: float) -> None:
        """Count a prefill of ``tokens`` that ended. The step that follows belongs to it; `decoded` will count that."""
        self.prefilled_tokens += tokens
        add_prefill(self._prefilled, active, tokens, prefill_s + step_s, round(cached))
        self.decoded(active, -1.0, -step_s, cached + active)  # the last term: a step back from there

    def take(self, now: float) -> tuple[list[Span], float, int, int]:
        """(busy spans, slot-seconds, prefilled tokens, found ones) up to ``now``, which starts the next report."""
        if self._since is not None:
            self._close(now)
            self._since = now
        report = self._busy, self.slot_seconds, self.prefilled_tokens, self.found_tokens
        self._busy, self.slot_seconds, self.prefilled_tokens, self.found_tokens = [], 0.0, 0, 0
        return report

    def take_steps(self) -> tuple[dict[int, DecodeSteps], dict[int, PrefillSteps]]:
        """Return the whole steps since the last report: (decode steps, steps with a prefill)."""
        decode: dict[int, DecodeSteps] = {}
        for active, total in self._decoded.items():
            steps = int(total[0] + ROUNDING)
            if steps > 0:
                share = steps / total[0]
                decode[active] = (steps, total[1] * share, round(total[2] * share))
                total[:] = [value * (1 - share) for value in total]
        prefilled, self._prefilled = self._prefilled, {}
        return decode, prefilled

    def _close(self, now: float) -> None:
        if self._since is not None and now > self._since:
            self._busy.append((self._since, now))
