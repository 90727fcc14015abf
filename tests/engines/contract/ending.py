"""Part of the contract: after `close` nobody waits, and nothing is left behind."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headway.data.interfaces.rollout import OnUpdate
from headway.errors import RunError
from tests.engines.contract.harness import OfEngine, collect, endless, make_calls, sampled, scenario, submit

JOIN_S = 60.0


class Ending(OfEngine):
    @scenario()
    async def test_closing_while_busy_ends_every_call_and_leaves_nothing_behind(self) -> None:
        """Over 5 s where the engine is vLLM, of which one is started here."""
        threads, tasks = set(threading.enumerate()), asyncio.all_tasks()
        async with self.harness.serve(fresh=True) as replica:
            running = await submit(replica, endless(1), endless(2), endless(3))
            await sampled(replica, 20)
            draining = asyncio.create_task(replica.engine.pause(OnUpdate.DRAIN))
            await replica.tick()
            held = await submit(replica, endless(4))
            await replica.engine.close()
            for call in (running, held, draining):
                with pytest.raises(RunError, match="closed"):
                    await call
        left = [thread for thread in set(threading.enumerate()) - threads if thread.name.startswith("headway")]
        for thread in left:
            thread.join(JOIN_S)
        assert not any(thread.is_alive() for thread in left)
        assert asyncio.all_tasks() == tasks

    @scenario()
    async def test_a_closed_engine_says_so_to_everybody(self) -> None:
        """Over 5 s where the engine is vLLM, of which one is started here."""
        async with self.harness.serve(fresh=True) as replica:
            engine = replica.engine
            await collect(replica, make_calls(1))
            await engine.close()
            await engine.close()  # twice is once
            for call in (
                engine.submit("me", make_calls(2)),
                anext(aiter(engine.finished("me"))),
                engine.pause(OnUpdate.INTERRUPT),
                engine.resume(),
                engine.abort("me", [1]),
                engine.release([]),
                engine.abort_older_than(1),
                engine.stats(),
                engine.stage_weights(1),
            ):
                with pytest.raises(RunError, match="closed"):
                    await call
