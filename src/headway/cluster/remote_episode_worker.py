"""Episode workers as the driver calls them, where they have a process of their own.

driver ──RemoteEpisodeWorker──▶ EpisodeWorkerRole ▶ EpisodeWorker ──ReplicaCalls──▶ a replica's engine
  └ a group, its tokens behind a handle ◀── TokenFiles ┘
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from weakref import finalize

from headway.cluster.machine.token_files import TokenFile
from headway.cluster.worker_engines import RolloutReplica
from headway.cluster.worker_group import Worker
from headway.data.interfaces.episode_groups import FinishedGroup, GroupRequest
from headway.data.interfaces.rollout import RolloutEngine
from headway.errors import HeadwayError


class RemoteEpisodeWorker:
    """`EpisodeWorkerProtocol` over a worker that runs an `EpisodeWorkerRole`. Groups' tokens are passed on unread."""

    def __init__(self, worker: Worker) -> None:
        self.name = worker.name
        self._worker = worker
        self._peer = worker.peer()
        self._forgotten: list[TokenFile] = []
        """Files on another machine of groups that nobody in this process knows any more."""
        self.heartbeat = worker.heartbeat
        self.died = worker.lost  # one on a silent machine is as good as dead; another one goes on

    async def generate(
        self, requests: Sequence[GroupRequest], *, on: str | None = None
    ) -> AsyncGenerator[FinishedGroup, None]:
        forgotten, self._forgotten = self._forgotten, []
        async with aclosing(self._peer.each("generate", list(requests), on, forgotten)) as finished:
            async for group in finished:
                if isinstance(group.tokens, TokenFile) and group.tokens.data is None:
                    copy = TokenFile(group.tokens.host, group.tokens.path)  # what is forgotten must not refer to itself
                    finalize(group.tokens, self._forget, copy).atexit = False
                yield group

    def _forget(self, file: TokenFile) -> None:
        """Remove ``file``, or have its episode worker do so where that is on another machine."""
        try:
            os.unlink(file.path)  # noqa: PTH108 - for each group: a Path takes longer to make than the file to remove
        except OSError:
            self._forgotten.append(file)

    async def join(self, replica: RolloutEngine) -> None:
        assert isinstance(replica, RolloutReplica), "another process can call replicas of the cluster alone"
        await self._peer.call("join", replica.calls)

    async def leave(self, replica: str) -> None:
        await self._peer.call("leave", replica)

    async def route(self, replicas: Sequence[str], *, halted: bool = False) -> None:
        await self._peer.call("route", list(replicas), halted)

    async def hold(self) -> None:
        await self._peer.call("hold")

    async def go_on(self) -> None:
        await self._peer.call("go_on")

    async def abort_older_than(self, version: int) -> None:
        await self._peer.call("abort_older_than", version)

    async def answer(self) -> None:
        await self._peer.call("answer")

    async def failures(self) -> AsyncGenerator[tuple[str, HeadwayError], None]:
        async with aclosing(self._peer.each("failures")) as failures:
            async for failure in failures:
                yield failure

    async def close(self) -> None:
        await self._peer.call("leave_all")
        self._peer.close()
