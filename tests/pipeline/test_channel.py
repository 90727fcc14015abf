"""Channels and signals: the only things that stages wait on among themselves."""

import asyncio

import pytest

from headway.pipeline.stage import Channel, Signal
from headway.planner.simulation.virtual_clock import Deadlock, run_virtual


def test_items_arrive_in_the_order_in_which_they_were_sent():
    async def main() -> list[int | None]:
        channel: Channel[int] = Channel("numbers")
        for i in range(3):
            await channel.send(i)
        return [await channel.get() for _ in range(3)]

    assert run_virtual(main()) == [0, 1, 2]


def test_get_waits_until_something_is_sent():
    async def main() -> tuple[int | None, float]:
        channel: Channel[int] = Channel("numbers")
        getting = asyncio.ensure_future(channel.get())
        await asyncio.sleep(2)
        await channel.send(7)
        return await getting, asyncio.get_running_loop().time()

    assert run_virtual(main()) == (7, 2)


def test_after_the_producer_closed_what_was_sent_can_still_be_taken_and_then_comes_none():
    async def main() -> list[int | None]:
        channel: Channel[int] = Channel("numbers")
        await channel.send(1)
        channel.close()
        return [await channel.get(), await channel.get(), await channel.get()]

    assert run_virtual(main()) == [1, None, None]


def test_closing_wakes_a_waiting_consumer():
    async def main() -> int | None:
        channel: Channel[int] = Channel("numbers")
        getting = asyncio.ensure_future(channel.get())
        await asyncio.sleep(0)
        channel.close()
        return await getting

    assert run_virtual(main()) is None


def test_sending_after_close_is_a_programming_error():
    async def main() -> None:
        channel: Channel[int] = Channel("numbers")
        channel.close()
        await channel.send(1)

    with pytest.raises(RuntimeError, match="numbers"):
        run_virtual(main())


def test_take_waiting_gives_what_is_there_without_waiting():
    async def main() -> tuple[list[int], list[int]]:
        channel: Channel[int] = Channel("numbers")
        await channel.send(1)
        await channel.send(2)
        return channel.take_waiting(), channel.take_waiting()

    assert run_virtual(main()) == ([1, 2], [])


def test_several_consumers_share_the_items_without_losing_or_doubling_any():
    async def main() -> list[int | None]:
        channel: Channel[int] = Channel("numbers")
        consumers = [asyncio.ensure_future(channel.get()) for _ in range(4)]
        await asyncio.sleep(0)
        for i in range(3):
            await channel.send(i)
        channel.close()
        return await asyncio.gather(*consumers)

    assert run_virtual(main()) == [0, 1, 2, None]


def test_a_signal_wakes_only_those_whose_condition_holds():
    async def main() -> list[int]:
        signal, value, woken = Signal(), 0, []

        async def wait_for(threshold: int) -> None:
            await signal.until(lambda: value >= threshold)
            woken.append(threshold)

        async with asyncio.TaskGroup() as tasks:
            for threshold in (3, 1, 2):
                tasks.create_task(wait_for(threshold))
            for value in (1, 2, 3):  # noqa: B007 - read by the condition
                await asyncio.sleep(1)
                signal.changed()
        return woken

    assert run_virtual(main()) == [1, 2, 3]


def test_a_signal_whose_condition_never_comes_true_is_noticed_as_a_deadlock():
    with pytest.raises(Deadlock):
        run_virtual(Signal().until(lambda: False))


def test_a_cancelled_waiter_leaves_the_others_alone():
    async def main() -> str:
        signal, ready = Signal(), False
        cancelled = asyncio.ensure_future(signal.until(lambda: ready))
        other = asyncio.ensure_future(signal.until(lambda: ready))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        ready = True
        signal.changed()
        await other
        return "woken"

    assert run_virtual(main()) == "woken"
