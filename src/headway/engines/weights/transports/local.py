"""Hand-over of buckets between threads of one process: the sender writes each bucket into the receivers' memory.

    receivers   come with their sinks, and wait ───────────────────────────────────────▶ all is there, or why not
    sender      waits for all ─ bucket 0 into each sink ─ bucket 1 ─ … ─ digests into each ─┘

One reused buffer is enough: a bucket is drawn when all sinks have the last one. Whoever gives up ends it for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Condition

import torch

from headway.devices import kind_of
from headway.engines.weights.protocols import (
    Chunk,
    EndContext,
    Link,
    OutgoingWeights,
    StoredVersion,
    WeightSink,
    place_of,
)
from headway.errors import UpdateFailed


def open_sender(link: Link, here: EndContext) -> LocalExchange:
    exchange: LocalExchange = link.exchange
    return exchange


def open_receiver(link: Link, name: str, here: EndContext) -> LocalReceiver:
    place_of(name, link.meeting.receivers)
    return LocalReceiver(link.exchange, name)


class LocalExchange:
    """The exchange at which the sender and the named receivers of one process meet. It is the sender's end.

    Good for any number of updates, one at a time.
    """

    def __init__(self, receivers: Sequence[str], timeout_s: float) -> None:
        self._receivers = tuple(receivers)
        self._timeout_s = timeout_s
        self._changed = Condition()
        self._waiting: dict[str, tuple[int, WeightSink, Future[None]]] = {}
        """The receivers that have come: which version each wants, where to, and what it waits for."""
        self._closed = False

    def send(self, version: int, weights: OutgoingWeights) -> None:
        """Put every bucket into every receiver's sink, once all have come."""
        came = self._meet(version)
        index, at = 0, ""
        try:
            for chunk in weights:
                self._check_open(f"version {version} was being sent")
                for name, (_, sink, _) in came.items():
                    at = name
                    take(sink, chunk)
                index, at = index + 1, ""
            digests = weights.digests
            for name, (_, sink, _) in came.items():
                at = name
                sink.ended(digests)
        except BaseException as cause:
            who = f"receiver {at}" if at else "the sender"
            stopped = UpdateFailed(f"version {version} stopped at bucket {index}: {who} gave up: {cause}")
            for name, (*_, told) in came.items():
                told.set_exception(cause if name == at else stopped)
            if at:
                raise stopped from cause
            raise
        for *_, told in came.values():
            told.set_result(None)

    def receive(self, name: str, version: int, sink: WeightSink) -> None:
        """Wait until the buckets of ``version`` are in ``sink``, for receiver ``name``."""
        told: Future[None] = Future()
        with self._changed:
            self._waiting[name] = version, sink, told
            self._changed.notify_all()
            try:
                waits = f"receiver {name} waited for the sender to begin version {version}"
                self._wait(lambda: name not in self._waiting, lambda: waits)
            finally:
                self._waiting.pop(name, None)
        told.result()  # no limit of its own: the sender writes into the sink until it tells how that ended

    def close(self) -> None:
        """Close the exchange: every end that waits here, or comes later, fails at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _meet(self, version: int) -> dict[str, tuple[int, WeightSink, Future[None]]]:
        def missing() -> list[str]:
            return [name for name in self._receivers if name not in self._waiting]

        with self._changed:
            self._wait(
                lambda: not missing(), lambda: f"the sender of version {version} waited for {', '.join(missing())}"
            )
            came, self._waiting = self._waiting, {}
            self._changed.notify_all()
        for name, (asked, _, _) in came.items():
            if asked != version:
                wrong = UpdateFailed(f"receiver {name} asked for version {asked}, the sender sends version {version}")
                for *_, told in came.values():
                    told.set_exception(wrong)
                raise wrong
        return came

    def _wait(self, condition: Callable[[], bool], who: Callable[[], str]) -> None:
        self._changed.wait_for(lambda: self._closed or condition(), timeout=self._timeout_s)
        if not condition():
            self._check_open(who())
            raise UpdateFailed(f"{who()} for longer than {self._timeout_s:g} s")

    def _check_open(self, doing: str) -> None:
        if self._closed:
            raise UpdateFailed(f"{doing} when an end was closed")


def take(sink: WeightSink, chunk: Chunk) -> None:
    """Put ``chunk`` into ``sink``: when this returns, its payload's memory may be used again."""
    sink.room(chunk.header, chunk.payload.device).copy_(chunk.payload)
    sink.filled(chunk.header)
    done_on(chunk.payload)  # also with what the sink made of it: the receiver goes on on another stream


def done_on(payload: torch.Tensor) -> None:
    """Wait until the payload's device has done what this thread gave it."""
    kind_of(payload.device).mark(payload.device)()


class LocalReceiver:
    """A replica's end of a `LocalExchange` (`WeightReceiver`)."""

    def __init__(self, exchange: LocalExchange, name: str) -> None:
        self._exchange = exchange
        self._name = name

    def receive(self, version: int, sink: WeightSink, parcel: StoredVersion | None = None) -> None:
        self._exchange.receive(self._name, version, sink)

    def close(self) -> None:
        """Close the exchange: every end that still waits fails at once."""
        self._exchange.close()
