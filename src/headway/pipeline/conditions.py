"""Waiting on one event loop: for any condition over shared state (`Signal`), or for a `Gate` to be opened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Signal:
    """Wakes all waiters when its owner's state changed; each looks again whether its own condition holds.

    Single-threaded by construction: everything runs on one event loop, so there is nothing to lock.
    """

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def changed(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter


class Gate:
    """Gate that its owner opens and shuts, and others wait for.

    Example:
        >>> async def pass_through(gate):
        ...     gate.set(False)
        ...     asyncio.get_running_loop().call_soon(gate.set, True)
        ...     await gate.until_open()
        ...     return gate.is_open
        >>> asyncio.run(pass_through(Gate()))
        True
    """

    def __init__(self) -> None:
        self.is_open = True
        self._changed = Signal()

    def set(self, is_open: bool) -> None:
        self.is_open = is_open
        self._changed.changed()

    async def until_open(self) -> None:
        await self._changed.until(lambda: self.is_open)
