"""Calls of user code: awaited with or without an event loop, failures turned into typed errors, generators seeded.

A synchronous program runs in a process without an event loop, so that its code may run one. Its asynchronous parts,
such as a reward that asks a judge, run in a loop for the duration of the call.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import os
import random
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from headway.errors import (
    EpisodeOver,
    HeadwayError,
    ProgramAway,
    ProgramFailed,
    Unavailable,
    UserCodeError,
    raised_by,
    shown,
)

T = TypeVar("T")
CLOSE_S = 20.0
"""Limit in seconds for a tool or an environment to release the resources of an episode."""


async def awaited(value: Awaitable[T]) -> T:
    """Await ``value``, in a loop of this process if none is running."""
    if is_in_a_loop():
        return await value

    async def result() -> T:
        return await value

    return _loop(os.getpid()).run_until_complete(result())


async def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of the user's, and await its result if that is awaitable."""
    value = function(*args, **kwargs)
    return await awaited(value) if inspect.isawaitable(value) else value


async def close_quietly(close: Callable[[], Any]) -> None:
    """Close a resource of an episode. An exception of ``close`` is only printed: the episode has ended already."""
    try:
        async with asyncio.timeout(CLOSE_S) if is_in_a_loop() else nullcontext():
            await called(close)
    except (Exception, SystemExit):
        traceback.print_exc(file=sys.stderr)


def are_coroutines(*functions: Any) -> bool:
    """Tell whether all ``functions`` are coroutine functions, and so do not block the event loop."""
    return all(inspect.iscoroutinefunction(one) or inspect.iscoroutinefunction(innermost(one)) for one in functions)


def innermost(function: Any) -> Any:
    """Return the function that ``function`` calls, if it is a `functools.partial` or an object with ``__call__``."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isfunction(function) or inspect.ismethod(function) else type(function).__call__


def is_in_a_loop() -> bool:
    """Tell whether an event loop runs this code."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@functools.lru_cache(maxsize=1)
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """Return the loop of ``process``: one for all calls, since clients stay bound to it; a forked child has its own."""
    return asyncio.new_event_loop()


class AskedTooOften(BaseException):
    """Exception that ends a program which asks on after its episode is over. `except Exception` does not catch it."""


AWAY_BY_NAME = frozenset(
    {"ConnectionError", "Timeout", "TransportError", "ClientConnectionError", "ConnectionClosed", "APIConnectionError"}
)
"""Names of exceptions for an absent peer: of ``requests``, ``httpx``, ``aiohttp``, ``websockets``, ``openai``."""


@contextmanager
def failing(doing: str) -> Iterator[None]:
    """Turn exceptions of user code into `ProgramFailed`, or into `ProgramAway` if a peer is temporarily unreachable.

    The traceback goes to standard error, the worker's log. `EpisodeOver` passes, also from a group of exceptions or as
    a cause; so do Headway's own errors, cancellation and interrupts.
    """
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit, AskedTooOften):
        raise
    # Some errors are no `Exception` (func_timeout, panics of Rust), and sys.exit() must not end the process.
    except BaseException as cause:
        if isinstance(cause, HeadwayError) and not isinstance(cause, Unavailable):
            raise
        # Only where this task is cancelled: user code raises CancelledError by itself, and that is a failure.
        if isinstance(cause, asyncio.CancelledError) and is_cancelled():
            raise
        if (over := _ended_by(cause)) is not None:
            raise over from cause
        traceback.print_exception(cause, file=sys.stderr)
        error = ProgramAway if is_away(cause) else ProgramFailed
        raise error(f"{doing} raised {raised_by(cause)}") from cause


@contextmanager
def beforehand() -> Iterator[None]:
    """Turn failures of user code before the first episode into `UserCodeError`; `ProgramAway` is raised unchanged."""
    try:
        yield
    except ProgramAway:
        raise
    except ProgramFailed as cause:
        raise UserCodeError(str(cause)) from cause


def is_away(cause: BaseException) -> bool:
    """Tell whether ``cause``, or an exception that it was raised from, means that a peer cannot be reached."""
    one: BaseException | None = cause
    while one is not None:
        names = {kind.__name__ for kind in type(one).__mro__}
        # urllib's HTTPError, for a peer that has answered, derives from its error for a peer that is away.
        by_urllib = "URLError" in names and "HTTPError" not in names
        if isinstance(one, ConnectionError | TimeoutError) or names & AWAY_BY_NAME or by_urllib:
            return True
        if isinstance(one, BaseExceptionGroup):
            return any(is_away(part) for part in one.exceptions)
        one = one.__cause__
    return False


def plain(value: Any) -> Any:
    """Convert arrays, tensors and their scalars to Python's own lists and numbers."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def finite_number(value: Any) -> float | None:
    """Return ``value`` as a float; None if it is not a finite number. Bool and arrays of one element are numbers."""
    found = plain(value)
    while found is not value and isinstance(found, list) and len(found) == 1:
        found = found[0]
    if isinstance(found, str | bytes) or not hasattr(found, "__float__"):
        return None
    try:
        number = float(found)
    except Exception:  # for example an integer beyond all floats
        return None
    return number if math.isfinite(number) else None


def number(value: Any, what: str) -> float:
    """Return ``value`` as a float; ``what`` names it in the message.

    Raises:
        ProgramFailed: it is not a finite number.
    """
    if (found := finite_number(value)) is not None:
        return found
    raise ProgramFailed(f"{what} is {shown(value)}, expected a finite number")


def _ended_by(cause: BaseException) -> EpisodeOver | None:
    """Return the `EpisodeOver` that ``cause`` was raised from, or that a group of exceptions consists of."""
    one: BaseException | None = cause
    while one is not None:
        if isinstance(one, EpisodeOver):
            return one
        if isinstance(one, BaseExceptionGroup):
            ends = [_ended_by(part) for part in one.exceptions]
            return ends[0] if all(ends) else None
        one = one.__cause__
    return None


def is_cancelled() -> bool:
    """Tell whether this task is being cancelled from outside; user code may raise `CancelledError` by itself."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # without an event loop nothing can be cancelled
        return False
    return task is None or task.cancelling() > 0


def path_of_commands() -> str:
    """Return the ``PATH`` of the user's commands: the folder of this interpreter comes first, as in an activated
    environment, so that ``python`` and the programs beside it are Headway's.

    ``PATH`` stays as it is outside a virtual environment if it has the interpreter's folder.
    """
    folder, path = str(Path(sys.executable).parent), os.environ.get("PATH") or os.defpath
    if sys.prefix == sys.base_prefix and folder in path.split(os.pathsep):
        return path
    return os.pathsep.join((folder, path))


def seed_generators(seed: int) -> None:
    """Seed Python's global generator, and numpy's if it is imported."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:  # not imported for this: that takes time
        numpy.random.seed(seed)
