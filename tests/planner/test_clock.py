"""The clock that every other test here runs on."""

import asyncio
import threading

import pytest

from headway.planner.simulation.virtual_clock import Deadlock, run_virtual


def test_time_starts_at_zero_and_jumps_from_timer_to_timer():
    async def main() -> list[float]:
        loop, times = asyncio.get_running_loop(), []
        for seconds in (1.5, 3600.0, 1e9):
            await asyncio.sleep(seconds)
            times.append(loop.time())
        return times

    assert run_virtual(main()) == [1.5, 3601.5, 1e9 + 3601.5]


def test_work_that_is_ready_runs_before_the_clock_moves():
    async def main() -> list[tuple[str, float]]:
        loop, seen = asyncio.get_running_loop(), []
        loop.call_later(1, lambda: seen.append(("timer", loop.time())))
        for _ in range(100):
            await asyncio.sleep(0)
        seen.append(("ready", loop.time()))
        await asyncio.sleep(2)
        return seen

    assert run_virtual(main()) == [("ready", 0.0), ("timer", 1.0)]


def test_the_same_program_runs_in_the_same_order_every_time():
    async def main() -> list[int]:
        fired: list[int] = []
        async with asyncio.TaskGroup() as tasks:
            for i in range(20):

                async def work(i: int) -> None:
                    await asyncio.sleep(i % 3)
                    fired.append(i)

                tasks.create_task(work(i))
        return fired

    assert run_virtual(main()) == run_virtual(main())


def test_what_is_given_to_a_thread_is_done_on_the_spot():
    async def main() -> tuple[int, float]:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(divmod, 1, 0)
        return await asyncio.to_thread(threading.get_ident), asyncio.get_running_loop().time()

    assert run_virtual(main()) == (threading.get_ident(), 0.0)


def test_asyncio_timeouts_expire_in_virtual_time():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 5


def test_a_deadlock_is_raised_at_once_and_says_where_each_task_waits():
    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.sleep(3)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(waits_for_ever(), name="one")
            tasks.create_task(waits_for_ever(), name="two")

    with pytest.raises(Deadlock, match=r"t=3 s.*\n.*\n  one: .*waits_for_ever:\d+ > Event\.wait:\d+\n  two: "):
        run_virtual(main())


def test_the_error_of_the_main_coroutine_is_raised_as_it_is():
    async def main() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_virtual(main())
