"""Transports of weights: the two ends of one, how they are opened, and the data that travels between them.

    OutgoingWeights ─▶ WeightSender ══ header, payload; header, payload; …; digests ══▶ WeightReceiver ─▶ WeightSink

*Streamed* transports (``broadcast``, ``local``): both ends run at the same time. *Stored* ones (``object_store``,
``shared_memory``, ``disk``): the sender stores everything and returns a `StoredVersion`, with which any receiver can
read it, until the sender sends the next version.

The ends find each other by a link:

    driver: Link(transport, …) ─▶ trainer: open_sender(link)      receivers: open_receiver(link, name)

A transport is a module of `transports` that has `open_sender` and `open_receiver`, functions or classes, and a line in
`headway.config.transport_facts`. It is imported when it is asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from headway.config.schema import Config
from headway.config.transport_facts import WITHIN_PROCESS, between_devices
from headway.devices import kind_of
from headway.engines.weights.weight_layout import Manifest
from headway.errors import UpdateFailed

if TYPE_CHECKING:
    import torch

    from headway.devices import Device


@dataclass(frozen=True, slots=True)
class Header:
    """Description of one bucket on its way."""

    index: int
    """Index of the bucket, from 0 without gaps."""
    offset: int
    """Offset of the bucket in the flat bytes of the weights."""
    nbytes: int
    """Size of the bucket in bytes."""
    payload_nbytes: int
    """Number of bytes that travel: ``nbytes``, or less for a delta."""
    base: int = -1
    """The version that a delta was computed against; -1 when the payload is the bucket itself."""
    checksum: int = 0
    """Digest of a delta's payload; 0 for a whole bucket, which the digests cover."""


@dataclass(frozen=True, slots=True)
class Chunk:
    header: Header
    payload: torch.Tensor
    """The bytes that travel: [payload_nbytes] uint8, on any device."""


class OutgoingWeights(Protocol):
    """A share of one version to be sent, bucket by bucket. To be iterated once."""

    @property
    def nbytes(self) -> int:
        """Number of bytes that travel, of the chunks drawn so far."""

    def __iter__(self) -> Iterator[Chunk]:
        """Yield the version's chunks in order; each one's payload is valid until the next one is drawn."""

    @property
    def digests(self) -> tuple[int, ...]:
        """The digest (64 bits) of each tensor's bytes, in the layout's order; known when all chunks were drawn."""


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """Data that receivers of a stored version need."""

    version: int
    headers: tuple[Header, ...]
    contents: tuple[Any, ...]
    """The place of each payload, as its transport names it: plain data, or handles."""
    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A complete and checked version in another process of this machine: nothing has to be received."""

    version: int
    path: str
    """Path of its memory, a `SharedBytes`."""
    checksum: int
    """Checksum of all weights, as its owner's report has it."""


class WeightSink(Protocol):
    """Target into which a receiver puts arriving buckets. Raises `UpdateFailed` with the wrong bucket and reason."""

    def room(self, header: Header, device: Device = "cpu") -> torch.Tensor:
        """Return the memory into which the payload has to be written: [payload_nbytes] uint8.

        ``device``: where the payload arrives. The memory is there, too, or on the host.
        """

    def filled(self, header: Header) -> None:
        """Take in the payload, which is now written where `room` said."""

    def ended(self, digests: Sequence[int]) -> None:
        """End the version, given the ``digests`` of all tensors."""


class IncomingWeights(Protocol):
    """A version that is being received: share by share, or found on this machine."""

    @property
    def manifest(self) -> Manifest:
        """Layout of the whole."""

    def expect(self, shares: Sequence[Manifest]) -> Sequence[WeightSink]:
        """Expect each sender's share, which together are the whole. Returns a sink for each, in order; each may be
        filled by another thread.
        """

    def found(self, copy: HostCopy) -> None:
        """Take the version from ``copy``, instead of all shares. Raises `UpdateFailed` when it is not there."""


class WeightSender(Protocol):
    """A trainer rank's end of a transport. Blocking; runs on a worker's own thread."""

    def send(self, version: int, weights: OutgoingWeights) -> StoredVersion | None:
        """Send ``weights``. Returns when every receiver has everything, or when all is stored (`StoredVersion`).

        Raises `UpdateFailed` within the transport's timeout when a receiver does not answer, and when what the
        transport needs (space, a store) is not there. Errors of ``weights`` itself pass through.
        """

    def close(self) -> None: ...


class WeightReceiver(Protocol):
    """A receiver's end of a transport. Blocking; runs on a worker's own thread, never on the decoding one."""

    def receive(self, version: int, sink: WeightSink, stored: StoredVersion | None) -> None:
        """Put all buckets of ``version`` into ``sink``, in order. ``stored``: what a stored sender has returned.

        Raises `UpdateFailed` within the transport's timeout when the sender does not answer, and when what arrives is
        not ``version``. Errors of ``sink`` pass through, and the other ends learn at once that this one gave up.
        """

    def close(self) -> None: ...


class StoredSender(ABC):
    """The trainer's end of a stored transport (`WeightSender`): puts each payload where receivers look for it."""

    def __init__(self, link: Link, here: EndContext) -> None:
        self._link, self._here = link, here

    def send(self, version: int, weights: OutgoingWeights) -> StoredVersion:
        """Store ``weights``, and return what receivers have to know."""
        headers: list[Header] = []
        contents: list[Any] = []
        for chunk in weights:
            contents.append(self._put(version, chunk))  # at once: the next chunk may use the payload's memory
            headers.append(chunk.header)
        # The digests last: they are known when all chunks were drawn.
        return StoredVersion(version, tuple(headers), tuple(contents), weights.digests)

    def close(self) -> None:  # noqa: B027  # most leave what was stored where it is
        """Remove the data that only this sender keeps."""

    @abstractmethod
    def _put(self, version: int, chunk: Chunk) -> Any:
        """Store the payload of ``chunk``, whose memory is used again, and return its place."""


class StoredReceiver(ABC):
    """A receiver's end of a stored transport (`WeightReceiver`)."""

    def __init__(self, link: Link, name: str, here: EndContext) -> None:
        self._link, self._name, self._here = link, name, here

    def receive(self, version: int, sink: WeightSink, stored: StoredVersion | None) -> None:
        """Put the payloads of ``stored`` into ``sink``. Raises `UpdateFailed` where it is of another version."""
        if stored is None or stored.version != version:
            given = "nothing" if stored is None else f"version {stored.version}"
            raise UpdateFailed(f"{self._name} was to receive version {version}, but {given} was sent")
        for header, content in zip(stored.headers, stored.contents, strict=True):
            self._get(version, header, content, sink.room(header))
            sink.filled(header)
        sink.ended(stored.digests)

    def close(self) -> None:  # noqa: B027  # most keep nothing open
        """Close everything that was opened."""

    @abstractmethod
    def _get(self, version: int, header: Header, content: Any, room: torch.Tensor) -> None:
        """Copy the payload at ``content`` into ``room``."""


Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Link:
    """Description of a transport, from which both ends open it. Each transport uses the fields that it needs.

    A link of ``local`` cannot be sent to other processes.
    """

    transport: str
    manifest: Manifest
    receivers: tuple[str, ...]
    timeout_s: float
    """Seconds for any wait of one end for another."""
    sender: str = "trainer"
    address: Address | None = None
    """The address of a TCP store, which the sender's process hosts."""
    generation: int = 0
    """Number of this rendezvous in its run. After a failure, or for other members, the ends use a new number."""
    device: str = "cpu"
    """Device on which buckets lie at both ends, ``cpu`` or ``cuda``, for a transport that can carry either."""
    directory: Path | None = None
    """A directory for files that the receivers can open, too."""
    exchange: Any = field(init=False, default=None)
    """The `LocalExchange` of transport ``local``, which is made with the link since both ends use the same one."""

    def __post_init__(self) -> None:
        if self.transport == WITHIN_PROCESS:
            exchange = _module(self.transport).LocalExchange(self.receivers, self.timeout_s)
            object.__setattr__(self, "exchange", exchange)


@dataclass(frozen=True, slots=True)
class EndContext:
    """Resources of one end of a transport on its machine."""

    host: str | None = None
    """Address at which the other ends reach this machine."""
    put: Callable[[Any], Any] = lambda value: value
    """Function that keeps an object where other processes can get it, and returns a handle of it."""
    fetch: Callable[[Sequence[Any]], list[Any]] = list
    """Function that gets the objects behind handles. Raises an error of any type when one does not come in time."""


def open_sender(link: Link, here: EndContext) -> WeightSender:
    """Open the trainer's end of ``link``. With ``broadcast`` this blocks until all receivers have opened theirs."""
    sender: WeightSender = _module(link.transport).open_sender(link, here)
    return sender


def open_receiver(link: Link, name: str, here: EndContext) -> WeightReceiver:
    """Open the end of the receiver called ``name``. With ``broadcast`` this blocks until all ends are open.

    A stored version is for any receiver, also one that the link does not name. Other transports raise `UpdateFailed`
    for one that the link is not for.
    """
    receiver: WeightReceiver = _module(link.transport).open_receiver(link, name, here)
    return receiver


def place_of(name: str, link: Link) -> int:
    """Return the place of ``name`` among a link's receivers. Raises `UpdateFailed` for one that the link is not for."""
    if name not in link.receivers:
        known = ", ".join(link.receivers)
        raise UpdateFailed(f"{name} is not among those that this link reaches: {known}; it has to meet anew")
    return link.receivers.index(name)


def through_devices(config: Config, device: str) -> bool:
    """Tell whether buckets go from device to device if training and generation have ``device`` s of their own."""
    update, kind = config.param_update, kind_of(device)
    return kind.collectives != "gloo" and between_devices(
        update.transport, update.schedule, update.encoding, config.cluster.backend
    )


def _module(transport: str) -> ModuleType:
    return import_module(f"headway.engines.weights.transports.{transport}")
