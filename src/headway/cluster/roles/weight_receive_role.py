"""Receiver's end of links to the trainer, for every role that holds a copy of the policy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from headway.engines.weights.protocols import HostCopy, IncomingWeights, StoredVersion, WeightReceiver, WeightSink
from headway.engines.weights.transports.links import EndContext, Link, open_receiver
from headway.errors import UpdateFailed

Left = tuple[StoredVersion | None, ...] | HostCopy
"""What a receiver is given: the parcel of each sender, with a stored transport, or another process's copy."""


class WeightInbox:
    def __init__(self, name: str) -> None:
        self._name = name
        self._receivers: list[WeightReceiver] = []
        """The end of each sender's link."""
        self._openings = 0
        self._left: dict[int, Left] = {}

    def open(self, links: Sequence[Link], here: EndContext) -> None:
        """Open this end of ``links``, in place of the previous ones. May wait for senders and receivers."""
        self.close()
        self._openings += 1
        opening = self._openings
        with ExitStack() as opened:
            receivers = []
            for link in links:  # one after the other, as the other receivers do
                receivers.append(open_receiver(link, self._name, here))
                opened.callback(receivers[-1].close)
            if opening == self._openings:  # else all met anew, while this one waited for somebody who never came
                opened.pop_all()
                self._receivers = receivers

    async def connect(self, links: Sequence[Link], here: EndContext) -> None:
        """Open links as `open` does, on a new thread: one that never comes about must not hold up the next one."""
        await asyncio.to_thread(self.open, links, here)

    @contextmanager
    def holding(self, version: int, left: Left) -> Iterator[None]:
        """Hold what was left of ``version`` until the block ends."""
        self._left[version] = left
        try:
            yield
        finally:
            self._left.pop(version, None)

    def receive(self, version: int, incoming: IncomingWeights) -> None:
        """Receive ``version``, or map it where another process of this machine has. Blocks."""
        left = self._left.get(version, ())
        if isinstance(left, HostCopy):
            self.close()  # another worker receives now
            incoming.found(left)
            return
        if len(self._receivers) != len(incoming.shares):
            raise UpdateFailed(f"{self._name} was asked for version {version} before it was connected to the trainer")
        parcels = left or (None,) * len(incoming.shares)
        shares = list(zip(self._receivers, incoming.shares, parcels, strict=True))
        if len(shares) == 1:
            _receive(version, *shares[0])
            return
        with ThreadPoolExecutor(len(shares), thread_name_prefix=f"headway-receive-{self._name}") as threads:
            arrivals = [threads.submit(_receive, version, *share) for share in shares]
        for arrival in arrivals:
            arrival.result()

    def close(self) -> None:
        for receiver in self._receivers:
            receiver.close()
        self._receivers = []


def _receive(version: int, receiver: WeightReceiver, sink: WeightSink, parcel: StoredVersion | None) -> None:
    receiver.receive(version, sink, parcel)
