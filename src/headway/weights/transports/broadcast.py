"""Buckets by broadcast: one process group spans the sender (rank 0) and all receivers (ranks 1 … n).

    each bucket     header [version, kind, index, nbytes] ─▶ nbytes bytes
    at the end      header END ─▶ all meet                       (the sender returns when every receiver has everything)
    on the sender's own error     header GIVE_UP                 (receivers fail at once; the group stays good)

When a collective fails, or a receiver gives up, both sides leave the group: whoever still waits is told by the broken
connection, and the next update needs `connect` with another generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import IntEnum

import torch

from headway.errors import UpdateFailed
from headway.weights.transports.group import StoreGroup
from headway.weights.transports.links import BroadcastLink


class _Kind(IntEnum):
    BUCKET = 0
    END = 1
    GIVE_UP = 2


class _Member:
    def __init__(self, link: BroadcastLink, rank: int, host: str | None) -> None:
        self._link = link
        self._rank = rank
        self._host = host
        self._group = self._connect(generation=0)

    def reconnect(self, generation: int) -> None:
        """Make a new group, after a failure; collective over all members. ``generation`` counts up from 0."""
        self.close()
        self._group = self._connect(generation)

    def close(self) -> None:
        """Leave the group; others that still wait in it fail at once."""
        self._group.close()

    def _connect(self, generation: int) -> StoreGroup:
        return StoreGroup(
            self._link.address,
            prefix=f"weights/{generation}",
            members=(self._link.sender, *self._link.receivers),
            rank=self._rank,
            timeout_s=self._link.timeout_s,
            device=self._link.device,
            host=self._host,
        )


class BroadcastSender(_Member):
    """The trainer's end, rank 0. See `headway.interfaces.WeightSender`. Joining blocks until all receivers join."""

    def __init__(self, link: BroadcastLink, host: str | None = None) -> None:
        super().__init__(link, rank=0, host=host)

    def send(self, version: int, buckets: Iterable[torch.Tensor]) -> None:
        index = 0
        source = iter(buckets)
        while (bucket := self._draw(source, version, index)) is not None:
            self._attempt(version, index, bucket)
            index += 1
        self._attempt(version, index, None)

    def _draw(self, source: Iterator[torch.Tensor], version: int, index: int) -> torch.Tensor | None:
        try:
            return next(source, None)
        except BaseException:
            with suppress(RuntimeError):
                self._header(version, _Kind.GIVE_UP, index, 0)
            raise

    def _attempt(self, version: int, index: int, bucket: torch.Tensor | None) -> None:
        """Broadcast one bucket, or the end; a failure is told with the names of those who are behind."""
        try:
            if bucket is None:
                self._header(version, _Kind.END, index, 0)
                self._group.meet()
            else:
                self._header(version, _Kind.BUCKET, index, bucket.numel())
                self._group.broadcast(bucket)
        except UpdateFailed:
            raise
        except RuntimeError as cause:
            late = ", ".join(self._group.behind(f"{version}:{index}")) or "the receivers"
            self._group.close()
            what = "the end" if bucket is None else f"bucket {index}"
            raise UpdateFailed(
                f"version {version}: {what} could not be sent; {late} did not answer within "
                f"param_update.timeout_s = {self._link.timeout_s:g} s or went away: {cause}"
            ) from cause

    def _header(self, version: int, kind: _Kind, index: int, nbytes: int) -> None:
        values = [version, int(kind), index, nbytes]
        self._group.broadcast(torch.tensor(values, dtype=torch.int64, device=self._link.device))


class BroadcastReceiver(_Member):
    """A replica's end, rank ``index + 1``. See `headway.interfaces.WeightReceiver`. Joining blocks until all join."""

    def __init__(self, link: BroadcastLink, index: int, host: str | None = None) -> None:
        super().__init__(link, rank=index + 1, host=host)
        self._name = link.receivers[index]
        self._buffer = torch.empty(0, dtype=torch.uint8, device=link.device)

    def receive(self, version: int) -> Iterator[torch.Tensor]:
        index = 0
        try:
            while (bucket := self._next(version, index)) is not None:
                yield bucket
                index += 1
        except _GivenUp as told:
            raise UpdateFailed(str(told)) from None
        except BaseException:
            # A bucket that nobody takes would keep the others waiting: leaving tells them.
            self._group.close()
            raise

    def _next(self, version: int, index: int) -> torch.Tensor | None:
        try:
            nbytes = self._expect(version, index)
            if nbytes is None:
                self._group.note(f"{version}:{index}")
                self._group.meet()
                return None
            if nbytes > self._buffer.numel():
                self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._link.device)
            bucket = self._buffer[:nbytes]
            self._group.broadcast(bucket)
            self._group.note(f"{version}:{index}")
            return bucket
        except UpdateFailed:
            raise
        except RuntimeError as cause:
            raise UpdateFailed(
                f"version {version}: {self._name} waited for bucket {index} from {self._link.sender}, which did not "
                f"answer within param_update.timeout_s = {self._link.timeout_s:g} s or went away: {cause}"
            ) from cause

    def _expect(self, version: int, index: int) -> int | None:
        """Bytes of the next bucket, or None at the end."""
        header = torch.empty(4, dtype=torch.int64, device=self._link.device)
        self._group.broadcast(header)
        sent_version, kind, sent_index, nbytes = (int(value) for value in header.tolist())
        if kind == _Kind.GIVE_UP:
            raise _GivenUp(f"version {sent_version}: {self._link.sender} gave up at bucket {sent_index}")
        if (sent_version, sent_index) != (version, index):
            raise UpdateFailed(
                f"{self._name} asked for bucket {index} of version {version}, "
                f"{self._link.sender} sends bucket {sent_index} of version {sent_version}"
            )
        return None if kind == _Kind.END else nbytes


class _GivenUp(UpdateFailed):
    """The sender said that it gives up; the group is in order."""
