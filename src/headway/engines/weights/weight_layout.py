"""The layout of weights: where each tensor lies in the flat bytes of a complete set.

    widest dtypes first, in the order given:   │ w0 │ w1 │ … │ wn │       no gaps; that of a safetensors file's data
    cut into buckets of any size:              │ bucket 0 │ bucket 1 │ … │  a tensor may lie across several

Both sides know the layout, so each may cut it into buckets of a size of its own. Without gaps, equal weights always
have equal bytes.

Nothing here imports torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import TYPE_CHECKING

from headway.errors import ModelError

if TYPE_CHECKING:
    import torch


ALIGNMENT = 64
"""Number of bytes of which buckets begin at multiples: a multiple of every dtype's size, and of a cache line."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Place of a tensor: bytes ``offset … offset + nbytes`` of the flat bytes; its dtype's size divides ``offset``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """The dtype as torch spells it, without the prefix: ``float32``, ``bfloat16``."""
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def itemsize(self) -> int:
        """Bytes of one element; 1 for a tensor without any."""
        return self.nbytes // max(1, prod(self.shape)) or 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """The layout of one complete set of weights, or of a share; fixed for a run, exchanged once. Tied weights appear
    once.
    """

    slots: tuple[TensorSlot, ...]
    senders: int = 1
    """Number of trainer ranks that send the weights side by side, each one of its `shares`."""

    @property
    def start(self) -> int:
        """Offset of the first byte: 0, but for a share."""
        return self.slots[0].offset if self.slots else 0

    @property
    def stop(self) -> int:
        """Offset behind the last byte."""
        return self.slots[-1].end if self.slots else 0

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def shares(self) -> tuple[Manifest, ...]:
        """Return the layout of what each sender sends: neighbouring tensors, as evenly as whole tensors allow.

        Offsets stay those of the whole. Where there are fewer tensors than senders, so are the shares.
        """
        shares: list[Manifest] = []
        first = 0
        for sender in range(self.senders):
            due = self.start + self.nbytes * (sender + 1) // self.senders
            last = bisect_right(self.slots, due, lo=first, key=lambda slot: (slot.offset + slot.end) // 2)
            last = len(self.slots) if sender + 1 == self.senders else last
            if last > first:
                shares.append(Manifest(self.slots[first:last]))
            first = last
        return tuple(shares) or (Manifest(()),)


def build_manifest(tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> Manifest:
    """Lay tensors out one behind the other, widest dtypes first, else in the order given.

    Each tensor begins at a multiple of its own dtype's size: the tensors before it are as wide, or wider.
    """
    slots: list[TensorSlot] = []
    offset = 0
    # Stable: tensors of one width stay in the order given.
    for name, shape, dtype in sorted(tensors, key=lambda tensor: -tensor[2].itemsize):
        nbytes = prod(shape) * dtype.itemsize
        slots.append(TensorSlot(name, tuple(shape), str(dtype).removeprefix("torch."), offset, nbytes))
        offset += nbytes
    return Manifest(tuple(slots))


def check_layout(manifest: Manifest, shapes: Mapping[str, tuple[int, ...]], receiver: str) -> None:
    """Raise `ModelError` unless ``manifest`` has each tensor of ``shapes`` once: the weights of ``receiver``.

    A receiver that lacks a weight, or gets another, would serve half a model.
    """
    for slot in manifest.slots:
        if (shape := shapes.get(slot.name)) != slot.shape:
            found = "no such tensor" if shape is None else f"shape {shape}"
            raise ModelError(f"updates bring {slot.name!r} of shape {slot.shape}; {receiver} has {found}")
    there = {slot.name for slot in manifest.slots}
    if missing := [name for name in shapes if name not in there]:
        raise ModelError(f"updates leave out {len(missing)} weights of {receiver}, such as {missing[0]!r}")


def bucket_bytes(megabytes: float) -> int:
    """Convert a bucket size in units of 2²⁰ bytes to bytes: a multiple of `ALIGNMENT`, and at least one of it."""
    return max(ALIGNMENT, int(megabytes * 2**20) // ALIGNMENT * ALIGNMENT)


def buckets(nbytes: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield ``(start, stop)`` of each bucket of at most ``size`` bytes, in order. `ALIGNMENT` divides ``size``."""
    if size <= 0 or size % ALIGNMENT:
        raise ValueError(f"a bucket of {size} bytes; expected a positive multiple of {ALIGNMENT}")
    for start in range(0, nbytes, size):
        yield start, min(start + size, nbytes)


def slots_in(slots: Sequence[TensorSlot], start: int, stop: int) -> Iterator[tuple[TensorSlot, int, int]]:
    """Yield ``(slot, first, last)`` for each tensor with bytes in ``start … stop``; offsets are the tensor's.

    ``slots`` are a layout's, in its order.
    """
    for index in range(bisect_right(slots, start, key=lambda slot: slot.end), len(slots)):
        slot = slots[index]
        if slot.offset >= stop:
            return
        if slot.nbytes:
            yield slot, max(start, slot.offset) - slot.offset, min(stop, slot.end) - slot.offset


def combined(digests: Sequence[int]) -> int:
    """Combine the digests of all tensors, in order, into one number of 64 bits."""
    # + 1: digests of empty tensors are 0, and those at the beginning would not count.
    return reduce(lambda all_before, digest: (all_before * 0x9E3779B97F4A7C15 + digest + 1) % 2**64, digests, 0)
