"""Admission to a step: of the trajectories that wait, as many as there are slots, memory and prefill budget for."""

from __future__ import annotations

from collections.abc import Callable

from headway.engines.rollout.work import GroupRun, TrajectoryRun


class StepAdmission:
    """Decides which waiting trajectories start in one step. It is asked in order, until it refuses one."""

    def __init__(self, *, rows: int, longest: int, budget: int, fits: Callable[[int, int], bool]) -> None:
        """
        Args:
            rows: that decode already.
            longest: positions that the longest of them has.
            budget: tokens that a step prefills, unless one context alone is longer.
            fits: whether the KV cache has memory for (rows, positions).
        """
        self._rows = rows
        self._budget = budget
        self._fits = fits
        self._prefilled = 0
        self._started = 0
        self._group: GroupRun | None = None
        self.positions = longest + 1
        """Number of positions of the longest row, its next token included."""

    def __call__(self, run: TrajectoryRun) -> bool:
        """Tell whether ``run`` starts, too."""
        length = run.length
        # Its context may be the group's prompt, which is kept, or which the one before it brings.
        is_prefilled = run.fresh and (run.group.prefilled is not None or run.group is self._group)
        tokens = self._prefilled + (0 if is_prefilled else length)
        if self._started and tokens > self._budget:
            return False
        positions = max(self.positions, length + 1)
        if not self._fits(self._rows + self._started + 1, positions):
            return False
        self._prefilled, self.positions = tokens, positions
        self._group = run.group if run.fresh else None
        self._started += 1
        return True
