"""Many jobs, of which one of each kind holds the interpreter's lock for ever: all others finish.

How late their turns come meanwhile: ``python -m benchmarks.held_lock``.
"""

from __future__ import annotations

import asyncio

import pytest

from headway.errors import RunnerLost
from tests.runtime.user_code.test_losses import patiently
from tests.runtime.user_code.test_workers import answered, workers_of

NAP_S = 0.05
TURNS = 6
HOLDS = ("keeps_the_lock",)


@pytest.mark.slow
async def test_jobs_that_hold_the_interpreters_lock_for_ever_cost_nobody_else_their_end() -> None:
    async with (
        workers_of("shared", processes=3, stall_s=1.0) as asynchronous,
        workers_of("forked", processes=7) as synchronous,
    ):
        await asyncio.gather(asynchronous.start(), synchronous.start())
        before = {worker.process.pid for worker in asynchronous._workers}
        jobs = [
            *(patiently(asynchronous, "asks", TURNS, NAP_S, on_ask=answered) for _ in range(60)),
            *(patiently(synchronous, "asks_and_blocks", TURNS, NAP_S, on_ask=answered) for _ in range(6)),
        ]
        running = asyncio.gather(*jobs)
        await asyncio.sleep(2 * NAP_S)
        limited = synchronous.run(HOLDS, timeout_s=2.0)
        holders = [asyncio.create_task(job) for job in (asynchronous.run(HOLDS), limited)]
        assert [len(answers) for answers in await running] == [TURNS] * len(jobs), "all others finish"
        for end in await asyncio.gather(*holders, return_exceptions=True):
            assert isinstance(end, RunnerLost)
            assert (end.culprit, end.timed_out) == (True, True)
        assert len(before - {worker.process.pid for worker in asynchronous._workers}) == 1
