"""Contexts between two calls of their episodes: their keys and values, in what decoding rows leave of the KV cache.

Rows come first: where they need the memory, blocks give way (see `prefix_cache`). An open episode is in a row or in
blocks, and there is memory for as many of them as there are slots, unless ``rollout.kv_cache_gib`` gives less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headway.data.types import TrajectoryId
from headway.engines.rollout.call_run import CallRun
from headway.engines.rollout.native.cache.kv_cache import SlotCache
from headway.engines.rollout.native.cache.prefix_cache import NOTHING, Found, PrefixCache
from headway.engines.rollout.native.decode_rows import DecodeRows


@dataclass(frozen=True, slots=True)
class FinishedContext:
    """A context on its way from a row into blocks."""

    ids: NDArray[np.int64]
    """[T]"""
    kv: torch.Tensor
    """[layers, 2·kv_heads, T, head_dim]"""
    shared: int
    """Leading tokens that are everybody's."""


class Prefixes:
    """The prefix cache of one engine: what it knows, and where that lies."""

    def __init__(self, cache: SlotCache) -> None:
        self._cache = cache
        self._tree = PrefixCache()
        self._running: dict[CallRun, int] = {}
        """Calls in rows whose contexts will be kept, and their leading tokens that are everybody's."""

    def __len__(self) -> int:
        """Blocks in use."""
        return len(self._tree)

    @property
    def lost(self) -> int:
        """Times that an open episode lost what was kept for it, for want of memory."""
        return self._tree.lost

    def find(self, run: CallRun) -> Found:
        """Find the part of a call's context that is there; not its last token, whose logits are wanted."""
        return self._tree.find(run.context[:-1], run.call.trajectory) if len(self._tree) else NOTHING

    def gather(self, found: Found) -> torch.Tensor | None:
        """A copy of the keys and values that were found: [layers, 2·kv_heads, P, head_dim]."""
        return self._cache.gather(found.blocks, found.length) if found.length else None

    def begin(self, run: CallRun, shared: int) -> None:
        """A call has got a row. The first ``shared`` tokens of its context are everybody's."""
        if run.call.goes_on:
            self._running[run] = shared
        if run.call.goes_on or self._tree.is_open(run.call.trajectory):
            self._tree.begin(run.call.trajectory, run.client)

    def end(self, run: CallRun) -> None:
        """A call has lost its row."""
        self._running.pop(run, None)
        self._tree.end(run.call.trajectory)

    def ending(self, rows: DecodeRows, row: int) -> FinishedContext | None:
        """Take what a call that ends has in its row, if it is to be kept."""
        run = rows.runs[row]
        if run not in self._running:
            return None
        ids = rows.context(row)
        return FinishedContext(ids, self._cache.read(row, len(ids)), self._running[run])

    def store(self, run: CallRun, ending: FinishedContext, rows: int) -> None:
        """Keep what a call that has ended had in its row, beside ``rows`` rows."""
        self._limit(self._cache.blocks_beside(rows))
        copies = self._tree.store(ending.ids, run.call.trajectory, ending.shared)
        self._cache.store(copies, ending.kv)
        self._cache.lent = self._tree.top

    def reserve(self, rows: int, positions: int, lengths: NDArray[np.int64]) -> None:
        """Make room for rows, as `SlotCache.reserve` does."""
        if len(self._tree):
            self._limit(self._cache.blocks_beside(rows, positions))
        self._cache.reserve(rows, positions, lengths)

    def release(self, trajectories: Sequence[TrajectoryId]) -> None:
        """Give up what is kept for these episodes."""
        self._tree.release(trajectories)

    def leave(self, client: str) -> None:
        """Give up what is kept for all episodes of a client."""
        self._tree.leave(client)

    def renew(self) -> None:
        """Keep contexts only for the open episodes that use them, as new weights are served."""
        self._tree.renew()

    def clear(self) -> None:
        """Drop everything."""
        self._tree.clear()
        self._cache.lent = 0

    def _limit(self, blocks: int) -> None:
        self._cache.shift(self._tree.resize(blocks))
        self._cache.lent = self._tree.top
