"""Sender's end of a training rank's weights: one route per served dtype, one sender per link.

    synchronous, full     gather ─bucket─▶ send                                  (Stream; one bucket of extra memory)
    delta, or overlapped  gather ─▶ complete copy in host memory ─▶ send …       (Staged)

The driver's requests are plain data (`Send`), and so are the results (`Sent`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headway.config.schema import Config
from headway.errors import UpdateFailed
from headway.interfaces import GatherReport, SendReport
from headway.progress import advance
from headway.weights.layout import Manifest, bucket_bytes
from headway.weights.protocols import Chunk, Outgoing, Parcel, WeightSender
from headway.weights.transports.links import EndContext, Link, open_sender

if TYPE_CHECKING:
    from headway.weights.outgoing import Staged, Window

Gather = Callable[[Manifest, int], "Iterator[Window]"]
"""Function that gathers the weights in a layout, bucket by bucket. Collective over the ranks."""

MOST_SENDS = 64
"""Maximum number of sends at once, beside training."""


@dataclass(frozen=True, slots=True)
class Send:
    """Request to send a version to all receivers at the other end of ``key``'s link."""

    dtype: str
    key: str
    base: int | None
    """Version that all receivers are known to hold, for a delta; None: all bytes are sent."""


@dataclass(frozen=True, slots=True)
class Sent:
    report: SendReport
    parcel: Parcel | None
    """Parcel for receivers of a stored transport."""


@dataclass(frozen=True, slots=True)
class SentWeights:
    """Report on one version that was sent to all its receivers."""

    sent: tuple[Sent | None, ...]
    """Results of the sends, one per `Send`."""
    probe: NDArray[np.float32] | None
    """Log-probs [N] of the probe's sequences, as in `GatherReport`."""


@dataclass(slots=True)
class _Route:
    manifest: Manifest
    staged: Staged | None
    """Complete copy of the weights; None where none is made, and on ranks that do not make it."""


class Outbox:
    """Outbox of one rank. Ranks without a sender take part in gathering and send nothing."""

    def __init__(self, config: Config, *, sends: bool) -> None:
        """Create the outbox. ``sends``: this rank always has a receiver to send to."""
        self._sends = sends
        self._bucket_bytes = bucket_bytes(config.rollout.param_update_preduce_bucket_size_mb)
        self._with_delta = config.param_update.encoding == "delta"
        self._copies = self._with_delta or config.param_update.schedule == "overlapped"
        self._routes: dict[str, _Route] = {}
        self._senders: dict[str, WeightSender] = {}
        self._beside_training = ThreadPoolExecutor(MOST_SENDS, thread_name_prefix="headway-send")

    def open_route(self, dtype: str, manifest: Manifest, *, makes_copy: bool, pinned: bool) -> None:
        """Prepare for sending weights to receivers that hold them in ``dtype``."""
        from headway.weights.outgoing import Staged

        staged = None
        if self._copies and makes_copy:
            staged = Staged(manifest, self._bucket_bytes, with_delta=self._with_delta, pinned=pinned)
        self._routes[dtype] = _Route(manifest, staged)

    async def connect(self, key: str, link: Link, here: EndContext) -> None:
        """Open a link as `open_link` does, on another thread than the caller's."""
        await asyncio.get_running_loop().run_in_executor(self._beside_training, self.open_link, key, link, here)

    def open_link(self, key: str, link: Link, here: EndContext) -> None:
        """Open the sender's end of ``link``, in place of the previous one under ``key``."""
        if (old := self._senders.pop(key, None)) is not None:
            old.close()
        self._senders[key] = open_sender(link, here)

    def send(self, version: int, send: Send, gather: Gather) -> Sent | None:
        """Gather the weights and send them. Returns None on a rank that has no receiver to send to.

        Gathering goes on to its end even if sending fails: the other ranks take part in it.
        """
        windows = gather(self._routes[send.dtype].manifest, self._bucket_bytes)
        try:
            return self._gather_and_send(version, send, windows)
        finally:
            deque(windows, maxlen=0)

    def _gather_and_send(self, version: int, send: Send, windows: Iterator[Window]) -> Sent | None:
        from headway.weights.outgoing import Stream

        route = self._routes[send.dtype]
        if send.key not in self._senders:
            if self._sends:
                raise UpdateFailed(f"version {version}: the trainer is not connected to {send.key}; reach it first")
            return None
        if route.staged is not None:
            gathered = route.staged.gather(version, windows)
            sent = self._send(version, send, route.staged.outgoing(version, to=send.base), route.manifest)
            report = replace(sent.report, gather_s=gathered.seconds, changed=gathered.changed)
            return replace(sent, report=report)
        stream = Stream(route.manifest, windows)
        sent = self._send(version, send, stream, route.manifest)
        # Gathering took place between two buckets that were sent: its time is taken off.
        report = replace(sent.report, gather_s=stream.gather_s, send_s=sent.report.send_s - stream.gather_s)
        return replace(sent, report=report)

    def gather(self, version: int, gather: Gather) -> GatherReport:
        """Gather the weights into the complete copies."""
        seconds, nbytes, changed = 0.0, 0, None
        for route in self._routes.values():
            windows = gather(route.manifest, self._bucket_bytes)
            if route.staged is None:
                deque(windows, maxlen=0)
                continue
            try:
                gathered = route.staged.gather(version, windows)
            finally:
                deque(windows, maxlen=0)
            seconds, nbytes, changed = seconds + gathered.seconds, nbytes + gathered.nbytes, gathered.changed
        return GatherReport(seconds, nbytes, changed)

    async def send_gathered(self, version: int, send: Send) -> Sent:
        """Send the complete copy, on another thread than the caller's."""
        return await asyncio.get_running_loop().run_in_executor(
            self._beside_training, self._send_gathered, version, send
        )

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        self._beside_training.shutdown(wait=False)

    def _send_gathered(self, version: int, send: Send) -> Sent:
        route = self._routes[send.dtype]
        if route.staged is None:
            raise UpdateFailed(f"version {version} was to be sent from a copy, and none is made with these settings")
        if send.key not in self._senders:
            raise UpdateFailed(f"version {version}: the trainer is not connected to {send.key}; reach it first")
        return self._send(version, send, route.staged.outgoing(version, to=send.base), route.manifest)

    def _send(self, version: int, send: Send, weights: Outgoing, manifest: Manifest) -> Sent:
        from headway.weights.digests import combined

        counted = _Counted(weights)
        started = time.perf_counter()
        parcel = self._senders[send.key].send(version, counted)
        seconds = time.perf_counter() - started
        report = SendReport(
            gather_s=0.0,
            send_s=seconds,
            nbytes=counted.nbytes,
            checksum=combined(weights.digests),
            full_nbytes=manifest.nbytes,
        )
        return Sent(report, parcel)


class _Counted:
    """Wrapper of an `Outgoing` that counts the bytes drawn from it."""

    def __init__(self, weights: Outgoing) -> None:
        self._weights = weights
        self.nbytes = 0

    @property
    def digests(self) -> tuple[int, ...]:
        return self._weights.digests

    def __iter__(self) -> Iterator[Chunk]:
        for chunk in self._weights:
            self.nbytes += chunk.header.payload_nbytes
            yield chunk
            advance(f"{self.nbytes / 1e6:,.0f} MB sent")
