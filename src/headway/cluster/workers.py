"""Workers of a run, and the replacement of lost replicas and episode workers.

    find a place ─▶ kill what is left ─▶ launch ─▶ up ─▶ sees the files ─▶ build ─▶ serve ─▶ joins the pipeline

A replica has the model that the run began with, may be reached for weights, and serves nothing before it has received
a version. It has the device of the one that is gone; where its machine is gone, too, one of another machine, as soon as
there is room for it. An episode worker has no device, and is beside whichever replica's is on a machine that answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import Generic, NoReturn, Protocol, TypeVar

from headway.cluster.machine.worker_setup import Hardware
from headway.cluster.profiled_processes import ProfiledProcess, profiled
from headway.cluster.snapshots import Snapshots
from headway.cluster.weight_sync.probe_tolerance import ProbeTolerance
from headway.cluster.worker_engines import RemoteEpisodeWorker, RolloutReplica, TrainGroup
from headway.cluster.worker_group import Worker
from headway.cluster.worker_plan import ClusterPlan, WorkerSpec
from headway.config.sizing.timeouts import Timeouts
from headway.data.interfaces.episode_groups import EpisodeWorkerProtocol
from headway.data.interfaces.rollout import RolloutEngine
from headway.data.interfaces.training import CriticEngine, LogProbEngine, ProximalEngine
from headway.data.interfaces.weights import PolicyReceiver
from headway.errors import HeadwayError, StallError
from headway.pipeline.recovery.rank_restarts import RestartableRanks
from headway.runtime.progress import Living
from headway.runtime.task_groups import concurrently


class Cluster(Protocol):
    """Cluster in which workers run."""

    separate_processes: bool
    """True where ranks are processes, which meet at a store and may be on several machines."""

    @property
    def address(self) -> str:
        """Address of the driver's machine, for the other machines."""

    async def connect(self) -> str:
        """Connect to the cluster; nothing is reserved yet. Returns the device that workers use: ``cpu`` or ``cuda``."""

    async def reserve(self, plan: ClusterPlan) -> None:
        """Reserve what the plan needs, until `stop`. Raises `ConfigError` for a plan that cannot run here."""

    async def find_place(self, spec: WorkerSpec, others: Sequence[int] = ()) -> int:
        """Wait until a device is on a living machine, for a worker that replaces another one. Returns it: that of
        ``spec`` or, while that is on none, the first of ``others`` that is.
        """

    def launch(self, spec: WorkerSpec) -> Worker:
        """Begin to start one worker, without waiting for it: see `Worker.up`."""

    async def died(self) -> NoReturn:
        """Wait until the cluster itself is lost, and raise `WorkerDied`, which names the cause."""

    async def stop(self) -> None:
        """Release everything, also after a failed `connect`. The workers must have been killed before."""


T = TypeVar("T", bound=Living)


@dataclass(slots=True)
class _ReplaceableWorker:
    """Place of a worker: its spec, its current worker, and how often it was replaced."""

    spec: WorkerSpec
    worker: Worker
    restarts: int = 0


class Replacements(Generic[T]):
    """Replacements of one run's replicas, or of its episode workers."""

    def __init__(
        self,
        cluster: Cluster,
        start: Callable[[Worker], Awaitable[T]],
        current: list[T],
        undo: AsyncExitStack,
        *,
        timeouts: Timeouts,
        others: Sequence[int] = (),
        measure: Callable[[Sequence[T]], Awaitable[object]] | None = None,
    ) -> None:
        """Set up replacements.

        Args:
            start: brings a launched worker up.
            current: the workers so far; a replacement takes the place of the lost one there.
            undo: kills, when it closes, the workers that were started as replacements.
            others: devices beside which a worker may be as well, where that of its own place is on no machine that
                answers.
            measure: measures how far the probe of a new replica is from the trainer's, as the last step of a start.
        """
        self._cluster = cluster
        self._start = start
        self.current = current
        self._others = others
        self._timeouts = timeouts
        self._measure = measure
        self._places: dict[str, _ReplaceableWorker] = {}
        undo.push_async_callback(self._kill)

    def know(self, spec: WorkerSpec, worker: Worker) -> None:
        """Register ``worker``, which may have to be replaced."""
        self._places[spec.name] = _ReplaceableWorker(spec, worker)

    async def start(self, lost: str) -> T:
        """Start a worker in the place of ``lost``, under its own name. A replica serves nothing before it has received
        a version; an episode worker knows no replica yet.

        Raises `StallError` if it is not up in time, and what ``measure`` raises. The new worker is killed then.
        """
        place = self._places[lost]
        place.restarts += 1
        first = place.spec.name.partition("+")[0]
        worker: Worker | None = None
        name = f"{first}+{place.restarts}"
        waiting_for = "its device to be on a machine that is alive; no other may have room for it"
        try:
            async with asyncio.timeout(self._timeouts.start_s) as limit:
                device = await self._cluster.find_place(place.spec, self._others)
                spec = replace(place.spec, name=name, device=device)
                waiting_for = "it to start"
                await place.worker.kill()  # one that was fenced off may still be there, and hold the device
                place.worker = worker = self._cluster.launch(spec)
                started = await self._start(worker)
                if self._measure is not None:
                    waiting_for = "it to compute the log-probs of the probe"
                    await self._measure([started])
        except TimeoutError:
            await _end(worker)
            if not limit.expired():
                raise
            raise StallError(
                f"{name}, which is to replace {lost}, was not up within {self._timeouts.start_limit()}: the "
                f"driver waited for {waiting_for}"
            ) from None
        except HeadwayError:
            await _end(worker)
            raise
        del self._places[lost]
        self._places[name] = _ReplaceableWorker(spec, worker, place.restarts)
        self.current[:] = [*(one for one in self.current if one.name != lost), started]
        return started

    async def _kill(self) -> None:
        """Kill the workers that were started as replacements."""
        await concurrently(place.worker.kill() for place in self._places.values() if place.restarts)


async def _end(worker: Worker | None) -> None:
    """Kill ``worker``, if there is one: it did not start in full, and would hold its device to the end of the run."""
    if worker is not None:
        with suppress(HeadwayError):
            await worker.kill()


@dataclass(slots=True)
class Workers:
    """Workers and engines of a run. `watch` raises when a part of it dies; `close` ends it."""

    train: TrainGroup
    rollouts: list[RolloutReplica]
    """Current replicas: those of the start, with lost ones exchanged for their replacements."""
    episode_workers: list[RemoteEpisodeWorker]
    """Current episode workers of the run's groups, as with replicas."""
    ref: LogProbEngine | None
    """Engine of the reference policy; None where the algorithm asks for none."""
    proximal: ProximalEngine | None
    """Engine that recomputes log π_prox; None where none does."""
    critic: CriticEngine | None
    """Engine of the critic; None where the algorithm asks for none."""
    receivers: Sequence[PolicyReceiver]
    """Workers that hold a copy of the policy and generate nothing."""
    on_trainer_ranks: frozenset[str]
    """Roles, of ``ref``, ``logp`` and ``critic``, that run on the trainer's ranks."""
    restartable: Mapping[str, RestartableRanks]
    """Ranks that can be started again, by role; others are among ``needed``."""
    snapshots: Snapshots | None
    """Snapshots of the trainer's ranks; None where none are made."""
    ranks: Callable[[], Sequence[Worker]]
    """Function that returns the ranks of now that can be started again."""
    needed: Sequence[Worker]
    """Workers each of which the run cannot go on without, for supervision."""
    cluster: Cluster
    timeouts: Timeouts
    """Time limits for the model's size and for what was measured at the start."""
    rounding: ProbeTolerance
    """Tolerances, in nats, by which the log-probs of each receiver may differ from the trainer's by rounding."""
    hardware: Mapping[str, Hardware]
    """Hardware that each worker computes on, by the worker's name."""
    padded: str | None
    """Reason why the policy's rows are padded and not packed; None where they are packed."""
    replicas_replaced: Replacements[RolloutReplica] | None
    """Replacements of lost replicas; None where replicas share their processes with training ranks."""
    episode_workers_replaced: Replacements[RemoteEpisodeWorker] | None
    """Replacements of lost episode workers; None where these are in the driver's process."""
    undo: AsyncExitStack

    async def watch(self) -> NoReturn:
        """Wait until the cluster or a needed worker ends, even while no call is under way; raise `WorkerDied`."""
        await any_dies(self.cluster, self.needed)

    def living(self) -> list[Living]:
        """Return every worker once, for heartbeats. A replica in the process of a training rank counts as that rank."""
        replicas = self.rollouts if self.replicas_replaced is not None else ()
        return [
            *self._computing,
            *replicas,
            *(self.episode_workers if self.episode_workers_replaced is not None else ()),
        ]

    def profiled(self, *, replicas: bool) -> list[ProfiledProcess]:
        """Return the processes that compute, once each: those of the ranks and, with ``replicas``, of their engines."""
        episode_workers = {episode_worker.name for episode_worker in self.episode_workers}
        computing = [worker for worker in self._computing if worker.name not in episode_workers]
        if replicas:
            computing += [replica.worker for replica in self.rollouts]
        return profiled(computing, separate_processes=self.cluster.separate_processes)

    @property
    def _computing(self) -> list[Worker]:
        return [*self.ranks(), *self.needed]

    async def close(self) -> None:
        """End all workers and leave the cluster; returns when no process is left. A second call does nothing."""
        await self.undo.aclose()


async def any_dies(cluster: Cluster, workers: Iterable[Worker]) -> NoReturn:
    """Wait until the cluster or one of ``workers`` ends, or is given up, and raise `WorkerDied`."""
    await concurrently([cluster.died(), *(worker.lost() for worker in workers)])
    raise AssertionError("unreachable: died() never returns")


async def replaceable_dies(one: RolloutEngine | EpisodeWorkerProtocol) -> NoReturn:
    """Wait until a replica or an episode worker is lost, as `Worker.lost` does; raise `WorkerDied`."""
    assert isinstance(one, RolloutReplica | RemoteEpisodeWorker)
    await one.died()
