"""Admission to a step: of the calls that wait, as many as there are slots, memory and prefill budget for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.engines.rollout.call_run import CallRun
from headway.engines.rollout.native.cache.prefix_cache import Found
from headway.engines.rollout.native.model_runner import Prefilled
from headway.engines.rollout.native.prefix_sharing import context_key


@dataclass(slots=True, eq=False)
class Share:
    """Calls that start in one step from the same context, which is prefilled once at most."""

    ids: NDArray[np.int64]
    """[P] the context."""
    found: Found
    """The part of it that the prefix cache has."""
    prefilled: Prefilled | None
    """All of it, from a prefill of before, or of this step once that has run."""
    runs: list[CallRun] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Places of ``runs`` among those that start in the step."""

    missing: int = field(init=False)
    """Tokens to prefill."""

    def __post_init__(self) -> None:
        self.missing = 0 if self.prefilled is not None else len(self.ids) - self.found.length

    @property
    def shared(self) -> int:
        """Leading tokens whose keys and values will be everybody's; see `Found`."""
        return self.found.shared if self.found.shared < self.found.length else len(self.ids)


class StepAdmission:
    """Decides which waiting calls start in one step. It is asked in order, until it refuses one."""

    def __init__(
        self,
        *,
        rows: int,
        longest: int,
        budget: int,
        fits: Callable[[int, int], bool],
        kept: Callable[[CallRun], Prefilled | None],
        find: Callable[[CallRun], Found],
    ) -> None:
        """
        Args:
            rows: that decode already.
            longest: positions that the longest of them has.
            budget: tokens that a step prefills, unless one context alone is longer.
            fits: whether the KV cache has memory for (rows, positions).
            kept: the prefill that was kept for a call.
            find: the part of a call's context that the prefix cache has.
        """
        self._rows = rows
        self._budget = budget
        self._fits = fits
        self._kept, self._find = kept, find
        self._prefilled = 0
        self._started = 0
        self._fresh: dict[bytes, Share] = {}
        self.shares: list[Share] = []
        """The calls that were admitted, by context."""
        self.positions = longest + 1
        """Number of positions of the longest row, its next token included."""

    def __call__(self, run: CallRun) -> bool:
        """Tell whether ``run`` starts, too."""
        found = self._find(run)
        share = self._fresh.get(context_key(run)) if run.fresh else None
        joins = share is not None and share.found.blocks == found.blocks
        if share is None or not joins:
            # What others had prefilled has no bit of what the call's episode sampled before.
            kept = self._kept(run) if found.shared == found.length else None
            share = Share(run.context, found, kept)
        tokens = self._prefilled + (0 if joins else share.missing)
        if self._started and tokens > self._budget:
            return False
        positions = max(self.positions, len(share.ids) + 1)
        if not self._fits(self._rows + self._started + 1, positions):
            return False
        if not joins:
            self.shares.append(share)
            if run.fresh:
                self._fresh[context_key(run)] = share
        share.runs.append(run)
        share.places.append(self._started)
        self._prefilled, self.positions = tokens, positions
        self._started += 1
        return True
