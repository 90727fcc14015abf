"""Runs one role inside a process, on both backends alike.

event loop ──coroutine methods──▶ role          (a rollout engine, which has a thread of its own)
    └──────blocking methods──▶ the role's one thread, in the order called     (a trainer's rank)
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from operator import attrgetter
from typing import Any

from headway.cluster.memory_errors import memory_errors_told


class RoleHost:
    """``role`` is any object; nothing of it runs on the event loop's thread except its coroutines."""

    def __init__(self, role: Any, name: str) -> None:
        self._role = role
        self._name = name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._closing = False

    async def call(self, method: str, *args: Any) -> Any:
        """The role's method (``name``, or ``part.name`` of one of its parts), awaited or run on the role's thread.

        Raises what the method raises, and `RunError` where its memory was not enough.
        """
        function = attrgetter(method)(self._role)
        with memory_errors_told(self._name, method):
            if inspect.iscoroutinefunction(function):
                return await function(*args)
            return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *args))

    async def stream(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        """What the role's asynchronous generator yields. Raises as `call` does."""
        with memory_errors_told(self._name, method):
            async with aclosing(attrgetter(method)(self._role)(*args)) as items:
                async for item in items:
                    yield item

    async def close(self) -> None:
        """Close the role behind whatever it is doing, and end its thread. A second call does nothing."""
        if self._closing:
            return
        self._closing = True
        await asyncio.get_running_loop().run_in_executor(self._thread, lambda: None)
        try:
            await self.call("close")
        finally:
            self._thread.shutdown(wait=False)
