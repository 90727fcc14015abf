"""New weights on a machine: received once and mapped by its other workers, or passed within a process.

begin ─▶ stage, asked of each worker ─┬─ the owner ─▶ receives ──────────────────────┐
                                      └─ another ───▶ waits for it ─▶ maps its memory ┴▶ staged
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headway.cluster.roles.rollout_role import WITHIN
from headway.cluster.roles.weight_roles import Send, Sent
from headway.cluster.worker_group import PartOf, Worker, WorkerGroup
from headway.config.sizing.timeouts import Timeouts
from headway.data.interfaces.weights import GatherReport, ReceiveReport, SendReport
from headway.engines.weights.protocols import Address, HostCopy, StoredVersion
from headway.errors import UpdateFailed, UpdateMissed
from headway.runtime.task_groups import failure_ignored


class HostWeights:
    """One copy of the weights, received by one worker and mapped by all other workers of the machine.

    A worker that receives in place, or cannot share memory, has a copy of its own.
    """

    def __init__(
        self, key: str, dtype: str, *, streamed: bool, mapping_s: float, on_failure: Callable[[Worker], None]
    ) -> None:
        """Create a copy without an owner.

        Args:
            key: name of the copy.
            dtype: dtype of the weights.
            streamed: True if sender and receivers run at the same time; False if receivers wait for stored versions.
            mapping_s: seconds for which workers wait for the one that receives for them.
            on_failure: function called with a worker that failed to receive.
        """
        self.key, self.dtype = key, dtype
        self._streamed = streamed
        self._mapping_s = mapping_s
        self._on_failure = on_failure
        self.owner: Worker | None = None
        """Worker that receives; None before the first `begin`."""
        self.link: str | None = None
        """Key of the link that the owner is connected to."""
        self.holds: int | None = None
        """Version that the copy holds completely; None if unknown."""
        self.trusted = True
        """True while stored versions may be used for this copy; False after a failure."""
        self._stored_versions: asyncio.Future[tuple[StoredVersion | None, ...]]
        """Stored versions of the current transfer, set by `begin`."""
        self._arrival: asyncio.Task[ReceiveReport] | None = None
        """Task that receives the current version; None until the first `stage` starts it."""

    def begin(self, workers: Sequence[Worker]) -> None:
        """Prepare for a version that ``workers`` load, one of which takes over if the owner is not among them."""
        if self._arrival is not None:
            self._arrival.cancel()  # of the previous version, if it has not ended
        self._stored_versions, self._arrival = asyncio.get_running_loop().create_future(), None
        if self.owner not in workers:
            self.owner = workers[0]
            self.holds, self.link = None, None

    def sent(self, stored_versions: tuple[StoredVersion | None, ...]) -> None:
        """Note that a version was sent, with the senders' stored versions."""
        if not self._stored_versions.done():
            self._stored_versions.set_result(stored_versions)

    def not_sent(self, failure: BaseException) -> None:
        """Note that sending failed: waits for stored versions fail, and the held version is unknown."""
        self.distrust(self.owner)
        if not self._stored_versions.done():
            self._stored_versions.set_exception(UpdateFailed(f"{self.key} got nothing: sending failed: {failure}"))
            self._stored_versions.exception()  # retrieved here: nobody may be waiting for it

    def distrust(self, owner: Worker | None) -> None:
        """Note that ``owner`` did not receive the last version: the next one is sent whole."""
        self.holds, self.trusted = None, False
        if owner is not None:
            self._on_failure(owner)

    async def stage(self, worker: Worker, version: int) -> ReceiveReport:
        """Have the owner receive, or another worker map what the owner has received."""
        assert self.owner is not None, "staging comes after `begin`"
        if self._arrival is None:  # each transfer is of one version
            self._arrival = asyncio.create_task(self._receive(self.owner, self._stored_versions, version))
        if worker is self.owner:
            return await self._arrival
        return await self._map(worker, self.owner, version, self._arrival)

    async def _receive(
        self, owner: Worker, stored_versions: asyncio.Future[tuple[StoredVersion | None, ...]], version: int
    ) -> ReceiveReport:
        try:
            # With a stream both ends work at once: the sender's stored versions come only when it has ended.
            left = () if self._streamed else await stored_versions
            report: ReceiveReport = await owner.call("stage_weights", version, left)
        except BaseException:  # also for a cancellation: the owner's version is unknown then
            self.distrust(owner)
            raise
        self.holds = version
        return report

    async def _map(
        self, worker: Worker, owner: Worker, version: int, arrival: asyncio.Task[ReceiveReport]
    ) -> ReceiveReport:
        """Let ``worker`` map the weights that ``owner`` receives. If the owner fails or is late, raises
        `UpdateMissed`, which does not blame ``worker``.
        """
        # `wait` and not `wait_for`, which would cancel the owner's receiving at the limit.
        await asyncio.wait([failure_ignored(arrival)], timeout=self._mapping_s)
        why: BaseException | str | None
        if not arrival.done():
            why = f"it did not receive that within {self._mapping_s:g} s"
        else:
            # Asked first: `exception` of a cancelled task raises.
            why = "it was left out" if arrival.cancelled() else arrival.exception()
        if why is not None:
            raise UpdateMissed(f"{worker.name} was to map the copy of version {version} that {owner.name} has: {why}")
        report = arrival.result()
        assert report.path is not None, f"{owner.name} has a copy that can be mapped"
        copy = HostCopy(version, report.path, report.checksum)
        mapped: ReceiveReport = await worker.call("stage_weights", version, copy)
        return mapped


NO_COPY = "within a process weights are handed over while training stands still, not sent from a copy"


class WithinProcesses:
    """Transfers to receivers that share a process with a training rank and get the weights from it."""

    def __init__(self, actor: WorkerGroup, timeouts: Timeouts, *, verify: bool) -> None:
        self._actor = actor
        self._receivers: dict[str, Worker] = {}
        self._dtype = ""
        self._timeouts = timeouts
        self._verify = verify

    async def add(self, name: str, workers: Sequence[Worker], dtype: str) -> None:
        """Connect a replica to the training rank in its process, at the start or after a restart of both."""
        (worker,) = workers
        assert isinstance(worker, PartOf), "it shares its process with a training rank"
        await worker.whole.call("connect_within", dtype, self._timeouts.transport_s)
        self._receivers[name], self._dtype = worker, dtype

    def trainer_restarted(self, address: Address | None) -> None:
        """Do nothing: receivers were restarted together with the trainer, and are added again."""

    async def reach(self, names: Sequence[str]) -> None:
        """Do nothing: every receiver shares a process with its sender."""

    async def send(self, version: int, names: Sequence[str]) -> SendReport:
        sent: Sent = await self._actor.send_weights(version, Send(self._dtype, WITHIN, None), True, self._verify)
        return sent.report

    async def gather(self, version: int) -> GatherReport:
        raise UpdateFailed(f"version {version}: {NO_COPY}")

    async def send_gathered(self, version: int, names: Sequence[str]) -> SendReport:
        raise UpdateFailed(f"version {version} to {', '.join(names)}: {NO_COPY}")

    def copy_of(self, name: str) -> str:
        return name

    async def stage(self, name: str, version: int) -> ReceiveReport:
        report: ReceiveReport = await self._receivers[name].call("stage_weights", version, ())
        return report
