"""Hand-over of buckets between threads of one process: the receivers read the sender's buffer.

    sender     offer bucket 0 ─ wait for all ─ offer bucket 1 ─ wait for all ─ … ─ offer end ─ wait for all
    receiver                 take ─ acknowledge             take ─ acknowledge            take ─ acknowledge

The sender draws the next bucket only when every receiver has acknowledged the last one, so one reused buffer is enough.
Whoever gives up says so, and the others fail at once instead of waiting for their time-outs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition

import torch

from headway.devices import kind_of
from headway.engines.weights.protocols import (
    Chunk,
    EndContext,
    OutgoingWeights,
    StoredVersion,
    TransportAddress,
    WeightSink,
    place_of,
)
from headway.errors import UpdateFailed

End = tuple[int, ...]
"""The digests, which are offered after the last bucket."""


def make_link(meeting: TransportAddress) -> LocalExchange:
    return LocalExchange(meeting.receivers, meeting.timeout_s)


def open_sender(link: LocalExchange, here: EndContext) -> LocalExchange:
    return link


def open_receiver(link: LocalExchange, name: str, here: EndContext) -> LocalReceiver:
    place_of(name, link.receivers)
    return LocalReceiver(link, name)


@dataclass(slots=True)
class _LocalVersion:
    """One version on its way. All fields are guarded by the exchange's condition."""

    version: int
    pending: set[str]
    """Receivers that have not yet acknowledged what is on offer."""
    index: int = -1
    """Index of what is on offer; -1 before the first."""
    offer: Chunk | End | None = None
    left: set[str] = field(default_factory=set)
    """Receivers that have acknowledged the end, or were told of the failure."""
    failure: str | None = None


class LocalExchange:
    """The exchange at which the sender and the named receivers of one process meet. It is the sender's end.

    Good for any number of updates, one at a time.
    """

    def __init__(self, receivers: Sequence[str], timeout_s: float) -> None:
        self.receivers = tuple(receivers)
        self._timeout_s = timeout_s
        self._changed = Condition()
        self._update: _LocalVersion | None = None
        self._closed = False

    def send(self, version: int, weights: OutgoingWeights) -> None:
        """Offer every bucket to every receiver; returns when all have acknowledged the end of ``version``."""
        update = _LocalVersion(version, pending=set())
        with self._changed:
            if self._update is not None and self._update.failure is None:
                raise UpdateFailed(
                    f"version {version} was to be sent while version {self._update.version} still is; end that first"
                )
            self._update = update
        try:
            for index, chunk in enumerate(weights):
                done_on(chunk.payload)  # receivers work on streams of their own
                self._offer(update, index, chunk)
            self._offer(update, update.index + 1, weights.digests)
        except BaseException as cause:
            # It stays, for receivers that come late: each is told once.
            self._fail(update, f"the sender gave up: {type(cause).__name__}: {cause}")
            raise
        with self._changed:
            self._update = None

    def receive(self, name: str, version: int, sink: WeightSink) -> None:
        """Put the buckets of ``version`` into ``sink``, for receiver ``name``."""
        update = self._join(name, version)
        try:
            index = 0
            while isinstance(chunk := self._take(update, name, index), Chunk):
                take(sink, chunk)
                self._acknowledge(update, name)
                index += 1
            self._acknowledge(update, name)
            sink.ended(chunk)
        except BaseException as cause:
            reason = f"receiver {name} gave up: {cause}" if str(cause) else f"receiver {name} gave up"
            self._fail(update, reason, told=name)
            raise

    def close(self) -> None:
        """Close the exchange: every end that waits here, or comes later, fails at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _offer(self, update: _LocalVersion, index: int, offer: Chunk | End) -> None:
        with self._changed:
            update.index, update.offer = index, offer
            update.pending = set(self.receivers)
            self._changed.notify_all()
            self._wait(
                lambda: not update.pending or update.failure is not None,
                lambda: (
                    f"the sender of version {update.version} waited for {', '.join(sorted(update.pending))} to "
                    f"take {f'bucket {index}' if isinstance(offer, Chunk) else 'the end'}"
                ),
            )
            if update.failure is not None:
                raise UpdateFailed(f"version {update.version} stopped at bucket {index}: {update.failure}")

    def _join(self, name: str, version: int) -> _LocalVersion:
        def ready() -> bool:
            update = self._update
            if update is None or name in update.left:
                return False
            return update.failure is None or update.version == version

        with self._changed:
            self._wait(ready, lambda: f"receiver {name} waited for the sender to begin version {version}")
            update = self._update
            assert update is not None
            if update.version != version:
                update.failure = f"receiver {name} asked for version {version}, the sender sends {update.version}"
                self._changed.notify_all()
                raise UpdateFailed(update.failure)
            if update.failure is not None:
                update.left.add(name)
                raise UpdateFailed(f"version {version} stopped before receiver {name} came: {update.failure}")
            return update

    def _take(self, update: _LocalVersion, name: str, index: int) -> Chunk | End:
        with self._changed:
            self._wait(
                lambda: update.index >= index or update.failure is not None,
                lambda: (
                    f"receiver {name} waited for bucket {index} of version {update.version} from the sender"
                    + (
                        f" (which waits for {', '.join(sorted(update.pending))} to take the last)"
                        * bool(update.pending)
                    )
                ),
            )
            if update.failure is not None:
                raise UpdateFailed(f"version {update.version} stopped at bucket {index}: {update.failure}")
            assert update.offer is not None
            return update.offer

    def _acknowledge(self, update: _LocalVersion, name: str) -> None:
        with self._changed:
            update.pending.discard(name)
            if not isinstance(update.offer, Chunk):
                update.left.add(name)
            self._changed.notify_all()

    def _fail(self, update: _LocalVersion, reason: str, told: str | None = None) -> None:
        with self._changed:
            update.failure = update.failure or reason
            update.offer = None
            if told is not None:
                update.left.add(told)
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool], who: Callable[[], str]) -> None:
        in_time = self._changed.wait_for(lambda: self._closed or condition(), timeout=self._timeout_s)
        if self._closed:
            raise UpdateFailed(f"{who()} when an end was closed")
        if not in_time:
            raise UpdateFailed(f"{who()} for longer than {self._timeout_s:g} s")


def take(sink: WeightSink, chunk: Chunk) -> None:
    """Put ``chunk`` into ``sink``: when this returns, its payload's memory may be used again."""
    sink.room(chunk.header, chunk.payload.device).copy_(chunk.payload)
    done_on(chunk.payload)
    sink.filled(chunk.header)


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
