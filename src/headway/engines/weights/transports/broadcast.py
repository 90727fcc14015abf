"""Buckets by broadcast: one process group spans the sender (rank 0) and all receivers (ranks 1 … n).

    each bucket     header [version, kind, index, …] ─▶ payload
    at the end      header END ─▶ digests ─▶ all meet            (the sender returns when every receiver has everything)
    on the sender's own error     header GIVE_UP                 (receivers fail at once; the group stays good)

When a collective fails, or a receiver gives up, both sides leave the group. A member that still waits notices the
broken connection. The next update needs a link of another generation, whose group uses another prefix of the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, replace
from enum import IntEnum

import torch

from headway.engines.weights.protocols import (
    Chunk,
    EndContext,
    Header,
    Link,
    OutgoingWeights,
    StoredVersion,
    WeightSink,
    place_of,
)
from headway.engines.weights.transports.process_group import StoreGroup
from headway.errors import UpdateFailed

HEADER = 8
"""Number of integers in a header: version, kind, then a bucket's `Header`, or the number of digests."""


class _MessageKind(IntEnum):
    BUCKET = 0
    END = 1
    GIVE_UP = 2


class _Member:
    def __init__(self, link: Link, rank: int, here: EndContext) -> None:
        self._link, self._device = link, link.device
        self._group = StoreGroup(link, rank, here.host)

    def close(self) -> None:
        """Leave the group; others that still wait in it fail at once."""
        self._group.close()

    @contextmanager
    def _together(self, what: Callable[[], str]) -> Iterator[None]:
        """Context of collectives. A failure closes the group and raises `UpdateFailed` that says ``what`` failed."""
        try:
            yield
        except UpdateFailed:
            raise
        except RuntimeError as cause:
            # First: the store may be slow to say who is late, and members that are well wait in a collective.
            self._group.close()
            limit = f"within {self._link.timeout_s:g} s or went away"
            raise UpdateFailed(f"{what()} did not answer {limit}: {cause}") from cause


class BroadcastSender(_Member):
    """The trainer's end of a broadcast, rank 0 (`WeightSender`). Joining blocks until all receivers join."""

    def __init__(self, link: Link, here: EndContext) -> None:
        super().__init__(link, 0, here)

    def send(self, version: int, weights: OutgoingWeights) -> StoredVersion | None:
        count = 0
        source = iter(weights)
        while (chunk := self._draw(source, version, count)) is not None:
            payload = chunk.payload.to(self._device)
            with self._sending(version, count, f"bucket {count}"):
                self._header(version, _MessageKind.BUCKET, *astuple(chunk.header))
                self._group.broadcast(payload)
            count += 1
        digests = weights.digests  # outside the context below: an error of the weights is not one of the group
        with self._sending(version, count, "the end"):
            self._header(version, _MessageKind.END, count, len(digests))
            if digests:
                self._group.broadcast(_signed(digests).to(self._device))
            self._group.meet()
        return None

    def _draw(self, source: Iterator[Chunk], version: int, index: int) -> Chunk | None:
        try:
            return next(source, None)
        except BaseException:
            try:
                self._header(version, _MessageKind.GIVE_UP, index)
            except RuntimeError:  # then receivers learn it by the broken connection
                self._group.close()
            raise

    def _sending(self, version: int, index: int, what: str) -> AbstractContextManager[None]:
        def failed() -> str:
            late = ", ".join(self._group.behind(f"{version}:{index}")) or "the receivers"
            return f"version {version}: {what} could not be sent; {late}"

        return self._together(failed)

    def _header(self, version: int, kind: _MessageKind, *values: int) -> None:
        numbers = [version, int(kind), *values]
        # Always of one length, which receivers have to know before it comes.
        self._group.broadcast(_signed(numbers + [0] * (HEADER - len(numbers))).to(self._device))


class BroadcastReceiver(_Member):
    """A replica's end of a broadcast, a rank behind the sender (`WeightReceiver`). Joining blocks until all join."""

    def __init__(self, link: Link, name: str, here: EndContext) -> None:
        super().__init__(link, 1 + place_of(name, link), here)
        self._name = name

    def receive(self, version: int, sink: WeightSink, stored: StoredVersion | None = None) -> None:
        index = 0
        try:
            while isinstance(what := self._next(version, index), Header):
                room = sink.room(what, self._device)
                with self._waiting(version, index):
                    # The note comes behind the payload: members without it are those that `behind` calls late.
                    self._payload(room)
                    self._group.note(f"{version}:{index}")
                sink.filled(what)
                index += 1
            sink.ended(what)
        except _SenderGaveUp as told:
            # All members have read that header: they are in step, and the group serves the next update.
            raise UpdateFailed(str(told)) from None
        except BaseException:
            # A bucket that nobody takes would keep the others waiting: leaving tells them.
            self._group.close()
            raise

    def _next(self, version: int, index: int) -> Header | tuple[int, ...]:
        """Receive the header of the bucket that is due, or, when all members have everything, the digests."""
        with self._waiting(version, index):
            sent_version, kind, *values = self._numbers(HEADER)
            if kind == _MessageKind.GIVE_UP:
                raise _SenderGaveUp(f"version {sent_version}: {self._link.sender} gave up at bucket {values[0]}")
            if (sent_version, values[0]) != (version, index):
                raise UpdateFailed(
                    f"{self._name} asked for bucket {index} of version {version}, "
                    f"{self._link.sender} sends bucket {values[0]} of version {sent_version}"
                )
            if kind == _MessageKind.BUCKET:
                header = Header(*values)
                # Collectives carry int64: numbers from 2⁶³ on came as negative ones.
                return replace(header, checksum=header.checksum % 2**64)
            digests = tuple(value % 2**64 for value in self._numbers(values[1]))
            self._group.note(f"{version}:{index}")
            self._group.meet()
            return digests

    def _waiting(self, version: int, index: int) -> AbstractContextManager[None]:
        what = f"version {version}: {self._name} waited for bucket {index} from {self._link.sender}, which"
        return self._together(lambda: what)

    def _payload(self, room: torch.Tensor) -> None:
        if room.device.type == self._device:
            self._group.broadcast(room)
        else:
            # The group's backend takes tensors of its own kind of device alone.
            arrived = torch.empty_like(room, device=self._device)
            self._group.broadcast(arrived)
            room.copy_(arrived)

    def _numbers(self, count: int) -> list[int]:
        numbers = torch.empty(count, dtype=torch.int64, device=self._device)
        if count:  # the sender broadcasts no empty tensor, either
            self._group.broadcast(numbers)
        received: list[int] = numbers.tolist()
        return received


open_sender, open_receiver = BroadcastSender, BroadcastReceiver


class _SenderGaveUp(UpdateFailed):
    """The sender said that it gives up; the group is in order."""


def _signed(numbers: Sequence[int]) -> torch.Tensor:
    """Return signed or unsigned 64-bit numbers as int64."""
    # torch refuses integers from 2⁶³ on for int64.
    return torch.tensor([(number + 2**63) % 2**64 - 2**63 for number in numbers])
