"""A replica in the place of one that is gone, on the same device, while the run goes on.

    kill what is left ─▶ launch ─▶ up ─▶ build ─▶ may be reached for weights ─▶ serve ─▶ `Pipeline.join`

It has the model that the run began with, and serves nothing before it has received a version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from headway.cluster.engines import RolloutReplica
from headway.cluster.exchange import Exchange
from headway.cluster.plan import WorkerSpec
from headway.cluster.roles.rollout import RolloutRole
from headway.cluster.worker_group import Worker, WorkerGroup
from headway.errors import StallError

Launch = Callable[[WorkerSpec], Worker]
Serve = Callable[[WorkerGroup], Awaitable[RolloutReplica]]


@dataclass(slots=True)
class _Place:
    """A device's replica, as it is now."""

    spec: WorkerSpec
    worker: Worker
    restarts: int = 0


class Replacements:
    """Of one run."""

    def __init__(
        self,
        launch: Launch,
        serve: Serve,
        exchange: Exchange,
        dtype: str,
        *,
        timeout_s: float,
    ) -> None:
        """``serve`` starts a built worker's engine; ``dtype`` is that of the served weights."""
        self._launch = launch
        self._serve = serve
        self._exchange = exchange
        self._dtype = dtype
        self._stack = AsyncExitStack()
        self._timeout_s = timeout_s
        self._places: dict[str, _Place] = {}

    def ends_with(self, stack: AsyncExitStack) -> None:
        """Whoever is started here is killed when ``stack`` closes."""
        stack.push_async_exit(self._stack)

    def know(self, spec: WorkerSpec, worker: Worker) -> None:
        """``worker``, a replica, may have to be replaced."""
        self._places[spec.name] = _Place(spec, worker)

    async def start(self, lost: str) -> RolloutReplica:
        """A replica in the place of ``lost``, under a name of its own. Raises `StallError` when it does not come up."""
        place = self._places[lost]
        await place.worker.kill()  # one that was fenced off may still be there, and hold the device
        place.restarts += 1
        first = place.spec.name.partition("+")[0]
        spec = replace(place.spec, name=f"{first}+{place.restarts}")
        place.worker = worker = self._launch(spec)
        self._stack.push_async_callback(worker.kill)
        try:
            async with asyncio.timeout(self._timeout_s):
                replica = await self._start(worker)
        except TimeoutError:
            raise StallError(
                f"{spec.name}, which is to replace {lost}, was not up within cluster.start_timeout_s = "
                f"{self._timeout_s:g} s"
            ) from None
        self._places[spec.name] = _Place(spec, worker, place.restarts)
        return replica

    async def _start(self, worker: Worker) -> RolloutReplica:
        await worker.up()
        group = WorkerGroup(RolloutRole, [worker])
        await group.build(None)
        self._exchange.add(worker, self._dtype)
        return await self._serve(group)
