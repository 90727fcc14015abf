"""Buckets by broadcast: one process group spans the sender (rank 0) and all receivers (ranks 1 … n).

    each bucket     header [version, kind, index, …] ─▶ payload
    at the end      header END ─▶ digests ─▶ all meet            (the sender returns when every receiver has everything)
    on the sender's own error     header GIVE_UP                 (receivers fail at once; the group stays good)

When a collective fails, or a receiver gives up, both sides leave the group: a member that still waits learns of it by
the broken connection, and the next update needs a link of another generation: a group on another prefix of the store.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import torch

from headway.engines.weights.protocols import (
    Address,
    Chunk,
    EndContext,
    Header,
    OutgoingWeights,
    StoredVersion,
    TransportAddress,
    WeightSink,
    needs,
    place_of,
)
from headway.engines.weights.transports.process_group import StoreGroup
from headway.errors import UpdateFailed

HEADER = 8
"""Number of integers in a header: version, kind, then a bucket's `Header`, or the number of digests."""


@dataclass(frozen=True, slots=True)
class BroadcastLink:
    """The facts that every member of a broadcast group has to know to find the others."""

    address: Address
    sender: str
    receivers: tuple[str, ...]
    timeout_s: float
    generation: int = 0
    device: str = "cpu"
    """Device on which buckets lie at both ends: ``cpu`` (Gloo) or ``cuda`` (NCCL)."""

    @property
    def prefix(self) -> str:
        """Prefix of the store's keys: no other group of a run has the same."""
        return f"weights/{self.generation}/{'+'.join(self.receivers)}"


def make_link(meeting: TransportAddress) -> BroadcastLink:
    if meeting.address is None:
        raise needs("broadcast", "the address of the sender's store")
    return BroadcastLink(
        meeting.address, meeting.sender, meeting.receivers, meeting.timeout_s, meeting.generation, meeting.device
    )


def open_sender(link: BroadcastLink, here: EndContext) -> BroadcastSender:
    return BroadcastSender(link, here.host)


def open_receiver(link: BroadcastLink, name: str, here: EndContext) -> BroadcastReceiver:
    return BroadcastReceiver(link, place_of(name, link.receivers), here.host)


class _MessageKind(IntEnum):
    BUCKET = 0
    END = 1
    GIVE_UP = 2


class _Member:
    def __init__(self, link: BroadcastLink, rank: int, host: str | None) -> None:
        self._link = link
        self._group = StoreGroup(
            link.address,
            prefix=link.prefix,
            members=(link.sender, *link.receivers),
            rank=rank,
            timeout_s=link.timeout_s,
            device=link.device,
            host=host,
        )

    def close(self) -> None:
        """Leave the group; others that still wait in it fail at once."""
        self._group.close()


class BroadcastSender(_Member):
    """The trainer's end of a broadcast, rank 0 (`WeightSender`). Joining blocks until all receivers join."""

    def __init__(self, link: BroadcastLink, host: str | None = None) -> None:
        super().__init__(link, rank=0, host=host)

    def send(self, version: int, weights: OutgoingWeights) -> StoredVersion | None:
        count = 0
        source = iter(weights)
        while (chunk := self._draw(source, version, count)) is not None:
            payload = chunk.payload.to(self._link.device)
            with self._sending(version, count, f"bucket {count}"):
                self._header(version, _MessageKind.BUCKET, *_numbers(chunk.header))
                self._group.broadcast(payload)
            count += 1
        digests = weights.digests  # outside the context below: an error of the weights is not one of the group
        with self._sending(version, count, "the end"):
            self._header(version, _MessageKind.END, count, len(digests))
            if digests:
                signed = [value - 2**64 if value >= 2**63 else value for value in digests]
                self._group.broadcast(torch.tensor(signed, dtype=torch.int64).to(self._link.device))
            self._group.meet()
        return None

    def _draw(self, source: Iterator[Chunk], version: int, index: int) -> Chunk | None:
        try:
            return next(source, None)
        except BaseException:
            try:
                self._header(version, _MessageKind.GIVE_UP, index)
            except RuntimeError:
                self._group.close()
            raise

    @contextmanager
    def _sending(self, version: int, index: int, what: str) -> Iterator[None]:
        """Context of one send. A failure closes the group and raises `UpdateFailed`, naming the receivers behind."""
        try:
            yield
        except UpdateFailed:
            raise
        except RuntimeError as cause:
            # First: the store may be slow to say who is late, and receivers that are well wait in a collective.
            self._group.close()
            late = ", ".join(self._group.behind(f"{version}:{index}")) or "the receivers"
            raise UpdateFailed(
                f"version {version}: {what} could not be sent; {late} did not answer within "
                f"{self._link.timeout_s:g} s or went away: {cause}"
            ) from cause

    def _header(self, version: int, kind: _MessageKind, *values: int) -> None:
        numbers = [version, int(kind), *values]
        numbers += [0] * (HEADER - len(numbers))
        self._group.broadcast(torch.tensor(numbers, dtype=torch.int64, device=self._link.device))


class BroadcastReceiver(_Member):
    """A replica's end of a broadcast, rank ``index + 1`` (`WeightReceiver`). Joining blocks until all join."""

    def __init__(self, link: BroadcastLink, index: int, host: str | None = None) -> None:
        super().__init__(link, rank=index + 1, host=host)
        self._name = link.receivers[index]

    def receive(self, version: int, sink: WeightSink, parcel: StoredVersion | None = None) -> None:
        index = 0
        try:
            while isinstance(what := self._next(version, index), Header):
                room = sink.room(what, self._link.device)
                with self._waiting(version, index):
                    self._payload(room)
                    self._group.note(f"{version}:{index}")
                sink.filled(what)
                index += 1
            sink.ended(what)
        except _SenderGaveUp as told:
            raise UpdateFailed(str(told)) from None
        except BaseException:
            # A bucket that nobody takes would keep the others waiting: leaving tells them.
            self._group.close()
            raise

    def _next(self, version: int, index: int) -> Header | tuple[int, ...]:
        """Receive the header of the bucket that is due, or, when all members have everything, the digests."""
        with self._waiting(version, index):
            numbers = self._expect(version, index)
            if numbers[1] == _MessageKind.BUCKET:
                return _header_of(numbers)
            digests = self._digests(numbers[3])
            self._group.note(f"{version}:{index}")
            self._group.meet()
            return digests

    @contextmanager
    def _waiting(self, version: int, index: int) -> Iterator[None]:
        try:
            yield
        except UpdateFailed:
            raise
        except RuntimeError as cause:
            raise UpdateFailed(
                f"version {version}: {self._name} waited for bucket {index} from {self._link.sender}, which did not "
                f"answer within {self._link.timeout_s:g} s or went away: {cause}"
            ) from cause

    def _payload(self, room: torch.Tensor) -> None:
        if room.device.type == self._link.device:
            self._group.broadcast(room)
        else:
            arrived = torch.empty_like(room, device=self._link.device)
            self._group.broadcast(arrived)
            room.copy_(arrived)

    def _digests(self, count: int) -> tuple[int, ...]:
        digests = torch.empty(count, dtype=torch.int64, device=self._link.device)
        if count:
            self._group.broadcast(digests)
        return tuple(value % 2**64 for value in digests.tolist())

    def _expect(self, version: int, index: int) -> list[int]:
        """Receive the next header and return its numbers: a bucket's, or the end's."""
        header = torch.empty(HEADER, dtype=torch.int64, device=self._link.device)
        self._group.broadcast(header)
        numbers: list[int] = header.tolist()
        sent_version, kind, sent_index = numbers[:3]
        if kind == _MessageKind.GIVE_UP:
            raise _SenderGaveUp(f"version {sent_version}: {self._link.sender} gave up at bucket {sent_index}")
        if (sent_version, sent_index) != (version, index):
            raise UpdateFailed(
                f"{self._name} asked for bucket {index} of version {version}, "
                f"{self._link.sender} sends bucket {sent_index} of version {sent_version}"
            )
        return numbers


class _SenderGaveUp(UpdateFailed):
    """The sender said that it gives up; the group is in order."""


def _numbers(header: Header) -> tuple[int, ...]:
    checksum = header.checksum - 2**64 if header.checksum >= 2**63 else header.checksum
    return header.index, header.offset, header.nbytes, header.payload_nbytes, header.base, checksum


def _header_of(numbers: list[int]) -> Header:
    index, offset, nbytes, payload_nbytes, base, checksum = numbers[2:HEADER]
    return Header(index, offset, nbytes, payload_nbytes, base, checksum % 2**64)
