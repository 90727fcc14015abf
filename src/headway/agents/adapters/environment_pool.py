"""Environments that are made once and reset often: episodes of a process take one and give it back."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any

from headway.agents.interface.awaiting import called, is_in_a_loop
from headway.agents.interface.failures import failing
from headway.errors import EpisodeOver

CLOSE_S = 10.0
"""Seconds for an asynchronous ``close()`` of an environment."""


class Instances:
    """Environments of one kind. One that failed, or whose episode was cancelled, is not used again."""

    def __init__(self, make: Callable[[], Any], who: str) -> None:
        self._make, self._who = make, who
        self._free: list[Any] = []
        self._process = os.getpid()

    @contextmanager
    def one(self) -> Iterator[Any]:
        """Lend an environment for the time of an episode; makes one where none is free."""
        instance = self._take()
        try:
            yield instance
        except EpisodeOver:
            self._free.append(instance)
            raise
        self._free.append(instance)

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[Any]:
        """`one`, which closes an environment that is not used again."""
        with self.one() as instance:
            try:
                yield instance
            except EpisodeOver:
                raise
            except BaseException:
                await close(instance)
                raise

    async def close(self) -> None:
        """Close those that are not lent."""
        while self._process == os.getpid() and self._free:
            await close(self._free.pop())

    def _take(self) -> Any:
        # A forked process shares the connections of what was made before the fork with its siblings: it makes its own.
        if self._process != os.getpid():
            self._process, self._free = os.getpid(), []
        if self._free:
            return self._free.pop()
        with failing(f"{self._who}: making it"):
            return self._make()


async def close(environment: Any) -> None:
    """Close an environment that has ``close()``. What that raises is printed: no episode depends on it."""
    closing = getattr(environment, "close", None)
    if not callable(closing):
        return
    try:
        async with asyncio.timeout(CLOSE_S) if is_in_a_loop() else nullcontext():
            await called(closing)
    except (Exception, SystemExit):
        traceback.print_exc(file=sys.stderr)
