"""Checksums of weights: xxh3 with 64 bits, per tensor, so that a mismatch names the tensor.

It runs at memory speed, an order of magnitude faster than CRC-32, so it can be on for every update.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack
from typing import TYPE_CHECKING

import xxhash

from headway.engines.weights.weight_layout import Manifest, slots_in
from headway.errors import UpdateFailed

if TYPE_CHECKING:
    import torch


def digest(data: torch.Tensor) -> int:
    """The xxh3 of ``data`` [n] uint8. What lies on a device is copied to the host first."""
    return xxhash.xxh3_64_intdigest(_bytes(data))


def combined(digests: Sequence[int]) -> int:
    """Combine the digests of all tensors, in order, into one number."""
    return xxhash.xxh3_64_intdigest(pack(f"<{len(digests)}Q", *digests))


class RunningDigests:
    """Computes the digest of each tensor of a layout as its bytes pass by, in order."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._at = manifest.start
        self._done: list[int] = []
        self._open = xxhash.xxh3_64()

    def add(self, offset: int, data: torch.Tensor) -> None:
        """Take in ``data`` [n] uint8, the flat bytes from ``offset`` on. Raises `UpdateFailed` if out of order."""
        if offset != self._at:
            raise UpdateFailed(f"bytes of the weights from {offset} on came where those from {self._at} on were due")
        view = _bytes(data)
        self._at += len(view)
        for slot, first, last in slots_in(self._manifest.slots, offset, self._at):
            while self._manifest.slots[len(self._done)] is not slot:  # tensors without elements
                self._close()
            at = slot.offset + first - offset
            self._open.update(view[at : at + last - first])
            if last == slot.nbytes:
                self._close()

    def finished(self) -> tuple[int, ...]:
        """Return all tensors' digests; an empty tensor has that of no bytes. Raises `UpdateFailed` before the end."""
        if self._at != self._manifest.stop:
            came = self._at - self._manifest.start
            raise UpdateFailed(f"the weights ended after {came} of {self._manifest.nbytes} bytes")
        while len(self._done) < len(self._manifest.slots):
            self._close()
        return tuple(self._done)

    def _close(self) -> None:
        self._done.append(self._open.intdigest())
        self._open.reset()


def _bytes(data: torch.Tensor) -> memoryview:
    return data.cpu().numpy().data
