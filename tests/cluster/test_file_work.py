"""Work with files ends when its bytes no longer move, and not before."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest

from headway.cluster.worker_group import while_bytes_move
from headway.config.sizing.timeouts import FILE_QUIET_S
from headway.errors import RunError, StallError
from headway.planner.simulation.virtual_clock import run_virtual
from headway.runtime.progress import Heartbeat


def now() -> float:
    return asyncio.get_running_loop().time()


class Rank:
    """Writes from 0 on: ``written(seconds)`` bytes, each whole second's at its beginning, until ``stops_s``."""

    def __init__(self, rank: int, stops_s: float = math.inf, rate: float = 1e6) -> None:
        self.name = f"actor-{rank}"
        self.asked = 0
        self._stops_s = stops_s
        self._rate = rate

    async def heartbeat(self) -> Heartbeat:
        self.asked += 1
        moved = min(now(), self._stops_s)
        return Heartbeat(f"export, {moved * self._rate / 1e6:g} MB", now() - moved, int(moved * self._rate))


class Waits:
    """A rank that takes no part in the writing: it waits for the one that does."""

    name = "actor-1"

    async def heartbeat(self) -> Heartbeat:
        return Heartbeat("export", now())


async def lasting(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


def ended(main: Callable[[], object]) -> tuple[float, str]:
    """When, and the message."""

    async def run() -> tuple[float, str]:
        with pytest.raises(StallError) as raised:
            await main()  # type: ignore[misc]
        return now(), str(raised.value)

    return run_virtual(run())


def test_a_slow_disk_may_take_hours_as_long_as_bytes_move():
    async def main() -> None:
        assert await while_bytes_move(lasting(30_000), [Rank(0, rate=2e6), Waits()], "exporting") == "done"
        assert now() == 30_000

    run_virtual(main())


def test_work_that_is_quick_asks_nobody():
    async def main() -> int:
        rank = Rank(0)
        await while_bytes_move(lasting(FILE_QUIET_S - 1), [rank], "saving")
        return rank.asked

    assert run_virtual(main()) == 0


def test_a_disk_that_takes_no_byte_is_told_after_two_minutes_with_path_and_ranks():
    at, said = ended(lambda: while_bytes_move(lasting(1e6), [Rank(0, 0.0), Waits()], "exporting the model to /there"))
    assert at == FILE_QUIET_S
    assert said.startswith("exporting the model to /there is stuck: nothing was read or written for longer than 120 s")
    assert "(actor-0: export, 0 MB; actor-1: export)" in said


def test_what_is_in_the_systems_cache_may_take_its_time_to_leave_it():
    """1000 s at 100 MB/s: 100 GB, for which a slow disk may need 5000 s more without a sign."""
    at, _ = ended(lambda: while_bytes_move(lasting(1e6), [Rank(0, 1000.0, rate=100e6)], "saving"))
    assert at == pytest.approx(1000 + FILE_QUIET_S + 5000)


def test_ranks_that_do_not_answer_do_not_move():
    class Silent:
        name = "actor-0"

        async def heartbeat(self) -> Heartbeat:
            await asyncio.Event().wait()
            raise AssertionError

    at, said = ended(lambda: while_bytes_move(lasting(1e6), [Silent()], "saving"))
    assert at == FILE_QUIET_S + 30
    assert "actor-0: no answer to its heartbeat within 30 s" in said


def test_what_the_work_raises_is_raised_as_it_is():
    async def fails() -> None:
        await asyncio.sleep(500)
        raise RunError("the disk is full")

    with pytest.raises(RunError, match=r"^the disk is full$"):
        run_virtual(while_bytes_move(fails(), [Rank(0)], "saving"))


def test_leaving_it_cancels_the_work():
    async def main() -> bool:
        work = asyncio.ensure_future(lasting(1e6))

        async def wrapped() -> str:
            return await work

        waiting = asyncio.ensure_future(while_bytes_move(wrapped(), [Rank(0)], "saving"))
        await asyncio.sleep(1)
        waiting.cancel()
        await asyncio.wait([waiting])
        await asyncio.sleep(0)
        return work.cancelled()

    assert run_virtual(main())
