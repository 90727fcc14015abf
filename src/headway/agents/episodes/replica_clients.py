"""The line from a keeper to one replica: orders in one message for each turn of the loop, finished calls in batches.

keeper ──submit, abort──▶ orders ──one message a loop turn──▶ engine
   ▲                                                            │
   └──────────── batches of what has finished since the last ───┘
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Protocol

from headway.data.interfaces.generation import FinishedCall, GenerateRequest
from headway.data.types import TrajectoryId
from headway.errors import DataError, HeadwayError, RunError, boundary
from headway.runtime.task_groups import end


class CallEngine(Protocol):
    """Part of `RolloutEngine` that `ReplicaClient` calls."""

    name: str
    slots: int

    async def submit(self, client: str, calls: Sequence[GenerateRequest]) -> None: ...

    def finished(self, client: str) -> AsyncIterator[Sequence[FinishedCall]]: ...

    async def abort(self, client: str, numbers: Sequence[int]) -> None: ...

    async def release(self, trajectories: Sequence[TrajectoryId]) -> None: ...


class ReplicaClient:
    """One keeper's end of a connection. Orders reach the engine in the order in which they were given."""

    def __init__(
        self,
        client: str,
        engine: CallEngine,
        *,
        on_finished: Callable[[str, Sequence[FinishedCall]], None],
        on_refused: Callable[[str, Sequence[GenerateRequest], DataError], None],
        on_failed: Callable[[str, HeadwayError], None],
    ) -> None:
        """
        Args:
            client: the keeper's name, under which the engine knows the calls.
            on_finished: called with the replica's name and a batch.
            on_refused: called with calls that the engine did not take, all of one message, and why.
            on_failed: called once with why the replica is of no use any more.
        """
        self.engine = engine
        self._client = client
        self._on_finished, self._on_refused, self._on_failed = on_finished, on_refused, on_failed
        self._calls: list[GenerateRequest] = []
        self._aborted: list[int] = []
        self._released: list[TrajectoryId] = []
        self._ordered = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._work(self._receive), name=f"{client} receives from {engine.name}"),
            loop.create_task(self._work(self._send), name=f"{client} asks {engine.name}"),
        ]
        self._failed = False

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
        self._failed = True
        await end(self._tasks)

    async def _send(self) -> None:
        while True:
            await self._ordered.wait()
            self._ordered.clear()
            calls, self._calls = self._calls, []
            aborted, self._aborted = self._aborted, []
            released, self._released = self._released, []
            if calls:
                await self._submit(calls)
            if aborted:
                await self.engine.abort(self._client, aborted)
            if released:
                await self.engine.release(released)

    async def _submit(self, calls: Sequence[GenerateRequest]) -> None:
        try:
            await self.engine.submit(self._client, calls)
        except DataError as error:
            self._on_refused(self.engine.name, calls, error)

    async def _receive(self) -> None:
        async for batch in self.engine.finished(self._client):
            self._on_finished(self.engine.name, batch)

    async def _work(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do ``work``, and report its failure once, whichever of the two it is."""
        try:
            with boundary(f"{self._client} at {self.engine.name}", RunError):
                await work()
        except HeadwayError as error:
            if not self._failed:
                self._failed = True
                self._on_failed(self.engine.name, error)
