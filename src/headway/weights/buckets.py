"""Weights as flat buckets of bytes: laid out, packed, checked, and held back until the engine swaps them in.

    tensors ─▶ build_manifest ─▶ Manifest                       (once; both sides know it)
    gather  ─▶ pack ─▶ bucket, bucket, … ─▶ transport ─▶ BackBuffer.fill ─▶ items ─▶ the engine's own tensors

A bucket is a one-dimensional uint8 tensor. Slots start on multiples of `ALIGNMENT` bytes, so a view of any dtype is
valid; the bytes between two slots are zero, so equal weights always have equal checksums.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import groupby

import torch

from headway.errors import UpdateFailed
from headway.interfaces import Manifest, ReceiveReport, TensorSlot

ALIGNMENT = 64
"""Bytes; a multiple of every dtype's size and of a cache line."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def build_manifest(tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]], bucket_bytes: int) -> Manifest:
    """Lay tensors out in buckets of at most ``bucket_bytes``, in the order given, which is that of gathering.

    A tensor goes into the open bucket if it fits there, else it opens the next one; a tensor larger than
    ``bucket_bytes`` has a bucket of its own size to itself.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; it must be positive")
    slots: list[TensorSlot] = []
    buckets: list[int] = []
    for name, shape, dtype in tensors:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if not buckets or (buckets[-1] > 0 and buckets[-1] + _aligned(nbytes) > bucket_bytes):
            buckets.append(0)
        slots.append(
            TensorSlot(
                name=name,
                shape=tuple(shape),
                dtype=str(dtype).removeprefix("torch."),
                bucket=len(buckets) - 1,
                offset=buckets[-1],
                nbytes=nbytes,
            )
        )
        buckets[-1] += _aligned(nbytes)
    return Manifest(slots=tuple(slots), bucket_nbytes=tuple(buckets))


def slot_dtype(slot: TensorSlot) -> torch.dtype:
    """The slot's dtype as torch has it."""
    dtype = getattr(torch, slot.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UpdateFailed(f"tensor {slot.name!r} has dtype {slot.dtype!r} in the manifest, which torch does not know")
    return dtype


def view(slot: TensorSlot, bucket: torch.Tensor) -> torch.Tensor:
    """The slot's tensor as a view into ``bucket`` ([bucket bytes] uint8, any device)."""
    return bucket[slot.offset : slot.offset + slot.nbytes].view(slot_dtype(slot)).view(slot.shape)


def pack(
    manifest: Manifest, get: Callable[[str], torch.Tensor], device: torch.device | str = "cpu"
) -> Iterator[torch.Tensor]:
    """The manifest's buckets on ``device``, in order; ``get`` is called once for each slot, in order.

    All buckets share one buffer, so each is valid only until the next one is drawn. Values are cast to the slot's
    dtype. Raises `UpdateFailed` when a tensor has another shape than the manifest says.
    """
    buffer = torch.zeros(max(manifest.bucket_nbytes, default=0), dtype=torch.uint8, device=device)
    for index, slots in groupby(manifest.slots, key=lambda slot: slot.bucket):
        bucket = buffer[: manifest.bucket_nbytes[index]]
        for slot in slots:
            tensor = get(slot.name)
            if tuple(tensor.shape) != slot.shape:
                raise UpdateFailed(
                    f"tensor {slot.name!r} has shape {tuple(tensor.shape)}, but the manifest says {slot.shape}"
                )
            view(slot, bucket).copy_(tensor.detach())
            end = slot.offset + slot.nbytes
            bucket[end : _aligned(end)].zero_()
        yield bucket


def checksum(bucket: torch.Tensor, running: int = 0) -> int:
    """CRC-32 of the bucket's bytes, continuing from ``running``. A device tensor is copied to the host first."""
    return zlib.crc32(bucket.detach().cpu().contiguous().numpy().data, running)


class BackBuffer:
    """One complete copy of the weights in host memory, filled beside the engine and swapped in at a safe point.

        empty ──fill──▶ filling ──all buckets there, checked──▶ staged (version) ──clear or fill──▶ …
                           └──────────────any error───────────▶ empty

    Not thread-safe: whoever swaps waits for `fill` to return.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._buckets = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in manifest.bucket_nbytes]
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        """The version that is staged, complete and checked; None while there is none."""
        return self._version

    def fill(self, version: int, buckets: Iterable[torch.Tensor]) -> ReceiveReport:
        """Copy every bucket in, check number and sizes, and stage ``version``: all of it or nothing.

        ``recv_s`` is the time spent waiting for buckets and copying them, ``register_s`` the time spent on checks.
        Raises `UpdateFailed` that says which bucket is wrong; errors of ``buckets`` itself pass through. A generator is
        closed on every way out, so that its transport learns at once when nobody takes the rest.
        """
        self._version = None
        try:
            report = self._copy(version, buckets)
        finally:
            if isinstance(buckets, Generator):
                buckets.close()
        self._version = version
        return report

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``(name, tensor)`` of the staged version in the manifest's order: views into the buffer, on the CPU."""
        if self._version is None:
            raise UpdateFailed("no version is staged: fill the buffer before its weights are read")
        for slot in self.manifest.slots:
            yield slot.name, view(slot, self._buckets[slot.bucket])

    def clear(self) -> None:
        """Forget the staged version; the memory is kept for the next one."""
        self._version = None

    def _copy(self, version: int, buckets: Iterable[torch.Tensor]) -> ReceiveReport:
        started = time.perf_counter()
        register_s, crc, count = 0.0, 0, 0
        for bucket in buckets:
            self._check(version, count, bucket)
            self._buckets[count].copy_(bucket)
            checking = time.perf_counter()
            crc = checksum(self._buckets[count], crc)
            register_s += time.perf_counter() - checking
            count += 1
        if count != len(self._buckets):
            raise UpdateFailed(
                f"version {version} ended after {count} buckets; the manifest says {len(self._buckets)}. "
                "The old version is still served."
            )
        total = time.perf_counter() - started
        return ReceiveReport(
            recv_s=total - register_s, register_s=register_s, nbytes=self.manifest.nbytes, checksum=crc
        )

    def _check(self, version: int, index: int, bucket: torch.Tensor) -> None:
        if index >= len(self._buckets):
            raise UpdateFailed(
                f"version {version} has more buckets than the {len(self._buckets)} of the manifest. "
                "The old version is still served."
            )
        expected = self.manifest.bucket_nbytes[index]
        if bucket.dtype != torch.uint8 or bucket.ndim != 1 or bucket.numel() != expected:
            raise UpdateFailed(
                f"bucket {index} of version {version} is {tuple(bucket.shape)} {bucket.dtype}; "
                f"the manifest says ({expected},) torch.uint8. The old version is still served."
            )


class GatheredBuckets:
    """Passes buckets on to a sender, and afterwards knows their gathering time, size and checksum."""

    def __init__(self, buckets: Iterator[torch.Tensor]) -> None:
        self._buckets = buckets
        self.gather_s = 0.0
        self.nbytes = 0
        self.checksum = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        started = time.perf_counter()
        bucket = next(self._buckets)
        self.gather_s += time.perf_counter() - started
        self.nbytes += bucket.numel()
        self.checksum = checksum(bucket, self.checksum)
        return bucket
