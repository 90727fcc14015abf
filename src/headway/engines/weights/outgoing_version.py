"""One version on its way out: sent while it is gathered, or from a complete copy made before.

    windows of flat bytes, as the ranks gather them
        ├─▶ Stream            one bucket at a time: the trainer is taken until the last one is sent
        └─▶ Staged.gather     a copy of them in host memory ─▶ Staged.outgoing, any number of times, the trainer free

The copy is also what a delta is computed against, as the next version is gathered over it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from headway.data.interfaces.weights import GatherReport
from headway.engines.host_copies import host_buffer
from headway.engines.weights.buckets import encode
from headway.engines.weights.digests import RunningDigests, digest
from headway.engines.weights.protocols import Chunk, Header, OutgoingWeights
from headway.engines.weights.weight_layout import Manifest, buckets
from headway.errors import UpdateFailed
from headway.runtime.progress import advance

Window = tuple[int, torch.Tensor]
"""Offset in the flat bytes, and the bytes: [n] uint8, on any device, valid until the next window is drawn."""


class Stream:
    """A version sent while it is gathered. Extra memory: a window's size on the host if windows are on a device."""

    def __init__(self, manifest: Manifest, windows: Iterable[Window]) -> None:
        """Send ``windows`` in their order; drawing one raises `UpdateFailed` when they have gaps or end too early."""
        self._windows = windows
        self._digests = RunningDigests(manifest)
        self.gather_s = 0.0
        """Seconds that drawing the windows and taking their digests took."""
        self.nbytes = 0
        """Number of bytes drawn so far."""

    @property
    def digests(self) -> tuple[int, ...]:
        return self._digests.finished()

    def __iter__(self) -> Iterator[Chunk]:
        began = time.perf_counter()
        for index, (offset, data) in enumerate(self._windows):
            # Before it is sent: drawing the next window reuses this one's memory.
            self._digests.add(offset, data)
            self.nbytes += data.numel()
            self.gather_s += time.perf_counter() - began
            yield Chunk(Header(index, offset, data.numel(), data.numel()), data)
            began = time.perf_counter()  # behind the yield, which sends
            advance(f"{self.nbytes / 1e6:,.0f} MB sent")
        self._digests.finished()  # raises here, where a sender can still tell the receivers
        self.gather_s += time.perf_counter() - began


class Staged:
    """Copy of a rank's share of one version in host memory, of ``manifest.nbytes``, with a delta to it if wanted.

    A delta takes at most as much again, if nearly everything changes, and a few per cent if little changes.
    """

    def __init__(self, manifest: Manifest, bucket_bytes: int, *, with_delta: bool, pinned: bool = False) -> None:
        """Allocate the copy. ``pinned``: in page-locked memory, for copies from a GPU."""
        self._manifest = manifest
        self._copy = host_buffer(manifest.nbytes, pinned=pinned)
        self._whole = [
            Chunk(Header(index, manifest.start + start, stop - start, stop - start), self._copy[start:stop])
            for index, (start, stop) in enumerate(buckets(manifest.nbytes, bucket_bytes))
        ]
        self._with_delta = with_delta
        self._deltas: dict[int, Chunk] = {}
        """Delta against the version before, by bucket, where that is smaller than the bucket."""
        self._base: int | None = None
        """The version that the deltas were computed against."""
        self._digests: tuple[int, ...] = ()
        self._gathered: GatherReport | None = None
        self.version: int | None = None
        """The version in the copy; None before the first, and when gathering it failed half-way."""

    def gather(self, version: int, windows: Iterable[Window]) -> GatherReport:
        """Overwrite the copy with ``version``, whose ``windows`` are this object's own buckets, in order.

        After any error the copy holds no version.
        """
        if version == self.version and self._gathered is not None:
            deque(windows, maxlen=0)  # sent again: the copy and its deltas already exist
            return self._gathered
        started = time.perf_counter()
        self._base = self.version if self._with_delta else None
        # No version until it is complete: gathering may fail half-way, and half a version must not be sent.
        self.version, self._deltas = None, {}
        running, changed = RunningDigests(self._manifest), 0
        # Not strict: windows that end too early are told by `finished`, which says after how many bytes.
        for whole, (offset, data) in zip(self._whole, windows, strict=False):
            if self._base is not None:
                host = data.cpu()  # once: both read it
                changed += self._encode(whole, host, self._base)
                whole.payload.copy_(host)
            else:
                whole.payload.copy_(data)
            # Digest of the copy, not of the window: the copy is sent, and receivers have to notice a wrong copy.
            running.add(offset, whole.payload)
        self._digests = running.finished()
        self.version = version
        share = None if self._base is None else changed / max(1, -(-self._manifest.nbytes // 2))
        self._gathered = GatherReport(time.perf_counter() - started, self._manifest.nbytes, share)
        return self._gathered

    def outgoing(self, version: int, *, to: int | None) -> OutgoingWeights:
        """Return ``version`` as it is sent to receivers that all hold version ``to`` (None: nothing that is known).

        Raises `UpdateFailed` when the copy holds another version.
        """
        if self.version != version:
            raise UpdateFailed(f"version {version} was to be sent, but the trainer's copy holds version {self.version}")
        deltas = self._deltas if to is not None and to == self._base else {}
        return _CompleteCopy([deltas.get(whole.header.index, whole) for whole in self._whole], self._digests)

    def _encode(self, whole: Chunk, data: torch.Tensor, base: int) -> int:
        """Keep the delta from the copy's bucket to ``data``, if it is small; return the number of units that differ."""
        (payload, changed), header = encode(whole.payload, data), whole.header
        if payload is not None:
            sent = replace(header, payload_nbytes=payload.numel(), base=base, checksum=digest(payload))
            self._deltas[header.index] = Chunk(sent, payload)
        return changed


@dataclass(slots=True)
class _CompleteCopy:
    chunks: Sequence[Chunk]
    digests: tuple[int, ...]
    nbytes: int = 0

    def __iter__(self) -> Iterator[Chunk]:
        for chunk in self.chunks:
            self.nbytes += chunk.header.payload_nbytes
            yield chunk
            advance(f"{self.nbytes / 1e6:,.0f} MB sent")
