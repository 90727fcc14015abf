"""Hand-over of buckets between threads of one process: the sender writes each bucket into the receivers' memory.

    receivers   come with their sinks, and wait ───────────────────────────────────────▶ all is there, or why not
    sender      waits for all ─ bucket 0 into each sink ─ bucket 1 ─ … ─ digests into each ─┘

One reused buffer is enough: a bucket is drawn when all sinks have the last one. If one end gives up, the update ends
for all: at once for the sender, between two buckets for a receiver, also when its wait for a bucket times out.
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

Ends = dict[str, tuple[int, WeightSink, Future[None]]]
"""Name of a receiver -> the version it wants, its sink, and the future that it waits for."""


def open_sender(link: Link, here: EndContext) -> LocalExchange:
    exchange: LocalExchange = link.exchange
    return exchange


class LocalExchange:
    """The exchange at which the sender and the named receivers of one process meet. It is the sender's end.

    Good for any number of updates, one at a time.
    """

    def __init__(self, receivers: Sequence[str], timeout_s: float) -> None:
        self._receivers = tuple(receivers)
        self._timeout_s = timeout_s
        self._changed = Condition()
        self._waiting: Ends = {}
        """The receivers that have come."""
        self._put = 0
        """Number of buckets that were put into all sinks."""
        self._closed = False

    def send(self, version: int, weights: OutgoingWeights) -> None:
        """Put every bucket into every receiver's sink, once all have come."""
        came = self._meet(version)
        index, at = 0, ""
        try:
            for chunk in weights:
                with self._changed:  # what is written to may give up before or after that
                    self._check_open(f"version {version} was being sent")
                    for name, (_, sink, told) in came.items():
                        at = name
                        if told.done():
                            told.result()
                        take(sink, chunk)
                    index, at = index + 1, ""
                    self._put += 1
                    self._changed.notify_all()
            digests = weights.digests
            with self._changed:
                self._check_open(f"version {version} was being sent")
                for name, (_, sink, told) in came.items():
                    at = name
                    if told.done():
                        told.result()
                    sink.ended(digests)
                self._tell(came, None)
        except BaseException as cause:
            who = f"receiver {at}" if at else "the sender"
            stopped = UpdateFailed(f"version {version} stopped at bucket {index}: {who} gave up: {cause}")
            if at:
                self._tell({at: came.pop(at)}, cause)  # its own error; the others are told that the version stopped
            self._tell(came, stopped)
            if at:
                raise stopped from cause
            raise

    def receive(self, name: str, version: int, sink: WeightSink) -> None:
        """Wait until the buckets of ``version`` are in ``sink``, for receiver ``name``."""
        told: Future[None] = Future()
        with self._changed:
            self._waiting[name] = version, sink, told
            self._changed.notify_all()
            try:
                waits = f"receiver {name} waited for the sender to begin version {version}"
                self._wait(lambda: name not in self._waiting, lambda: waits)
                waits = f"receiver {name} waited for the sender of version {version}"
                while not told.done():
                    # `put` is bound now: the time limit begins anew with each bucket.
                    self._wait(lambda put=self._put: told.done() or self._put > put, lambda: waits)  # type: ignore[misc]
            except BaseException as cause:
                self._tell({name: (version, sink, told)}, cause)
                raise
            finally:
                self._waiting.pop(name, None)  # a later sender must not write to one that has given up
        told.result()

    def close(self) -> None:
        """Close the exchange: every end that waits here, or comes later, fails at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _meet(self, version: int) -> Ends:
        seen: set[str] = set()  # also who waited for as long, and has gone

        def missing() -> list[str]:
            seen.update(self._waiting)
            return [name for name in self._receivers if name not in self._waiting]

        def waits() -> str:
            never = [name for name in self._receivers if name not in seen]
            return f"the sender of version {version} waited for {', '.join(never or missing())}"

        with self._changed:
            try:
                self._wait(lambda: not missing(), waits)
                for name, (asked, _, _) in self._waiting.items():
                    if asked != version:
                        raise UpdateFailed(
                            f"receiver {name} asked for version {asked}, the sender sends version {version}"
                        )
            except UpdateFailed as cause:
                self._tell(self._waiting, cause)
                raise
            finally:
                # Receivers see by this that the sender has begun, or failed.
                came, self._waiting = self._waiting, {}
                self._changed.notify_all()
        return came

    def _tell(self, ends: Ends, cause: BaseException | None) -> None:
        """End the waiting of ``ends``: with the error ``cause``, or successfully if it is None."""
        with self._changed:
            for *_, told in ends.values():
                if not told.done():
                    told.set_exception(cause) if cause else told.set_result(None)
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool], who: Callable[[], str]) -> None:
        self._changed.wait_for(lambda: self._closed or condition(), timeout=self._timeout_s)
        # The condition first: what was complete before the exchange was closed counts.
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

    def __init__(self, link: Link, name: str, here: EndContext) -> None:
        place_of(name, link)
        self._exchange: LocalExchange = link.exchange
        self._name = name

    def receive(self, version: int, sink: WeightSink, stored: StoredVersion | None = None) -> None:
        self._exchange.receive(self._name, version, sink)

    def close(self) -> None:
        """Close the exchange: every end that still waits fails at once."""
        self._exchange.close()


open_receiver = LocalReceiver
