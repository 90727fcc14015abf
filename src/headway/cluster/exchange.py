"""Driver's view of a transfer: who is connected to whom, what each receiver holds, and where a version is stored.

    reach(names)             makes missing or broken links, or those made for others, anew, both ends side by side
    send / gather            asked of the trainer's ranks
    stage(name)              asked of a receiver, with the sender's parcel where the transport stores

A delta is sent to receivers that are all known to hold the version before; one that failed is assumed to hold nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from headway.cluster.roles.fused import WITHIN
from headway.cluster.roles.outbox import Send, Sent, SentWeights
from headway.cluster.worker_group import Worker, WorkerGroup
from headway.concurrently import both, concurrently, failure_ignored
from headway.config.schema import Config
from headway.config.transports import TRANSPORTS, transport_of, update_limit_s
from headway.devices import CPU, kind_of
from headway.errors import ConfigError, UpdateFailed, WorkerDied
from headway.interfaces import GatherReport, ReceiveReport, SendReport
from headway.weights.layout import Manifest
from headway.weights.protocols import Parcel
from headway.weights.transports.links import Address, Link, Meeting, make_link


class WeightPaths(Protocol):
    """Transfer of weights from the trainer's ranks to receivers."""

    async def reach(self, names: Sequence[str]) -> None:
        """Connect to the receivers, as `TrainEngine.reach` does."""

    async def send(self, version: int, names: Sequence[str]) -> SendReport:
        """Gather and send a version, as `TrainEngine.send_weights` does."""

    async def gather(self, version: int) -> GatherReport:
        """Gather a version into a copy, as `OverlappingTrainEngine.gather_weights` does."""

    async def send_gathered(self, version: int, name: str) -> SendReport:
        """Send the copy, as `OverlappingTrainEngine.send_gathered` does."""

    async def stage(self, name: str, version: int) -> ReceiveReport:
        """Let a receiver stage a version, as `PolicyReceiver.stage_weights` does."""


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    transport: str
    streamed: bool
    """True where sender and receivers run at the same time."""
    apart: bool
    """True where each receiver gets weights by itself, from a copy."""
    with_delta: bool
    verify: bool
    """True where the trainer's log-probs of the probe come with each version."""
    timeout_s: float
    """Seconds for which one end waits for another; less than an update's, so that who failed is known in time."""
    address: Address | None
    device: str
    directory: Path | None


def transport_timeout(config: Config, nbytes: int = 0) -> float:
    """Return a transport's time limit in seconds: half of an update's, so that it can name who failed."""
    return update_limit_s(config.param_update.timeout_s, nbytes) / 2


def exchange_settings(
    config: Config, address: Address | None, device: str, directory: Path | None, nbytes: int = 0
) -> ExchangeSettings:
    """Return the settings for ``param_update.*``. ``address``: the trainer's store; ``device``: that of the workers."""
    update = config.param_update
    transport = transport_of(update.transport, backend=config.cluster.backend, shared=False)
    apart = update.schedule == "overlapped"
    kind = kind_of(device)
    if update.backend not in ("auto", "gloo", kind.collectives):
        raise ConfigError(
            f"param_update.backend={update.backend}: the workers compute on {kind.called}s; set it to gloo, or to auto"
        )
    through_devices = kind.collectives != "gloo" and not apart and update.backend != "gloo"
    return ExchangeSettings(
        transport=transport,
        streamed=TRANSPORTS[transport].streamed,
        apart=apart,
        with_delta=update.encoding == "delta",
        verify=update.verify,
        timeout_s=transport_timeout(config, nbytes),
        address=address,
        device=device if through_devices and TRANSPORTS[transport].on_gpu else CPU.name,
        directory=directory,
    )


@dataclass(slots=True)
class _Receiver:
    name: str
    workers: tuple[Worker, ...]
    """Ranks that hold a copy together, each of which gets all that is sent and keeps its part."""
    dtype: str
    key: str | None = None
    """Key of the link that the receiver is connected to."""
    holds: int | None = None
    trusted: bool = True
    """True while a stored version may be used for this receiver as for others."""
    parcel: asyncio.Future[Parcel | None] | None = None
    """Parcel of the transfer that is under way."""


@dataclass(slots=True)
class _Connection:
    link: Link
    names: list[str]
    broken: bool


@dataclass(frozen=True, slots=True)
class _Published:
    """Stored version, for all receivers of a dtype."""

    base: int | None
    sending: asyncio.Task[Sent]

    @property
    def failed(self) -> bool:
        return self.sending.done() and (self.sending.cancelled() or self.sending.exception() is not None)

    def is_of_no_use_to(self, receiver: _Receiver) -> bool:
        return self.base is not None and self.base != receiver.holds


class Exchange:
    """Transfers from the trainer's ranks to every receiver, by transports to other processes (and ``local``)."""

    def __init__(self, actor: WorkerGroup, settings: ExchangeSettings, manifests: Mapping[str, Manifest]) -> None:
        """Create the exchange, without receivers. ``manifests``: layout of the weights by served dtype."""
        self._actor = actor
        self._settings = settings
        self._manifests = manifests
        self._receivers: dict[str, _Receiver] = {}
        self._connections: dict[str, _Connection] = {}
        self._published: dict[str, _Published] = {}
        """Published versions by dtype: a stored version is sent once for all receivers."""
        self._turns: dict[str, asyncio.Lock] = {}
        """Locks by link key, held while a link is opened, or used to send where several receivers share it."""
        self._generation = 0

    def add(self, name: str, workers: Sequence[Worker], dtype: str) -> None:
        """Add a receiver that may be reached from now on, with weights in ``dtype``: one worker, or several that hold a
        copy together.
        """
        self._receivers[name] = _Receiver(name, tuple(workers), dtype)

    # ------------------------------------------------------------------------------------------ meeting

    async def reach(self, names: Sequence[str]) -> None:
        """Connect to the receivers, as `TrainEngine.reach` does."""
        loop = asyncio.get_running_loop()
        for name in names:
            self._receivers[name].parcel = loop.create_future()
        await concurrently(self._connect(key, members) for key, members in self._by_key(names).items())

    def _by_key(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Return the receivers by key: one key per receiver with a stream to itself, else one for all of a dtype."""
        found: dict[str, list[str]] = {}
        for name in names:
            dtype = self._receivers[name].dtype
            key = f"{dtype}/{name}" if self._settings.streamed and self._settings.apart else dtype
            found.setdefault(key, []).append(name)
        return found

    async def _connect(self, key: str, names: Sequence[str]) -> None:
        async with self._turn(key):
            connection = self._connections.get(key)
            if self._settings.streamed:
                if connection is None or connection.broken or connection.names != names:
                    await self._meet(key, names)
            elif connection is None:
                await self._meet(key, names)
            else:  # a stored version's place does not depend on who receives
                new = [self._receivers[name] for name in names if self._receivers[name].key != key]
                await self._open_receivers(key, connection.link, new)

    async def _meet(self, key: str, names: Sequence[str]) -> None:
        """Open all ends of a new link side by side, as those of some transports wait for each other."""
        self._generation += 1
        link = self._link(names)
        self._connections[key] = connection = _Connection(link, list(names), broken=True)  # until all have met
        receivers = [self._receivers[name] for name in names]
        await both(self._open_sender(key, link), self._open_receivers(key, link, receivers))
        connection.broken = False

    async def _open_sender(self, key: str, link: Link) -> None:
        await self._actor.connect(key, link)

    async def _open_receivers(self, key: str, link: Link, receivers: Sequence[_Receiver]) -> None:
        await concurrently(self._open_receiver(worker, link) for receiver in receivers for worker in receiver.workers)
        for receiver in receivers:
            receiver.key = key

    async def _open_receiver(self, worker: Worker, link: Link) -> None:
        try:
            await worker.call("connect", link)
        except WorkerDied as death:  # the others are met without a receiver that failed
            raise UpdateFailed(f"{worker.name} died before it met the trainer: {death}") from death

    def _turn(self, key: str) -> asyncio.Lock:
        return self._turns.setdefault(key, asyncio.Lock())

    def _link(self, names: Sequence[str]) -> Link:
        settings = self._settings
        return make_link(
            settings.transport,
            Meeting(
                manifest=self._manifests[self._receivers[names[0]].dtype],
                receivers=tuple(worker.name for name in names for worker in self._receivers[name].workers),
                timeout_s=settings.timeout_s,
                sender=self._actor.workers[0].name,
                address=settings.address,
                generation=self._generation,
                device=settings.device,
                directory=settings.directory,
            ),
        )

    # ------------------------------------------------------------------------------------------ sending

    async def send(self, version: int, names: Sequence[str]) -> SendReport:
        """Gather and send a version, as `TrainEngine.send_weights` does."""
        by_key = self._by_key(names)
        sends = [Send(self._receivers[members[0]].dtype, key, self._base(members)) for key, members in by_key.items()]
        with self._failing(names):
            weights: SentWeights = await self._actor.send_weights(version, sends, False, self._settings.verify)
        results = [sent for sent in weights.sent if sent is not None]
        for sent, members in zip(results, by_key.values(), strict=True):
            self._hand_over(members, sent.parcel)
        pairs = zip(by_key.values(), results, strict=True)
        return replace(_together({tuple(members): sent.report for members, sent in pairs}), probe=weights.probe)

    async def gather(self, version: int) -> GatherReport:
        """Gather a version into a copy, as `OverlappingTrainEngine.gather_weights` does."""
        report: GatherReport = await self._actor.gather_weights(version, self._settings.verify)
        self._published.clear()
        return report

    async def send_gathered(self, version: int, name: str) -> SendReport:
        """Send the copy, as `OverlappingTrainEngine.send_gathered` does."""
        receiver = self._receivers[name]
        sent: Sent
        with self._failing([name]):
            if self._settings.streamed:
                (key,) = self._by_key([name])
                sent = await self._actor.send_gathered(version, Send(receiver.dtype, key, self._base([name])))
            else:
                sent = await self._publish(version, receiver)
        self._hand_over([name], sent.parcel)
        return sent.report

    async def _publish(self, version: int, receiver: _Receiver) -> Sent:
        """Send a version once for all receivers of a dtype; once more, whole, for one that cannot use what was sent."""
        dtype = receiver.dtype
        async with self._turn(dtype):
            published = self._published.get(dtype)
            first = published is None or published.failed or not receiver.trusted or published.is_of_no_use_to(receiver)
            if first:
                if published is not None:
                    await asyncio.wait([published.sending])  # one sending at a time
                base = self._base([receiver.name]) if published is None else None
                sending = self._actor.send_gathered(version, Send(dtype, dtype, base))
                published = self._published[dtype] = _Published(base, sending)
        assert published is not None
        # Shielded: whoever asked first may be left out before it is done, and the others need it, too.
        sent: Sent = await asyncio.shield(failure_ignored(published.sending))
        receiver.trusted = True
        # A sending for several receivers counts once.
        return sent if first else replace(sent, report=replace(sent.report, send_s=0.0, nbytes=0))

    def _base(self, names: Sequence[str]) -> int | None:
        """Return the version that all receivers named hold, where a delta may be sent to them; None otherwise."""
        held = {self._receivers[name].holds for name in names}
        return held.pop() if self._settings.with_delta and len(held) == 1 else None

    def _hand_over(self, names: Sequence[str], parcel: Parcel | None) -> None:
        for name in names:
            future = self._receivers[name].parcel
            if future is not None and not future.done():
                future.set_result(parcel)

    @contextmanager
    def _failing(self, names: Sequence[str]) -> Iterator[None]:
        """Distrust the receivers named, and fail their pending parcels, when the block, which sends to them, fails."""
        try:
            yield
        except BaseException as failure:
            for name in names:
                receiver = self._receivers[name]
                self._distrust(receiver)
                if receiver.parcel is not None and not receiver.parcel.done():
                    receiver.parcel.set_exception(UpdateFailed(f"{name} got nothing: sending failed: {failure}"))
                    receiver.parcel.exception()  # retrieved here: nobody may be waiting for it
            raise

    # ------------------------------------------------------------------------------------------ receiving

    async def stage(self, name: str, version: int) -> ReceiveReport:
        """Let a receiver stage a version, as `PolicyReceiver.stage_weights` does."""
        receiver = self._receivers[name]
        assert receiver.parcel is not None, "stage comes after reach"
        try:
            parcel = None if self._settings.streamed else await receiver.parcel
            calls = (worker.call("stage_weights", version, parcel) for worker in receiver.workers)
            reports: list[ReceiveReport] = await concurrently(calls)
        except BaseException:
            self._distrust(receiver)
            raise
        receiver.holds = version
        return _slowest(reports)

    def _distrust(self, receiver: _Receiver) -> None:
        """Have the next version sent to a receiver whole, and by a new link where the ends depend on each other."""
        receiver.holds, receiver.trusted = None, False
        if self._settings.streamed:
            for connection in self._connections.values():
                connection.broken |= receiver.name in connection.names


NO_COPY = "within a process weights are handed over while training stands still, not sent from a copy"


class WithinProcesses:
    """Implementation of `WeightPaths` where each receiver gets weights from the training rank in its process."""

    def __init__(self, actor: WorkerGroup, receivers: Mapping[str, Worker], dtype: str, *, verify: bool) -> None:
        self._actor = actor
        self._receivers = receivers
        self._dtype = dtype
        self._verify = verify

    async def reach(self, names: Sequence[str]) -> None:
        """Do nothing: every receiver shares a process with its sender."""

    async def send(self, version: int, names: Sequence[str]) -> SendReport:
        sends = [Send(self._dtype, WITHIN, None)]
        weights: SentWeights = await self._actor.send_weights(version, sends, True, self._verify)
        (sent,) = weights.sent
        assert sent is not None, "rank zero has a replica in its process"
        return replace(sent.report, probe=weights.probe)

    async def gather(self, version: int) -> GatherReport:
        raise UpdateFailed(f"version {version}: {NO_COPY}")

    async def send_gathered(self, version: int, name: str) -> SendReport:
        raise UpdateFailed(f"version {version} to {name}: {NO_COPY}")

    async def stage(self, name: str, version: int) -> ReceiveReport:
        report: ReceiveReport = await self._receivers[name].call("stage_weights", version, None)
        return report


def _slowest(reports: Sequence[ReceiveReport]) -> ReceiveReport:
    """Combine the reports of ranks that hold a copy together, and have all received the same. Raises `UpdateFailed`."""
    first = max(reports, key=lambda report: report.recv_s)
    if len({report.checksum for report in reports}) > 1:
        raise UpdateFailed("ranks that hold a copy of the policy together have received different weights")
    return first


def _together(reports: Mapping[tuple[str, ...], SendReport]) -> SendReport:
    """Combine the reports of all dtypes: times and bytes add up, and each receiver has its own dtype's checksum."""
    first = next(iter(reports.values()))
    return SendReport(
        gather_s=sum(report.gather_s for report in reports.values()),
        send_s=sum(report.send_s for report in reports.values()),
        nbytes=sum(report.nbytes for report in reports.values()),
        checksum=first.checksum,
        checksums={name: report.checksum for names, report in reports.items() for name in names},
        full_nbytes=sum(report.full_nbytes or report.nbytes for report in reports.values()),
        changed=first.changed,
    )
