"""Replacement of lost replicas and episode workers during the run.

    find a place ─▶ kill what is left ─▶ launch ─▶ up ─▶ sees the files ─▶ build ─▶ serve ─▶ joins the pipeline

A replica has the model that the run began with, may be reached for weights, and serves nothing before it has received
a version. It has the device of the one that is gone; where its machine is gone, too, one of another machine, as soon as
there is room for it. An episode worker has no device, and is beside whichever replica's is on a machine that answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from headway.cluster.remote_episode_worker import RemoteEpisodeWorker
from headway.cluster.shared_filesystem import SharedFilesystem
from headway.cluster.worker_engines import RolloutReplica
from headway.cluster.worker_group import Worker
from headway.cluster.worker_plan import WorkerSpec
from headway.config.sizing.timeouts import Timeouts
from headway.errors import HeadwayError, StallError


class Places(Protocol):
    """The methods of a `Cluster` that replacing a worker needs."""

    async def find_place(self, spec: WorkerSpec, others: Sequence[int] = ()) -> int: ...

    def launch(self, spec: WorkerSpec) -> Worker: ...


T = TypeVar("T")

Measure = Callable[[Sequence[T]], Awaitable[object]]
"""Coroutine function that measures how far the probe of a new replica is from the trainer's."""

Serve = Callable[[Worker], Awaitable[RolloutReplica]]


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
        places: Places,
        start: Callable[[Worker], Awaitable[T]],
        *,
        timeouts: Timeouts,
        others: Sequence[int] = (),
    ) -> None:
        """Set up replacements. ``start`` brings a launched worker up. ``others``: devices beside which a worker may be
        as well, where that of its own place is on no machine that answers.
        """
        self._cluster = places
        self._start = start
        self._others = others
        self._stack = AsyncExitStack()
        self._timeouts = timeouts
        self._places: dict[str, _ReplaceableWorker] = {}

    def ends_with(self, stack: AsyncExitStack) -> None:
        """Make ``stack`` kill, when it closes, the workers that were started as replacements."""
        stack.push_async_exit(self._stack)

    def know(self, spec: WorkerSpec, worker: Worker) -> None:
        """Register ``worker``, which may have to be replaced."""
        self._places[spec.name] = _ReplaceableWorker(spec, worker)

    async def start(self, lost: str, measure: Measure[T] | None = None) -> T:
        """Start a worker in the place of ``lost``, under its own name; ``measure`` is its last step.

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
                self._stack.push_async_callback(worker.kill)
                started = await self._start(worker)
                if measure is not None:
                    waiting_for = "it to compute the log-probs of the probe"
                    await measure([started])
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
        self._places[name] = _ReplaceableWorker(spec, worker, place.restarts)
        return started


def replica_start(sight: SharedFilesystem | None, serve: Serve) -> Callable[[Worker], Awaitable[RolloutReplica]]:
    """Return the start of a replica's worker. ``serve`` brings up what the worker serves. ``sight`` is None where all
    workers are in one process.
    """

    async def start(worker: Worker) -> RolloutReplica:
        await worker.up()
        if sight is not None:
            await sight.check_replica(worker)
        return await serve(worker)

    return start


def episode_worker_start(sight: SharedFilesystem | None) -> Callable[[Worker], Awaitable[RemoteEpisodeWorker]]:
    """Return the function that starts an episode worker in a process."""

    async def start(worker: Worker) -> RemoteEpisodeWorker:
        await worker.up()
        if sight is not None:
            await sight.check_episode_worker(worker)
        await worker.call("build")
        await worker.call("serve")
        return RemoteEpisodeWorker(worker)

    return start


async def _end(worker: Worker | None) -> None:
    """Kill ``worker``, if there is one: it did not start in full, and would hold its device to the end of the run."""
    if worker is not None:
        with suppress(HeadwayError):
            await worker.kill()
