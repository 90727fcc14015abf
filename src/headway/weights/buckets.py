"""Weights as flat bytes: taken apart into buckets on one side, put together again on the other.

    the trainer's shards ─gather─▶ bucket ─▶ Stream ─────────────────▶ transport ─▶ BackBuffer ─load─▶ Tensors.write
                                      └────▶ Staged (a complete copy) ─▶ …        └─▶ InPlace ────────▶ Tensors.write

A bucket is a one-dimensional uint8 tensor. Extra memory: on the trainer one bucket (`Stream`), or one complete copy in
host memory (`Staged`: what ``schedule: overlapped`` and ``encoding: delta`` cost); on a replica one complete copy in
host memory (`BackBuffer`: ``rollout.enable_dual_buffer``), or one bucket (`InPlace`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from headway.errors import UpdateFailed
from headway.weights.layout import Manifest, TensorSlot, slots_in


def slot_dtype(slot: TensorSlot) -> torch.dtype:
    """The slot's dtype as torch has it."""
    dtype = getattr(torch, slot.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UpdateFailed(f"tensor {slot.name!r} has dtype {slot.dtype!r} in the layout, which torch does not know")
    return dtype


def view(slot: TensorSlot, flat: torch.Tensor) -> torch.Tensor:
    """The slot's tensor as a view into ``flat`` ([all bytes] uint8, any device)."""
    return flat[slot.offset : slot.end].view(slot_dtype(slot)).view(slot.shape)


class Tensors:
    """Named tensors that flat bytes are written into, whatever the buckets."""

    def __init__(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take ``tensors``, which have all names and shapes of the layout; their dtypes may differ: values are cast.

        Raises `UpdateFailed` for a tensor that is not there, or has another shape.
        """
        for slot in manifest.slots:
            if slot.name not in tensors:
                raise UpdateFailed(f"there is no tensor {slot.name!r}, which the layout of the weights has")
            if tuple(tensors[slot.name].shape) != slot.shape:
                raise UpdateFailed(
                    f"tensor {slot.name!r} has shape {tuple(tensors[slot.name].shape)}; the layout says {slot.shape}"
                )
        self._slots = manifest.slots
        self._tensors = tensors

    @torch.no_grad()
    def write(self, offset: int, data: torch.Tensor) -> None:
        """Copy ``data`` [n] uint8, the flat bytes from ``offset`` on, into the tensors that they belong to."""
        for slot, first, last in slots_in(self._slots, offset, offset + data.numel()):
            at = slot.offset + first - offset
            values = data[at : at + last - first].view(slot_dtype(slot))
            elements = first // slot.itemsize
            target = self._tensors[slot.name].detach()
            # A tensor that is not contiguous (one of several that an engine fused) is written whole rows at a time.
            if target.is_contiguous():
                target.view(-1)[elements : elements + values.numel()].copy_(values)
            else:
                _write_strided(target, elements, values)


def _write_strided(target: torch.Tensor, first: int, values: torch.Tensor) -> None:
    """Write elements ``first …`` of ``target`` in row-major order: whole rows as blocks, ends of rows one by one."""
    while target.ndim > 1 and target.shape[0] == 1:
        target = target[0]
    if target.ndim <= 1:
        target[first : first + values.numel()].copy_(values)
        return
    row = target[0].numel()
    while values.numel():
        index, within = divmod(first, row)
        whole = values.numel() // row if within == 0 else 0
        count = whole * row or min(row - within, values.numel())
        if whole:
            target[index : index + whole].copy_(values[:count].view(whole, *target.shape[1:]))
        else:
            _write_strided(target[index], within, values[:count])
        first, values = first + count, values[count:]


@dataclass(frozen=True, slots=True)
class Shard:
    """A stretch of a tensor's elements, in row-major order."""

    first: int
    values: torch.Tensor
    """The elements: [n], of any dtype, on any device."""


def pack(
    manifest: Manifest,
    shards: Mapping[str, Shard],
    spans: Iterable[tuple[int, int]],
    device: torch.device | str = "cpu",
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield ``(offset, bucket)`` for each of ``spans``: bytes of ``shards``, cast to the layout's dtypes; else zeros.

    All buckets share one buffer on ``device``, so each is valid only until the next one is drawn. Nothing else of their
    size is allocated.
    """
    spans = list(spans)
    whole = all(shards[slot.name].values.numel() * slot.itemsize >= slot.nbytes for slot in manifest.slots)
    buffer = torch.zeros(max((stop - start for start, stop in spans), default=0), dtype=torch.uint8, device=device)
    for start, stop in spans:
        bucket = buffer[: stop - start]
        if not whole:
            bucket.zero_()
        for slot, first, last in slots_in(manifest.slots, start, stop):
            shard, size = shards[slot.name], slot.itemsize
            low = max(first // size, shard.first)
            high = min(last // size, shard.first + shard.values.numel())
            if low < high:
                at = slot.offset + low * size - start
                room = bucket[at : at + (high - low) * size].view(slot_dtype(slot))
                room.copy_(shard.values[low - shard.first : high - shard.first])
        yield start, bucket
