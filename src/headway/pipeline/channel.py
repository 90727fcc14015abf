"""Channel between two stages: an ordered hand-over that either side may close.

It has no capacity. Admission (`headway.pipeline.admission.staleness`) bounds how many groups exist at all, so a channel
can hold no more than that; a second bound here could only deadlock against the order of consumption.

Also here: waiting on one event loop, for any condition over shared state (`Signal`), or for a `Gate` to be opened.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar


class Signal:
    """Wakes all waiters when its owner's state changed; each looks again whether its own condition holds.

    Single-threaded by construction: everything runs on one event loop, so there is nothing to lock.
    """

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def changed(self) -> None:
        # Taken out first: who is woken may wait again at once, in the new list.
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            # One that was cancelled is still in the list.
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():  # again after each wake-up: another waiter may have changed what it saw
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


T = TypeVar("T")


class Channel(Generic[T]):
    """Queue of items, first in, first out. ``get`` gives None once the producer closed and all is taken.

    Example:
        >>> async def hand_over():
        ...     channel = Channel("Generate")
        ...     await channel.send("group 0")
        ...     channel.close()
        ...     return await channel.get(), await channel.get()
        >>> import asyncio
        >>> asyncio.run(hand_over())
        ('group 0', None)
    """

    def __init__(self, name: str) -> None:
        """Open a channel. ``name``: its producer's, for messages."""
        self.name = name
        self._items: deque[T] = deque()
        self._producer_closed = False
        self._signal = Signal()

    def __len__(self) -> int:
        return len(self._items)

    async def send(self, item: T) -> None:
        if self._producer_closed:
            raise RuntimeError(f"{self.name} sent after it had closed its channel")
        self._items.append(item)
        self._signal.changed()

    async def get(self) -> T | None:
        await self._signal.until(lambda: bool(self._items) or self._producer_closed)
        return self._items.popleft() if self._items else None

    def take_waiting(self) -> list[T]:
        """Take and return all items that are there right now, without waiting."""
        items = list(self._items)
        self._items.clear()
        return items

    def close(self) -> None:
        """Close the producer's end: no more will be sent. Items sent before can still be taken."""
        self._producer_closed = True
        self._signal.changed()
