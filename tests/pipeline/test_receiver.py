"""Calls to a replica that is gone: none stays open, and none that was given up is waited for."""

from __future__ import annotations

import asyncio

import pytest

from headway.config.sizing.timeouts import Timeouts
from headway.data.interfaces.rollout import Capabilities, OnUpdate
from headway.errors import UpdateFailed, WorkerDied
from headway.pipeline.remote_workers import Replica, WorkerUnavailable
from headway.planner.simulation.virtual_clock import run_virtual

TIMEOUT_S = 5.0
CALLS = {
    "stage_weights": (1,),
    "activate": (1,),
    "probe": (),
    "pause": (OnUpdate.KEEP,),
    "resume": (),
    "abort_older_than": (1,),
    "wake": (),
    "stats": (),
}
BOUNDED = ["activate", "probe", "pause", "resume"]


class Stuck:
    """Answers nothing, and ends no call that is cancelled before ``let_go``."""

    capabilities = Capabilities(frozenset(OnUpdate), reproducible=True)
    slots = 1
    name = "stuck"

    def __init__(self) -> None:
        self.let_go = asyncio.Event()

    def __getattr__(self, call: str):
        async def never(*_: object) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await self.let_go.wait()

        return never


def now() -> float:
    return asyncio.get_running_loop().time()


def in_a_loop(test):
    async def run() -> None:
        engine = Stuck()
        await test(engine, Replica(engine, Timeouts(60, TIMEOUT_S, 300)))
        engine.let_go.set()

    run_virtual(run())


@pytest.mark.parametrize("call", BOUNDED)
def test_a_quick_call_that_is_not_answered_ends_in_time_although_it_cannot_be_cancelled(call: str):
    async def test(engine: Stuck, replica: Replica) -> None:
        with pytest.raises(WorkerUnavailable) as gone:
            await getattr(replica, call)(*CALLS[call])
        assert now() == TIMEOUT_S
        assert isinstance(gone.value.why, UpdateFailed)
        assert "stuck was told to" in str(gone.value.why) and "param_update.timeout_s = 5 s" in str(gone.value.why)

    in_a_loop(test)


def test_a_drain_may_take_as_long_as_the_longest_answer():
    async def test(engine: Stuck, replica: Replica) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000.0):
                await replica.pause(OnUpdate.DRAIN)
        assert now() == 1000.0

    in_a_loop(test)


@pytest.mark.parametrize("call", CALLS)
def test_every_call_under_way_ends_at_once_when_the_replica_is_gone(call: str):
    async def test(engine: Stuck, replica: Replica) -> None:
        death = WorkerDied("stuck was killed")
        asyncio.get_running_loop().call_later(1.0, replica.leave, death)
        with pytest.raises(WorkerUnavailable) as gone:
            await getattr(replica, call)(*CALLS[call])
        assert now() == 1.0 and gone.value.why is death
        with pytest.raises(WorkerUnavailable):
            await getattr(replica, call)(*CALLS[call])

    in_a_loop(test)


def test_it_may_be_lost_at_the_very_moment_at_which_its_time_is_up():
    async def test(engine: Stuck, replica: Replica) -> None:
        calls = [asyncio.ensure_future(replica.activate(1)), asyncio.ensure_future(replica.resume())]
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_at(TIMEOUT_S, replica.leave, WorkerDied("killed"))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert now() == TIMEOUT_S and all(isinstance(answer, WorkerUnavailable) for answer in answers)

    in_a_loop(test)


def test_the_first_reason_is_the_one_that_counts():
    async def test(engine: Stuck, replica: Replica) -> None:
        replica.leave(first := UpdateFailed("fenced"))
        replica.leave(WorkerDied("later its process ended, too"))
        assert replica.why is first

    in_a_loop(test)


def test_a_call_that_is_cancelled_from_outside_is_cancelled_and_not_taken_for_silence():
    async def test(engine: Stuck, replica: Replica) -> None:
        task = asyncio.ensure_future(replica.activate(1))
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert now() == 1.0 and not replica.is_gone

    in_a_loop(test)


def test_a_time_out_of_the_engines_own_is_not_taken_for_silence():
    async def test(engine: Stuck, replica: Replica) -> None:
        async def raises(version: int) -> float:
            raise TimeoutError("the store did not answer")

        engine.activate = raises
        with pytest.raises(TimeoutError, match="the store"):
            await replica.activate(1)

    in_a_loop(test)
