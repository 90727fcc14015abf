"""The calls of one keeper: each goes to a replica, and to another one where that is lost.

ask ──▶ a replica that takes calls? ──yes──▶ Line ──▶ done(call, result)
             │ no: wait for `route`            └ the replica is lost: ask again
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.agents.episodes.replica_clients import CallEngine, ReplicaClient
from headway.agents.episodes.routing import Routes
from headway.data.interfaces.generation import FinishedCall, GenerateRequest, Priority, SamplingParams
from headway.data.types import FinishReason, TrajectoryId
from headway.errors import DataError, HeadwayError, WorkerDied
from headway.runtime.task_groups import concurrently


@dataclass(slots=True, eq=False)
class Affinity:
    """The replica that calls with a common prefix go to while it has free slots."""

    on: str | None = None
    """The one replica for all of these calls, whatever its load is; None for any."""
    replica: str | None = None
    """The replica chosen for the first of these calls; None before."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One call of the policy, from when it is wanted until its result is there."""

    trajectory: TrajectoryId
    input_ids: NDArray[np.int32]
    sampling: SamplingParams
    home: Affinity
    done: Callable[[PendingRequest, FinishedCall], None]
    """Called with the result, that of an aborted call too."""
    failed: Callable[[PendingRequest, HeadwayError], None]
    """Called instead where an engine does not take the call, or the one replica for it is gone."""
    priority: Priority = Priority.TRAINING
    key: int = 0
    goes_on: bool = False
    together: int = 1
    """See `headway.data.interfaces.generation.GenerateRequest`."""
    replica: str = ""
    """The replica that has the call, or had it; empty before."""
    number: int = 0
    """Number of the call at the replicas; 0 before."""


class RequestDispatcher:
    """All calls of one keeper, and its lines to the replicas. ``name``: the keeper's, under which replicas know it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lines: dict[str, ReplicaClient] = {}
        self._routes = Routes()
        self._open: dict[int, PendingRequest] = {}
        """Calls that a replica has, by number."""
        self._waiting: dict[PendingRequest, None] = {}
        """Calls that wait for a replica that takes some."""
        self._asked = 0
        self._failures: asyncio.Queue[tuple[str, HeadwayError]] = asyncio.Queue()

    # ------------------------------------------------------------------------------------- calls

    def ask(self, asked: PendingRequest) -> None:
        """Send the call to a replica, once some replica takes calls."""
        home = asked.home
        if home.on is not None:
            if home.on not in self._lines:
                asked.failed(asked, WorkerDied(f"{home.on} is gone"))
                return
            self._routes.count(home.on)
            replica = home.on
        elif self._routes.any:
            if home.replica is None:
                home.replica = self._routes.home()
            replica = self._routes.choose(home.replica)
        else:
            self._waiting[asked] = None
            return
        self._asked += 1
        asked.number, asked.replica = self._asked, replica
        self._open[asked.number] = asked
        call = GenerateRequest(
            number=asked.number,
            trajectory=asked.trajectory,
            input_ids=asked.input_ids,
            sampling=asked.sampling,
            key=asked.key,
            priority=asked.priority,
            goes_on=asked.goes_on,
            together=asked.together,
        )
        self._lines[replica].submit(call)

    def abort(self, calls: Iterable[PendingRequest]) -> list[PendingRequest]:
        """End calls as they are: what replicas have of them comes back. Returns those that no replica has: they end
        here, without a result."""
        unsent = []
        for asked in calls:
            if asked in self._waiting:
                del self._waiting[asked]
                unsent.append(asked)
            elif asked.number in self._open:
                self._lines[asked.replica].abort(asked.number)
        return unsent

    def drop(self, calls: Iterable[PendingRequest]) -> None:
        """Abort calls, and drop their results."""
        for asked in calls:
            self._waiting.pop(asked, None)
            if self._open.pop(asked.number, None) is None:
                continue
            self._routes.finished(asked.replica)
            if (line := self._lines.get(asked.replica)) is not None:
                line.abort(asked.number)

    def release(self, trajectory: TrajectoryId, replicas: Iterable[str]) -> None:
        """Tell replicas to release the context of the episode ``trajectory``, which has ended."""
        for replica in replicas:
            if (line := self._lines.get(replica)) is not None:
                line.release(trajectory)

    # ------------------------------------------------------------------------------------- replicas

    def knows(self, replica: str) -> bool:
        """Tell whether the keeper is connected to ``replica``."""
        return replica in self._lines

    def join(self, replica: CallEngine) -> None:
        """Connect to ``replica``."""
        self._routes.add(replica.name, replica.slots)
        self._lines[replica.name] = ReplicaClient(
            self._name,
            replica,
            on_finished=self._on_finished,
            on_refused=self._on_refused,
            on_failed=lambda name, error: self._failures.put_nowait((name, error)),
        )

    async def leave(self, replica: str) -> None:
        """Ask the calls of ``replica`` again of others; those that must not go elsewhere fail."""
        if (line := self._lines.pop(replica, None)) is None:
            return
        self._routes.remove(replica)
        lost = [asked for asked in self._open.values() if asked.replica == replica]
        for asked in lost:
            del self._open[asked.number]
        for asked in lost:
            self.ask(asked)
        await line.close()

    def route(self, replicas: Sequence[str]) -> None:
        """Send new calls to ``replicas`` alone."""
        self._routes.open(replicas)
        if self._routes.any:
            waiting, self._waiting = self._waiting, {}
            for asked in waiting:
                self.ask(asked)

    async def failures(self) -> AsyncGenerator[tuple[str, HeadwayError], None]:
        """Yield the name of each replica that failed, and why."""
        while True:
            yield await self._failures.get()

    async def close(self) -> None:
        """Leave all replicas."""
        lines, self._lines = self._lines, {}
        await concurrently(line.close() for line in lines.values())

    def _on_finished(self, replica: str, batch: Sequence[FinishedCall]) -> None:
        for finished in batch:
            if (asked := self._open.pop(finished.number, None)) is None:
                continue  # it was dropped
            self._routes.finished(replica)
            asked.done(asked, finished)

    def _on_refused(self, replica: str, calls: Sequence[GenerateRequest], error: DataError) -> None:
        """Fail the calls that an engine did not take: those of one message, which it takes whole or not."""
        for call in calls:
            if (asked := self._open.pop(call.number, None)) is not None:
                self._routes.finished(replica)
                asked.failed(asked, error)


def nothing_sampled() -> FinishedCall:
    """Result of a call that was aborted before any replica had it."""
    now = asyncio.get_running_loop().time()
    return FinishedCall(0, 0, [], FinishReason.ABORTED, now, now)
