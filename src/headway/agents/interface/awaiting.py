"""Waiting for coroutines of the user's: in the event loop that runs, or without one.

A synchronous program is served in a process without an event loop, so that its code may run one of its own. What of it
is asynchronous all the same, such as a reward that asks a judge, runs in a loop that is there for the time of the call.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def awaited(value: Awaitable[T]) -> T:
    """Await ``value``, in a loop of this process where none is running."""
    if is_in_a_loop():
        return await value

    async def result() -> T:
        return await value

    return _loop(os.getpid()).run_until_complete(result())


async def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of the user's, and await its result where that is awaitable."""
    value = function(*args, **kwargs)
    return await awaited(value) if inspect.isawaitable(value) else value


def are_coroutines(*functions: Any) -> bool:
    """Tell whether all these are coroutine functions; only then does none of them block the loop."""
    return all(inspect.iscoroutinefunction(function) for function in functions)


def is_in_a_loop() -> bool:
    """Tell whether an event loop runs this code."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@functools.lru_cache(maxsize=1)
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The loop of ``process``: one for all calls, since clients stay bound to theirs; a forked child has its own."""
    return asyncio.new_event_loop()
