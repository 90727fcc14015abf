"""Supervision of replicas and of episode workers: watches their processes, and replaces lost ones.

    watch(member) ──its process ended──▶ died ──▶ lost ──▶ start another ──▶ join

A death is noticed even if no call is open. A new replica serves once it has loaded a version: the next one, together
with the others, or the trainer's current one if no other replica is left. A new episode worker makes groups once it
knows the replicas. The run ends when the last member is lost and cannot be replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from headway.config.sizing.timeouts import Timeouts
from headway.errors import HeadwayError, RunError, WorkerDied
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.episode_workers import EpisodeWorkers
from headway.pipeline.update.replica_pool import ReplicaPool
from headway.runtime.task_groups import Tasks


class Restarts:
    """Counter of the replacements that a run may still start, for one kind of members or several."""

    def __init__(self, left: int, timeouts: Timeouts) -> None:
        self.left = left
        self.starts_until = 0.0
        """Time on the event clock by which the newest start must have ended."""
        self.timeouts = timeouts

    def begin(self) -> None:
        """Count a start, which must end within `Timeouts.start_s`."""
        self.left -= 1
        self.starts_until = now() + self.timeouts.start_s


Watch = Callable[[Any], Coroutine[Any, Any, None]]
"""Coroutine function that runs until cancelled, and raises `WorkerDied` when the given member's process ends."""

Replace = Callable[[str], Coroutine[Any, Any, Any]]
"""Coroutine function that starts a replacement of the member with the given name. Raises errors of `headway.errors`."""


@dataclass(eq=False)
class Supervision:
    """Supervisor of members (replicas or episode workers), from `start` to `stop`.

    consumes        the deaths that ``watch`` tells of; names of members that are lost
    waits for       a member's process to end; a replacement to be up
    is unblocked by the operating system or the cluster, which tell of a process's end; `stop`
    produces        losses and joins of the members
    """

    state: RunState
    members: ReplicaPool | EpisodeWorkers
    watch: Watch | None
    """Function that watches a member's process; None if members are not watched."""
    replace: Replace | None
    """Function that replaces a lost member within `Timeouts.start_s`, called while ``restarts`` are left. None: lost
    members are not replaced."""
    restarts: Restarts

    _replacing: int = field(default=0, init=False)
    """Number of lost members whose replacements are being started."""
    _tasks: Tasks | None = field(default=None, init=False)
    _started: dict[asyncio.Task[Any], None] = field(default_factory=dict, init=False)

    def start(self, tasks: Tasks) -> None:
        self._tasks = tasks
        for member in self.members.present:
            self._add(member)
        tasks.start(self._replace_lost(tasks), among=self._started)

    def join(self, newcomer: Any) -> None:
        """Add and watch a late member. Raises `ValueError` if its name was used before."""
        self.members.join(newcomer)
        self._add(newcomer)

    def stop(self) -> None:
        """Stop watching and replacing members."""
        self._tasks = None
        for task in self._started:
            task.cancel()

    def _add(self, member: Any) -> None:
        """Watch ``member``. Before `start`, do nothing: `start` watches all members."""
        if self._tasks is not None and self.watch is not None:
            self._tasks.start(self._lose_dead(member, self.watch), among=self._started)

    async def _lose_dead(self, member: Any, watch: Watch) -> None:
        try:
            await watch(member)
        except WorkerDied as death:
            await self.members.died(member, death)

    async def _replace_lost(self, tasks: Tasks) -> None:
        while (one := await self.members.lost.get()) is not None:
            lost, why = one
            if self.replace is None:
                self._go_on_without(lost, why, f"no {self.members.kind} can be started in its place")
            else:
                # Counted before the task's first step: another loss handled in between must not end the run.
                self._replacing += 1
                tasks.start(self._replace_one(lost, why, self.replace), among=self._started)

    async def _replace_one(self, lost: str, reason: RunError, replace: Replace) -> None:
        """Start a replacement for ``lost``. A failure is reported, and does not end the run by itself."""
        why = ""
        while self.restarts.left > 0:
            self.restarts.begin()
            if not self.members.present:
                self._warn(
                    lost,
                    f"it was the last {self.members.kind}, and the run waits for another one to start in its place, "
                    f"for {self.restarts.timeouts.start_limit()} at most",
                )
            try:
                newcomer = await replace(lost)
            except HeadwayError as failure:
                why = f"no {self.members.kind} could be started in its place: {failure}"
                self._warn(lost, why)
                continue
            self._replacing -= 1
            self.join(newcomer)
            self._warn(lost, f"{newcomer.name} takes its place, and {self.members.then}")
            return
        used_up = f"no further {self.members.kind} is started in its place: cluster.max_replica_restarts is used up"
        self._warn(lost, used_up)
        self._replacing -= 1
        self._go_on_without(lost, reason, f"{why}; {used_up}" if why else used_up)

    def _go_on_without(self, lost: str, reason: RunError, why: str) -> None:
        """Continue with members that are left or being started. Raises the error of the loss if there are none."""
        # A loss still queued in `lost` may get a replacement.
        if not (self.members.present or self._replacing or len(self.members.lost)):
            raise type(reason)(
                f"{reason}. It was the last {self.members.kind}, without which no group is made, and {why}"
            ) from reason

    def _warn(self, lost: str, what: str) -> None:
        self.state.note(f"{lost} is gone; {what}")
