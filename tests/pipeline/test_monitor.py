"""The watch at the side: activity, and a run in which nothing moves."""

from __future__ import annotations

import asyncio

import pytest

from headway.errors import StallError
from headway.events import Note, ReplicaActivity
from headway.interfaces import EngineStats
from headway.pipeline.monitor import Monitor, Movement
from headway.simulate.clock import run_virtual
from tests.pipeline.fakes import Recorder


class Replica:
    name = "rollout-0"

    def __init__(self, tokens_until: float = 0.0) -> None:
        self._tokens_until = tokens_until

    async def stats(self) -> EngineStats:
        active = asyncio.get_running_loop().time() <= self._tokens_until
        return EngineStats(busy=[(0.0, 1.0)] if active else [], generated_tokens=5 * active, slot_seconds=2.0)


class Serving:
    """A fleet of one."""

    def __init__(self, replica: Replica) -> None:
        self.serving = [replica]


def monitor(replica: Replica, recorder: Recorder, timeout: float = 10.0) -> Monitor:
    movement = Movement()
    recorder.on = movement.on_event
    fleet = Serving(replica)
    return Monitor(fleet, [], movement, recorder.on_event, stall_timeout_s=timeout, interval_s=1.0)  # type: ignore[arg-type]


def stalls_at(made: Monitor) -> float:
    async def main() -> float:
        with pytest.raises(StallError, match="nothing moved for 10 s"):
            await made.run()
        return asyncio.get_running_loop().time()

    return run_virtual(main())


def test_what_a_replica_did_is_reported_every_second():
    recorder = Recorder()
    stalls_at(monitor(Replica(), recorder))
    reports = [event for event in recorder.events if isinstance(event, ReplicaActivity)]
    assert [event.time for event in reports] == [float(second) for second in range(1, len(reports) + 1)]
    assert {(event.replica, event.slot_seconds) for event in reports} == {("rollout-0", 2.0)}


def test_nothing_at_all_is_a_stall():
    assert stalls_at(monitor(Replica(), Recorder())) == 10


def test_a_replica_that_decodes_is_no_stall():
    assert stalls_at(monitor(Replica(tokens_until=25), Recorder())) == 35


def test_any_event_is_progress():
    recorder = Recorder()
    made = monitor(Replica(), recorder)

    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_at(7, lambda: recorder.on_event(Note(time=7.0, level="info", text="still here")))
        with pytest.raises(StallError):
            await made.run()
        return loop.time()

    assert run_virtual(main()) == 17
