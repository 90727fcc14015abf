"""A worker on Ray as another worker's process calls it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from headway.cluster.ray_deaths import death
from headway.errors import HeadwayError, RunError


class RayPeer:
    """`headway.cluster.worker_group.Peer` over the handle of an actor. Can be pickled."""

    def __init__(self, name: str, pid: int | None, log: str, actor: Any) -> None:
        """``log``: path of the worker's log, for messages."""
        self.name = name
        self._pid = pid
        self._log = log
        self._actor = actor

    async def call(self, method: str, *args: Any) -> Any:
        try:
            return await self._actor.call.remote(method, *args)
        except RayError as error:
            raise self._translated(method, error) from error

    async def each(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        try:
            items = self._actor.each.options(num_returns="streaming").remote(method, *args)
            try:
                async for item in items:
                    yield await item
            except (asyncio.CancelledError, GeneratorExit):
                ray.cancel(items)  # dropping the stream here would not end it there
                raise
        except RayError as error:
            raise self._translated(method, error) from error

    def _translated(self, doing: str, error: RayError) -> HeadwayError:
        if isinstance(error, RayTaskError):
            cause = error.cause
            if isinstance(cause, HeadwayError):
                return cause
            return RunError(
                f"worker {self.name} failed in {doing!r}: {type(cause).__name__}: {cause}. Its log: {self._log}"
            )
        return death(self.name, self._pid, self._log, doing, error)
