"""Watching the processes of replicas, and putting others in the place of those that are gone.

A death is noticed also while nobody calls the one that died. A replacement joins as any late replica does: it gets the
next version with the others, and serves from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from headway.errors import HeadwayError, WorkerDied
from headway.events import Note
from headway.interfaces import RolloutEngine
from headway.pipeline.concurrently import Tasks
from headway.pipeline.fleet import Fleet
from headway.pipeline.receiver import Gone, Replica
from headway.pipeline.state import RunState, now

Watch = Callable[[RolloutEngine], Coroutine[Any, Any, None]]
"""Runs until cancelled; raises `WorkerDied` as soon as this replica's process ends."""


@dataclass(slots=True)
class Replacing:
    """How replicas are replaced, and how often that is still done."""

    state: RunState
    start: Callable[[str], Coroutine[Any, Any, RolloutEngine]]
    join: Callable[[RolloutEngine], None]
    left: int
    """Restarts."""

    async def replace(self, lost: str) -> None:
        """Start a replica in the place of ``lost``, and let it join. A failure is told, and ends nothing."""
        while self.left > 0:
            self.left -= 1
            try:
                replica = await self.start(lost)
            except HeadwayError as failure:
                self._tell(f"no replica could be started in its place: {failure}", lost)
                continue
            self.join(replica)
            self._tell(f"{replica.name} takes its place, and serves from the next version on", lost)
            return
        self._tell("no further replica is started in its place: cluster.max_replica_restarts is used up", lost)

    def _tell(self, what: str, lost: str) -> None:
        self.state.emit(Note(time=now(), level="warning", text=f"{lost} is gone; {what}"))


class Supervision:
    """Of a fleet, from `start` to `stop`. Without a ``watch`` it does nothing."""

    def __init__(self, fleet: Fleet, watch: Watch | None) -> None:
        self._fleet = fleet
        self._watch = watch
        self._tasks: Tasks | None = None
        self._watching: list[asyncio.Task[None]] = []
        self.replacing: Replacing | None = None

    def start(self, tasks: Tasks) -> None:
        self._tasks = tasks
        for replica in self._fleet.replicas:
            self.add(replica)

    def add(self, replica: Replica) -> None:
        """A late one. Those that are there at the `start` are watched from then on; after `stop` nobody is."""
        if self._tasks is not None and self._watch is not None:
            self._watching.append(self._tasks.start(self._lose_dead(replica, self._watch)))

    def replace(self, lost: str) -> None:
        """Begin to replace a replica that is gone, if that is done at all and the run is not ending."""
        if self._tasks is not None and self.replacing is not None:
            self._watching.append(self._tasks.start(self.replacing.replace(lost)))

    def stop(self) -> None:
        self._tasks = None
        for task in self._watching:
            task.cancel()

    async def _lose_dead(self, replica: Replica, watch: Watch) -> None:
        try:
            await watch(replica.engine)
        except WorkerDied as death:
            await self._fleet.lose(Gone(replica, death))
