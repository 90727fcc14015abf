"""One version on its way in: into a back buffer beside what is served, or straight into it while nothing decodes.

    BackBuffer   empty ──fill──▶ filling ──all there, checked──▶ staged (version) ──load──▶ …     the old version serves
                                   └──────────any error────────▶ empty                           on after any error
    InPlace      whole ──fill──▶ torn ─────all there, checked──▶ whole (version)                  torn weights serve
                                   └──────────any error────────▶ torn                            nobody

"Checked": every bucket came once and in order, and the digest of each tensor is the sender's.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import torch

from headway.errors import UpdateFailed
from headway.interfaces import ReceiveReport
from headway.weights.buckets import Tensors, view
from headway.weights.delta import apply
from headway.weights.digests import RunningDigests, combined, digest
from headway.weights.layout import ALIGNMENT, Manifest, buckets
from headway.weights.protocols import Header, WeightSink

Receive = Callable[[WeightSink], None]
"""Function that puts one version into a sink, blocking."""


class BackBuffer:
    """One complete copy of the weights in host memory, filled beside the engine and swapped in at a safe point.

    It keeps the last version after it was loaded, so that a delta can be applied to it. Whoever swaps waits for `fill`
    to return.
    """

    def __init__(self, manifest: Manifest, *, pinned: bool = False, memory: torch.Tensor | None = None) -> None:
        """Allocate ``manifest.nbytes`` of memory; a delta takes its own while it arrives.

        Args:
            manifest: the layout of the weights.
            pinned: page-locked, for copies to a GPU.
            memory: [nbytes] uint8, to keep them in. Default: its own.
        """
        self.manifest = manifest
        self._flat = torch.empty(manifest.nbytes, dtype=torch.uint8, pin_memory=pinned) if memory is None else memory
        self._holds: int | None = None
        self._staged = False
        self._turn = _Turn()

    @property
    def version(self) -> int | None:
        """The version that is staged, complete and checked; None while there is none."""
        return self._holds if self._staged else None

    def fill(self, version: int, receive: Receive) -> ReceiveReport:
        """Let ``receive`` put ``version`` in; stage it, all of it or nothing.

        ``recv_s`` is the time until everything was there, ``register_s`` the time spent on checks. Raises
        `UpdateFailed` that says what is wrong, also when another `fill` is running; errors of ``receive`` itself pass
        through.
        """
        with self._turn.of(version):
            base, self._holds, self._staged = self._holds, None, False
            report = _arrive(_IntoBuffer(self.manifest, version, self._flat, base), receive)
            self._holds, self._staged = version, True
            return report

    def windows(self, nbytes: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield ``(offset, bytes)`` of the staged version, at most ``nbytes`` at a time: views."""
        self._check_staged()
        for start, stop in buckets(self.manifest.nbytes, nbytes):
            yield start, self._flat[start:stop]

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(name, tensor)`` of the staged version in the layout's order: views into the buffer, on the CPU."""
        self._check_staged()
        for slot in self.manifest.slots:
            yield slot.name, view(slot, self._flat)

    def clear(self) -> None:
        """Unstage the version; its bytes stay, so that a delta can be applied to them."""
        self._staged = False

    def _check_staged(self) -> None:
        if not self._staged:
            raise UpdateFailed("no version is staged: fill the buffer before its weights are read")


class InPlace:
    """Receives weights straight into the tensors that are served, while nothing decodes.

    Memory: one bucket of the sender's. After a failure the tensors may be `torn`, until a whole version has come.
    """

    def __init__(self, manifest: Manifest, tensors: Tensors, *, window: int, pinned: bool = False) -> None:
        """Write into ``tensors``. ``window``: bytes at a time (``rollout.param_update_consume_bucket_size_mb``)."""
        self.manifest = manifest
        self.torn = False
        """True when part of a version was written, and the rest did not come or was not what was sent."""
        self._tensors = tensors
        self._window = window
        self._pinned = pinned
        self._turn = _Turn()

    def fill(self, version: int, receive: Receive) -> ReceiveReport:
        """Let ``receive`` write ``version`` into the tensors. Report and errors are those of `BackBuffer.fill`."""
        with self._turn.of(version):
            report = _arrive(_IntoTensors(self.manifest, version, self._write, pinned=self._pinned), receive)
            self.torn = False
            return report

    def _write(self, offset: int, data: torch.Tensor) -> None:
        self.torn = True
        for start, stop in buckets(data.numel(), self._window):
            self._tensors.write(offset + start, data[start:stop])


class _Turn:
    """Lock for one update at a time: a second one would mix with the first."""

    def __init__(self) -> None:
        self._taken = Lock()

    @contextmanager
    def of(self, version: int) -> Iterator[None]:
        if not self._taken.acquire(blocking=False):
            raise UpdateFailed(f"version {version} was to be received while another one still arrives; end that first")
        try:
            yield
        finally:
            self._taken.release()


def _arrive(sink: _Arrival, receive: Receive) -> ReceiveReport:
    started = time.perf_counter()
    receive(sink)
    arrived = time.perf_counter()
    checksum = sink.check()
    return ReceiveReport(arrived - started, time.perf_counter() - arrived, sink.nbytes, checksum)


class _Arrival(ABC):
    """The part of a `WeightSink` that both ways in share: the order of buckets, the end, and the checks."""

    def __init__(self, manifest: Manifest, version: int) -> None:
        self._manifest = manifest
        self._version = version
        self._due = 0
        """Index of the bucket that comes next."""
        self._offset = 0
        """Offset at which the bytes of the next bucket begin."""
        self._sent: tuple[int, ...] | None = None
        """Digests that the sender computed; None until they arrive."""
        self.nbytes = 0
        """Number of bytes received so far."""

    def room(self, header: Header) -> torch.Tensor:
        self._expect(header)
        return self._room(header)

    def filled(self, header: Header) -> None:
        self._take(header)
        self._due += 1
        self._offset += header.nbytes
        self.nbytes += header.payload_nbytes

    def ended(self, digests: Sequence[int]) -> None:
        self._sent = tuple(digests)

    def check(self) -> int:
        """Compare with the sender's digests; return all as one number. Raises `UpdateFailed`, naming a tensor."""
        if self._sent is None or self._offset != self._manifest.nbytes:
            raise self._wrong(f"ended after {self._offset} of {self._manifest.nbytes} bytes")
        digests = self._digests()
        if len(digests) != len(self._sent):
            raise self._wrong(f"came with {len(self._sent)} digests for {len(digests)} tensors")
        pairs = zip(self._manifest.slots, digests, self._sent, strict=True)
        wrong = [slot.name for slot, mine, theirs in pairs if mine != theirs]
        if wrong:
            more = f" (and of {len(wrong) - 1} more tensors)" if len(wrong) > 1 else ""
            raise self._wrong(f"the bytes of {wrong[0]!r}{more} are not those that the trainer sent")
        return combined(digests)

    @abstractmethod
    def _room(self, header: Header) -> torch.Tensor:
        """Memory for a bucket that is due: [payload_nbytes] uint8."""

    @abstractmethod
    def _take(self, header: Header) -> None:
        """Take in a bucket whose payload was written into its room."""

    @abstractmethod
    def _digests(self) -> tuple[int, ...]:
        """Digests of each tensor's bytes, as they came."""

    def _expect(self, header: Header) -> None:
        if (header.index, header.offset) != (self._due, self._offset):
            raise self._wrong(
                f"bucket {header.index} came with the bytes from {header.offset} on, but bucket {self._due}, "
                f"from {self._offset} on, is due: one was lost, sent twice or overtaken"
            )
        rest = self._manifest.nbytes - header.offset
        # Only the last bucket may end inside an element.
        if not 0 < header.nbytes <= rest or (header.nbytes < rest and header.nbytes % ALIGNMENT):
            raise self._wrong(
                f"bucket {header.index} has {header.nbytes} bytes from {header.offset} on; expected a multiple of "
                f"{ALIGNMENT}, or all that are left of the {self._manifest.nbytes} bytes of the weights"
            )
        whole = header.base < 0
        if not 0 < header.payload_nbytes <= header.nbytes or (whole and header.payload_nbytes != header.nbytes):
            raise self._wrong(f"{header.payload_nbytes} bytes came for the {header.nbytes} of bucket {header.index}")

    def _wrong(self, what: str) -> UpdateFailed:
        return UpdateFailed(f"version {self._version}: {what}")


class _IntoBuffer(_Arrival):
    """Receives a version into a back buffer: whole buckets in their place, deltas beside it."""

    def __init__(self, manifest: Manifest, version: int, flat: torch.Tensor, base: int | None) -> None:
        super().__init__(manifest, version)
        self._flat = flat
        self._base = base
        self._delta = torch.empty(0, dtype=torch.uint8)

    def _room(self, header: Header) -> torch.Tensor:
        if header.base < 0:
            return self._place(header)
        if header.base != self._base:
            held = "nothing complete" if self._base is None else f"version {self._base}"
            raise self._wrong(f"came as a delta to version {header.base}, but what is here is {held}; send it whole")
        self._delta = torch.empty(header.payload_nbytes, dtype=torch.uint8)
        return self._delta

    def _take(self, header: Header) -> None:
        if header.base < 0:
            return
        if digest(self._delta) != header.checksum:
            raise self._wrong(f"the delta of bucket {header.index} is not what the trainer sent")
        apply(self._delta, self._place(header))

    def _digests(self) -> tuple[int, ...]:
        running = RunningDigests(self._manifest)
        running.add(0, self._flat)
        return running.finished()

    def _place(self, header: Header) -> torch.Tensor:
        return self._flat[header.offset : header.offset + header.nbytes]


class _IntoTensors(_Arrival):
    """Receives a version straight into the served tensors, by way of one bucket."""

    def __init__(
        self, manifest: Manifest, version: int, write: Callable[[int, torch.Tensor], None], *, pinned: bool
    ) -> None:
        super().__init__(manifest, version)
        self._write = write
        self._pinned = pinned
        self._running = RunningDigests(manifest)
        self._bucket = torch.empty(0, dtype=torch.uint8)

    def _room(self, header: Header) -> torch.Tensor:
        if header.base >= 0:
            raise self._wrong("came as a delta, which needs rollout.enable_dual_buffer on the replica")
        if self._bucket.numel() < header.nbytes:
            self._bucket = torch.empty(header.nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        return self._bucket[: header.nbytes]

    def _take(self, header: Header) -> None:
        data = self._bucket[: header.nbytes]
        self._running.add(header.offset, data)
        self._write(header.offset, data)

    def _digests(self) -> tuple[int, ...]:
        return self._running.finished()
