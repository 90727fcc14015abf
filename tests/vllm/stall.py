"""How long an update stops generation in mid-flight, and of what that consists.

    python -m tests.vllm.stall [requests] [updates]

Milliseconds, medians over the updates, each with all requests decoding: pause, load, probe, resume, and from the resume
to the next token, which under ``interrupt`` has the prefill of everything that was cut.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from headway.interfaces import OnUpdate
from tests.vllm.serving import CONTEXT, Served, endless

T = TypeVar("T")


async def timed(work: Awaitable[T]) -> float:
    start = time.perf_counter()
    await work
    return (time.perf_counter() - start) * 1e3


async def one_update(served: Served, policy: OnUpdate) -> dict[str, float]:
    engine, version = served.engine, await served.stage()
    start = time.perf_counter()
    phases = {"pause": await timed(engine.pause(policy)), "load": await timed(engine.activate(version))}
    phases["probe"] = await timed(engine.probe())
    await engine.stats()
    phases["resume"] = await timed(engine.resume())
    phases["all of it"] = (time.perf_counter() - start) * 1e3
    phases["next token"] = await timed(served.sampled(1))
    served.version = version
    return phases


async def main(requests: int, updates: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(folder), slots=requests)
        await served.engine.start()
        try:
            for policy in (OnUpdate.INTERRUPT, OnUpdate.KEEP):
                measured = []
                for _ in range(updates):
                    task = asyncio.create_task(served.collect([endless(n, n=8) for n in range(requests // 8)]))
                    await served.engine.stats()
                    await served.sampled(CONTEXT // 4 * requests)
                    measured.append(await one_update(served, policy))
                    await task
                phases = {name: statistics.median(m[name] for m in measured) for name in measured[0]}
                print(f"{policy:>9}", "  ".join(f"{name} {ms:.1f}" for name, ms in phases.items()))
        finally:
            await served.engine.close()


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    asyncio.run(main(*given, *(64, 7)[len(given) :]))
