"""Counting of optimizer steps that were skipped because loss or gradient was not finite: many in a row end the run."""

from __future__ import annotations

from headway.data.interfaces.training import StepReport
from headway.errors import NonFinite


class SkippedSteps:
    def __init__(self, lr_key: str, limit: int) -> None:
        """Count from zero. ``lr_key``: the learning rate's setting; ``limit``: skipped steps allowed in a row."""
        self._lr_key = lr_key
        self._limit = limit
        self._in_row = 0

    def state(self) -> int:
        """Return the number of steps skipped in a row, for the checkpoint."""
        return self._in_row

    def restore(self, state: int) -> None:
        self._in_row = state

    def count(self, report: StepReport) -> None:
        """Count the step of ``report`` if it was skipped. Raises `NonFinite` for more in a row than the limit."""
        self._in_row = self._in_row + 1 if report.skipped else 0
        if self._in_row > self._limit:
            raise NonFinite(
                f"{self._in_row} optimizer steps in a row were skipped because loss or gradient was not finite "
                f"(trainer.max_nonfinite_steps); lower {self._lr_key}, or look at the rewards for extreme values"
            )
