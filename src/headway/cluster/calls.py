"""Replicas as keepers call them, and keepers as the driver does, in whichever process each of them is.

driver ──RemoteKeeper──▶ KeeperRole ▶ GroupKeeper ──ReplicaCalls──▶ a replica's engine
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from headway.cluster.worker_group import Peer, Worker
from headway.data.types import TrajectoryId
from headway.errors import HeadwayError
from headway.interfaces import Call, FinishedCall, FinishedGroup, GroupRequest

if TYPE_CHECKING:
    from headway.cluster.engines import RolloutReplica


class ReplicaCalls:
    """Calls to the engine of one replica: `headway.episodes.lines.CallEngine` over a `Peer`. Can be pickled."""

    def __init__(self, name: str, slots: int, peer: Peer) -> None:
        self.name = name
        self.slots = slots
        self._peer = peer

    async def submit(self, client: str, calls: Sequence[Call]) -> None:
        await self._peer.call("engine.submit", client, list(calls))

    async def finished(self, client: str) -> AsyncGenerator[Sequence[FinishedCall], None]:
        async with aclosing(self._peer.each("engine.finished", client)) as batches:
            async for batch in batches:
                yield batch

    async def abort(self, client: str, numbers: Sequence[int]) -> None:
        await self._peer.call("engine.abort", client, list(numbers))

    async def release(self, trajectories: Sequence[TrajectoryId]) -> None:
        await self._peer.call("engine.release", list(trajectories))


class RemoteKeeper:
    """`Keeper` over a worker that runs a `KeeperRole`. Groups' tokens are passed on unread."""

    def __init__(self, worker: Worker) -> None:
        self.name = worker.name
        self._worker = worker

    async def generate(
        self, requests: Sequence[GroupRequest], *, on: str | None = None
    ) -> AsyncGenerator[FinishedGroup, None]:
        async with aclosing(self._worker.stream("generate", list(requests), on)) as finished:
            async for group, tokens in finished:
                yield replace(group, tokens=tokens)

    async def join(self, replica: RolloutReplica) -> None:
        await self._worker.call("join", replica.calls)

    async def leave(self, replica: str) -> None:
        await self._worker.call("leave", replica)

    async def route(self, replicas: Sequence[str]) -> None:
        await self._worker.call("route", list(replicas))

    async def abort(self, numbers: Sequence[int]) -> None:
        await self._worker.call("abort", list(numbers))

    async def abort_older_than(self, version: int) -> None:
        await self._worker.call("abort_older_than", version)

    async def failures(self) -> AsyncGenerator[tuple[str, HeadwayError], None]:
        async with aclosing(self._worker.peer().each("failures")) as failures:
            async for failure in failures:
                yield failure

    async def close(self) -> None:
        await self._worker.call("leave_all")
