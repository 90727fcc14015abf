"""Channel between two stages: an ordered hand-over that either side may close.

It has no capacity. Admission (`headway.pipeline.admission.staleness`) bounds how many groups exist at all, so a channel
can hold no more than that; a second bound here could only deadlock against the order of consumption.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from headway.pipeline.conditions import Signal

T = TypeVar("T")


class Channel(Generic[T]):
    """Queue of items, first in, first out. ``get`` gives None once the producer closed and all is taken; ``send`` gives
    False once the consumer closed.

    Example:
        >>> async def hand_over():
        ...     channel = Channel("from Generate to Reward")
        ...     await channel.send("group 0")
        ...     channel.close()
        ...     return await channel.get(), await channel.get()
        >>> import asyncio
        >>> asyncio.run(hand_over())
        ('group 0', None)
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._items: deque[T] = deque()
        self._producer_closed = False
        self._consumer_closed = False
        self._signal = Signal()

    def __len__(self) -> int:
        return len(self._items)

    async def send(self, item: T) -> bool:
        if self._consumer_closed:
            return False
        if self._producer_closed:
            raise RuntimeError(f"channel {self.name}: sent after close")
        self._items.append(item)
        self._signal.changed()
        return True

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

    def close_consumer(self) -> None:
        """Close the consumer's end: further sends are refused."""
        self._consumer_closed = True
