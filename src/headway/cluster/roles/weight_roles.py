"""Both ends of links that carry weights: a training rank's share on its way out, and a receiver's way in.

    synchronous, full     gather ─bucket─▶ send                                  (Stream; two buckets of extra memory)
    delta, or overlapped  gather ─▶ copy of the share in host memory ─▶ send …   (Staged)

A rank that sends has a route per served dtype, and a sender per link. The driver's requests are plain data (`Send`),
and so are the results (`Sent`): one of each rank that sends.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headway.config.schema import Config
from headway.config.transport_facts import transport_of
from headway.data.interfaces.weights import GatherReport, SendReport, changed_of_all
from headway.engines.weights.protocols import (
    EndContext,
    HostCopy,
    IncomingWeights,
    Link,
    OutgoingWeights,
    StoredVersion,
    WeightReceiver,
    WeightSender,
    open_receiver,
    open_sender,
)
from headway.engines.weights.weight_layout import Manifest, bucket_bytes, combined
from headway.errors import UpdateFailed

if TYPE_CHECKING:
    from headway.engines.weights.outgoing_version import Staged, Window


Left = tuple[StoredVersion | None, ...] | HostCopy
"""Source of a version: the `StoredVersion` of each sender, with a stored transport, or another process's copy."""


def transport_in(config: Config) -> str:
    """Return the transport of a run, with ``auto`` resolved."""
    shared = config.cluster.placement == "shared"
    return transport_of(config.param_update.transport, backend=config.cluster.backend, shared=shared)


class WeightInbox:
    def __init__(self, name: str, here: EndContext) -> None:
        self._name, self._here = name, here
        self._receivers: list[WeightReceiver] = []
        """Receiving end of each sender's link."""
        self._shares: list[Manifest] = []
        """Layout of the weights that come over each link."""
        self._openings = 0
        self._left: dict[int, Left] = {}

    def open(self, links: Sequence[Link]) -> None:
        """Open this end of ``links``, in place of the previous ones. May wait for senders and receivers."""
        self.close()
        self._openings += 1
        opening = self._openings
        with ExitStack() as opened:
            receivers = []
            for link in links:  # one after the other, as the other receivers do
                receivers.append(open_receiver(link, self._name, self._here))
                opened.callback(receivers[-1].close)
            if opening == self._openings:  # otherwise all have connected again, while this attempt waited in vain
                opened.pop_all()
                self._receivers, self._shares = receivers, [link.manifest for link in links]

    async def connect(self, links: Sequence[Link]) -> None:
        """Open links as `open` does, on a new thread: an attempt that hangs must not block the next one."""
        await asyncio.to_thread(self.open, links)

    @contextmanager
    def holding(self, version: int, left: Left) -> Iterator[None]:
        """Have `receive` take ``version`` from ``left`` until the block ends."""
        self._left[version] = left
        try:
            yield
        finally:
            self._left.pop(version, None)

    def receive(self, version: int, incoming: IncomingWeights) -> None:
        """Receive ``version``, or map it if another process of this machine has it. Blocks."""
        left = self._left.get(version, ())
        if isinstance(left, HostCopy):
            self.close()  # another worker receives now
            incoming.found(left)
            return
        if not self._receivers:
            raise UpdateFailed(f"{self._name} was asked for version {version} before it was connected to the trainer")
        stored_versions = left or (None,) * len(self._receivers)
        shares = list(zip(self._receivers, incoming.expect(self._shares), stored_versions, strict=True))
        if len(shares) == 1:
            receiver, sink, stored = shares[0]
            receiver.receive(version, sink, stored)
            return
        with ThreadPoolExecutor(len(shares), thread_name_prefix=f"headway-receive-{self._name}") as threads:
            arrivals = [threads.submit(receiver.receive, version, sink, stored) for receiver, sink, stored in shares]
        # Raise after all threads have ended: none may write into the weights afterwards.
        for arrival in arrivals:
            arrival.result()

    def close(self) -> None:
        for receiver in self._receivers:
            receiver.close()
        self._receivers = []


Gather = Callable[[Manifest, int], "Iterator[Window]"]
"""Function that gathers this rank's share of a layout, bucket by bucket. Collective over the ranks."""

MOST_SENDS = 64
"""Maximum number of concurrent sends beside training."""


@dataclass(frozen=True, slots=True)
class Send:
    """Request to send a version to all receivers at the other end of ``key``'s link."""

    dtype: str
    key: str
    base: int | None
    """Version that all receivers hold, as the base of a delta; None to send all bytes."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Result of sending a version, by one rank or, after `joined`, by all sending ranks."""

    report: SendReport
    digests: tuple[int, ...]
    """Digests of the sent tensors, in the layout's order."""
    stored_versions: tuple[StoredVersion | None, ...]
    """Stored versions for receivers of a stored transport, one of each rank."""

    def joined(self, others: Sequence[Sent | None]) -> Sent:
        """Return the combined result of all ranks. ``others``: results of the later ranks; None if a rank sent
        nothing.
        """
        every = [self, *(sent for sent in others if sent is not None)]
        digests = tuple(digest for sent in every for digest in sent.digests)
        stored_versions = tuple(stored for sent in every for stored in sent.stored_versions)
        reports = [sent.report for sent in every]
        # The others wait for the slowest in gather, which is no work.
        slowest = max(reports, key=lambda report: report.send_s)
        report = replace(
            slowest,
            nbytes=sum(report.nbytes for report in reports),
            checksum=combined(digests),
            full_nbytes=sum(report.full_nbytes or report.nbytes for report in reports),
            changed=changed_of_all([(report.changed, report.full_nbytes or report.nbytes) for report in reports]),
            probe=self.report.probe,
        )
        return Sent(report, digests, stored_versions)


@dataclass(slots=True)
class _Route:
    manifest: Manifest
    share: Manifest | None
    """Layout of the weights that this rank sends; None if it sends nothing."""
    staged: Staged | None
    """Copy of the share; None if no copy is made."""


class WeightSendRole:
    """Sending of one rank's share of the weights. Ranks without a share take part in gathering and send nothing."""

    def __init__(self, config: Config, rank: int, here: EndContext) -> None:
        """Create the role for rank ``rank``, which sends the share with that number, if there is one."""
        self._rank, self._here = rank, here
        self._bucket_bytes = bucket_bytes(config.rollout.param_update_preduce_bucket_size_mb)
        self._with_delta = config.param_update.encoding == "delta"
        self._copies = self._with_delta or config.param_update.schedule == "overlapped"
        self._routes: dict[str, _Route] = {}
        self._senders: dict[str, WeightSender] = {}
        self._beside_training = ThreadPoolExecutor(MOST_SENDS, thread_name_prefix="headway-send")

    def open_route(self, dtype: str, manifest: Manifest, *, pinned: bool) -> None:
        """Prepare for sending weights in the layout ``manifest`` to receivers that hold them in ``dtype``."""
        from headway.engines.weights.outgoing_version import Staged

        shares = manifest.shares()
        share = shares[self._rank] if self._rank < len(shares) else None
        staged = None
        if self._copies and share is not None:
            staged = Staged(share, self._bucket_bytes, with_delta=self._with_delta, pinned=pinned)
        self._routes[dtype] = _Route(manifest, share, staged)

    async def connect(self, key: str, link: Link) -> None:
        """Open a link as `open_link` does, on another thread, also while the rank trains. May wait for receivers."""
        await asyncio.get_running_loop().run_in_executor(self._beside_training, self.open_link, key, link)

    def open_link(self, key: str, link: Link) -> None:
        """Open the sender's end of ``link``, in place of the previous one under ``key``."""
        if (old := self._senders.pop(key, None)) is not None:
            old.close()
        self._senders[key] = open_sender(link, self._here)

    def send(self, version: int, send: Send, gather: Gather) -> Sent | None:
        """Gather the weights and send this rank's share. Returns None on a rank without a share or a receiver.

        Gathering is completed even if sending fails: the other ranks take part in it.
        """
        from headway.engines.weights.outgoing_version import Stream

        route = self._routes[send.dtype]
        windows = gather(route.manifest, self._bucket_bytes)
        try:
            share = route.share
            if send.key in self._senders and share is None:  # on shared devices each rank gets all, for its own replica
                share = route.manifest
            if share is None:
                return None
            if route.staged is not None:
                gathered = route.staged.gather(version, windows)
                sent = self._send(version, send, route.staged.outgoing(version, to=send.base), share)
                return replace(sent, report=replace(sent.report, gather_s=gathered.gather_s, changed=gathered.changed))
            stream = Stream(share, windows)
            sent = self._send(version, send, stream, share)
            # Gathering took place between sending buckets: its time is subtracted.
            send_s = sent.report.send_s - stream.gather_s
            return replace(sent, report=replace(sent.report, gather_s=stream.gather_s, send_s=send_s))
        finally:
            # Drawing windows is collective: if this rank stopped, the others would wait in the next bucket's reduction.
            deque(windows, maxlen=0)

    def gather(self, version: int, gather: Gather) -> GatherReport:
        """Gather this rank's share of the weights into its copies."""
        reports = [GatherReport(0.0, 0)]
        for route in self._routes.values():
            windows = gather(route.manifest, self._bucket_bytes)
            try:
                if route.staged is not None:
                    reports.append(route.staged.gather(version, windows))
            finally:  # drawing windows is collective, also without a share or after a failure
                deque(windows, maxlen=0)
        return GatherReport(
            gather_s=sum(report.gather_s for report in reports),
            nbytes=sum(report.nbytes for report in reports),
            changed=reports[-1].changed,
        )

    async def send_gathered(self, version: int, send: Send) -> Sent:
        """Send the copy of this rank's share on another thread, so that the rank can train meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(
            self._beside_training, self._send_gathered, version, send
        )

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        self._beside_training.shutdown(wait=False)  # a send may be waiting for a receiver that is gone

    def _send_gathered(self, version: int, send: Send) -> Sent:
        route = self._routes[send.dtype]
        assert route.staged is not None and route.share is not None, "only overlapped updates are sent from copies"
        return self._send(version, send, route.staged.outgoing(version, to=send.base), route.share)

    def _send(self, version: int, send: Send, weights: OutgoingWeights, share: Manifest) -> Sent:
        if (sender := self._senders.get(send.key)) is None:
            raise UpdateFailed(f"version {version}: the trainer is not connected to {send.key}; reach it first")
        started = time.perf_counter()
        stored = sender.send(version, weights)
        seconds = time.perf_counter() - started
        digests = weights.digests
        report = SendReport(0.0, seconds, weights.nbytes, combined(digests), full_nbytes=share.nbytes)
        return Sent(report, digests, (stored,))
