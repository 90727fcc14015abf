"""A thousand jobs, of which one of each kind holds the interpreter's lock for ever: nobody else is any worse off."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest

from headway.errors import RunnerLost
from tests.runtime.user_code.test_losses import patiently
from tests.runtime.user_code.test_workers import workers_of

NAP_S = 0.05
TURNS = 6
HOLDS = ("keeps_the_lock",)


class Turns:
    """Lateness of turns: the time from the host's answer to the next ask, less the nap between them."""

    def __init__(self) -> None:
        self.late_s: dict[int, list[float]] = {}
        """Process → how late its asks came, in seconds."""

    def of_a_job(self) -> Callable[[int], Awaitable[None]]:
        loop = asyncio.get_running_loop()
        answered: dict[int, float] = {}  # by process: the first ask of a job that is run again is no turn's end

        async def on_ask(pid: int) -> None:
            if pid in answered:
                self.late_s.setdefault(pid, []).append(loop.time() - answered[pid] - NAP_S)
            answered[pid] = loop.time()

        return on_ask

    def p99(self, without: frozenset[int] = frozenset()) -> float:
        late = chain.from_iterable(late for pid, late in self.late_s.items() if pid not in without)
        return float(np.percentile(list(late), 99))


async def run_all(shared: int, forked: int, *, with_holders: bool) -> tuple[Turns, frozenset[int]]:
    """Run so many jobs of both kinds; returns their turns, and the processes that were lost."""
    turns = Turns()
    async with (
        workers_of("shared", processes=3, stall_s=1.0) as asynchronous,
        workers_of("forked", processes=min(forked, 64) + 1) as synchronous,
    ):
        await asyncio.gather(asynchronous.start(), synchronous.start())
        before = {worker.process.pid for worker in asynchronous._workers}
        jobs = [
            *(patiently(asynchronous, "turns", TURNS, NAP_S, on_ask=turns.of_a_job()) for _ in range(shared)),
            *(patiently(synchronous, "blocking_turns", TURNS, NAP_S, on_ask=turns.of_a_job()) for _ in range(forked)),
        ]
        running = asyncio.gather(*jobs)
        holders: list[Any] = []
        if with_holders:
            await asyncio.sleep(2 * NAP_S)
            limited = synchronous.run(HOLDS, timeout_s=2.0)
            holders = [asyncio.create_task(job) for job in (asynchronous.run(HOLDS), limited)]
        assert await running == [TURNS] * (shared + forked), "all others finish"
        for end in await asyncio.gather(*holders, return_exceptions=True):
            assert isinstance(end, RunnerLost)
            assert (end.culprit, end.timed_out) == (True, True)
        lost = frozenset(before - {worker.process.pid for worker in asynchronous._workers})
        assert len(lost) == with_holders
    return turns, lost


@pytest.mark.slow
async def test_jobs_that_hold_the_interpreters_lock_for_ever_cost_nobody_else_their_end() -> None:
    await run_all(60, 6, with_holders=True)


@pytest.mark.slow
async def test_turns_elsewhere_are_as_quick_as_without_them() -> None:
    """Over 5 s: runs a thousand jobs four times, and compares times. On a machine that is busy otherwise they say
    nothing, so that this is no test for every commit.
    """
    usual, beside = [], []
    for _ in range(2):  # one after the other, twice: a burst of other work meets one of them
        turns, _ = await run_all(1000, 64, with_holders=False)
        usual.append(turns.p99())
        turns, lost = await run_all(1000, 64, with_holders=True)
        beside.append(turns.p99(lost))
    print(f"p99 of a turn's lateness, in s: {usual} without, {beside} in workers beside")
    assert min(beside) - min(usual) < 0.050
