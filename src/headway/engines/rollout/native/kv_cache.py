"""The KV cache: one row per decoding slot, with keys and values side by side; each has room for the longest.

    [layers, rows, 2·kv_heads, room, head_dim]        heads 0..kv_heads-1 are keys, the rest are values
    [layers, blocks, 2·kv_heads, BLOCK, head_dim]     the same memory from its end

Rows 0..active-1 are in use, so that attention reads a view and finished rows cost nothing. The memory is allocated
once, for a fixed number of tokens. Its division into rows of ``room`` positions changes: many short rows, or few long
ones. Rows then move within the memory, at most once in ``room_step`` tokens. The rest of the memory holds blocks of
contexts that do not decode (see `prefix_cache`), with the first block at the memory's end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from headway.data.types import TrajectoryId
from headway.engines.host_copies import to_device
from headway.engines.rollout.native.prefix_cache import BLOCK, Found, Ids, PrefixCache
from headway.engines.rollout.native.supported_models import KvGeometry

ROOM_STEP = 64
"""Least number of positions by which rows are lengthened at a time."""


def enough(slots: int, context: int) -> int:
    """Return the number of tokens of a cache that fits ``slots`` contexts of ``context`` tokens, in rows or blocks."""
    return slots * -(-context // BLOCK) * BLOCK


class SlotCache:
    """Owns the cache's memory; writes, fills and moves rows."""

    def __init__(
        self,
        geometry: KvGeometry,
        *,
        slots: int,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
        tokens: int | None = None,
        room_step: int = ROOM_STEP,
        least_rows: int = 1,
    ) -> None:
        """``slots``, ``context``: most rows, most positions of one; ``tokens``: of all. Default: `enough`.

        ``least_rows``: number of rows that a step is filled up to; ``tokens`` has room for so many, however long.
        """
        self.geometry = geometry
        self.slots = slots
        self.context = context
        self.tokens = enough(slots, context) if tokens is None else tokens
        self.tree = PrefixCache()
        """The blocks at the memory's end and their contents; `rows` do not reach them."""
        self._room_step, self._least_rows = room_step, least_rows
        self._dtype, self._device = dtype, device
        self._heads = 2 * geometry.kv_heads
        self.allocate()

    def allocate(self) -> None:
        # Zeros, not garbage: attention also reads masked positions, and 0 · NaN is not 0. Values left over from rows
        # that moved are finite.
        g = self.geometry
        shape = (g.layers, self.tokens * self._heads * g.head_dim)
        rows = torch.arange(self.slots, device=self._device).unsqueeze(1)
        # Made once: recorded steps read it at every replay, even after the memory is divided anew.
        self._places = rows * self._heads + torch.arange(self._heads, device=self._device)
        self.bounds = torch.arange(self.slots + 1, dtype=torch.int32, device=self._device)
        """[slots + 1] 0, 1, 2, …"""
        self._kv = torch.zeros(shape, dtype=self._dtype, device=self._device)
        blocks = self.tokens // BLOCK
        of_blocks = self._kv[:, (self.tokens - blocks * BLOCK) * self._heads * g.head_dim :]
        self._blocks = of_blocks.unflatten(1, (blocks, self._heads, BLOCK, g.head_dim))
        self._divide(self._rounded(1))

    def release(self) -> None:
        """Free the memory; every row and block is lost. `allocate` takes it again."""
        # All views, too: a single one would keep the memory.
        del self._kv, self._rows, self._layers, self._flat, self._places, self._blocks, self.bounds

    def fits(self, rows: int, positions: int) -> bool:
        """Tell whether there is memory for ``rows`` rows, the longest with ``positions`` positions."""
        return rows * self._rounded(positions) <= self.tokens

    @property
    def rows(self) -> int:
        """Number of rows in the current division of the memory."""
        return min(self.slots, (self.tokens - self.tree.top * BLOCK) // self.room)

    def reserve(self, rows: int, positions: int, lengths: NDArray[np.int64]) -> None:
        """Divide the memory into ``rows`` rows with room for ``positions``. Requires `fits`.

        The rows in use keep their ``lengths`` [A] positions. Blocks make room for rows.
        """
        needed = self._room_for(rows, positions)
        if len(self.tree):
            self._limit_blocks(rows, needed)
        if needed == self.room:
            return
        before, room = self._rows, self.room
        self._divide(needed)
        # Front to back if rows get shorter, else back to front: no row is overwritten before it has moved.
        order = range(len(lengths)) if needed < room else reversed(range(len(lengths)))
        for row in order:
            length = int(lengths[row])
            # Through a copy: a row's old and new place may overlap, and `copy_` would read its own output.
            self._rows[:, row, :, :length] = before[:, row, :, :length].clone()

    def addresses(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the addresses [A, 2·kv_heads] of the next token of rows 0..A-1 with ``lengths`` [A], for `append`."""
        return self._places[: len(lengths)] * self.room + lengths.unsqueeze(1)

    def append(self, layer: int, addresses: torch.Tensor, kv: torch.Tensor) -> None:
        """Store one token's keys and values [A, 2·kv_heads, head_dim] in rows 0..A-1."""
        # One operation for all rows: a copy per row would take most of the time of a small step.
        self._flat[layer][addresses] = kv

    def view(self, layer: int, start: int, stop: int, span: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """View keys and values [stop - start, kv_heads, span, head_dim] of rows start..stop-1, from ``first`` on."""
        rows = self._layers[layer][start:stop, :, first : first + span]
        return rows[:, : self.geometry.kv_heads], rows[:, self.geometry.kv_heads :]

    @property
    def row_stride(self) -> int:
        """Number of positions from the start of one row to the start of the next, in `in_line`."""
        return self._heads * self.room

    def in_line(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """View keys and values [positions, kv_heads, head_dim] of all rows, one after the other.

        Row r begins at r · `row_stride`. Between two rows are positions of other heads: readers have to respect each
        row's length.
        """
        g, flat = self.geometry, self._flat[layer]
        # Enough positions for the last position of the last row, in the last head, too.
        positions = len(flat) - (self._heads - 1) * self.room
        size, stride = (positions, g.kv_heads, g.head_dim), (g.head_dim, self.room * g.head_dim, 1)
        first = flat.storage_offset()
        return (
            flat.as_strided(size, stride, first),
            flat.as_strided(size, stride, first + g.kv_heads * self.room * g.head_dim),
        )

    def fill(self, rows: range, kv: torch.Tensor) -> None:
        """Copy keys and values [layers, 2·kv_heads, T, head_dim] to the beginning of each of ``rows``."""
        self._rows[:, rows.start : rows.stop, :, : kv.shape[2]] = kv.unsqueeze(1)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of row ``source`` to row ``target``."""
        self._rows[:, target, :, :length] = self._rows[:, source, :, :length]

    def read(self, row: int, length: int) -> torch.Tensor:
        """Copy the keys and values [layers, 2·kv_heads, length, head_dim] at the start of ``row``."""
        copy: torch.Tensor = self._rows[:, row, :, :length].clone()
        return copy

    def gather(self, found: Found) -> torch.Tensor | None:
        """Copy the keys and values of the ``found`` tokens: [layers, 2·kv_heads, P, head_dim]; None if none were."""
        if not found.length:
            return None
        parts: torch.Tensor = self._blocks.transpose(1, 2).index_select(2, self._at(found.blocks))
        return parts.flatten(2, 3)[:, :, : found.length]

    def store(self, trajectory: TrajectoryId, ids: Ids, shared: int, kv: torch.Tensor, *, rows: int) -> None:
        """Keep a context's keys and values [layers, 2·kv_heads, T, head_dim] in blocks, beside ``rows`` rows.

        For the other arguments see `PrefixCache.store`.
        """
        # First give up the blocks that rows have grown into: new ones must not be taken from there.
        self._limit_blocks(rows, self.room)
        copies = self.tree.store(ids, trajectory, shared)
        whole = [copy for copy in copies if copy.stop - copy.start == BLOCK]
        if whole:  # neighbours: behind a block that is new, all are
            parts = kv[:, :, whole[0].start : whole[-1].stop].unflatten(2, (len(whole), BLOCK))
            self._blocks[:, self._at([copy.block for copy in whole])] = parts.transpose(1, 2)
        for copy in copies:
            count = copy.stop - copy.start
            if count < BLOCK:
                target = self._blocks[:, self._last - copy.block, :, copy.offset : copy.offset + count]
                target.copy_(kv[:, :, copy.start : copy.stop])

    def _limit_blocks(self, rows: int, room: int) -> None:
        """Limit the blocks to the memory beside ``rows`` rows, before the rows take theirs."""
        limit = max(0, (self.tokens - max(rows, self._least_rows) * room) // BLOCK)
        if moves := self.tree.resize(limit):
            sources, targets = zip(*moves, strict=True)
            # Indexing by a tensor copies: a target may be a source, too.
            self._blocks[:, self._at(targets)] = self._blocks[:, self._at(sources)]

    @property
    def _last(self) -> int:
        """Index of block 0: blocks are counted from the memory's end."""
        return int(self._blocks.shape[1]) - 1

    def _at(self, blocks: Sequence[int]) -> torch.Tensor:
        """Indices of blocks, on the device."""
        return to_device([self._last - np.array(blocks)], self._device)[0]

    def _room_for(self, rows: int, positions: int) -> int:
        """Return the positions per row for ``rows`` rows with room for ``positions``: as now, if that is possible."""
        needed = self._rounded(positions)
        fits = needed <= self.room < 2 * needed and rows * self.room <= self.tokens
        return self.room if fits else needed

    def _divide(self, room: int) -> None:
        """View the memory as rows of ``room`` positions."""
        g, rows = self.geometry, min(self.slots, self.tokens // room)
        self.room = room
        self._rows = self._kv[:, : rows * self._heads * room * g.head_dim].unflatten(
            1, (rows, self._heads, room, g.head_dim)
        )
        self._layers = list(self._rows.unbind(0))
        self._flat = [layer.view(-1, g.head_dim) for layer in self._layers]

    def _rounded(self, positions: int) -> int:
        return min(-(-positions // self._room_step) * self._room_step, self.context)
