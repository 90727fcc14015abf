"""Workers of a run, and the replacement of lost ones.

    find a place ─▶ kill what is left ─▶ launch ─▶ up ─▶ sees the files ─▶ build ─▶ serve ─▶ joins the pipeline

A new replica has the run's initial model, can be reached for weights, and serves nothing before it has received a
version. It gets the device of the lost one or, if that machine is lost, too, a device of another machine as soon as
there is room. An episode worker has no device, and is placed on a machine of any replica that answers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol, TypeVar

from headway.cluster.machine.worker_setup import Hardware
from headway.cluster.profiled_processes import ProfiledProcess, profiled
from headway.cluster.worker_engines import RemoteEpisodeWorker, RolloutReplica, TrainGroup
from headway.cluster.worker_group import Worker
from headway.cluster.worker_plan import ClusterPlan, WorkerSpec
from headway.config.sizing.timeouts import Timeouts
from headway.data.interfaces.episode_groups import EpisodeWorkerProtocol
from headway.data.interfaces.rollout import RolloutEngine
from headway.errors import HeadwayError, StallError
from headway.pipeline.wiring import Machinery
from headway.runtime.progress import Living
from headway.runtime.task_groups import concurrently, never


class Cluster(Protocol):
    """Cluster in which workers run."""

    separate_processes: bool
    """True if ranks are processes, which meet at a store and may be on several machines."""

    @property
    def address(self) -> str:
        """Address of the driver's machine, as other machines reach it."""

    def begin(self) -> None:
        """Begin to start the cluster in the background, if this run starts one. `connect` waits for it."""

    async def connect(self) -> str:
        """Connect to the cluster; nothing is reserved yet. Returns the device that workers use: ``cpu`` or ``cuda``."""

    async def reserve(self, plan: ClusterPlan) -> None:
        """Reserve the plan's devices until `stop`. Raises `ConfigError` for a plan that cannot run here."""

    async def find_place(self, spec: WorkerSpec, others: Sequence[int] = ()) -> int:
        """Wait for a device on a living machine, for a replacement worker. Returns the device of ``spec`` or, if its
        machine is lost, the first of ``others`` on a living machine.
        """

    def avoid(self, spec: WorkerSpec) -> None:
        """Never start the worker of ``spec`` on its current machine again."""

    def launch(self, spec: WorkerSpec) -> Worker:
        """Begin to start one worker, without waiting for it: see `Worker.up`."""

    async def died(self) -> NoReturn:
        """Wait until the cluster itself is lost, and raise `WorkerDied`, which names the cause."""

    async def stop(self) -> None:
        """Release everything, also after a failed `connect`. The workers must have been killed before."""


R = TypeVar("R")
T = TypeVar("T", bound=Living)


class StartWaits:
    """Descriptions of the answers that a start waits for.

    Example:
        >>> async def start(waits):
        ...     waiting = asyncio.ensure_future(waits.wait("rollout-0 to start", asyncio.sleep(0.01)))
        ...     await asyncio.sleep(0)
        ...     before = str(waits)
        ...     await waiting
        ...     return before, str(waits)
        >>> asyncio.run(start(StartWaits()))
        ('rollout-0 to start', 'nothing')
    """

    def __init__(self) -> None:
        self._pending: dict[str, None] = {}

    def __str__(self) -> str:
        return "; ".join(self._pending) or "nothing"

    async def wait(self, what: str, answer: Awaitable[R]) -> R:
        """Return the ``answer``, and list it as pending meanwhile. ``what``: its description."""
        self._pending[what] = None
        result = await answer
        del self._pending[what]  # not in a `finally`: messages name what failed or was cut off
        return result


class LaunchedWorkers:
    """Current workers of a run by first name: ``rollout-1+2`` is the second replacement of ``rollout-1``."""

    def __init__(self, cluster: Cluster, timeouts: Timeouts) -> None:
        self._cluster, self._timeouts = cluster, timeouts
        self.by_name: dict[str, Worker] = {}
        self._specs: dict[str, WorkerSpec] = {}
        self._launches: Counter[str] = Counter()

    def __getitem__(self, name: str) -> Worker:
        return self.by_name[name]

    def launch(self, spec: WorkerSpec) -> None:
        """Begin to start a worker, without waiting for it."""
        self._specs[spec.name] = spec
        self.by_name[spec.name] = self._cluster.launch(spec)

    async def places(self, names: Sequence[str], wait_s: float) -> dict[str, int]:
        """Return name -> device for the workers to restart, on a machine that answers: the worker's own or another with
        room. Workers without a device after ``wait_s`` seconds are left out.
        """
        # Side by side: otherwise one silent machine would use up the time for all others.
        looks = {name: asyncio.ensure_future(self._cluster.find_place(self._specs[name])) for name in names}
        if not looks:
            return {}
        try:
            await asyncio.wait(looks.values(), timeout=wait_s)
        finally:
            found = {name: look for name, look in looks.items() if look.done()}
            for look in looks.values():
                look.cancel()
        return {name: look.result() for name, look in found.items()}

    def avoid(self, name: str) -> None:
        """Never start the worker ``name`` on its current machine again."""
        self._cluster.avoid(self._specs[name.partition("+")[0]])

    async def launch_again(self, name: str, device: int, waits: StartWaits, **arguments: Any) -> Worker:
        """Begin to start a replacement of the worker ``name`` on ``device``. The old worker is killed first: if it was
        fenced off, it may still hold the device. ``arguments``: changed arguments of the role.
        """
        first = name.partition("+")[0]
        await waits.wait(f"{first} to end", self.by_name[first].kill())
        self._launches[first] += 1
        spec = self._specs[first]
        name = f"{first}+{self._launches[first]}"
        again = replace(spec, name=name, device=device, arguments=spec.arguments | arguments)
        worker = self.by_name[first] = self._cluster.launch(again)
        return worker

    async def replace(
        self,
        lost: str,
        *,
        start: Callable[[Worker, StartWaits], Awaitable[T]],
        current: list[T],
        others: Sequence[int] = (),
    ) -> T:
        """Start a replacement of ``lost``, under a new name. A replica serves nothing before it has received a version;
        an episode worker knows no replica yet.

        Args:
            start: coroutine function that brings a launched worker up, and notes what it waits for.
            current: list of current workers, in which the new one replaces the lost one.
            others: alternative devices beside which it may run, if the machine of its own device does not answer.

        Raises `StallError` if the worker is not up in time, and the errors of ``start``. It is killed then.
        """
        worker: Worker | None = None
        waits = StartWaits()
        try:
            async with asyncio.timeout(self._timeouts.start_s) as limit:
                where = f"a device for another {lost} on a machine that is alive; no other may have room for it"
                device = await waits.wait(where, self._cluster.find_place(self._specs[lost.partition("+")[0]], others))
                worker = await self.launch_again(lost, device, waits)
                started = await waits.wait(f"{worker.name} to start", start(worker, waits))
        except (TimeoutError, HeadwayError):
            if worker is not None:  # it would hold its device until the end of the run
                with suppress(HeadwayError):
                    await worker.kill()
            if not limit.expired():
                raise
            raise StallError(
                f"the worker in the place of {lost} was not up within {self._timeouts.start_limit()}: the driver "
                f"waited for {waits}"
            ) from None
        current[:] = [*(one for one in current if one.name != lost), started]  # in place: `Workers` has this list
        return started

    async def kill(self) -> None:
        """Kill all workers, even if one of them fails to end."""
        # Continue after a failure: one worker that does not end must not leave the others running.
        ends = await asyncio.gather(*(worker.kill() for worker in self.by_name.values()), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end


@dataclass(slots=True, kw_only=True)
class Workers(Machinery):
    """Workers and engines of a run. `watch` raises when the cluster or a needed worker dies; `close` ends all."""

    trainer: TrainGroup
    rollouts: list[RolloutReplica]
    """Current replicas: those of the start, with lost ones replaced."""
    episode_workers: list[RemoteEpisodeWorker]
    """Current episode workers: those of the start, with lost ones replaced."""
    ranks: Callable[[], Sequence[Worker]]
    """Function that returns the current ranks that can be restarted."""
    needed: Sequence[Worker]
    """Workers whose loss ends the run."""
    cluster: Cluster
    hardware: Mapping[str, Hardware]
    """Name of a worker -> the hardware that it computes on."""
    padded: str | None
    """Reason why the policy's rows are padded and not packed; None if they are packed."""
    undo: AsyncExitStack

    async def watch(self) -> NoReturn:
        """Wait until the cluster or a needed worker ends, even while no call is under way; raise `WorkerDied`."""
        await any_dies(self.cluster, self.needed)

    def living(self) -> list[Living]:
        """Return every worker process once, for heartbeats. A replica in a training rank's process is not listed
        separately.
        """
        replicas = self.rollouts if self.replace_replica is not None else ()
        return [
            *self._computing,
            *replicas,
            *(self.episode_workers if self.replace_episode_worker is not None else ()),
        ]

    def profiled(self, *, replicas: bool) -> list[ProfiledProcess]:
        """Return each computing process once: those of the ranks and, with ``replicas``, of the replicas' engines."""
        episode_workers = {episode_worker.name for episode_worker in self.episode_workers}
        computing = [worker for worker in self._computing if worker.name not in episode_workers]
        if replicas:
            computing += [replica.worker for replica in self.rollouts]
        return profiled(computing, separate_processes=self.cluster.separate_processes)

    @property
    def _computing(self) -> list[Worker]:
        return [*self.ranks(), *self.needed]

    async def close(self) -> None:
        """End all workers and leave the cluster. Returns when no process is left. A second call does nothing."""
        await self.undo.aclose()


async def any_dies(cluster: Cluster, workers: Iterable[Worker]) -> NoReturn:
    """Wait until the cluster or one of ``workers`` ends, or is given up, and raise `WorkerDied`."""
    await concurrently([cluster.died(), *(worker.lost() for worker in workers)])
    await never()  # not reached: a watch has raised


async def replaceable_dies(one: RolloutEngine | EpisodeWorkerProtocol) -> NoReturn:
    """Wait until a replica or an episode worker is lost, as `Worker.lost` does; raise `WorkerDied`."""
    assert isinstance(one, RolloutReplica | RemoteEpisodeWorker)
    await one.died()
