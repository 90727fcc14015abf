"""Receiver's end of links to the trainer, for every role that holds a copy of the policy."""

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
        """Open this end of ``link``, in place of the previous one. May wait for sender and receivers."""
        self.close()
        self._openings += 1
        opening = self._openings
        receiver = open_receiver(link, self._name, here)
        if opening == self._openings:
            self._receiver = receiver
        else:  # all met anew, while this one waited for somebody who never came
            receiver.close()

    async def connect(self, link: Link, here: EndContext) -> None:
        """Open a link as `open` does, on a new thread: one that never comes about must not hold up the next one."""
        await asyncio.to_thread(self.open, link, here)

    @contextmanager
    def holding(self, version: int, parcel: Parcel | None) -> Iterator[None]:
        """Hold ``parcel`` until the block ends: what the sender left of ``version``, with a stored transport."""
        self._parcels[version] = parcel
        try:
            yield
        finally:
            self._parcels.pop(version, None)

    def receive(self, version: int, sink: WeightSink) -> None:
        """Receive ``version`` into ``sink``. Blocks."""
        if self._receiver is None:
            raise UpdateFailed(f"{self._name} was asked for version {version} before it was connected to the trainer")
        self._receiver.receive(version, sink, self._parcels.get(version))

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
