"""Dispatch of an episode worker's requests to replicas. The requests of a lost replica go to others.

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
    """Connection of one episode worker to a replica. Orders reach the engine in the order in which they were given."""

    client: str
    """Name of the episode worker, under which the engine knows the calls."""
    engine: CallEngine
    on_finished: Callable[[str, Sequence[Completion]], None]
    """Called with the replica's name and a batch of results."""
    on_refused: Callable[[str, Sequence[GenerateRequest], DataError], None]
    """Called with all calls of a message that the engine refused, and the reason."""
    on_failed: Callable[[str, HeadwayError], None]
    """Called once, with the reason, when the replica has failed."""
    load: int = 0
    """Number of unfinished calls."""

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
        """True while a slot of the replica is free."""
        return self.load < self.engine.slots

    def submit(self, call: GenerateRequest) -> None:
        """Order ``call``."""
        self._calls.append(call)
        self._ordered.set()

    def abort(self, number: int) -> None:
        """Order the end of a call. An unsent call is still sent, so that its result comes back."""
        self._aborted.append(number)
        self._ordered.set()

    def release(self, trajectory: TrajectoryId) -> None:
        """Tell the engine to release the context of an episode that has ended."""
        self._released.append(trajectory)
        self._ordered.set()

    async def close(self) -> None:
        """Leave the engine, which drops the unfinished calls."""
        self._failed = True  # first: errors from now on are no failure of the replica
        await end(self._tasks)

    async def _send(self) -> None:
        while True:
            await self._ordered.wait()
            self._ordered.clear()  # before the lists are taken: later orders set it again
            calls, self._calls = self._calls, []
            aborted, self._aborted = self._aborted, []
            released, self._released = self._released, []
            # Before aborts: an engine ignores aborts of unknown calls, and would decode those calls to their ends.
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
        """Do ``work``, and report a failure once for sending and receiving together."""
        try:
            with boundary(f"{self.client} at {self.engine.name}", RunError):
                await work()
        except HeadwayError as error:
            if not self._failed:
                self._failed = True
                self.on_failed(self.engine.name, error)


@dataclass(slots=True, eq=False)
class Affinity:
    """Replica that calls with a common prefix go to while it has free slots."""

    on: str | None = None
    """The only replica that may have these calls; None for any replica."""
    replica: str | None = None
    """The replica chosen for the first of these calls; None before."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One call of the policy that has no result yet."""

    request: GenerateRequest
    """The request to a replica; it is numbered when it is sent."""
    affinity: Affinity
    done: Callable[[PendingRequest, Completion], None]
    """Called with the result, also that of an aborted call."""
    failed: Callable[[PendingRequest, HeadwayError], None]
    """Called instead of ``done`` if an engine refuses the call, or its only replica is gone."""
    replica: str = ""
    """Replica that has or had the call; empty before."""
    number: int = 0
    """Number of the call at the replicas; 0 before it is sent."""
    group: int = 0
    """Number of the episode's group, under which the journal keeps the call."""


class RequestDispatcher:
    """Dispatcher of one episode worker's calls, with a client for each connected replica.

    A group's calls share a prefix, so they go to one replica (`Affinity`): the least loaded one when the first call
    came. While all of its slots are taken, they go to a replica with a free one.
    """

    def __init__(self, name: str, journal: CompletionJournal | None = None) -> None:
        """``name``: the client's name at the replicas. ``journal``: gets each result before ``done`` is called."""
        self._name = name
        self._journal = journal
        self._clients: dict[str, ReplicaClient] = {}
        self._routed: list[str] = []
        """Replicas that take calls."""
        self._open: dict[int, PendingRequest] = {}
        """Number → call that a replica has."""
        self._waiting: dict[PendingRequest, None] = {}
        """Calls that wait for a replica."""
        self._asked = 0
        self._failures: asyncio.Queue[tuple[str, HeadwayError]] = asyncio.Queue()

    # ------------------------------------------------------------------------------------- calls

    def ask(self, pending: PendingRequest) -> None:
        """Send the call once a replica takes calls, unless the journal has its result."""
        affinity = pending.affinity
        if self._journal is not None and (past := self._journal.recall(pending.group, pending.request)) is not None:
            pending.replica, completion = past
            # In the next turn of the loop, as from a replica: the caller has not finished asking.
            asyncio.get_running_loop().call_soon(pending.done, pending, completion)
            return
        if affinity.on is not None:
            if affinity.on not in self._clients:
                pending.failed(pending, WorkerDied(f"{affinity.on} is gone"))
                return
            client = self._clients[affinity.on]
        elif self._routed:
            client = self._choose(affinity)
        else:
            self._waiting[pending] = None
            return
        self._asked += 1
        pending.number, pending.replica = self._asked, client.engine.name
        client.load += 1
        self._open[pending.number] = pending
        of = pending.request  # copied by hand: `replace` costs as much as the rest of this method
        client.submit(
            GenerateRequest(
                self._asked, of.trajectory, of.input_ids, of.sampling, of.key, of.priority, of.goes_on, of.together
            )
        )

    def _choose(self, affinity: Affinity) -> ReplicaClient:
        own = self._clients[affinity.replica] if affinity.replica in self._routed else None
        if own is not None and own.has_room:
            return own
        lightest = min((self._clients[name] for name in self._routed), key=lambda client: client.load)
        if affinity.replica is None:
            affinity.replica = lightest.engine.name
        return lightest if own is None or lightest.has_room else own

    def abort(self, calls: Iterable[PendingRequest]) -> list[PendingRequest]:
        """End calls as they are; replicas return partial results. Returns the calls that no replica has: they end here,
        without a result.
        """
        unsent = []
        for pending in calls:
            if pending in self._waiting:
                del self._waiting[pending]
                unsent.append(pending)
            elif pending.number in self._open:
                self._clients[pending.replica].abort(pending.number)
        return unsent

    def drop(self, calls: Iterable[PendingRequest]) -> None:
        """Abort calls, and drop their results."""
        for pending in calls:
            self._waiting.pop(pending, None)
            if self._open.pop(pending.number, None) is None:
                continue
            self._count_off(pending.replica)
            if (client := self._clients.get(pending.replica)) is not None:
                client.abort(pending.number)

    def release(self, trajectory: TrajectoryId, replicas: Iterable[str]) -> None:
        """Tell replicas to release the context of the episode ``trajectory``, which has ended."""
        for replica in replicas:
            if (client := self._clients.get(replica)) is not None:
                client.release(trajectory)

    def unused(self, group: int, trajectory: TrajectoryId) -> int:
        """Return the number of an episode's finished calls in the journal that nothing has asked for. ``group``: number
        of its group.
        """
        return 0 if self._journal is None else self._journal.unused(group, trajectory)

    # ------------------------------------------------------------------------------------- replicas

    def knows(self, replica: str) -> bool:
        """Tell whether the episode worker is connected to ``replica``."""
        return replica in self._clients

    def join(self, replica: CallEngine) -> None:
        """Connect to ``replica``."""
        self._clients[replica.name] = ReplicaClient(
            self._name,
            replica,
            on_finished=self._on_finished,
            on_refused=self._on_refused,
            on_failed=lambda name, error: self._failures.put_nowait((name, error)),
        )

    async def leave(self, replica: str) -> None:
        """Send the calls of ``replica`` to others; calls that are bound to it fail."""
        if (client := self._clients.pop(replica, None)) is None:
            return
        self._routed = [name for name in self._routed if name != replica]
        # All are removed before the first is asked again: a failing call drops others of its group.
        lost = [pending for pending in self._open.values() if pending.replica == replica]
        for pending in lost:
            del self._open[pending.number]
        for pending in lost:
            self.ask(pending)
        await client.close()  # last: it waits for its tasks, and others have the calls by now

    def route(self, replicas: Sequence[str]) -> None:
        """Send new calls only to ``replicas``."""
        self._routed = [name for name in replicas if name in self._clients]
        if self._routed:
            waiting, self._waiting = self._waiting, {}
            for pending in waiting:
                self.ask(pending)

    async def failures(self) -> AsyncGenerator[tuple[str, HeadwayError], None]:
        """Yield the name of each replica that failed, and why."""
        while True:
            yield await self._failures.get()

    async def close(self) -> None:
        """Leave all replicas."""
        clients, self._clients = self._clients, {}
        await concurrently(client.close() for client in clients.values())

    def _count_off(self, replica: str) -> None:
        if (client := self._clients.get(replica)) is not None:
            client.load -= 1

    def _on_finished(self, replica: str, batch: Sequence[Completion]) -> None:
        for finished in batch:
            if (pending := self._open.pop(finished.number, None)) is None:
                continue  # it was dropped
            self._count_off(replica)
            if self._journal is not None:
                # Before anything acts on the result: it must be found again after a kill.
                self._journal.append(pending.group, pending.request, replica, finished)
            pending.done(pending, finished)

    def _on_refused(self, replica: str, calls: Sequence[GenerateRequest], error: DataError) -> None:
        """Fail all calls of a message that an engine refused: it takes a message completely or not at all."""
        for call in calls:
            if (pending := self._open.pop(call.number, None)) is not None:
                self._count_off(replica)
                pending.failed(pending, error)


def nothing_sampled() -> Completion:
    """Return the result of a call that was aborted before any replica had it."""
    now = asyncio.get_running_loop().time()
    return Completion(0, 0, [], FinishReason.ABORTED, now, now)
