"""Running things side by side and failing as one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
U = TypeVar("U")


def _first_failure(failures: BaseExceptionGroup[Any]) -> BaseException:
    """The exception that a TaskGroup failed for: the others were cancelled because of it."""
    failure: BaseException = failures
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure


@contextmanager
def failing_as_one() -> Iterator[None]:
    """Around a TaskGroup: it raises what it failed for as it is, not in a group.

    For failures that end the run. Python 3.11's TaskGroup forgets a cancellation that comes while it ends for a
    failure: whoever handles a failure and goes on uses `concurrently`.
    """
    try:
        yield
    except BaseExceptionGroup as failures:
        failure = _first_failure(failures)
        raise failure from failure.__cause__  # keeps its own cause, and leaves the group out of the traceback


async def concurrently(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in the order given. The first failure cancels the rest and is raised as it is, when all have ended.

    A cancellation from outside cancels all of them, and is never taken for a failure of theirs.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    if not tasks:
        return []
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await _end(tasks)
    for task in tasks:
        if task in done:
            task.result()  # raises the failure; of several at once, that of the first in order
    return [task.result() for task in tasks]


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what still runs and see it through, however often this task is cancelled meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    for task in tasks:
        task.cancel()
    while running := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # looked at: only one failure can be raised, and asyncio would complain about the others
    if cancelled is not None:
        raise cancelled


async def both(left: Coroutine[Any, Any, T], right: Coroutine[Any, Any, U]) -> tuple[T, U]:
    """`concurrently` for two results of different types."""
    results: list[Any] = await concurrently([left, right])
    return results[0], results[1]
