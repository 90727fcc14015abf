"""Replacement of a replica that is gone, on the same device, while the run goes on.

    find a place ─▶ kill what is left ─▶ launch ─▶ up ─▶ sees the files ─▶ build ─▶ may be reached for weights ─▶ serve
                                                                                                ─▶ `Pipeline.join`

A replacement has the model that the run began with, and serves nothing before it has received a version. Where the
machine is gone, its device is one of another machine, as soon as there is room for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from headway.cluster.engines import RolloutReplica
from headway.cluster.exchange import Exchange
from headway.cluster.plan import WorkerSpec
from headway.cluster.roles.rollout import RolloutRole
from headway.cluster.sight import Sight
from headway.cluster.worker_group import Worker, WorkerGroup
from headway.errors import HeadwayError, StallError


class Places(Protocol):
    """The methods of a `Cluster` that replacing a replica needs."""

    async def find_place(self, spec: WorkerSpec) -> None: ...

    def launch(self, spec: WorkerSpec) -> Worker: ...


Measure = Callable[[Sequence[RolloutReplica]], Awaitable[object]]
"""Coroutine function that measures how far the probe of a new replica is from the trainer's."""

Serve = Callable[[WorkerGroup], Awaitable[RolloutReplica]]


@dataclass(slots=True)
class _Place:
    """Place of a replica: its spec, its current worker, and how often it was replaced."""

    spec: WorkerSpec
    worker: Worker
    restarts: int = 0


class Replacements:
    """Replacements of one run's replicas."""

    def __init__(
        self,
        places: Places,
        sight: Sight | None,
        serve: Serve,
        exchange: Exchange,
        dtype: str,
        *,
        timeout_s: float,
    ) -> None:
        """Set up replacements. ``serve`` starts a built worker's engine; ``dtype`` is that of the served weights.

        ``sight`` is None where all workers are in one process.
        """
        self._cluster = places
        self._sight = sight
        self._serve = serve
        self._exchange = exchange
        self._dtype = dtype
        self._stack = AsyncExitStack()
        self._timeout_s = timeout_s
        self._places: dict[str, _Place] = {}

    def ends_with(self, stack: AsyncExitStack) -> None:
        """Make ``stack`` kill, when it closes, the replicas that were started as replacements."""
        stack.push_async_exit(self._stack)

    def know(self, spec: WorkerSpec, worker: Worker) -> None:
        """Register ``worker``, a replica that may have to be replaced."""
        self._places[spec.name] = _Place(spec, worker)

    async def start(self, lost: str, measure: Measure | None = None) -> RolloutReplica:
        """Start a replica in the place of ``lost``, under its own name; ``measure`` is its last step.

        Raises `StallError` if it is not up in time, and what ``measure`` raises. The new replica is killed then.
        """
        place = self._places[lost]
        place.restarts += 1
        first = place.spec.name.partition("+")[0]
        spec = replace(place.spec, name=f"{first}+{place.restarts}")
        worker: Worker | None = None
        waiting_for = "its device to be on a machine that is alive; no other may have room for it"
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                await self._cluster.find_place(place.spec)
                waiting_for = "it to start"
                await place.worker.kill()  # a replica that was fenced off may still be there, and hold the device
                place.worker = worker = self._cluster.launch(spec)
                self._stack.push_async_callback(worker.kill)
                replica = await self._start(worker)
                if measure is not None:
                    waiting_for = "it to compute the log-probs of the probe"
                    await measure([replica])
        except TimeoutError:
            await _end(worker)
            if not limit.expired():
                raise
            raise StallError(
                f"{spec.name}, which is to replace {lost}, was not up within cluster.start_timeout_s = "
                f"{self._timeout_s:g} s: the driver waited for {waiting_for}"
            ) from None
        except HeadwayError:
            await _end(worker)
            raise
        self._places[spec.name] = _Place(spec, worker, place.restarts)
        return replica

    async def _start(self, worker: Worker) -> RolloutReplica:
        await worker.up()
        if self._sight is not None:
            await self._sight.check_replica(worker)
        group = WorkerGroup(RolloutRole, [worker])
        await group.build(None)
        self._exchange.add(worker, self._dtype)
        return await self._serve(group)


async def _end(worker: Worker | None) -> None:
    """Kill ``worker``, if there is one: it did not start in full, and would hold its device to the end of the run."""
    if worker is not None:
        with suppress(HeadwayError):
            await worker.kill()
