"""Hand-over of buckets between threads of one process: nothing is copied, the receivers read the sender's buffer.

    sender     offer bucket 0 ─ wait for all ─ offer bucket 1 ─ wait for all ─ … ─ offer end ─ wait for all
    receiver                 take ─ acknowledge             take ─ acknowledge            take ─ acknowledge

The sender draws the next bucket only when every receiver has acknowledged the last one, so one reused buffer is enough.
Whoever gives up says so, and the others fail at once instead of waiting for their time-outs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Condition
from typing import TYPE_CHECKING

from headway.errors import UpdateFailed

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class _Update:
    """One version on its way. All fields are guarded by the exchange's condition."""

    version: int
    pending: set[str]
    """Receivers that have not yet acknowledged what is on offer."""
    index: int = -1
    """Of the bucket on offer; -1 before the first."""
    bucket: torch.Tensor | None = None
    """None with ``ended``: there are no more."""
    ended: bool = False
    left: set[str] = field(default_factory=set)
    """Receivers that have acknowledged the end, or were told of the failure."""
    failure: str | None = None


class LocalExchange:
    """Where the sender and the named receivers of one process meet. Good for any number of updates, one at a time."""

    def __init__(self, receivers: Sequence[str], timeout_s: float) -> None:
        self._receivers = tuple(receivers)
        self._timeout_s = timeout_s
        self._changed = Condition()
        self._update: _Update | None = None
        self._closed = False

    def send(self, version: int, buckets: Iterable[torch.Tensor]) -> None:
        """Offer every bucket to every receiver; returns when all have acknowledged the end of ``version``."""
        deadline = time.monotonic() + self._timeout_s
        update = _Update(version, pending=set())
        with self._changed:
            self._update = update
        try:
            for index, bucket in enumerate(buckets):
                self._offer(update, index, bucket, deadline)
            self._offer(update, update.index + 1, None, deadline)
        except BaseException as cause:
            # It stays, for receivers that come late: each is told once.
            self._fail(update, f"the sender gave up: {type(cause).__name__}: {cause}")
            raise
        with self._changed:
            self._update = None

    def receive(self, name: str, version: int) -> Iterator[torch.Tensor]:
        """The buckets of ``version`` for receiver ``name``."""
        deadline = time.monotonic() + self._timeout_s
        update = self._join(name, version, deadline)
        try:
            index = 0
            while (bucket := self._take(update, name, index, deadline)) is not None:
                yield bucket
                self._acknowledge(update, name)
                index += 1
            self._acknowledge(update, name)
        except BaseException as cause:
            reason = f"receiver {name} gave up: {cause}" if str(cause) else f"receiver {name} gave up"
            self._fail(update, reason, told=name)
            raise

    def close(self) -> None:
        """End the meeting for all: whoever waits here, or comes later, fails at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _offer(self, update: _Update, index: int, bucket: torch.Tensor | None, deadline: float) -> None:
        with self._changed:
            update.index, update.bucket, update.ended = index, bucket, bucket is None
            update.pending = set(self._receivers)
            self._changed.notify_all()
            self._wait(
                lambda: not update.pending or update.failure is not None,
                deadline,
                lambda: (
                    f"the sender of version {update.version} waited for {', '.join(sorted(update.pending))} to "
                    f"take {'the end' if bucket is None else f'bucket {index}'}"
                ),
            )
            if update.failure is not None:
                raise UpdateFailed(f"version {update.version} stopped at bucket {index}: {update.failure}")

    def _join(self, name: str, version: int, deadline: float) -> _Update:
        def ready() -> bool:
            update = self._update
            if update is None or name in update.left:
                return False
            return update.failure is None or update.version == version

        with self._changed:
            self._wait(ready, deadline, lambda: f"receiver {name} waited for the sender to begin version {version}")
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

    def _take(self, update: _Update, name: str, index: int, deadline: float) -> torch.Tensor | None:
        with self._changed:
            self._wait(
                lambda: update.index >= index or update.failure is not None,
                deadline,
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
            return update.bucket

    def _acknowledge(self, update: _Update, name: str) -> None:
        with self._changed:
            update.pending.discard(name)
            if update.ended:
                update.left.add(name)
            self._changed.notify_all()

    def _fail(self, update: _Update, reason: str, told: str | None = None) -> None:
        with self._changed:
            update.failure = update.failure or reason
            update.bucket = None
            if told is not None:
                update.left.add(told)
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool], deadline: float, who: Callable[[], str]) -> None:
        in_time = self._changed.wait_for(
            lambda: self._closed or condition(), timeout=max(0.0, deadline - time.monotonic())
        )
        if self._closed:
            raise UpdateFailed(f"{who()} when an end was closed")
        if not in_time:
            raise UpdateFailed(f"{who()} for longer than param_update.timeout_s = {self._timeout_s:g} s")


class LocalSender:
    """The trainer's end. See `headway.interfaces.WeightSender`."""

    def __init__(self, exchange: LocalExchange) -> None:
        self._exchange = exchange

    def send(self, version: int, buckets: Iterable[torch.Tensor]) -> None:
        self._exchange.send(version, buckets)

    def close(self) -> None:
        """Whoever still waits at any end fails at once."""
        self._exchange.close()


class LocalReceiver:
    """A replica's end. See `headway.interfaces.WeightReceiver`."""

    def __init__(self, exchange: LocalExchange, name: str) -> None:
        self._exchange = exchange
        self._name = name

    def receive(self, version: int) -> Iterator[torch.Tensor]:
        return self._exchange.receive(self._name, version)

    def close(self) -> None:
        """Whoever still waits at any end fails at once."""
        self._exchange.close()
