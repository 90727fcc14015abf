"""Supervision of replicas: watches their processes, and puts others in the place of those that are gone.

    watch(replica) ──its process ended──▶ Fleet.lose ──▶ Fleet.lost ──▶ start another ──▶ join

A death is noticed also while nobody calls the one that died. A replacement joins as any late replica does: it gets the
next version with the others, and serves from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from headway.concurrently import Tasks
from headway.errors import HeadwayError, WorkerDied
from headway.events import Note
from headway.interfaces import RolloutEngine
from headway.pipeline.fleet import Fleet
from headway.pipeline.receiver import Gone, Replica
from headway.pipeline.state import RunState, now

Watch = Callable[[RolloutEngine], Coroutine[Any, Any, None]]
"""Coroutine function that runs until cancelled, and raises `WorkerDied` as soon as the given replica's process ends."""

Replace = Callable[[str], Coroutine[Any, Any, RolloutEngine]]
"""Coroutine function that starts a replica in the place of the given one. Raises the errors of `headway.errors`."""


class Supervision:
    """Supervises a fleet from `start` to `stop`.

    consumes        the deaths that ``watch`` tells of; names of replicas that the fleet lost
    waits for       a replica's process to end; a replacement to be up
    is unblocked by the operating system or the cluster, which tell of a process's end; `stop`
    produces        losses and joins of the fleet
    """

    def __init__(
        self, state: RunState, fleet: Fleet, watch: Watch | None, replace: Replace | None, max_restarts: int
    ) -> None:
        """Set up supervision. Without ``watch`` no replica is watched; with ``replace`` lost ones are replaced,
        ``max_restarts`` times in the run.
        """
        self._state = state
        self._fleet = fleet
        self._watch = watch
        self._replace = replace
        self._restarts_left = max_restarts
        self._tasks: Tasks | None = None
        self._started: list[asyncio.Task[None]] = []

    def start(self, tasks: Tasks) -> None:
        self._tasks = tasks
        for replica in self._fleet.replicas:
            self._add(replica)
        if self._replace is not None:
            self._started.append(tasks.start(self._replace_lost(tasks, self._replace)))

    def join(self, engine: RolloutEngine) -> None:
        """Let a late replica join the fleet, and watch it. Raises `ValueError` when its name was taken before."""
        self._add(self._fleet.join(engine))

    def stop(self) -> None:
        """Stop watching and replacing replicas."""
        self._tasks = None
        for task in self._started:
            task.cancel()

    def _add(self, replica: Replica) -> None:
        """Watch ``replica``, unless supervision has not started: `start` does it then."""
        if self._tasks is not None and self._watch is not None:
            self._started.append(self._tasks.start(self._lose_dead(replica, self._watch)))

    async def _lose_dead(self, replica: Replica, watch: Watch) -> None:
        try:
            await watch(replica.engine)
        except WorkerDied as death:
            await self._fleet.lose(Gone(replica, death))

    async def _replace_lost(self, tasks: Tasks, replace: Replace) -> None:
        while (lost := await self._fleet.lost.get()) is not None:
            self._started.append(tasks.start(self._replace_one(lost, replace)))

    async def _replace_one(self, lost: str, replace: Replace) -> None:
        """Start a replica in the place of ``lost``. A failure is reported, and does not end the run."""
        while self._restarts_left > 0:
            self._restarts_left -= 1
            try:
                replica = await replace(lost)
            except HeadwayError as failure:
                self._warn(lost, f"no replica could be started in its place: {failure}")
                continue
            self.join(replica)
            self._warn(lost, f"{replica.name} takes its place, and serves from the next version on")
            return
        self._warn(lost, "no further replica is started in its place: cluster.max_replica_restarts is used up")

    def _warn(self, lost: str, what: str) -> None:
        self._state.emit(Note(time=now(), level="warning", text=f"{lost} is gone; {what}"))
