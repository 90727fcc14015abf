"""Replicas as episode workers call them, in whichever processes the two are."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from headway.cluster.worker_group import Peer
from headway.data.interfaces.rollout import FinishedCall, GenerateRequest
from headway.data.types import TrajectoryId

BETWEEN_BATCHES_S = 0.01
"""Least seconds between two batches: an engine finishes calls in every step, and a process that wakes up for each of
them takes cores from the next step."""


class ReplicaCalls:
    """Calls to the engine of one replica: `headway.agents.episodes.request_dispatcher.CallEngine` over a `Peer`. Can be
    pickled."""

    def __init__(self, name: str, slots: int, peer: Peer) -> None:
        self.name = name
        self.slots = slots
        self._peer = peer

    async def submit(self, client: str, calls: Sequence[GenerateRequest]) -> None:
        await self._peer.call("engine.submit", client, list(calls))

    async def finished(self, client: str) -> AsyncGenerator[Sequence[FinishedCall], None]:
        async with aclosing(self._peer.each("engine.finished", client, apart_s=BETWEEN_BATCHES_S)) as batches:
            async for batch in batches:
                yield batch

    async def abort(self, client: str, numbers: Sequence[int]) -> None:
        await self._peer.call("engine.abort", client, list(numbers))

    async def release(self, trajectories: Sequence[TrajectoryId]) -> None:
        await self._peer.call("engine.release", list(trajectories))
