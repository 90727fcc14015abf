"""The pieces that travel between the trainer and those who hold a copy of the policy, and the two ends of a transport.

    Outgoing ─▶ WeightSender ══ header, payload; header, payload; …; digests ══▶ WeightReceiver ─▶ WeightSink

*Streamed* transports (``broadcast``, ``local``): both ends run at the same time. *Stored* ones (``object_store``,
``shared_memory``, ``disk``): the sender stores everything and returns a `StoredVersion`, with which any receiver can
read it, until the sender sends the next version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


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
    """Checksum of a delta's payload (xxh3, 64 bits); 0 for a whole bucket, which the digests cover."""


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
        """The xxh3 (64 bits) of each tensor's bytes, in the layout's order; known when all chunks were drawn."""


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """The facts that receivers of a stored version have to know."""

    version: int
    headers: tuple[Header, ...]
    contents: tuple[Any, ...]
    """The place of each payload, as its transport names it: plain data, or handles."""
    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A version that lies in a process of this machine, complete and checked: nothing of it has to be received."""

    version: int
    path: str
    """Path of its memory, a `SharedBytes`."""
    checksum: int
    """Checksum of all weights, as its owner's report has it."""


class WeightSink(Protocol):
    """The end at which a receiver puts what arrives. Raises `UpdateFailed` that says which bucket is wrong, and how."""

    def room(self, header: Header) -> torch.Tensor:
        """Return the memory into which the payload has to be written: [payload_nbytes] uint8."""

    def filled(self, header: Header) -> None:
        """Take in the payload, which is now written where `room` said."""

    def ended(self, digests: Sequence[int]) -> None:
        """End the version, given the ``digests`` of all tensors."""


class IncomingWeights(Protocol):
    """A version that is being received: share by share, or found on this machine."""

    @property
    def shares(self) -> Sequence[WeightSink]:
        """Sinks for each sender's share, in order; each may be filled by another thread."""

    def found(self, copy: HostCopy) -> None:
        """Take the version from ``copy``, instead of all shares. Raises `UpdateFailed` when it is not there."""


class WeightSender(Protocol):
    """A trainer rank's end of a transport. Blocking; runs on a worker's own thread."""

    def send(self, version: int, weights: OutgoingWeights) -> StoredVersion | None:
        """Send ``weights`` until every receiver has everything, or return a parcel once they lie where receivers look.

        Raises `UpdateFailed` within the transport's timeout when a receiver does not answer, and when what the
        transport needs (space, a store) is not there. Errors of ``weights`` itself pass through.
        """

    def close(self) -> None: ...


class WeightReceiver(Protocol):
    """A receiver's end of a transport. Blocking; runs on a worker's own thread, never on the decoding one."""

    def receive(self, version: int, sink: WeightSink, parcel: StoredVersion | None) -> None:
        """Put all buckets of ``version`` into ``sink``, in order. ``parcel`` is the sender's, for a stored transport.

        Raises `UpdateFailed` within the transport's timeout when the sender does not answer, and when what arrives is
        not ``version``. Errors of ``sink`` pass through, and the other ends learn at once that this one gave up.
        """

    def close(self) -> None: ...
