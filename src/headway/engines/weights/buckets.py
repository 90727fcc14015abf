"""Weights as flat bytes: taken apart into buckets on one side, put together again on the other.

    the trainer's shards ─gather─▶ bucket ─▶ Stream ─────────────────▶ transport ─▶ BackBuffer ─load─▶ Tensors.write
                                      └────▶ Staged (a copy) ─▶ …                 └─▶ InPlace ────────▶ Tensors.write

A bucket is a one-dimensional uint8 tensor. Extra memory: on each rank that sends two buckets (`Stream`), and with
``schedule: overlapped`` or ``encoding: delta`` a copy of its share in host memory (`Staged`); on a machine that serves
one complete copy in host memory (`BackBuffer`: ``rollout.enable_dual_buffer``), or on each replica one bucket of each
sender's (`InPlace`).

Also here: lossless changes between two versions of the same bytes, as bit patterns of any dtype.

Bytes are compared as *units* of 16 bits, in blocks of 65,536 units. A bfloat16 element is one unit, a float32 element
two; an odd last byte is a unit of its own, as if a zero followed. Numbers are little-endian, and there are no gaps:

    payload   │ count 0 │ count 1 │ … │ block 0 │ block 1 │ …     counts: uint32 each, the units that differ
    block     │ where │ values │                                  values: count × uint16, the new units
    where     count × uint16, the places of these units in the block, ascending; or, where that is shorter,
              one bit per unit of the block, lowest bit first, padded to a multiple of 16 bits

A changed unit takes four bytes, or less where more than one in sixteen changed; every block takes four more. Blocks are
worked on one at a time, within the processor's cache, so there is never an index of a whole bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import numpy as np
import numpy.typing as npt
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

    def __init__(self, manifest: Manifest, parts: Parts, device: torch.device | None = None) -> None:
        """Take ``parts`` of all tensors of the layout; their dtypes may differ: values are cast.

        ``device``: what is written is brought there in one copy, and taken apart there; None: it is where they are.
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
        self._parts, self._device = parts, device

    @torch.no_grad()
    def write(self, offset: int, data: torch.Tensor) -> None:
        """Copy ``data`` [n] uint8, the flat bytes from ``offset`` on, into the parts that they belong to."""
        data = data if self._device is None else data.to(self._device)
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
            # The buffer has the last bucket's bytes, and the ranks' buckets are summed: what others give must be zero.
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


BLOCK_UNITS = 65_536
"""Number of units in a block: as many as a uint16 tells apart."""

_UNIT = np.dtype("<u2")
_COUNT = np.dtype("<u4")
_BLOCK_BYTES = BLOCK_UNITS * _UNIT.itemsize

_Bytes = npt.NDArray[np.uint8]
_Units = npt.NDArray[np.uint16]
_Places = npt.NDArray[np.intp]
_SizeT = TypeVar("_SizeT", int, npt.NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class Delta:
    """The changes that make the new version of some bytes from the old one."""

    payload: torch.Tensor | None
    """The encoded changes, [m] uint8 on the CPU; None where they would not be smaller than the bytes themselves."""
    changed: int
    """Number of 16-bit units that differ."""


def encode(old: torch.Tensor, new: torch.Tensor) -> Delta:
    """Encode ``new`` as a delta from ``old``, both [n] uint8; ``new`` may be on a device, and is copied to the host.

    Memory besides that copy: the payload, an eighth of it to grow into, and 1 MiB. A payload that is then too large was
    n · 17/16 bytes at the most. Raises ValueError for lengths that differ.
    """
    if old.shape != new.shape:
        raise ValueError(f"old has shape {tuple(old.shape)}, new has {tuple(new.shape)}; a delta needs equal lengths")
    before, after = old.numpy(), new.cpu().numpy()
    counts = np.zeros(_block_count(after.size), _COUNT)
    payload = bytearray(counts.nbytes)
    for index in range(counts.size):
        units = _units(after, index)
        differs = units != _units(before, index)
        places = np.flatnonzero(differs)
        counts[index] = places.size
        payload.extend(_where(differs, places))
        payload.extend(units[places].data)
    changed = int(counts.sum(dtype=np.int64))
    if len(payload) >= after.size:
        return Delta(None, changed)
    payload[: counts.nbytes] = counts.tobytes()
    return Delta(torch.frombuffer(payload, dtype=torch.uint8), changed)


def apply(payload: torch.Tensor, target: torch.Tensor) -> None:
    """Turn the old version in ``target`` [n] into the new one, in place; ``payload`` [m]; both uint8, on the CPU.

    Memory: 1 MiB, and n / 1000 at the most. Raises `UpdateFailed`, with ``target`` untouched, for a payload that
    `encode` cannot have made for n bytes. Values that were altered, and a target that holds something else than the
    old version, are not seen here: the checksum of the payload and the digests of the result are for those.
    """
    delta, data = payload.numpy(), target.numpy()
    for block in _changed_blocks(delta, data.size):
        block.check()
    for block in _changed_blocks(delta, data.size):
        units = _units(data, block.index)
        units[block.places()] = block.values
        start = block.index * _BLOCK_BYTES
        if start + units.nbytes > data.size:  # with an odd last byte, these units are a padded copy
            data[start:] = units.view(np.uint8)[:-1]


@dataclass(frozen=True, slots=True)
class _DeltaBlock:
    """One block of a payload, with at least one change."""

    index: int
    size: int
    """Number of units in the block, changed or not."""
    where: _Units
    values: _Units

    def check(self) -> None:
        """Raise `UpdateFailed` unless there is one place in the block for each value."""
        if self._as_bits:
            bits = self._bits()
            if np.count_nonzero(bits) != self.values.size or np.any(bits[self.size :]):
                raise _malformed(
                    f"the bits of block {self.index} are not those of {self.values.size} of {self.size} units"
                )
        elif self.where[-1] >= self.size or np.any(self.where[1:] <= self.where[:-1]):
            raise _malformed(f"the places in block {self.index} do not ascend within its {self.size} units")

    def places(self) -> _Places:
        """Indices of the units that change. Call it only after the block has been checked."""
        return np.flatnonzero(self._bits()) if self._as_bits else self.where.astype(np.intp)

    @property
    def _as_bits(self) -> bool:
        return self.where.size < self.values.size

    def _bits(self) -> npt.NDArray[np.bool_]:
        # As booleans: numpy searches those several times as fast as bytes.
        return np.unpackbits(self.where.view(np.uint8), bitorder="little").view(np.bool_)


def _changed_blocks(payload: _Bytes, nbytes: int) -> Iterator[_DeltaBlock]:
    """The blocks with changes in a delta to ``nbytes`` bytes. That its counts add up is checked before the first."""
    blocks = _block_count(nbytes)
    header = blocks * _COUNT.itemsize
    if payload.size < header:
        raise _malformed(f"it has {payload.size} bytes, and the counts of {blocks} blocks take {header}")
    counts = payload[:header].view(_COUNT).astype(np.int64)
    sizes = np.full(blocks, BLOCK_UNITS)
    sizes[-1:] = -(-nbytes // _UNIT.itemsize) - (blocks - 1) * BLOCK_UNITS
    if np.any(counts > sizes):
        first = np.argmax(counts > sizes)
        raise _malformed(f"{counts[first]} changes in block {first}, which has {sizes[first]} units")
    wheres = np.minimum(counts, _bitmask_units(sizes))
    stops = np.cumsum(wheres + counts)
    total = header + int(stops[-1:].sum()) * _UNIT.itemsize
    if payload.size != total:
        raise _malformed(f"it has {payload.size} bytes, and its counts add up to {total}")
    body = payload[header:].view(_UNIT)
    for index in np.flatnonzero(counts):
        stop, count = stops[index], counts[index]
        middle = stop - count
        yield _DeltaBlock(int(index), int(sizes[index]), body[middle - wheres[index] : middle], body[middle:stop])


def _where(differs: npt.NDArray[np.bool_], places: _Places) -> bytes:
    if places.size <= _bitmask_units(differs.size):
        return places.astype(_UNIT).tobytes()
    bits = np.packbits(differs, bitorder="little").tobytes()
    return bits.ljust(_bitmask_units(differs.size) * _UNIT.itemsize, b"\0")


def _units(data: _Bytes, index: int) -> _Units:
    """The units of block ``index``: a view, or a padded copy where the last byte is an odd one."""
    block = data[index * _BLOCK_BYTES : (index + 1) * _BLOCK_BYTES]
    if block.size % _UNIT.itemsize:
        block = np.append(block, np.uint8(0))
    return block.view(_UNIT)


def _block_count(nbytes: int) -> int:
    return -(-nbytes // _BLOCK_BYTES)


def _bitmask_units(size: _SizeT) -> _SizeT:
    """Number of units that a bitmask of ``size`` units takes."""
    return (size + 15) // 16


def _malformed(what: str) -> UpdateFailed:
    return UpdateFailed(f"a delta is malformed: {what}; the version has to be sent whole")
