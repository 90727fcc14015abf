"""One version on its way in: the memory that it arrives in, and the checks of each sender's share.

    BackBuffer   separate memory, on the host, or on a device if versions arrive there: the old version is served until
                 the new one is loaded from it
    InPlace      over the served weights, while nothing decodes: torn weights are never served

"Checked": every bucket came once and in order, and the digest of each tensor is the sender's.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING
from weakref import finalize

import torch

from headway.data.interfaces.weights import ReceiveReport
from headway.devices import CPU, kind_of
from headway.engines.host_copies import host_buffer
from headway.engines.weights.buckets import Tensors, apply
from headway.engines.weights.digests import RunningDigests, digest
from headway.engines.weights.protocols import Header, HostCopy, IncomingWeights
from headway.engines.weights.receiver_state import ReceiverState
from headway.engines.weights.weight_layout import ALIGNMENT, Manifest, buckets, combined
from headway.errors import UpdateFailed, boundary

if TYPE_CHECKING:
    from headway.devices import Device

Receive = Callable[[IncomingWeights], None]
"""Function that receives one version, blocking."""
Pin = Callable[[torch.Tensor], Callable[[], None]]
"""Function that locks pages of memory, for copies to a device, and returns one that undoes it."""


NOTHING = -1
"""Stamp of bytes that are no complete version."""
_STAMP_BYTES = 8


class SharedBytes:
    """Bytes [nbytes] of memory that processes of one machine share, mapped into this process, and their stamp.

        one process   SharedBytes.reserve(n)  ─path─▶   others   SharedBytes.at(path, n)      each maps the same bytes

    The memory has no name in any file system, so it disappears with the processes that map it, however they end. The
    stamp after the bytes is their version: it shows a reader whether the bytes were overwritten meanwhile.

    Example:
        >>> mine = SharedBytes.reserve(2)
        >>> theirs = SharedBytes.at(str(mine.path), 2)  # in another process
        >>> mine.flat[:] = 7
        >>> mine.stamp = 3
        >>> theirs.flat.tolist(), theirs.stamp
        ([7, 7], 3)
    """

    def __init__(self, file: FileIO, nbytes: int) -> None:
        """Map what was reserved for ``nbytes`` bytes. Raises `RuntimeError` when it cannot be mapped."""
        self._file = file  # stays open: others map the memory by this descriptor
        size = _size(nbytes)
        mapped = torch.from_file(str(self.path), shared=True, size=size, dtype=torch.uint8)
        self.flat = mapped[:nbytes]
        """The bytes: [nbytes] uint8, writable by all who map them."""
        self._stamp = mapped[size - _STAMP_BYTES :].view(torch.int64)

    @classmethod
    def reserve(cls, nbytes: int) -> SharedBytes:
        """Reserve new memory. Raises `UpdateFailed` when there is not enough."""
        short = f"no shared memory for {nbytes} bytes of weights (give this machine, or container, more memory)"
        with boundary(short, UpdateFailed):
            file = FileIO(os.memfd_create("headway-weights"), "r+")
            # Reserve all of it first: a shortage is an error here, but a crash (SIGBUS) at a later write.
            os.posix_fallocate(file.fileno(), 0, _size(nbytes))
            made = cls(file, nbytes)
        made.stamp = NOTHING  # new memory is zeros, which would be the stamp of version 0
        return made

    @classmethod
    def at(cls, path: str, nbytes: int) -> SharedBytes:
        """Map what another process of this user and machine has reserved, at its `path`. Raises `UpdateFailed`."""
        with boundary(
            f"the weights at {path} cannot be mapped (the process that has them may have ended)", UpdateFailed
        ):
            file = FileIO(path, "r+")
            if (size := os.fstat(file.fileno()).st_size) != _size(nbytes):  # torch would make any file long enough
                raise OSError(f"{size} bytes are there, expected {_size(nbytes)}")
            return cls(file, nbytes)

    @property
    def path(self) -> Path:
        """The path at which other processes of this user and machine find the memory while this one lives."""
        return Path(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")

    @property
    def stamp(self) -> int:
        """Version of the bytes; `NOTHING` if they are no complete version, or are being written."""
        return int(self._stamp.item())

    @stamp.setter
    def stamp(self, version: int) -> None:
        self._stamp.fill_(version)

    def is_at(self, path: str) -> bool:
        """Tell whether ``path`` leads to this very memory."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), Path(path).stat())
        except OSError:
            return False


class DeviceBytes:
    """Bytes [nbytes] of device memory, private to this process, with a stamp like `SharedBytes`."""

    path = None

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Take the memory. Raises `UpdateFailed` when there is not enough."""
        with boundary(f"no memory for {nbytes} bytes of new weights on {device}", UpdateFailed):
            self.flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.stamp = NOTHING


def memory_domain() -> str:
    """Name the processes that can map each other's `SharedBytes`: those of one user, kernel and container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    processes, network = (Path(f"/proc/self/ns/{kind}").readlink() for kind in ("pid", "net"))
    return f"{boot}/{processes}/{network}/{os.getuid()}"


def _size(nbytes: int) -> int:
    # The stamp is read as an int64, which has to lie at a multiple of 8.
    return nbytes + -nbytes % _STAMP_BYTES + _STAMP_BYTES


class Arrival:
    """One sender's share of a version on its way in (`WeightSink`): the order of buckets, the end, and the checks."""

    def __init__(self, manifest: Manifest, version: int, intake: Intake) -> None:
        self.manifest = manifest
        self._version, self._intake = version, intake
        self._due = 0
        """Index of the next bucket."""
        self._offset = manifest.start
        """Offset at which the bytes of the next bucket begin."""
        self._sent: tuple[int, ...] | None = None
        """Digests that the sender computed; None until they arrive."""
        self.bucket = torch.empty(0, dtype=torch.uint8)
        """Memory of the last payload: [payload_nbytes] uint8."""
        self.running = RunningDigests(manifest)
        self.nbytes = 0
        """Number of bytes received so far."""

    def room(self, header: Header, device: Device = "cpu") -> torch.Tensor:
        if (header.index, header.offset) != (self._due, self._offset):
            raise self.wrong(
                f"bucket {header.index} came with the bytes from {header.offset} on, but bucket {self._due}, "
                f"from {self._offset} on, is due: one was lost, sent twice or overtaken"
            )
        rest, payload = self.manifest.stop - header.offset, header.payload_nbytes
        # Only the last bucket may end inside an element.
        fits = 0 < header.nbytes <= rest and (header.nbytes == rest or header.nbytes % ALIGNMENT == 0)
        if not fits or not 0 < payload <= header.nbytes or (header.base < 0 and payload != header.nbytes):
            raise self.wrong(
                f"bucket {header.index} has {header.nbytes} bytes from {header.offset} on, of which {payload} came; "
                f"expected a multiple of {ALIGNMENT}, or all that are left of the {self.manifest.nbytes} bytes"
            )
        self.bucket = self._intake.room(self, header, device)
        return self.bucket

    def filled(self, header: Header) -> None:
        self._intake.take(self, header)
        self._due += 1
        self._offset += header.nbytes
        self.nbytes += header.payload_nbytes

    def ended(self, digests: Sequence[int]) -> None:
        self._sent = tuple(digests)

    def check(self) -> tuple[int, ...]:
        """Compare with the sender's digests, and return them. Raises `UpdateFailed`, naming a tensor."""
        if self._sent is None or self._offset != self.manifest.stop:
            came = self._offset - self.manifest.start
            raise self.wrong(f"ended after {came} of {self.manifest.nbytes} bytes")
        digests = self._intake.digests(self)
        if len(digests) != len(self._sent):
            raise self.wrong(f"came with {len(self._sent)} digests for {len(digests)} tensors")
        pairs = zip(self.manifest.slots, digests, self._sent, strict=True)
        wrong = [slot.name for slot, mine, theirs in pairs if mine != theirs]
        if wrong:
            more = f" (and of {len(wrong) - 1} more tensors)" if len(wrong) > 1 else ""
            raise self.wrong(f"the bytes of {wrong[0]!r}{more} are not those that the trainer sent")
        return digests

    def wrong(self, what: str) -> UpdateFailed:
        return UpdateFailed(f"version {self._version}: {what}")


class Intake(ABC):
    """The memory that versions arrive in, one at a time. It is the `IncomingWeights` of the version that arrives."""

    def __init__(self, manifest: Manifest, state: ReceiverState) -> None:
        self.manifest = manifest
        self.state = state
        self.shares: list[Arrival] = []
        """Shares of the version that arrives, as they are expected."""
        self.torn = False
        """True while the served weights are partly overwritten by a version that is not complete."""
        self._copy: HostCopy | None = None
        """The machine's copy from which the version was mapped; None if it was received share by share."""

    def fill(self, version: int, receive: Receive) -> ReceiveReport:
        """Receive ``version`` by calling ``receive``: all of it or nothing.

        ``recv_s`` is the time until everything was there, ``register_s`` the time spent on checks. Raises
        `UpdateFailed` that says what is wrong, also when another version arrives; errors of ``receive`` itself pass
        through.
        """
        self.state.begin(version)
        return self.finish(version, receive, nullcontext())

    def finish(self, version: int, receive: Receive, within: AbstractContextManager[None]) -> ReceiveReport:
        """Receive like `fill`, after `state` was told that ``version`` begins, ``within`` a context."""
        self.torn = False
        try:
            with within:
                report = self._take_in(version, receive)
        except BaseException:
            self.state.fail(torn=self.torn)
            raise
        # After the context, which waits for the device: a load would otherwise read bytes still being copied.
        self.state.complete()
        self.torn = False
        return report

    def _take_in(self, version: int, receive: Receive) -> ReceiveReport:
        self._copy, self.shares = None, []
        started = time.perf_counter()
        receive(self)
        arrived = time.perf_counter()
        if self._copy is not None:
            checksum = self._copy.checksum
        else:
            checksum = combined([digest for share in self.shares for digest in share.check()])
        nbytes = sum(share.nbytes for share in self.shares)
        return ReceiveReport(arrived - started, time.perf_counter() - arrived, nbytes, checksum)

    def expect(self, shares: Sequence[Manifest]) -> Sequence[Arrival]:
        """Expect ``shares``: there may be more or fewer senders than for the version before."""
        if (slots := tuple(slot for share in shares for slot in share.slots)) != self.manifest.slots:
            raise UpdateFailed(
                f"version {self.state.version}: the senders have {len(slots)} tensors; expected all "
                f"{len(self.manifest.slots)} of the layout, in its order"
            )
        self.shares = [Arrival(share, self.state.version, self) for share in shares]
        return self.shares

    def found(self, copy: HostCopy) -> None:
        """Take the version from ``copy``."""
        raise UpdateFailed(f"version {copy.version} was to be read from a copy, which needs rollout.enable_dual_buffer")

    @property
    def version(self) -> int | None:
        """The version that is staged, complete and checked."""
        return self.state.staged

    def loaded(self) -> None:
        """Note that the staged version was loaded. Raises `UpdateFailed` when another one was received meanwhile."""
        self.state.loaded()

    @abstractmethod
    def room(self, share: Arrival, header: Header, device: Device) -> torch.Tensor:
        """Memory for a bucket of ``share`` that arrives on ``device``: [payload_nbytes] uint8."""

    @abstractmethod
    def take(self, share: Arrival, header: Header) -> None:
        """Take in ``share.bucket``, now that the payload was written into it."""

    @abstractmethod
    def digests(self, share: Arrival) -> tuple[int, ...]:
        """Digests of each tensor's bytes of ``share``, all of which have come."""


class BackBuffer(Intake):
    """A complete copy of the weights, beside the engine, that is swapped in at a safe point.

    In host memory a machine needs one: the process that receives a version has it, and others map it (`HostCopy`). The
    owner keeps the last version after it was loaded, so that a delta can be applied to it. On a device it is this
    process's alone. The first bucket that arrives decides where it is.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        state: ReceiverState | None = None,
        pin: Pin | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Take memory when the first version comes: ``manifest.nbytes`` here, or nothing where another process has it.

        Args:
            manifest: the layout of the weights.
            state: that of the receiver; None: one of its own.
            pin: is called with host memory once it is mapped.
            device: takes versions that arrive on it; None: all are taken into host memory.
        """
        super().__init__(manifest, state or ReceiverState())
        self._pin, self._device = pin, device
        self._memory: SharedBytes | DeviceBytes | None = None
        """The memory of the version: this process's own, or another's that is mapped."""
        self._owns = False
        """True where the memory is this process's own."""
        self._unpin: Callable[[], None] | None = None
        self._base = NOTHING
        """Version that was complete in its own memory before another arrived, the base of deltas; `NOTHING` if none."""
        self._mapping = Lock()

    @property
    def version(self) -> int | None:
        """The version that is staged, complete and checked; None if there is none, or if it was overwritten."""
        whole = self._memory is not None and self._memory.stamp == self.state.staged
        return self.state.staged if whole else None

    @property
    def path(self) -> str:
        """The path at which other processes map the staged version. Raises `UpdateFailed` while there is none."""
        return str(self._staged_memory().path)

    def _take_in(self, version: int, receive: Receive) -> ReceiveReport:
        self._base = self._memory.stamp if self._memory is not None and self._owns else NOTHING
        report = super()._take_in(version, receive)
        assert self._memory is not None
        if self._copy is None:
            # Only now, with all bytes checked: processes that map the memory trust the stamp.
            self._memory.stamp = version
        return replace(report, path=None if self._memory.path is None else str(self._memory.path))

    def found(self, copy: HostCopy) -> None:
        memory, version = self._memory, self.state.version
        if not isinstance(memory, SharedBytes) or not memory.is_at(copy.path):
            memory = SharedBytes.at(copy.path, self.manifest.nbytes)
            self._map(memory, owns=False)
        if not copy.version == version == memory.stamp:
            held = "none" if memory.stamp == NOTHING else f"version {memory.stamp}"
            raise UpdateFailed(f"version {version} was to be read from a copy on this machine, which holds {held}")
        self._copy = copy

    def room(self, share: Arrival, header: Header, device: Device) -> torch.Tensor:
        place = self._own(device)[header.offset :][: header.nbytes]
        if header.base < 0:
            return place
        if header.base != self._base:
            held = "nothing complete" if self._base == NOTHING else f"version {self._base}"
            raise share.wrong(f"came as a delta to version {header.base}, but what is here is {held}; send it whole")
        return torch.empty(header.payload_nbytes, dtype=torch.uint8)

    def take(self, share: Arrival, header: Header) -> None:
        if header.base >= 0:
            # Before it is applied, which writes over its base: after a wrong delta no other could be applied.
            if digest(share.bucket) != header.checksum:
                raise share.wrong(f"the delta of bucket {header.index} is not what the trainer sent")
            apply(share.bucket, self._own(CPU.name)[header.offset :][: header.nbytes])

    def digests(self, share: Arrival) -> tuple[int, ...]:
        start, stop = share.manifest.start, share.manifest.stop
        share.running.add(start, self._own(CPU.name)[start:stop])
        return share.running.finished()

    def windows(self, nbytes: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield ``(offset, bytes)`` of the staged version, at most ``nbytes`` at a time: views."""
        flat = self._staged_memory().flat
        for start, stop in buckets(self.manifest.nbytes, nbytes):
            yield start, flat[start:stop]

    def loaded(self) -> None:
        # The owner of mapped memory may receive the next version into it while this process reads. Only the stamp shows
        # that, and it has to be read after the bytes.
        if self._staged_memory().stamp != self.state.version:
            raise UpdateFailed(f"version {self.state.version} was written over by another one while it was loaded")
        super().loaded()

    def _own(self, device: Device) -> torch.Tensor:
        """Return this process's own memory, which holds no version from now on: [nbytes] uint8. Thread-safe.

        ``device``: where the version arrives.
        """
        with self._mapping:  # senders' threads come side by side, and need one memory
            if self._memory is None or not self._owns:
                nbytes, there = self.manifest.nbytes, self._device
                if there is not None and kind_of(device) is kind_of(there) is not CPU:
                    self._map(DeviceBytes(nbytes, there), owns=True)
                else:
                    self._map(SharedBytes.reserve(nbytes), owns=True)
            assert self._memory is not None
            # Before the first byte is written: another process that maps this memory would take it for the old version.
            self._memory.stamp = NOTHING
            return self._memory.flat

    def _map(self, memory: SharedBytes | DeviceBytes, *, owns: bool) -> None:
        if self._unpin is not None:  # before the old memory is let go: pages cannot be unlocked once they are unmapped
            self._unpin()
        self._memory, self._owns = memory, owns
        pin = None if isinstance(memory, DeviceBytes) else self._pin
        self._unpin = None if pin is None else finalize(self, pin(memory.flat))

    def _staged_memory(self) -> SharedBytes | DeviceBytes:
        if self.state.staged is None or self._memory is None:
            raise UpdateFailed("no version is staged: fill the buffer before its weights are read")
        return self._memory


class InPlace(Intake):
    """Receives weights straight into the tensors that are served, while nothing decodes.

    Memory: one bucket of each sender's. After a failure the tensors may be `torn`, until a whole version has come.
    """

    def __init__(
        self,
        manifest: Manifest,
        tensors: Tensors,
        *,
        window: int,
        state: ReceiverState | None = None,
        pinned: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """Write into ``tensors``. ``window``: bytes at a time (``rollout.param_update_consume_bucket_size_mb``).

        ``device``: that of the tensors, where it takes buckets that arrive on it; None: all come to host memory first.
        """
        super().__init__(manifest, state or ReceiverState())
        self.state.in_place = True
        self._tensors = tensors
        self._window = window
        self._pinned, self._device = pinned, device

    def room(self, share: Arrival, header: Header, device: Device) -> torch.Tensor:
        if header.base >= 0:
            raise share.wrong("came as a delta, which needs rollout.enable_dual_buffer on the replica")
        if share.bucket.numel() >= header.nbytes:
            return share.bucket[: header.nbytes]  # used again: what was in it has been written
        if self._device is not None and kind_of(device) is kind_of(self._device):
            return torch.empty(header.nbytes, dtype=torch.uint8, device=self._device)
        return host_buffer(header.nbytes, pinned=self._pinned)

    def take(self, share: Arrival, header: Header) -> None:
        share.running.add(header.offset, share.bucket)
        self.torn = True  # before the first byte: writing may fail half-way
        for start, stop in buckets(header.nbytes, self._window):
            self._tensors.write(header.offset + start, share.bucket[start:stop])

    def digests(self, share: Arrival) -> tuple[int, ...]:
        return share.running.finished()
