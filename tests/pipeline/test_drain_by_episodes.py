"""A drain that finishes the episodes of started groups: it is given back, and waits for no more than it has to."""

from __future__ import annotations

import asyncio
from itertools import product

import pytest

from headway.errors import WorkerDied
from tests.pipeline.scenario import Run, Scenario
from tests.tiers import mostly_slow

PROGRAM = {"agent": {"program": "x.py:run"}}


@mostly_slow(
    ("mode", "drain"),
    product(["async_stale", "overlapped"], ["turn", "episode"]),
    quick=[("async_stale", "episode"), ("overlapped", "turn")],
)
def test_a_replica_that_dies_while_it_is_halted_holds_nobody_back(drain: str, mode: str):
    def script(run: Run) -> None:
        victim = run.rollouts[1]
        activate = victim.activate

        async def dying(version: int) -> float:
            if version == 2:
                victim.die(WorkerDied("killed"))
            return await activate(version)

        victim.activate = dying

    settings = {"drain": drain, "on_update": "drain"}
    run = Scenario(
        mode=mode, replicas=2, script=script, supervised=True, sections=PROGRAM, async_training=settings
    ).run()
    run.assert_completed()


@pytest.mark.slow
def test_a_validation_holds_generation_up_no_longer_than_a_drain_by_turns_does():
    def ended(drain: str) -> float:
        settings = {"drain": drain, "on_update": "drain"}
        scenario = Scenario(
            mode="async_stale", replicas=2, sections=PROGRAM, problems=40, slots=4, test_freq=1, async_training=settings
        )
        return scenario.run().assert_completed().ended

    assert ended("episode") <= 1.02 * ended("turn")


@pytest.mark.parametrize("drain", ["turn", "episode"])
def test_a_stop_during_a_drain_ends_the_run(drain: str):
    async def beside(run: Run) -> None:
        await asyncio.sleep(9.3)
        run.request_stop()

    settings = {"drain": drain, "on_update": "drain"}
    scenario = Scenario(mode="async_stale", replicas=2, sections=PROGRAM, async_training=settings, beside=beside)
    scenario.run().assert_clean()
