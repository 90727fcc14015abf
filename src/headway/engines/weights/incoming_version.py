"""One version on its way in: the memory that it arrives in, and the checks of each sender's share.

    BackBuffer   beside what is served, in host memory, or on a device where it arrives on one: the old version serves
                 until another one is loaded from there
    InPlace      over what is served, while nothing decodes: torn weights serve nobody

"Checked": every bucket came once and in order, and the digest of each tensor is the sender's.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING
from weakref import finalize

import torch

from headway.data.interfaces.weights import ReceiveReport
from headway.devices import CPU, host_buffer, kind_of
from headway.engines.weights.buckets import Tensors, apply
from headway.engines.weights.digests import RunningDigests, digest
from headway.engines.weights.protocols import Header, HostCopy, IncomingWeights
from headway.engines.weights.receiver_state import ReceiverState
from headway.engines.weights.version_memory import NOTHING, DeviceBytes, SharedBytes
from headway.engines.weights.weight_layout import ALIGNMENT, Manifest, buckets, combined
from headway.errors import UpdateFailed

if TYPE_CHECKING:
    from headway.devices import Device

Receive = Callable[[IncomingWeights], None]
"""Function that lets one version come in, blocking."""
Pin = Callable[[torch.Tensor], Callable[[], None]]
"""Function that locks pages of memory, for copies to a device, and returns one that undoes it."""


class Intake(ABC):
    """The memory that versions arrive in, one at a time. It is the `IncomingWeights` of the version that arrives."""

    def __init__(self, manifest: Manifest, state: ReceiverState) -> None:
        self.manifest = manifest
        self.state = state
        self.shares: list[_Arrival] = []
        self.torn = False
        """True once a part of a version was written over the served weights, until all of it has come."""
        self._copy: HostCopy | None = None
        """The machine's copy that the version was mapped from; None where it was received, share by share."""

    def fill(self, version: int, receive: Receive) -> ReceiveReport:
        """Let ``receive`` put ``version`` in, all of it or nothing.

        ``recv_s`` is the time until everything was there, ``register_s`` the time spent on checks. Raises
        `UpdateFailed` that says what is wrong, also when another version arrives; errors of ``receive`` itself pass
        through.
        """
        self.state.begin(version)
        try:
            report = self.take_in(version, receive)
        except BaseException:
            self.state.fail(torn=self.torn)
            raise
        self.state.complete()
        return report

    def take_in(self, version: int, receive: Receive) -> ReceiveReport:
        """Do what `fill` does, for a caller that tells `state` of it."""
        self._copy, self.shares = None, [self._sink(share, version) for share in self.manifest.shares()]
        started = time.perf_counter()
        receive(self)
        arrived = time.perf_counter()
        if self._copy is not None:
            checksum = self._copy.checksum
        else:
            checksum = combined([digest for share in self.shares for digest in share.check()])
        nbytes = sum(share.nbytes for share in self.shares)
        return ReceiveReport(arrived - started, time.perf_counter() - arrived, nbytes, checksum)

    def found(self, copy: HostCopy) -> None:
        """Take the version from ``copy``."""
        raise UpdateFailed(f"version {copy.version} was to be read from a copy, which needs rollout.enable_dual_buffer")

    @property
    def version(self) -> int | None:
        """The version that is staged, complete and checked."""
        return self.state.staged

    def loaded(self) -> None:
        """Unstage the version, which was loaded. Raises `UpdateFailed` when another one was received over it."""
        self.state.loaded()

    @abstractmethod
    def _sink(self, share: Manifest, version: int) -> _Arrival:
        """Make the sink of a sender's share of ``version``."""


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
        self._holds: int | None = None
        """The version that lies in memory of its own, complete."""
        self._base: int | None = None
        """The same, before the version that arrives: what a delta may be applied to."""
        self._mapping = Lock()

    @property
    def version(self) -> int | None:
        """The version that is staged, complete and checked; None while there is none, also once it was written over."""
        whole = self._memory is not None and self._memory.stamp == self.state.staged
        return self.state.staged if whole else None

    @property
    def path(self) -> str:
        """The path at which other processes map the staged version. Raises `UpdateFailed` while there is none."""
        return str(self._staged_memory().path)

    def take_in(self, version: int, receive: Receive) -> ReceiveReport:
        self._base, self._holds = self._holds, None
        report = super().take_in(version, receive)
        assert self._memory is not None
        if self._copy is None:
            # Only now, with all bytes checked: whoever maps the memory trusts the stamp.
            self._memory.stamp = self._holds = version
        return replace(report, path=None if self._memory.path is None else str(self._memory.path))

    def found(self, copy: HostCopy) -> None:
        if self._memory is None or not self._memory.is_at(copy.path):
            self._map(SharedBytes.at(copy.path, self.manifest.nbytes), owns=False)
            assert self._memory is not None
        version = self.state.version
        if not copy.version == version == self._memory.stamp:
            raise UpdateFailed(
                f"version {version} was to be read from a copy on this machine, which holds "
                f"{'none' if self._memory.stamp == NOTHING else f'version {self._memory.stamp}'}"
            )
        self._copy = copy

    def _sink(self, share: Manifest, version: int) -> _Arrival:
        return _IntoBuffer(share, version, self._own, self._base)

    def windows(self, nbytes: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield ``(offset, bytes)`` of the staged version, at most ``nbytes`` at a time: views."""
        flat = self._staged_memory().flat
        for start, stop in buckets(self.manifest.nbytes, nbytes):
            yield start, flat[start:stop]

    def loaded(self) -> None:
        # The owner of mapped memory may have received the next version into it while this process read: only the stamp
        # behind the bytes tells, and it has to be read after them.
        if self._staged_memory().stamp != self.state.version:
            raise UpdateFailed(f"version {self.state.version} was written over by another one while it was loaded")
        super().loaded()

    def _own(self, device: Device) -> torch.Tensor:
        """Memory of this process's own, which holds no version from now on: [nbytes] uint8. Any thread may ask.

        ``device``: where the version arrives.
        """
        with self._mapping:
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

    def take_in(self, version: int, receive: Receive) -> ReceiveReport:
        self.torn = False
        report = super().take_in(version, receive)
        self.torn = False
        return report

    def _sink(self, share: Manifest, version: int) -> _Arrival:
        return _IntoTensors(share, version, self._write, self._memory)

    def _memory(self, nbytes: int, device: Device) -> torch.Tensor:
        """Memory for a bucket that arrives on ``device``."""
        if self._device is not None and kind_of(device) is kind_of(self._device):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return host_buffer(nbytes, pinned=self._pinned)

    def _write(self, offset: int, data: torch.Tensor) -> None:
        self.torn = True
        for start, stop in buckets(data.numel(), self._window):
            self._tensors.write(offset + start, data[start:stop])


class _Arrival(ABC):
    """The part of a `WeightSink` that both ways in share: the order of buckets, the end, and the checks."""

    def __init__(self, manifest: Manifest, version: int) -> None:
        self._manifest = manifest
        self._version = version
        self._due = 0
        """Index of the bucket that comes next."""
        self._offset = manifest.start
        """Offset at which the bytes of the next bucket begin."""
        self._sent: tuple[int, ...] | None = None
        """Digests that the sender computed; None until they arrive."""
        self.nbytes = 0
        """Number of bytes received so far."""

    def room(self, header: Header, device: Device = "cpu") -> torch.Tensor:
        self._expect(header)
        return self._room(header, device)

    def filled(self, header: Header) -> None:
        self._take(header)
        self._due += 1
        self._offset += header.nbytes
        self.nbytes += header.payload_nbytes

    def ended(self, digests: Sequence[int]) -> None:
        self._sent = tuple(digests)

    def check(self) -> tuple[int, ...]:
        """Compare with the sender's digests, and return them. Raises `UpdateFailed`, naming a tensor."""
        if self._sent is None or self._offset != self._manifest.stop:
            came = self._offset - self._manifest.start
            raise self._wrong(f"ended after {came} of {self._manifest.nbytes} bytes")
        digests = self._digests()
        if len(digests) != len(self._sent):
            raise self._wrong(f"came with {len(self._sent)} digests for {len(digests)} tensors")
        pairs = zip(self._manifest.slots, digests, self._sent, strict=True)
        wrong = [slot.name for slot, mine, theirs in pairs if mine != theirs]
        if wrong:
            more = f" (and of {len(wrong) - 1} more tensors)" if len(wrong) > 1 else ""
            raise self._wrong(f"the bytes of {wrong[0]!r}{more} are not those that the trainer sent")
        return digests

    @abstractmethod
    def _room(self, header: Header, device: Device) -> torch.Tensor:
        """Memory for a bucket that is due, and arrives on ``device``: [payload_nbytes] uint8."""

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
        rest = self._manifest.stop - header.offset
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

    def __init__(
        self, manifest: Manifest, version: int, memory: Callable[[Device], torch.Tensor], base: int | None
    ) -> None:
        """Receive into the bytes of all weights that ``memory`` gives when the first bucket comes."""
        super().__init__(manifest, version)
        self._memory = memory
        self._flat: torch.Tensor | None = None
        self._base = base
        self._delta = torch.empty(0, dtype=torch.uint8)

    def _room(self, header: Header, device: Device) -> torch.Tensor:
        if self._flat is None:
            self._flat = self._memory(device)
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
        start, stop = self._manifest.start, self._manifest.stop
        flat = self._memory(CPU.name) if self._flat is None else self._flat  # None where there are no bytes
        running.add(start, flat[start:stop])
        return running.finished()

    def _place(self, header: Header) -> torch.Tensor:
        assert self._flat is not None
        return self._flat[header.offset : header.offset + header.nbytes]


class _IntoTensors(_Arrival):
    """Receives a version straight into the served tensors, by way of one bucket."""

    def __init__(
        self,
        manifest: Manifest,
        version: int,
        write: Callable[[int, torch.Tensor], None],
        memory: Callable[[int, Device], torch.Tensor],
    ) -> None:
        super().__init__(manifest, version)
        self._write, self._memory = write, memory
        self._running = RunningDigests(manifest)
        self._bucket = torch.empty(0, dtype=torch.uint8)

    def _room(self, header: Header, device: Device) -> torch.Tensor:
        if header.base >= 0:
            raise self._wrong("came as a delta, which needs rollout.enable_dual_buffer on the replica")
        if self._bucket.numel() < header.nbytes:
            self._bucket = self._memory(header.nbytes, device)
        return self._bucket[: header.nbytes]

    def _take(self, header: Header) -> None:
        data = self._bucket[: header.nbytes]
        self._running.add(header.offset, data)
        self._write(header.offset, data)

    def _digests(self) -> tuple[int, ...]:
        return self._running.finished()
