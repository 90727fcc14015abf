"""Admission to a step, and what a call that starts need not prefill.

    StepAdmission   how many waiting calls start: as many as there are slots, memory and prefill budget for
    Siblings        prefills of contexts that further calls will start from
    Prefixes        contexts between two calls of their episodes, in memory that decoding rows leave

Rows come first: where they need the memory, blocks of contexts give way (see `prefix_cache`). An open episode is in a
row or in blocks. There is memory for as many of them as there are slots, unless ``rollout.kv_cache_gib`` gives less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from headway.engines.rollout.native.kv_cache import SlotCache
from headway.engines.rollout.native.model_runner import Prefilled
from headway.engines.rollout.native.prefix_cache import NOTHING, Found, PrefixCache
from headway.engines.rollout.scheduler import CallRun


def context_key(run: CallRun) -> bytes:
    """The key of a call's own context."""
    return run.call.input_ids.tobytes()


class Siblings:
    """The contexts of calls that have not started, and the prefills kept for these: whole ones, with their logits.

    Calls start in order, so that there is one such prefill for each priority, unless calls of many contexts were
    submitted by turns. The oldest are given up where they take too much.
    """

    def __init__(self, most: int) -> None:
        """``most``: tokens to keep, unless one context alone is longer."""
        self._most = most
        self._waiting = Counter[bytes]()
        """Calls that have not started, by context."""
        self._kept: dict[bytes, Prefilled] = {}
        """Prefills by context, the oldest first."""

    def expect(self, run: CallRun) -> None:
        """Note that a call will start from its own context."""
        self._waiting[context_key(run)] += 1

    def started(self, run: CallRun) -> None:
        """Note that a call has started, or never will."""
        key = context_key(run)
        self._waiting[key] -= 1
        if not self._waiting[key]:
            del self._waiting[key]
            self._kept.pop(key, None)

    def of(self, run: CallRun) -> Prefilled | None:
        """The prefill that is kept for ``run``."""
        return self._kept.get(context_key(run)) if run.fresh else None

    def keep(self, run: CallRun, prefilled: Prefilled) -> None:
        """Keep a copy of the prefill from which ``run`` has started, if any that wait have the same context."""
        key = context_key(run)
        if not run.fresh or key not in self._waiting or key in self._kept:
            return
        self._kept[key] = prefilled.copy()
        while len(self._kept) > 1 and sum(kept.length for kept in self._kept.values()) > self._most:
            del self._kept[next(iter(self._kept))]

    def drop(self) -> None:
        """Give up all that is kept: its keys and values are not to be used any more."""
        self._kept.clear()


class Prefixes:
    """The prefix cache of one engine: what it knows, and where that lies."""

    def __init__(self, cache: SlotCache) -> None:
        self._cache = cache
        self.tree = PrefixCache()
        """The contexts that are kept, and their episodes."""
        self._running: dict[CallRun, int] = {}
        """Calls in rows whose contexts will be kept, and the number of their leading tokens that all episodes share."""

    def find(self, run: CallRun) -> Found:
        """Find the cached part of a call's context, at most up to its last token, whose logits are wanted."""
        return self.tree.find(run.context[:-1], run.call.trajectory) if len(self.tree) else NOTHING

    def gather(self, found: Found) -> torch.Tensor | None:
        """A copy of the keys and values that were found: [layers, 2·kv_heads, P, head_dim]."""
        return self._cache.gather(found.blocks, found.length) if found.length else None

    def begin(self, run: CallRun, shared: int) -> None:
        """Note that a call has a row. All episodes share the first ``shared`` tokens of its context."""
        if run.call.goes_on:
            self._running[run] = shared
        if run.call.goes_on or self.tree.is_open(run.call.trajectory):
            self.tree.begin(run.call.trajectory, run.client)

    def end(self, run: CallRun) -> None:
        """Note that a call has lost its row."""
        self._running.pop(run, None)
        self.tree.end(run.call.trajectory)

    def kept(self, run: CallRun) -> int | None:
        """Leading tokens of a decoding call's context that all episodes share; None where it will not be kept."""
        return self._running.get(run)

    def store(self, run: CallRun, ids: NDArray[np.int64], kv: torch.Tensor, shared: int, rows: int) -> None:
        """Keep the context ``ids`` [T] of a call that has ended, beside ``rows`` rows.

        ``kv``: [layers, 2·kv_heads, T, head_dim]. All episodes share the first ``shared`` tokens.
        """
        # First give up the blocks that rows have grown into: new ones must not be taken from there.
        self._limit(self._cache.blocks_beside(rows))
        self._cache.store(self.tree.store(ids, run.call.trajectory, shared), kv)
        self._cache.lent = self.tree.top

    def reserve(self, rows: int, positions: int, lengths: NDArray[np.int64]) -> None:
        """Make room for rows, as `SlotCache.reserve` does."""
        if len(self.tree):
            self._limit(self._cache.blocks_beside(rows, positions))
        self._cache.reserve(rows, positions, lengths)

    def clear(self) -> None:
        """Drop everything."""
        self.tree.clear()
        self._cache.lent = 0

    def _limit(self, blocks: int) -> None:
        self._cache.shift(self.tree.resize(blocks))
        self._cache.lent = self.tree.top


@dataclass(slots=True, eq=False)
class Share:
    """Calls that start in one step from the same context, which is prefilled once at most."""

    ids: NDArray[np.int64]
    """[P] the context."""
    found: Found
    """The part of it that the prefix cache has."""
    prefilled: Prefilled | None
    """All of it: from an earlier prefill, or from this step once it has run."""
    runs: list[CallRun] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Places of ``runs`` among those that start in the step."""

    missing: int = field(init=False)
    """Tokens to prefill."""

    def __post_init__(self) -> None:
        self.missing = 0 if self.prefilled is not None else len(self.ids) - self.found.length

    @property
    def shared(self) -> int:
        """Leading tokens whose keys and values all episodes will share; see `Found`."""
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
        self._fresh: dict[bytes, Share] = {}
        self.starting: list[CallRun] = []
        """The calls that were admitted."""
        self.shares: list[Share] = []
        """The same, by context."""
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
        if self.starting and tokens > self._budget:
            return False
        positions = max(self.positions, len(share.ids) + 1)
        if not self._fits(self._rows + len(self.starting) + 1, positions):
            return False
        if not joins:
            self.shares.append(share)
            if run.fresh:
                self._fresh[context_key(run)] = share
        share.runs.append(run)
        share.places.append(len(self.starting))
        self._prefilled, self.positions = tokens, positions
        self.starting.append(run)
        return True
