"""Driver's view of a transfer: connections of workers, the version in each copy, and stored versions.

    reach(names)             makes missing or broken links, or those made for others, anew, all ends side by side
    send / gather            asked of the trainer's ranks, each for its share
    stage(name)              asked of a receiver's workers, each of which loads from its machine's copy (`HostWeights`)

A delta is sent only if all copies are known to hold the previous version; a failed copy is assumed to hold none.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from headway.cluster.roles.weight_roles import Send, Sent, transport_in
from headway.cluster.weight_sync.host_weights import HostWeights, WithinProcesses
from headway.cluster.worker_group import Worker, WorkerGroup
from headway.config.schema import Config
from headway.config.sizing.placement import LOGP
from headway.config.sizing.timeouts import Timeouts
from headway.config.transport_facts import TRANSPORTS
from headway.data.interfaces.weights import GatherReport, ReceiveReport, SendReport
from headway.devices import CPU
from headway.engines.weights.protocols import Address, Link, through_devices
from headway.engines.weights.weight_layout import Manifest
from headway.errors import UpdateFailed, WorkerDied
from headway.runtime.task_groups import both, concurrently, failure_ignored


@dataclass(slots=True)
class _TransportConnection:
    links: list[Link]
    """Link of each sending rank."""
    owners: Sequence[Worker] = ()
    """Receiving workers; empty until all are connected, and after a failure of one."""


@dataclass(frozen=True, slots=True)
class _PublishedCopy:
    """Stored version for all copies of a dtype."""

    base: int | None
    sending: asyncio.Task[Sent]

    def serves(self, copies: Sequence[HostWeights]) -> bool:
        """Return True if ``copies`` can use the stored version, as far as is known."""
        done = self.sending.done()
        failed = done and (self.sending.cancelled() or self.sending.exception() is not None)
        return not failed and all(copy.trusted and self.base in (None, copy.holds) for copy in copies)


class WeightSync:
    """Transfers from the trainer's ranks to every receiver, by transports to other processes (and ``local``)."""

    def __init__(
        self,
        actor: WorkerGroup,
        config: Config,
        manifests: Mapping[str, Manifest],
        *,
        address: Address | None,
        device: str,
        directory: Path | None,
        timeouts: Timeouts,
    ) -> None:
        """Create the exchange, without receivers.

        Args:
            manifests: layout of the weights by served dtype.
            address: address of the trainer's store; None without one.
            device: device of the workers.
            directory: directory for a transport that stores files; None without files.
        """
        update = config.param_update
        self._actor = actor
        self._config = config
        self._manifests = manifests
        self._address, self._directory, self._timeouts = address, directory, timeouts
        self._transport = transport_in(config)
        self._streamed = TRANSPORTS[self._transport].streamed
        """True if sender and receivers run at the same time."""
        self._apart = update.schedule == "overlapped"
        """True if each receiver gets weights separately, from a copy."""
        self._device = device if through_devices(config, device) else CPU.name
        """Device that holds the buckets sent. On a GPU, a replica of the native engine receives into a copy of its
        own."""
        self._receivers: dict[str, list[tuple[Worker, HostWeights]]] = {}
        """Receiver -> its workers, each with the copy that it loads from. Several workers may hold the policy
        together."""
        self._copies: dict[str, HostWeights] = {}
        self._connections: dict[str, _TransportConnection] = {}
        self._published: dict[str, _PublishedCopy] = {}
        """Dtype -> published version: a stored version is sent once for all copies."""
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Key of a link -> lock, held while the link is opened, or while a link shared by several copies sends."""
        self._generation = 0

    async def add(self, name: str, workers: Sequence[Worker], dtype: str) -> None:
        """Add a receiver of weights in ``dtype``: one worker, or several that hold a copy of the policy together. A
        receiver of the same name is replaced.
        """
        names = await concurrently(self._copy_name(name, worker) for worker in workers)
        copies = [self._copy(f"{dtype}/{copy}", dtype) for copy in names]
        self._receivers[name] = list(zip(workers, copies, strict=True))

    async def _copy_name(self, receiver: str, worker: Worker) -> str:
        """Return the name of the copy of the weights that ``worker`` loads from: one for its machine, or its own."""
        rollout = self._config.rollout
        alone = self._device != CPU.name or not rollout.enable_dual_buffer
        if receiver != LOGP and rollout.name == "native" and alone:
            return worker.name.partition("+")[0]  # a replacement takes over the links of the one that is gone
        domain: str = await worker.call("memory_domain")
        return f"{domain}/{LOGP}" if receiver == LOGP else domain

    def _copy(self, key: str, dtype: str) -> HostWeights:
        if key not in self._copies:
            self._copies[key] = HostWeights(
                key, dtype, streamed=self._streamed, mapping_s=self._timeouts.mapping_s, on_failure=self._broke
            )
        return self._copies[key]

    def copy_of(self, name: str) -> str:
        """Return `PolicyReceiver.copy` of a receiver."""
        return ", ".join(dict.fromkeys(copy.key for _, copy in self._receivers[name]))

    def trainer_restarted(self, address: Address | None) -> None:
        """Note that the trainer has new ranks, whose store is at ``address``. They know no earlier version."""
        self._address = address
        self._connections.clear()
        self._published.clear()
        for copy in self._copies.values():
            copy.link = None
            # New ranks have no version to compute a delta from: the next one goes whole.
            copy.distrust(None)

    # ------------------------------------------------------------------------------------------ rendezvous

    async def reach(self, names: Sequence[str]) -> None:
        """Connect to the receivers, as `TrainEngine.reach` does."""
        there: dict[str, list[Worker]] = defaultdict(list)
        for name in names:
            for worker, copy in self._receivers[name]:
                there[copy.key].append(worker)
        for key, workers in there.items():
            self._copies[key].begin(workers)  # before any link: a machine's receiving worker may have changed
        await concurrently(self._connect(key, members) for key, members in self._by_link(names).items())

    def _copies_of(self, names: Sequence[str]) -> list[HostWeights]:
        return list({copy.key: copy for name in names for _, copy in self._receivers[name]}.values())

    def _by_link(self, names: Sequence[str]) -> dict[str, list[HostWeights]]:
        """Return key of a link -> its copies: one link per copy with its own stream, else one for all copies of a
        dtype.
        """
        found: dict[str, list[HostWeights]] = defaultdict(list)
        for copy in self._copies_of(names):
            found[copy.key if self._streamed and self._apart else copy.dtype].append(copy)
        return found

    async def _connect(self, key: str, copies: Sequence[HostWeights]) -> None:
        async with self._turns[key]:
            connection = self._connections.get(key)
            owners = [copy.owner for copy in copies if copy.owner is not None]
            if connection is None or (self._streamed and connection.owners != owners):
                await self._meet(key, copies, owners)
            elif not self._streamed:  # a stored version's place does not depend on who receives
                await self._open_owners(key, connection.links, [copy for copy in copies if copy.link != key])

    async def _meet(self, key: str, copies: Sequence[HostWeights], owners: Sequence[Worker]) -> None:
        """Open all ends of new links side by side, since the ends of some transports wait for each other."""
        links = self._links(copies[0].dtype, owners)
        connection = self._connections[key] = _TransportConnection(links)
        senders = zip(self._actor.workers, links, strict=False)
        await both(
            concurrently(rank.call("outbox.connect", key, link) for rank, link in senders),
            self._open_owners(key, links, copies),
        )
        connection.owners = owners  # only after both: a rendezvous that failed half-way is repeated

    async def _open_owners(self, key: str, links: Sequence[Link], copies: Sequence[HostWeights]) -> None:
        await concurrently(self._open_owner(copy.owner, links) for copy in copies if copy.owner is not None)
        for copy in copies:
            copy.link = key

    async def _open_owner(self, worker: Worker, links: Sequence[Link]) -> None:
        try:
            await worker.call("inbox.connect", links)
        except WorkerDied as death:  # the others are met without a receiver that failed
            raise UpdateFailed(f"{worker.name} died before it met the trainer: {death}") from death

    def _links(self, dtype: str, owners: Sequence[Worker]) -> list[Link]:
        """Make a link for each rank that sends a share."""
        links = []
        for rank, share in zip(self._actor.workers, self._manifests[dtype].shares(), strict=False):
            self._generation += 1  # numbered, so that an abandoned rendezvous cannot mix with the next
            link = Link(
                self._transport,
                share,
                receivers=tuple(worker.name for worker in owners),
                timeout_s=self._timeouts.transport_s,
                sender=rank.name,
                address=self._address,
                generation=self._generation,
                device=self._device,
                directory=self._directory,
            )
            links.append(link)
        return links

    # ------------------------------------------------------------------------------------------ sending

    async def send(self, version: int, names: Sequence[str]) -> SendReport:
        """Gather and send a version, as `TrainEngine.send_weights` does."""
        reports: dict[str, SendReport] = {}
        failures: list[UpdateFailed] = []
        with self._failing(self._copies_of(names)):
            for dtype, copies in self._by_link(names).items():  # one link for all copies of a dtype
                verify = self._config.param_update.verify and not reports  # the probe is the same for each
                send = Send(dtype, dtype, self._base(copies))
                try:
                    sent: Sent = await self._actor.send_weights(version, send, False, verify)
                except UpdateFailed as failure:
                    # Receivers of other dtypes wait for their sends: continue, so that one failure does not cost them
                    # the version.
                    failures.append(failure)
                    continue
                reports[dtype] = sent.report
                _tell(copies, sent)
            if failures:
                raise failures[0]
        checksums = {name: reports[self._receivers[name][0][1].dtype].checksum for name in names}
        return _together(list(reports.values()), checksums)

    async def gather(self, version: int) -> GatherReport:
        """Gather a version into the ranks' copies, as `TrainEngine.gather_weights` does."""
        report: GatherReport = await self._actor.gather_weights(version, self._config.param_update.verify)
        self._published.clear()  # stored versions are outdated
        return report

    async def send_gathered(self, version: int, names: Sequence[str]) -> SendReport:
        """Send the ranks' copies, as `TrainEngine.send_gathered` does."""
        copies = self._copies_of(names)
        with self._failing(copies):
            if self._streamed:
                by_link = self._by_link(names).items()
                sent = await concurrently(self._send_copies(version, key, of_link) for key, of_link in by_link)
            else:
                sent = [await self._publish(version, copies)]
        return _together([one.report for one in sent], dict.fromkeys(names, sent[0].report.checksum))

    async def _send_copies(self, version: int, key: str, copies: Sequence[HostWeights]) -> Sent:
        sent = await self._from_all_ranks(version, Send(copies[0].dtype, key, self._base(copies)))
        _tell(copies, sent)
        return sent

    async def _from_all_ranks(self, version: int, send: Send) -> Sent:
        ranks = zip(self._actor.workers, self._manifests[send.dtype].shares(), strict=False)
        sending = [asyncio.ensure_future(rank.call("outbox.send_gathered", version, send)) for rank, _ in ranks]
        try:
            await asyncio.wait(sending)  # all of them, also after a failure: the next version is gathered over theirs
        finally:
            for one in sending:
                failure_ignored(one).cancel()
        first, *others = [one.result() for one in sending]
        sent: Sent = first.joined(others)
        return sent

    async def _publish(self, version: int, copies: Sequence[HostWeights]) -> Sent:
        """Send a version once for all copies of a dtype, and once more, whole, for copies that cannot use the first."""
        dtype = copies[0].dtype
        async with self._turns[dtype]:
            published = self._published.get(dtype)
            first = published is None or not published.serves(copies)
            if first:
                if published is not None:
                    await asyncio.wait([published.sending])  # one sending at a time
                base = self._base(copies) if published is None else None
                sending = asyncio.create_task(self._from_all_ranks(version, Send(dtype, dtype, base)))
                published = self._published[dtype] = _PublishedCopy(base, sending)
        assert published is not None
        # Shielded: the first caller may be cancelled before it is done, and others need the result, too.
        sent: Sent = await asyncio.shield(failure_ignored(published.sending))
        for copy in copies:
            copy.trusted = True
        _tell(copies, sent)
        # A sending for several receivers counts once.
        return sent if first else replace(sent, report=replace(sent.report, send_s=0.0, nbytes=0))

    def _base(self, copies: Sequence[HostWeights]) -> int | None:
        """Return the version that all ``copies`` hold, as the base of a delta; None if no delta may be sent."""
        held = {copy.holds for copy in copies}  # {None} where none is known to hold anything
        return held.pop() if self._config.param_update.encoding == "delta" and len(held) == 1 else None

    @contextmanager
    def _failing(self, copies: Sequence[HostWeights]) -> Iterator[None]:
        """Distrust ``copies``, and fail their pending stored versions, when the block, which sends to them, fails."""
        try:
            yield
        except BaseException as failure:
            for copy in copies:
                copy.not_sent(failure)
            raise

    # ------------------------------------------------------------------------------------------ receiving

    async def stage(self, name: str, version: int) -> ReceiveReport:
        """Let a receiver stage a version, as `PolicyReceiver.stage_weights` does."""
        reports = await concurrently(copy.stage(worker, version) for worker, copy in self._receivers[name])
        if len({report.checksum for report in reports}) > 1:
            raise UpdateFailed("ranks that hold a copy of the policy together have received different weights")
        return max(reports, key=lambda report: report.recv_s)

    def _broke(self, owner: Worker) -> None:
        """Mark links of the failed ``owner`` to be reopened, if their ends depend on each other."""
        if self._streamed:
            for connection in self._connections.values():
                if owner in connection.owners:
                    connection.owners = ()


def _tell(copies: Sequence[HostWeights], sent: Sent) -> None:
    for copy in copies:
        copy.sent(sent.stored_versions)


def _together(reports: Sequence[SendReport], checksums: Mapping[str, int]) -> SendReport:
    """Combine the reports of all sends: times and bytes add up, and each receiver has its own dtype's checksum."""
    return SendReport(
        gather_s=sum(report.gather_s for report in reports),
        send_s=sum(report.send_s for report in reports),
        nbytes=sum(report.nbytes for report in reports),
        checksum=reports[0].checksum,
        checksums=checksums,
        full_nbytes=sum(report.full_nbytes or report.nbytes for report in reports),
        changed=reports[0].changed,
        probe=reports[0].probe,
    )


WeightPaths = WeightSync | WithinProcesses
"""Transfers of weights from the trainer's ranks to receivers: between processes, or within them."""
