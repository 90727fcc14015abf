"""The KV cache: one row per decoding slot, keys and values side by side, all rows as long as the longest needs.

    [layers, rows, 2·kv_heads, room, head_dim]        heads 0..kv_heads-1 are keys, the rest are values
    [layers, blocks, 2·kv_heads, BLOCK, head_dim]     the same memory from its end

Rows 0..active-1 are in use, so that what attention reads is a view and finished rows cost nothing. The memory is taken
once, for so many tokens; how they are divided into rows and room changes with what decodes: many short rows or few long
ones. Rows move when it does, within that memory, once in ``room_step`` tokens at most. What rows leave of it holds
blocks of contexts that do not decode (see `prefix_cache`), the first block at the memory's end.
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
"""Number of positions by which rows are lengthened at a time, unless more is asked for."""


def enough(slots: int, context: int) -> int:
    """Tokens of a cache in which each of ``slots`` contexts has a place, be it in a row or in blocks."""
    return slots * -(-context // BLOCK) * BLOCK


class SlotCache:
    """Owns the cache's memory and knows how rows are written, filled and moved."""

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
        """The blocks at the memory's end and what each holds; `rows` do not reach them."""
        self._room_step, self._least_rows = room_step, least_rows
        self._dtype, self._device = dtype, device
        self._heads = 2 * geometry.kv_heads
        self.allocate()

    def allocate(self) -> None:
        # Zeros, not garbage: attention reads masked positions too, and 0 · NaN would not be 0. What rows leave behind
        # when they move is finite.
        g = self.geometry
        shape = (g.layers, self.tokens * self._heads * g.head_dim)
        rows = torch.arange(self.slots, device=self._device).unsqueeze(1)
        # Made once: recorded steps read it, however the memory is divided when they are replayed.
        self._places = rows * self._heads + torch.arange(self._heads, device=self._device)
        self.bounds = torch.arange(self.slots + 1, dtype=torch.int32, device=self._device)
        """[slots + 1] 0, 1, 2, …"""
        self._kv = torch.zeros(shape, dtype=self._dtype, device=self._device)
        blocks = self.tokens // BLOCK
        of_blocks = self._kv[:, (self.tokens - blocks * BLOCK) * self._heads * g.head_dim :]
        self._blocks = of_blocks.unflatten(1, (blocks, self._heads, BLOCK, g.head_dim))
        self._divide(self._rounded(1))

    def release(self) -> None:
        """Give the memory back; every row and block is lost. `allocate` brings it back."""
        # All views with it: one that is left would hold the memory.
        del self._kv, self._rows, self._layers, self._flat, self._places, self._blocks, self.bounds

    def fits(self, rows: int, positions: int) -> bool:
        """Tell whether there is memory for so many rows, the longest of ``positions``."""
        return rows * self._rounded(positions) <= self.tokens

    @property
    def rows(self) -> int:
        """Rows that there are, as the memory is divided."""
        return min(self.slots, (self.tokens - self.tree.top * BLOCK) // self.room)

    def reserve(self, rows: int, positions: int, lengths: NDArray[np.int64]) -> None:
        """Divide the memory so that ``rows`` rows have room for ``positions``, which `fits`.

        The rows that are in use keep what they hold, ``lengths`` [A] positions each. Blocks give way to them.
        """
        needed = self._room_for(rows, positions)
        if len(self.tree):
            self._limit_blocks(rows, needed)
        if needed == self.room:
            return
        before, room = self._rows, self.room
        self._divide(needed)
        # Front to back if rows get shorter, else back to front: no row is written over before it has moved.
        order = range(len(lengths)) if needed < room else reversed(range(len(lengths)))
        for row in order:
            length = int(lengths[row])
            # By way of a copy: a row's old and new place may overlap, and `copy_` reads what it has written then.
            self._rows[:, row, :, :length] = before[:, row, :, :length].clone()

    def addresses(self, lengths: torch.Tensor) -> torch.Tensor:
        """[A, 2·kv_heads] where rows 0..A-1 store their next token, given ``lengths`` [A]; for `append`."""
        return self._places[: len(lengths)] * self.room + lengths.unsqueeze(1)

    def append(self, layer: int, addresses: torch.Tensor, kv: torch.Tensor) -> None:
        """Store one token's keys and values [A, 2·kv_heads, head_dim] in rows 0..A-1."""
        # One operation for all rows: a copy for each would be most of the time of a small step.
        self._flat[layer][addresses] = kv

    def view(self, layer: int, start: int, stop: int, span: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [stop - start, kv_heads, span, head_dim] of rows start..stop-1, from position ``first`` on.

        They are views.
        """
        rows = self._layers[layer][start:stop, :, first : first + span]
        return rows[:, : self.geometry.kv_heads], rows[:, self.geometry.kv_heads :]

    @property
    def row_stride(self) -> int:
        """Positions from the beginning of a row to that of the next, in `in_line`."""
        return self._heads * self.room

    def in_line(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [positions, kv_heads, head_dim] of all rows, one behind the other, as views.

        Those of row r begin at r · `row_stride`. Between the end of a row and the beginning of the next are positions
        of other heads: who reads has to keep to each row's length.
        """
        g, flat = self.geometry, self._flat[layer]
        # So many that the last position of the last row is there, in the last head, too.
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
        """A copy of the keys and values [layers, 2·kv_heads, length, head_dim] at the start of ``row``."""
        copy: torch.Tensor = self._rows[:, row, :, :length].clone()
        return copy

    def gather(self, found: Found) -> torch.Tensor | None:
        """A copy of the keys and values that were found: [layers, 2·kv_heads, P, head_dim]."""
        if not found.length:
            return None
        parts: torch.Tensor = self._blocks.transpose(1, 2).index_select(2, self._at(found.blocks))
        return parts.flatten(2, 3)[:, :, : found.length]

    def store(self, trajectory: TrajectoryId, ids: Ids, shared: int, kv: torch.Tensor, *, rows: int) -> None:
        """Keep a context's keys and values [layers, 2·kv_heads, T, head_dim] in blocks, beside ``rows`` rows.

        The rest as for `PrefixCache.store`.
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
        """Keep to the blocks that there is memory for beside so many rows; done before those take it."""
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
        """Positions of a row when ``rows`` are reserved with room for ``positions``: as now, unless that is unfit."""
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
