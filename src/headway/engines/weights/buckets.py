"""Weights as flat bytes: packed into buckets by `pack`, written into tensors by `Tensors.write`, encoded as deltas.

    the trainer's shards ─gather─▶ bucket ─▶ Stream ─────────────────▶ transport ─▶ BackBuffer ─load─▶ Tensors.write
                                      └────▶ Staged (a copy) ─▶ …                 └─▶ InPlace ────────▶ Tensors.write

A bucket is a one-dimensional uint8 tensor. Extra memory of each sending rank: two buckets (`Stream`), and with
``schedule: overlapped`` or ``encoding: delta`` a copy of its share in host memory (`Staged`). Of each serving machine:
one complete copy in host memory (`BackBuffer`, ``rollout.enable_dual_buffer``); or, of each replica, one bucket per
sender (`InPlace`).

Also here: lossless changes between two versions of the same bytes, as bit patterns of any dtype.

Bytes are compared as *units* of 16 bits, in blocks of 65,536 units. A bfloat16 element is one unit, a float32 element
two. Numbers are little-endian, and there are no gaps:

    payload   │ count 0 │ count 1 │ … │ block 0 │ block 1 │ …     counts: uint32 each, the units that differ
    block     │ where │ values │                                  values: count × uint16, the new units
    where     count × uint16, the places of these units in the block, ascending; or, where that is shorter,
              one bit per unit of the block, lowest bit first, padded to a multiple of 16 bits

A changed unit takes four bytes, or less where more than one in sixteen changed; every block takes four more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from headway.engines.weights.weight_layout import Manifest, TensorSlot, slots_in

if TYPE_CHECKING:
    from headway.models.weight_files import FileTensor


def slot_dtype(slot: TensorSlot) -> torch.dtype:
    """The slot's dtype as torch has it."""
    dtype: torch.dtype = getattr(torch, slot.dtype)
    return dtype


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor: all of it, or the part that a rank holds."""

    start: tuple[int, ...]
    """Indices of the box's first element in the tensor."""
    values: torch.Tensor
    """The elements: of any dtype, on any device, in any memory layout."""


Parts = Mapping[str, Sequence[Part]]
"""Parts of each tensor that are here, by name."""


def whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, Sequence[Part]]:
    """Return whole ``tensors`` as parts."""
    return {name: (Part((0,) * tensor.ndim, tensor.detach()),) for name, tensor in tensors.items()}


def parts_of_files(held: Parts, files: Iterable[FileTensor]) -> dict[str, list[Part]]:
    """Return the parts of each tensor of a model's ``files``, given the parts that are ``held`` of its parameters."""
    found: dict[str, list[Part]] = {}
    for file in files:
        there = (file.within(box.start, box.values) for box in held[file.parameter])
        found[file.name] = [Part(*part) for part in there if part is not None]
    return found


class Tensors:
    """Named tensors, or parts of them, as targets of flat bytes in buckets of any size."""

    def __init__(self, manifest: Manifest, parts: Parts, device: torch.device | None = None) -> None:
        """Take ``parts`` of all tensors of the layout; their dtypes may differ: values are cast.

        ``device``: each bucket is first copied there as a whole; None: buckets are where the parts are.
        """
        self._slots = manifest.slots
        self._parts, self._device = parts, device

    @torch.no_grad()
    def write(self, offset: int, data: torch.Tensor) -> None:
        """Copy ``data`` [n] uint8, the flat bytes from ``offset`` on, into the parts that they belong to."""
        data = data if self._device is None else data.to(self._device)
        for values, here in shared_elements(self._slots, self._parts, offset, data):
            here.copy_(values)


def pack(
    manifest: Manifest, parts: Parts, spans: Iterable[tuple[int, int]], buffer: torch.Tensor | None = None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield ``(offset, bucket)`` for each of ``spans``: bytes of ``parts``, cast to the layout's dtypes; else zeros.

    All buckets lie in ``buffer`` ([bytes of the largest] uint8, on any device; default: one on the CPU), so each is
    valid only until the next one is drawn. Nothing else of their size is allocated.
    """
    spans = list(spans)  # read twice: for the largest one, and for the buckets
    here = {slot.name: sum(part.values.numel() for part in parts[slot.name]) for slot in manifest.slots}
    # Parts that cover all tensors write each byte of a bucket: it needs no zeros first.
    complete = all(here[slot.name] * slot.itemsize >= slot.nbytes for slot in manifest.slots)
    if buffer is None:
        buffer = torch.empty(max((stop - start for start, stop in spans), default=0), dtype=torch.uint8)
    for start, stop in spans:
        bucket = buffer[: stop - start]
        if not complete:
            # The buffer has the last bucket's bytes, and the ranks' buckets are summed: others' bytes must be zero.
            bucket.zero_()
        for room, values in shared_elements(manifest.slots, parts, start, bucket):
            room.copy_(values)
        yield start, bucket


def shared_elements(
    slots: Sequence[TensorSlot], parts: Parts, offset: int, data: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield views of the same elements, in ``data`` (flat bytes from ``offset`` on) and in ``parts``.

    They come in order of the tensors, of each tensor's parts, and of a part's elements, row by row. The number of
    elements in a pair may depend on the part's memory layout.
    """
    for slot, first, last in slots_in(slots, offset, offset + data.numel()):
        at = slot.offset + first - offset
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
    # A part without elements has no rows to visit, and `row` may be 0.
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


BLOCK_UNITS = 65_536
"""Number of units in a block: as many as a uint16 tells apart."""
_UNIT, _COUNT = np.dtype("<u2"), np.dtype("<u4")


def encode(old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """Encode ``new`` as a delta from ``old``, both [n] uint8; ``new`` may be on a device, and is copied to the host.

    Returns the payload ([m] uint8 on the CPU; None where it would not be smaller than the bytes themselves), and the
    number of units that differ.
    """
    # As bit patterns: of numbers, NaN would differ from itself, and -0.0 would be 0.0.
    before, after = _units(old), _units(new.cpu())
    counts: list[int] = []
    parts: list[npt.NDArray[np.uint16]] = []
    for start in range(0, after.size, BLOCK_UNITS):
        block = after[start : start + BLOCK_UNITS]
        differs = block != before[start : start + BLOCK_UNITS]
        places = np.flatnonzero(differs)
        counts.append(places.size)
        if places.size <= _bitmask_units(block.size):
            parts.append(places.astype(_UNIT))
        else:
            parts.append(np.packbits(np.pad(differs, (0, -differs.size % 16)), bitorder="little").view(_UNIT))
        parts.append(block[places])
    header: npt.NDArray[Any] = np.array(counts, _COUNT)
    odd = new.numel() % 2 and bool(old[-1] != new[-1])  # a byte that is in no unit
    if odd or not counts or header.nbytes + sum(part.nbytes for part in parts) >= new.numel():
        return None, sum(counts)
    return torch.from_numpy(np.concatenate([part.view(np.uint8) for part in (header, *parts)])), sum(counts)


def apply(payload: torch.Tensor, target: torch.Tensor) -> None:
    """Turn the old version in ``target`` [n] into the new one, in place; ``payload`` [m]; both uint8, on the CPU.

    ``payload`` is what `encode` made for n bytes; a checksum tells that it is.
    """
    units = _units(target)
    header = -(-units.size // BLOCK_UNITS) * _COUNT.itemsize
    body, at = payload[header:].numpy().view(_UNIT), 0
    for index, count in enumerate(payload[:header].numpy().view(_COUNT).tolist()):
        block = units[index * BLOCK_UNITS :][:BLOCK_UNITS]
        bitmask = _bitmask_units(block.size)
        where = body[at : at + min(count, bitmask)]
        at += where.size
        # As booleans: numpy searches those several times as fast as bytes.
        bits = np.unpackbits(where.view(np.uint8), bitorder="little").view(np.bool_) if count > bitmask else None
        block[where if bits is None else np.flatnonzero(bits)] = body[at : at + count]
        at += count


def _bitmask_units(size: int) -> int:
    """Number of units that a bit for each of ``size`` units takes."""
    return -(-size // 16)


def _units(data: torch.Tensor) -> npt.NDArray[np.uint16]:
    """The bytes as units, a view. An odd last byte is in none."""
    return data.numpy()[: data.numel() // 2 * 2].view(_UNIT)
