"""Tasks that run side by side and fail as one: in what order they end, whose failure it is, and what is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from headway.planner.simulation.virtual_clock import run_virtual
from headway.runtime.task_groups import Tasks, concurrently, failing_as_one


class Log:
    """What happened, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    async def work(self, name: str, seconds: float, failure: Exception | None = None, cleanup_s: float = 0.0) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            await asyncio.sleep(cleanup_s)
            self.lines.append(f"{name} cancelled")
            raise
        if failure is not None:
            raise failure
        self.lines.append(f"{name} done")
        return name


def alone(main: Coroutine[Any, Any, Any]) -> Any:
    """Its result on the virtual clock; no task may be left when it ends."""

    async def watched() -> Any:
        try:
            return await main
        finally:
            assert asyncio.all_tasks() == {asyncio.current_task()}

    return run_virtual(watched())


def test_the_result_is_mains_and_comes_when_all_that_it_started_has_ended():
    log = Log()

    async def main(tasks: Tasks) -> float:
        tasks.start(log.work("long", 5))
        tasks.start(log.work("short", 1))
        return asyncio.get_running_loop().time()

    async def timed() -> tuple[float, float]:
        return await failing_as_one(main), asyncio.get_running_loop().time()

    assert alone(timed()) == (0, 5)
    assert log.lines == ["short done", "long done"]


def test_what_a_started_task_starts_is_waited_for_too():
    log = Log()

    async def main(tasks: Tasks) -> None:
        async def first() -> None:
            await asyncio.sleep(1)
            tasks.start(log.work("second", 1))

        tasks.start(first())

    alone(failing_as_one(main))
    assert log.lines == ["second done"]


def test_a_failure_cancels_the_others_in_the_order_in_which_they_were_started():
    log = Log()

    async def main(tasks: Tasks) -> None:
        for i in range(50):
            tasks.start(log.work(str(i), 10))
        tasks.start(log.work("bad", 1, ValueError("bad")))
        await log.work("main", 10)

    with pytest.raises(ValueError, match="bad"):
        alone(failing_as_one(main))
    assert log.lines == ["main cancelled", *(f"{i} cancelled" for i in range(50))]


def test_concurrently_cancels_in_order_too():
    log = Log()
    with pytest.raises(ValueError, match="bad"):
        alone(concurrently([*(log.work(str(i), 10) for i in range(50)), log.work("bad", 1, ValueError("bad"))]))
    assert log.lines == [f"{i} cancelled" for i in range(50)]


def test_the_first_failure_is_raised_as_it_is_whatever_fails_because_of_it():
    cause = OSError("cause")

    async def main(tasks: Tasks) -> None:
        failure = ValueError("first")
        failure.__cause__ = cause
        tasks.start(Log().work("bad", 1, failure))
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            raise KeyError("second") from None

    with pytest.raises(ValueError, match="first") as caught:
        alone(failing_as_one(main))
    assert caught.value.__cause__ is cause


def test_mains_own_failure_cancels_what_it_started():
    log = Log()

    async def main(tasks: Tasks) -> None:
        tasks.start(log.work("long", 10, cleanup_s=2))
        await asyncio.sleep(1)
        raise ValueError("main")

    with pytest.raises(ValueError, match="main"):
        alone(failing_as_one(main))
    assert log.lines == ["long cancelled"]


def test_a_task_that_is_cancelled_alone_is_no_failure():
    log = Log()

    async def main(tasks: Tasks) -> str:
        unwanted = tasks.start(log.work("unwanted", 10))
        wanted = tasks.start(log.work("wanted", 2))
        await asyncio.sleep(1)
        unwanted.cancel()
        return await wanted

    assert alone(failing_as_one(main)) == "wanted"
    assert log.lines == ["unwanted cancelled", "wanted done"]


@pytest.mark.parametrize("cancelled_at", [1.0, 2.0, 3.0])
def test_a_cancellation_from_outside_is_never_lost_in_a_failure(cancelled_at: float):
    """Before the failure, at the same instant, and while the others end because of it."""
    log = Log()

    async def main(tasks: Tasks) -> None:
        tasks.start(log.work("slow to end", 100, cleanup_s=4))
        tasks.start(log.work("bad", 2, ValueError("bad")))
        await asyncio.sleep(100)

    async def cancelled() -> float:
        running = asyncio.ensure_future(failing_as_one(main))
        asyncio.get_running_loop().call_at(cancelled_at, running.cancel)
        with pytest.raises(asyncio.CancelledError):
            await running
        return asyncio.get_running_loop().time()

    assert alone(cancelled()) >= min(cancelled_at, 2.0) + 4
    assert log.lines[-1] == "slow to end cancelled"
