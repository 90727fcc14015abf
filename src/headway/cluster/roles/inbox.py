"""The receiver's end of links to the trainer, for every role that holds a copy of the policy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from headway.errors import UpdateFailed
from headway.weights.protocols import Parcel, WeightReceiver, WeightSink
from headway.weights.transports.links import EndContext, Link, open_receiver


class WeightInbox:
    def __init__(self, name: str) -> None:
        self._name = name
        self._receiver: WeightReceiver | None = None
        self._openings = 0
        self._parcels: dict[int, Parcel | None] = {}

    def open(self, link: Link, here: EndContext) -> None:
        """Open this end of ``link``, in the place of the last one. May wait for sender and receivers."""
        self.close()
        self._openings += 1
        opening = self._openings
        receiver = open_receiver(link, self._name, here)
        if opening == self._openings:
            self._receiver = receiver
        else:  # all met anew, while this one waited for somebody who never came
            receiver.close()

    async def connect(self, link: Link, here: EndContext) -> None:
        """`open` on a thread of its own: a meeting to which one does not come must not keep the next one waiting."""
        await asyncio.to_thread(self.open, link, here)

    @contextmanager
    def holding(self, version: int, parcel: Parcel | None) -> Iterator[None]:
        """Hold, until the block ends, ``parcel``: what the sender left of ``version``, with a stored transport."""
        self._parcels[version] = parcel
        try:
            yield
        finally:
            self._parcels.pop(version, None)

    def receive(self, version: int, sink: WeightSink) -> None:
        """Put ``version`` into ``sink``, blocking."""
        if self._receiver is None:
            raise UpdateFailed(f"{self._name} was asked for version {version} before it was connected to the trainer")
        self._receiver.receive(version, sink, self._parcels.get(version))

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
