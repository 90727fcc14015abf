"""Keepers as the driver calls them, where they have a process of their own.

driver ──RemoteKeeper──▶ KeeperRole ▶ GroupKeeper ──ReplicaCalls──▶ a replica's engine
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from headway.cluster.engines import RolloutReplica
from headway.cluster.worker_group import Worker
from headway.errors import HeadwayError
from headway.interfaces import FinishedGroup, GroupRequest, RolloutEngine


class RemoteKeeper:
    """`Keeper` over a worker that runs a `KeeperRole`. Groups' tokens are passed on unread."""

    def __init__(self, worker: Worker) -> None:
        self.name = worker.name
        self._worker = worker
        self.heartbeat = worker.heartbeat
        self.died = worker.lost  # one on a silent machine is as good as dead; another one goes on

    async def generate(
        self, requests: Sequence[GroupRequest], *, on: str | None = None
    ) -> AsyncGenerator[FinishedGroup, None]:
        async with aclosing(self._worker.stream("generate", list(requests), on)) as finished:
            async for group, tokens in finished:
                yield replace(group, tokens=tokens)

    async def join(self, replica: RolloutEngine) -> None:
        assert isinstance(replica, RolloutReplica), "another process can call replicas of the cluster alone"
        await self._worker.call("join", replica.calls)

    async def leave(self, replica: str) -> None:
        await self._worker.call("leave", replica)

    async def route(self, replicas: Sequence[str], *, halted: bool = False) -> None:
        await self._worker.call("route", list(replicas), halted)

    async def hold(self) -> None:
        await self._worker.call("hold")

    async def go_on(self) -> None:
        await self._worker.call("go_on")

    async def abort_older_than(self, version: int) -> None:
        await self._worker.call("abort_older_than", version)

    async def answer(self) -> None:
        await self._worker.heartbeat()

    async def failures(self) -> AsyncGenerator[tuple[str, HeadwayError], None]:
        async with aclosing(self._worker.peer().each("failures")) as failures:
            async for failure in failures:
                yield failure

    async def close(self) -> None:
        await self._worker.call("leave_all")
