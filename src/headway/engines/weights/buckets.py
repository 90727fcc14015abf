"""Weights as flat bytes: taken apart into buckets on one side, put together again on the other.

    the trainer's shards ─gather─▶ bucket ─▶ Stream ─────────────────▶ transport ─▶ BackBuffer ─load─▶ Tensors.write
                                      └────▶ Staged (a copy) ─▶ …                 └─▶ InPlace ────────▶ Tensors.write

A bucket is a one-dimensional uint8 tensor. Extra memory: on each rank that sends two buckets (`Stream`), and with
``schedule: overlapped`` or ``encoding: delta`` a copy of its share in host memory (`Staged`); on a machine that serves
one complete copy in host memory (`BackBuffer`: ``rollout.enable_dual_buffer``), or on each replica one bucket of each
sender's (`InPlace`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from headway.engines.weights.weight_layout import Manifest, TensorSlot, slots_in
from headway.errors import UpdateFailed


def slot_dtype(slot: TensorSlot) -> torch.dtype:
    """The slot's dtype as torch has it."""
    dtype = getattr(torch, slot.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UpdateFailed(f"tensor {slot.name!r} has dtype {slot.dtype!r} in the layout, which torch does not know")
    return dtype


def view(slot: TensorSlot, flat: torch.Tensor) -> torch.Tensor:
    """The slot's tensor as a view into ``flat`` ([all bytes] uint8, any device)."""
    return flat[slot.offset : slot.end].view(slot_dtype(slot)).view(slot.shape)


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of a tensor that are neighbours in all of its dimensions: a box, all of it or what a rank holds."""

    start: tuple[int, ...]
    """Indices of the first one in the tensor."""
    values: torch.Tensor
    """The elements: of any dtype, on any device, in any memory layout."""


Parts = Mapping[str, Sequence[Part]]
"""What is here of each tensor, by name."""


def whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, Sequence[Part]]:
    """Return ``tensors``, all of each, as parts."""
    return {name: (Part((0,) * tensor.ndim, tensor.detach()),) for name, tensor in tensors.items()}


class Tensors:
    """Named tensors, or parts of them, as targets of flat bytes in buckets of any size."""

    def __init__(self, manifest: Manifest, parts: Parts) -> None:
        """Take ``parts`` of all tensors of the layout; their dtypes may differ: values are cast.

        Raises `UpdateFailed` for a tensor that is not there, or is larger than the layout says.
        """
        for slot in manifest.slots:
            if slot.name not in parts:
                raise UpdateFailed(f"there is no tensor {slot.name!r}, which the layout of the weights has")
            for part in parts[slot.name]:
                ends = tuple(first + size for first, size in zip(part.start, part.values.shape, strict=False))
                if len(ends) != len(slot.shape) or any(e > size for e, size in zip(ends, slot.shape, strict=True)):
                    raise UpdateFailed(f"tensor {slot.name!r} has shape {ends} here; the layout says {slot.shape}")
        self._slots = manifest.slots
        self._parts = parts

    @torch.no_grad()
    def write(self, offset: int, data: torch.Tensor) -> None:
        """Copy ``data`` [n] uint8, the flat bytes from ``offset`` on, into the parts that they belong to."""
        for values, here in meetings(self._slots, self._parts, offset, data):
            here.copy_(values)


def pack(
    manifest: Manifest, parts: Parts, spans: Iterable[tuple[int, int]], buffer: torch.Tensor | None = None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield ``(offset, bucket)`` for each of ``spans``: bytes of ``parts``, cast to the layout's dtypes; else zeros.

    All buckets lie in ``buffer`` ([bytes of the largest] uint8, on any device; default: one on the CPU), so each is
    valid only until the next one is drawn. Nothing else of their size is allocated.
    """
    spans = list(spans)
    here = {slot.name: sum(part.values.numel() for part in parts[slot.name]) for slot in manifest.slots}
    complete = all(here[slot.name] * slot.itemsize >= slot.nbytes for slot in manifest.slots)
    if buffer is None:
        buffer = torch.empty(max((stop - start for start, stop in spans), default=0), dtype=torch.uint8)
    for start, stop in spans:
        bucket = buffer[: stop - start]
        if not complete:
            bucket.zero_()
        for room, values in meetings(manifest.slots, parts, start, bucket):
            room.copy_(values)
        yield start, bucket


def meetings(
    slots: Sequence[TensorSlot], parts: Parts, offset: int, data: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield views of the same elements, in ``data`` (flat bytes from ``offset`` on) and in ``parts``.

    In order of the tensors, of each one's parts, and of a part's elements, row by row: how many elements a pair has may
    depend on how the part lies in memory.
    """
    for slot, first, last in slots_in(slots, offset, offset + data.numel()):
        at = slot.offset + first - offset
        if first % slot.itemsize or last % slot.itemsize:
            raise UpdateFailed(f"bytes {first} to {last} of tensor {slot.name!r} are not whole elements")
        room = data[at : at + last - first].view(slot_dtype(slot))
        for part in parts[slot.name]:
            yield from _overlaps(room, first // slot.itemsize, slot.shape, part.start, part.values)


def _overlaps(
    room: torch.Tensor, low: int, shape: Sequence[int], start: Sequence[int], values: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield views of the same elements in ``room`` and ``values``.

    ``room``: elements ``low …`` of a tensor of ``shape``, row by row; ``values``: a box of it, from ``start`` on.
    """
    row = prod(shape[1:])
    if values.numel() and (len(shape) <= 1 or (values.shape[1:] == tuple(shape[1:]) and values.is_contiguous())):
        begin = (start[0] if start else 0) * row
        first, stop = max(begin, low), min(begin + values.numel(), low + room.numel())
        if first < stop:
            yield room[first - low : stop - low], values.view(-1)[first - begin : stop - begin]
        return
    high, rows = low + room.numel(), values.shape[0]
    index = max(start[0], low // row) if values.numel() else start[0] + rows
    while index < start[0] + rows and index * row < high:
        block = min((high - index * row) // row, start[0] + rows - index) if index * row >= low else 0
        if block:  # whole rows, together
            there = room[index * row - low :][: block * row].view(block, *shape[1:])
            for dim, (first, size) in enumerate(zip(start[1:], values.shape[1:], strict=True), 1):
                there = there.narrow(dim, first, size)
            yield there, values[index - start[0] : index - start[0] + block]
        else:  # one that begins before the room, or ends behind it
            first, stop = max(index * row, low), min((index + 1) * row, high)
            within = room[first - low : stop - low]
            yield from _overlaps(within, first - index * row, shape[1:], start[1:], values[index - start[0]])
        index += max(block, 1)
