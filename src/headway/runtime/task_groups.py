"""Concurrent coroutines that fail as one.

    concurrently(coroutines)   all of them are known at the start
    failing_as_one(main)       ``main`` starts others while it runs

Tasks are cancelled in the order in which they were started, so that a failing run always ends in the same way;
`asyncio.TaskGroup` cancels in the order of a set. A cancellation from outside is not lost in a simultaneous failure, as
it can be there: only started tasks are ever cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future as ConcurrentFuture
from threading import Thread
from typing import Any, NoReturn, ParamSpec, TypeVar

T = TypeVar("T")
U = TypeVar("U")
P = ParamSpec("P")

LONG = 20_000
"""Minimum number of characters of text whose processing goes to a thread: it takes tens of milliseconds."""


async def off_loop(size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``function`` on text of ``size`` characters; on long text in a thread, so the event loop runs."""
    if size < LONG:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


async def never() -> NoReturn:
    """Wait for ever; only a cancellation ends it."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def failure_ignored(future: asyncio.Future[T]) -> asyncio.Future[T]:
    """Mark the failure of ``future`` as retrieved, so that asyncio does not log it. Returns ``future``."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # otherwise asyncio logs it
    return future


def in_daemon_thread(name: str, function: Callable[[], T]) -> ConcurrentFuture[T]:
    """Call ``function`` in a new daemon thread. Returns a future of its result."""
    future: ConcurrentFuture[T] = ConcurrentFuture()
    # Marked as running: otherwise a cancelled waiter would cancel it, and `set_result` raise in the thread.
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as failure:
            future.set_exception(failure)

    Thread(target=work, name=name, daemon=True).start()
    return future


class Tasks:
    """Running tasks that `failing_as_one` waits for, in the order in which they were started."""

    def __init__(self) -> None:
        # A dict, not a set: a set would cancel tasks in another order in each process, and simulated runs would differ.
        self._running: dict[asyncio.Task[Any], None] = {}
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when all tasks have ended, or with the first failure."""

    def start(
        self,
        coroutine: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        among: dict[asyncio.Task[Any], None] | None = None,
    ) -> asyncio.Task[T]:
        """Start ``coroutine`` as a task. A task cancelled alone ends quietly; a failure ends the whole group.

        ``among``: the caller's set of tasks, which contains it while it runs.
        """
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._running[task] = None
        task.add_done_callback(self._ended)
        if among is not None:
            among[task] = None
            task.add_done_callback(among.pop)
        return task

    async def ended(self) -> None:
        """Wait until all tasks have ended. The first failure, or a cancellation of this wait, cancels the other tasks
        and is raised after they ended.
        """
        try:
            await self._over
        finally:
            # Repeatedly: a task may start others while it ends.
            while running := [task for task in self._running if not task.done()]:
                await end(running)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._running[task]
        failure = None if task.cancelled() else task.exception()
        if self._over.done():
            return
        if failure is not None:
            self._over.set_exception(failure)
        elif not self._running:
            self._over.set_result(None)


async def failing_as_one(main: Callable[[Tasks], Coroutine[Any, Any, T]]) -> T:
    """Run ``main``, and return its result when all tasks that it started have ended, too.

    The first failure of any of them cancels the others, ``main`` first, and is raised unchanged when all have ended. A
    cancellation from outside cancels them, too, and is never taken for a failure of a task.
    """
    tasks = Tasks()
    # As the first task of the group: a failure of another task cancels it before all others.
    result = tasks.start(main(tasks))
    await tasks.ended()
    return result.result()


async def concurrently(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run the coroutines side by side and return their results in the order given.

    The first failure cancels the others and is raised unchanged when all have ended. A cancellation from outside
    cancels them, too, and is never taken for a failure of a coroutine.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    if not tasks:
        return []
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await end(tasks)
    for task in tasks:
        if task in done:
            task.result()  # raises the failure; of several at once, that of the first in order
    return [task.result() for task in tasks]


async def end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel the running tasks and wait until they have ended, even if this task is cancelled meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    for task in tasks:
        task.cancel()
    # The wait survives a cancellation: otherwise the tasks would go on, and write files or end workers beside later
    # code.
    while running := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved: only one failure can be raised, and asyncio would complain about the others
    if cancelled is not None:
        raise cancelled


async def both(left: Coroutine[Any, Any, T], right: Coroutine[Any, Any, U]) -> tuple[T, U]:
    """Run two coroutines as `concurrently` does, with results of different types."""
    results: list[Any] = await concurrently([left, right])
    return results[0], results[1]
