"""Watching the processes of replicas: a death is noticed also while nobody calls the one that died."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from headway.errors import WorkerDied
from headway.interfaces import RolloutEngine
from headway.pipeline.concurrently import Tasks
from headway.pipeline.fleet import Fleet
from headway.pipeline.receiver import Gone, Replica

Watch = Callable[[RolloutEngine], Coroutine[Any, Any, None]]
"""Runs until cancelled; raises `WorkerDied` as soon as this replica's process ends."""


class Supervision:
    """Of a fleet, from `start` to `stop`. Without a ``watch`` it does nothing."""

    def __init__(self, fleet: Fleet, watch: Watch | None) -> None:
        self._fleet = fleet
        self._watch = watch
        self._tasks: Tasks | None = None
        self._watching: list[asyncio.Task[None]] = []

    def start(self, tasks: Tasks) -> None:
        self._tasks = tasks
        for replica in self._fleet.replicas:
            self.add(replica)

    def add(self, replica: Replica) -> None:
        """A late one. Those that are there at the `start` are watched from then on; after `stop` nobody is."""
        if self._tasks is not None and self._watch is not None:
            self._watching.append(self._tasks.start(self._lose_dead(replica, self._watch)))

    def stop(self) -> None:
        self._tasks = None
        for task in self._watching:
            task.cancel()

    async def _lose_dead(self, replica: Replica, watch: Watch) -> None:
        try:
            await watch(replica.engine)
        except WorkerDied as death:
            await self._fleet.lose(Gone(replica, death))
