"""``python -m benchmarks.held_lock``: how late turns come beside a job that never gives the interpreter's lock back.

A thousand asynchronous jobs in three workers, sixty-four synchronous ones in a process each, without and with one more
job of each kind that holds the lock, in turns. Those of the worker that is held are left out: it is replaced.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from statistics import median, quantiles

from benchmarks.runner import parser
from benchmarks.table import report
from benchmarks.user_code import NAP_S, TurnsSpec
from headway.errors import RunnerLost
from headway.runtime.workers.worker_pool import WorkerPool

HELD_S = 2.0
"""Seconds that a synchronous job may take."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("held_lock", __doc__, shared=1000, forked=64, turns=6, rounds=3).parse_args(arguments)
    late: dict[str, list[float]] = {"without": [], "beside": []}
    for _ in range(options.rounds):
        for contender, held in (("without", False), ("beside", True)):
            jobs = asyncio.run(lateness(options.shared, options.forked, options.turns, held=held))
            late[contender].append(quantiles(jobs, n=100)[-1] * 1e3)
    rows = [{"job that holds the lock": contender, "p99 ms": median(p99)} for contender, p99 in late.items()]
    title = f"Lateness of a turn, {options.shared} jobs that share workers and {options.forked} in processes"
    report("held_lock", {title: rows}, [f"Medians of {options.rounds} rounds."])


async def lateness(shared: int, forked: int, times: int, *, held: bool) -> list[float]:
    """Run so many jobs of both kinds. Returns how much later than its nap each further ask came, in seconds."""
    late = defaultdict[int, list[float]](list)
    started = partial(WorkerPool, "turns", TurnsSpec(), log_path=None)
    together, alone = (
        started(processes=3, at_once=None, stall_s=1.0),
        started(processes=forked + 1, at_once=1, forked=True),
    )
    try:
        await asyncio.gather(together.start(), alone.start())
        jobs = [*(turns(together, "naps", times, late) for _ in range(shared))]
        jobs += [turns(alone, "blocks", times, late) for _ in range(forked)]
        holding = [
            asyncio.create_task(pool.run(("holds", 0), timeout_s=limit_s))
            for pool, limit_s in ((together, None), (alone, HELD_S))
            if held
        ]
        await asyncio.gather(*jobs)
        ends = await asyncio.gather(*holding, return_exceptions=True)
        assert all(isinstance(end, RunnerLost) and end.culprit for end in ends), ends
    finally:
        await asyncio.gather(together.close(), alone.close())
    return [seconds for of_process in late.values() for seconds in of_process]


async def turns(pool: WorkerPool, kind: str, times: int, late: dict[int, list[float]]) -> None:
    """Run one job. Where its worker is lost for another job's fault, it runs anew, and its turns there do not count."""
    loop = asyncio.get_running_loop()
    answered: dict[int, float] = {}

    async def on_ask(process: int) -> None:
        if process in answered:
            late[process].append(loop.time() - answered[process] - NAP_S)
        answered[process] = loop.time()

    while True:
        try:
            return await pool.run((kind, times), on_ask)
        except RunnerLost as lost:
            if lost.culprit is not False:
                raise
            for process in answered:
                late.pop(process, None)


if __name__ == "__main__":
    main()
