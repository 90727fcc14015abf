"""Running things side by side and failing as one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator
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
    """Around a TaskGroup: it raises what it failed for as it is, not in a group."""
    try:
        yield
    except BaseExceptionGroup as failures:
        failure = _first_failure(failures)
        raise failure from failure.__cause__  # keeps its own cause, and leaves the group out of the traceback


async def concurrently(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in the order given. The first failure cancels the rest and is raised as it is, not in a group."""
    with failing_as_one():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    return [task.result() for task in tasks]


async def both(left: Coroutine[Any, Any, T], right: Coroutine[Any, Any, U]) -> tuple[T, U]:
    """`concurrently` for two results of different types."""
    results: list[Any] = await concurrently([left, right])
    return results[0], results[1]
