"""Dispatch of one episode worker's calls: each goes to a replica, and to another one where that is lost.

ask ──▶ is there a replica that takes calls? ──yes──▶ ReplicaClient ──one message a loop turn──▶ engine
   │                    │ no: wait for `route`                     └ the replica is lost: ask again
   └ the journal has the result: it is answered from there
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headway.data.interfaces.rollout import Completion, GenerateRequest
from headway.data.journal import CompletionJournal
from headway.data.types import FinishReason, TrajectoryId
from headway.errors import DataError, HeadwayError, RunError, WorkerDied, boundary
from headway.runtime.task_groups import concurrently, end


class CallEngine(Protocol):
    """Part of `RolloutEngine` that `ReplicaClient` calls."""

    name: str
    slots: int

    async def submit(self, client: str, calls: Sequence[GenerateRequest]) -> None: ...

    def finished(self, client: str) -> AsyncIterator[Sequence[Completion]]: ...

    async def abort(self, client: str, numbers: Sequence[int]) -> None: ...

    async def release(self, trajectories: Sequence[TrajectoryId]) -> None: ...


@dataclass(eq=False, repr=False)
class ReplicaClient:
    """One episode worker's end of a connection. Orders reach the engine in the order in which they were given."""

    client: str
    """The episode worker's name, under which the engine knows the calls."""
    engine: CallEngine
    on_finished: Callable[[str, Sequence[Completion]], None]
    """Called with the replica's name and a batch."""
    on_refused: Callable[[str, Sequence[GenerateRequest], DataError], None]
    """Called with calls that the engine did not take, all of one message, and why."""
    on_failed: Callable[[str, HeadwayError], None]
    """Called once with why the replica is of no use any more."""
    load: int = 0
    """Calls that are not finished."""

    def __post_init__(self) -> None:
        self._calls: list[GenerateRequest] = []
        self._aborted: list[int] = []
        self._released: list[TrajectoryId] = []
        self._ordered = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._work(self._receive), name=f"{self.client} receives from {self.engine.name}"),
            loop.create_task(self._work(self._send), name=f"{self.client} asks {self.engine.name}"),
        ]
        self._failed = False

    @property
    def has_room(self) -> bool:
        """Some slot of the replica is free."""
        return self.load < self.engine.slots

    def submit(self, call: GenerateRequest) -> None:
        """Order ``call``."""
        self._calls.append(call)
        self._ordered.set()

    def abort(self, number: int) -> None:
        """Order the end of a call. One that was not sent yet is sent all the same: its result comes back."""
        self._aborted.append(number)
        self._ordered.set()

    def release(self, trajectory: TrajectoryId) -> None:
        """Tell the engine to release the context of an episode that has ended."""
        self._released.append(trajectory)
        self._ordered.set()

    async def close(self) -> None:
        """Leave the engine, which drops the unfinished calls."""
        self._failed = True  # first: what ends by this is no failure of the replica
        await end(self._tasks)

    async def _send(self) -> None:
        while True:
            await self._ordered.wait()
            self._ordered.clear()  # before the lists are taken: what is ordered from here on sets it again
            calls, self._calls = self._calls, []
            aborted, self._aborted = self._aborted, []
            released, self._released = self._released, []
            # Before aborts: an engine ignores those of calls that it does not know, and would decode them whole.
            if calls:
                try:
                    await self.engine.submit(self.client, calls)
                except DataError as error:
                    self.on_refused(self.engine.name, calls, error)
            if aborted:
                await self.engine.abort(self.client, aborted)
            if released:
                await self.engine.release(released)

    async def _receive(self) -> None:
        async for batch in self.engine.finished(self.client):
            self.on_finished(self.engine.name, batch)

    async def _work(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do ``work``, and report its failure once, whichever of the two it is."""
        try:
            with boundary(f"{self.client} at {self.engine.name}", RunError):
                await work()
        except HeadwayError as error:
            if not self._failed:
                self._failed = True
                self.on_failed(self.engine.name, error)


@dataclass(slots=True, eq=False)
class Affinity:
    """The replica that calls with a common prefix go to while it has free slots."""

    on: str | None = None
    """The only replica that may have these calls, whatever its load is; None for any replica."""
    replica: str | None = None
    """The replica chosen for the first of these calls; None before."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One call of the policy that has no result yet."""

    request: GenerateRequest
    """The request to a replica; it gets its number when it is sent."""
    home: Affinity
    done: Callable[[PendingRequest, Completion], None]
    """Called with the result, also with that of an aborted call."""
    failed: Callable[[PendingRequest, HeadwayError], None]
    """Called instead of ``done`` where an engine refuses the call, or its only replica is gone."""
    replica: str = ""
    """The replica that has the call, or had it; empty before."""
    number: int = 0
    """Number of the call at the replicas; 0 before."""
    group: int = 0
    """Number of the episode's group, by which the journal keeps its calls."""


class RequestDispatcher:
    """All calls of one episode worker, and its lines to the replicas.

    A group's calls go to its home, the replica that was least loaded when its first call came, since they share a
    prefix there; while all slots of the home are taken, they go to a replica that has one free.
    """

    def __init__(self, name: str, journal: CompletionJournal | None = None) -> None:
        """``name``: the client's name at the replicas. ``journal``: gets each result before ``done`` is called."""
        self._name = name
        self._journal = journal
        self._lines: dict[str, ReplicaClient] = {}
        self._routed: list[str] = []
        """Replicas that take calls."""
        self._open: dict[int, PendingRequest] = {}
        """Calls that a replica has, by number."""
        self._waiting: dict[PendingRequest, None] = {}
        """Calls that wait for a replica that takes some."""
        self._asked = 0
        self._failures: asyncio.Queue[tuple[str, HeadwayError]] = asyncio.Queue()

    # ------------------------------------------------------------------------------------- calls

    def ask(self, asked: PendingRequest) -> None:
        """Send the call to a replica, once some replica takes calls, unless the journal has its result."""
        home = asked.home
        if self._journal is not None and (past := self._journal.recall(asked.group, asked.request)) is not None:
            asked.replica, completion = past
            # In the next turn of the loop, as from a replica: who asks has not finished asking.
            asyncio.get_running_loop().call_soon(asked.done, asked, completion)
            return
        if home.on is not None:
            if home.on not in self._lines:
                asked.failed(asked, WorkerDied(f"{home.on} is gone"))
                return
            line = self._lines[home.on]
        elif self._routed:
            line = self._choose(home)
        else:
            self._waiting[asked] = None
            return
        self._asked += 1
        asked.number, asked.replica = self._asked, line.engine.name
        line.load += 1
        self._open[asked.number] = asked
        of = asked.request  # taken apart by hand: `replace` costs as much as the rest of this method
        line.submit(
            GenerateRequest(
                self._asked, of.trajectory, of.input_ids, of.sampling, of.key, of.priority, of.goes_on, of.together
            )
        )

    def _choose(self, home: Affinity) -> ReplicaClient:
        own = self._lines[home.replica] if home.replica in self._routed else None
        if own is not None and own.has_room:
            return own
        lightest = min((self._lines[name] for name in self._routed), key=lambda line: line.load)
        if home.replica is None:
            home.replica = lightest.engine.name
        return lightest if own is None or lightest.has_room else own

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
            self._count_off(asked.replica)
            if (line := self._lines.get(asked.replica)) is not None:
                line.abort(asked.number)

    def release(self, trajectory: TrajectoryId, replicas: Iterable[str]) -> None:
        """Tell replicas to release the context of the episode ``trajectory``, which has ended."""
        for replica in replicas:
            if (line := self._lines.get(replica)) is not None:
                line.release(trajectory)

    def unused(self, group: int, trajectory: TrajectoryId) -> int:
        """Return how many finished calls of an episode of group number ``group`` the journal has that were not asked
        for."""
        return 0 if self._journal is None else self._journal.unused(group, trajectory)

    # ------------------------------------------------------------------------------------- replicas

    def knows(self, replica: str) -> bool:
        """Tell whether the episode worker is connected to ``replica``."""
        return replica in self._lines

    def join(self, replica: CallEngine) -> None:
        """Connect to ``replica``."""
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
        self._routed = [name for name in self._routed if name != replica]
        # All are taken out before the first is asked again: one that fails drops its group's others.
        lost = [asked for asked in self._open.values() if asked.replica == replica]
        for asked in lost:
            del self._open[asked.number]
        for asked in lost:
            self.ask(asked)
        await line.close()  # last: it waits for its tasks, and others have the calls by now

    def route(self, replicas: Sequence[str]) -> None:
        """Send new calls to ``replicas`` alone."""
        self._routed = [name for name in replicas if name in self._lines]
        if self._routed:
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

    def _count_off(self, replica: str) -> None:
        if (line := self._lines.get(replica)) is not None:
            line.load -= 1

    def _on_finished(self, replica: str, batch: Sequence[Completion]) -> None:
        for finished in batch:
            if (asked := self._open.pop(finished.number, None)) is None:
                continue  # it was dropped
            self._count_off(replica)
            if self._journal is not None:
                # Before anybody acts on it: what is done with it must be found again after a kill.
                self._journal.append(asked.group, asked.request, replica, finished)
            asked.done(asked, finished)

    def _on_refused(self, replica: str, calls: Sequence[GenerateRequest], error: DataError) -> None:
        """Fail the calls that an engine did not take: those of one message, which it takes whole or not."""
        for call in calls:
            if (asked := self._open.pop(call.number, None)) is not None:
                self._count_off(replica)
                asked.failed(asked, error)


def nothing_sampled() -> Completion:
    """Result of a call that was aborted before any replica had it."""
    now = asyncio.get_running_loop().time()
    return Completion(0, 0, [], FinishReason.ABORTED, now, now)
