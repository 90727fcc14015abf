"""A worker on Ray, as another process calls it often. Ray tells its address, and why it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray.exceptions import RayError, RayTaskError

from headway.cluster.calls.worker_connections import CallFailed, ConnectionEnded, WorkerConnection, connected
from headway.cluster.on_ray.ray_deaths import death
from headway.errors import HeadwayError, RunError, WorkerDied, said_by


class RayPeer:
    """`headway.cluster.worker_group.Peer` over the handle of an actor. Can be pickled, without its connection.

    A connection that has ended stays so: whoever called the worker reports it as lost, and another one takes its place.
    """

    def __init__(self, name: str, pid: int | None, log: str, actor: Any) -> None:
        """``log``: path of the worker's log, for messages."""
        self.name = name
        self._pid = pid
        self._log = log
        self._actor = actor
        self._connection: WorkerConnection | None = None
        self._connecting = asyncio.Lock()

    def __reduce__(self) -> tuple[type[RayPeer], tuple[Any, ...]]:
        return RayPeer, (self.name, self._pid, self._log, self._actor)

    async def call(self, method: str, *args: Any) -> Any:
        try:
            return await (await self._connected(method)).call(method, *args)
        except (ConnectionEnded, CallFailed) as error:
            raise await self._translated(method, error) from error

    async def each(self, method: str, *args: Any, apart_s: float = 0.0) -> AsyncGenerator[Any, None]:
        try:
            async with aclosing((await self._connected(method)).each(method, *args, apart_s=apart_s)) as items:
                async for item in items:
                    yield item
        except (ConnectionEnded, CallFailed) as error:
            raise await self._translated(method, error) from error

    def close(self) -> None:
        """Close the connection. Open calls fail as if the worker were gone."""
        if self._connection is not None:
            self._connection.close()

    async def _connected(self, doing: str) -> WorkerConnection:
        async with self._connecting:
            if self._connection is None:
                try:
                    self._connection = await connected(await self._actor.address.remote())
                except RayTaskError as error:
                    raise RunError(
                        f"worker {self.name} takes no calls: {said_by(error.cause)}. Its log: {self._log}"
                    ) from error
                except RayError as error:
                    raise death(self.name, self._pid, self._log, doing, error) from error
            return self._connection

    async def _translated(self, doing: str, error: ConnectionEnded | CallFailed) -> HeadwayError:
        if isinstance(error, CallFailed):
            return RunError(f"worker {self.name} failed in {doing!r}: {error}. Its log: {self._log}")
        try:
            await self._actor.process.remote()
        except RayError as why:
            return death(self.name, self._pid, self._log, doing, why)
        return WorkerDied(f"worker {self.name} is out of reach during {doing!r}: {error}. Its log: {self._log}")
