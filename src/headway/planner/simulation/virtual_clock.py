"""An event loop without wall time: when nothing is ready, its clock jumps to the next timer.

    ready callbacks ─▶ run them ─▶ nothing ready? ─▶ a timer is set: time = its time ─▶ …
                                        └─▶ no timer either: every task waits for another one ─▶ `Deadlock`

Code that waits only on asyncio primitives and reads only ``loop.time()`` runs unchanged, in no wall time and in the
same order every time. What it gives to a thread (`asyncio.to_thread`) is done on the spot. Processes, sockets and
threads of its own are outside: the clock would run away while the loop waits for one, and a loop that has nothing else
to do is reported as a deadlock at once.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Deadlock(RuntimeError):
    """No callback is ready and no timer is set, but the program has not ended. Lists what each task waits for."""


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose virtual clock starts at 0. Running code takes no time: only timers move the clock.

    Example:
        >>> async def an_hour():
        ...     await asyncio.sleep(3600)
        ...     return asyncio.get_running_loop().time()
        >>> run_virtual(an_hour())  # at once
        3600.0
    """

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Call ``func`` at once: work takes no time here, in a thread or not."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def jump(self, seconds: float) -> None:
        self._now += seconds
        # The loop fires timers that are due before now + resolution: far from 0 that sum must not round back to now.
        self._clock_resolution = max(1e-9, math.ulp(self._now))


POLL_EVERY = 64
"""Turns of the loop between two looks at its own socket: a system call costs as much as a whole turn."""


class _JumpingSelector(selectors.SelectSelector):
    """Selector that moves the loop's clock to the next timer instead of sleeping until then.

    The loop calls ``select`` once per turn with the time to its next timer: 0 when callbacks are ready, None when there
    is no timer. The loop's own socket (`call_soon_threadsafe`, signals) is still polled.
    """

    def __init__(self, loop: VirtualClockLoop) -> None:
        super().__init__()
        self._loop = loop
        self._turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._turns += 1
        # Without a timer a signal or a thread can still wake the loop: that is looked at before a deadlock is told.
        if (timeout is None or self._turns % POLL_EVERY == 0) and (ready := super().select(0)):
            return ready
        if timeout is None:
            raise Deadlock(_who_waits(self._loop))
        if timeout > 0:
            self._loop.jump(timeout)
        return []


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end on a virtual clock, as `asyncio.run` does on the wall's.

    Raises what ``main`` raises, and `Deadlock` when no task can ever go on.
    """
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)


def _who_waits(loop: asyncio.AbstractEventLoop) -> str:
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    lines = [f"{task.get_name()}: {' > '.join(_await_chain(task.get_coro()))}" for task in tasks]
    return "\n  ".join([f"nothing is ready and no timer is set at t={loop.time():g} s; waiting:", *lines])


def _await_chain(awaitable: Any) -> Iterator[str]:
    """The coroutines that a task is suspended in, outermost first, each with its line."""
    while awaitable is not None:
        frame = _any_of(awaitable, "cr_frame", "gi_frame", "ag_frame")
        if frame is not None:
            yield f"{frame.f_code.co_qualname}:{frame.f_lineno}"
        awaitable = _any_of(awaitable, "cr_await", "gi_yieldfrom", "ag_await")


def _any_of(owner: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(owner, name, None)) is not None), None)
