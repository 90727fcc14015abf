"""The watch at the side: activity, and a run in which nothing moves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from headway.config.sizing.timeouts import FILE_RATE, Timeouts, file_stall_s
from headway.data.interfaces.rollout import EngineStats
from headway.errors import StallError
from headway.events import Note, ReplicaActivity
from headway.pipeline.admission.pipeline_state import RunState
from headway.pipeline.episode_workers import EpisodeWorkers
from headway.pipeline.recovery.run_monitor import RunMonitor
from headway.pipeline.update.replica_pool import ReplicaPool
from headway.planner.simulation.virtual_clock import run_virtual
from headway.runtime.progress import Heartbeat
from tests.pipeline.fakes import Recorder


class Replica:
    name = "rollout-0"

    def __init__(self, tokens_until: float = 0.0) -> None:
        self._tokens_until = tokens_until

    async def stats(self) -> EngineStats:
        active = asyncio.get_running_loop().time() <= self._tokens_until
        return EngineStats(
            busy=[(0.0, 1.0)] if active else [],
            generated_tokens=5 * active,
            slot_seconds=2.0,
            cached_tokens=7,
            unpinned=1,
        )


class Serving:
    """A pool of one replica."""

    losing = ReplicaPool.losing

    def __init__(self, replica: Replica, stall_s: float) -> None:
        self.serving = [replica]
        self.timeouts = Timeouts(60, 10, stall_s)
        self.episode_workers = EpisodeWorkers([], cast(RunState, None), timeout_s=1.0)
        self.pauses = SimpleNamespace(stands=lambda replica: False)


class Rank:
    """Computes until ``until``, and counts each ``every`` seconds as progress."""

    def __init__(self, name: str, until: float = 0.0, every: float = 1.0) -> None:
        self.name = name
        self.answers = True
        self.file_nbytes: int | None = None
        self._until = until
        self._every = every

    async def heartbeat(self) -> Heartbeat:
        now = asyncio.get_running_loop().time()
        if not self.answers:
            await asyncio.Event().wait()
        moved = min(now, self._until) // self._every * self._every
        doing = f"train_step for {now:g} s, no progress for {now - moved:g} s"
        return Heartbeat(doing, now - moved, self.file_nbytes)


def monitor(replica: Replica, recorder: Recorder, timeout: float = 10.0, workers: Sequence[Rank] = ()) -> RunMonitor:
    made = RunMonitor(
        Serving(replica, timeout),  # type: ignore[arg-type]
        [],
        [],
        recorder.on_event,
        workers=lambda: workers,
        interval_s=1.0,
    )
    recorder.on = made.on_event
    return made


def stalls_at(made: RunMonitor, says: str = "") -> float:
    async def main() -> float:
        with pytest.raises(StallError, match=rf"nothing moved for 10 s \(cluster\.stall_timeout_s\): .*{says}"):
            await made.run()
        return asyncio.get_running_loop().time()

    return run_virtual(main())


def test_what_a_replica_did_is_reported_every_second():
    recorder = Recorder()
    stalls_at(monitor(Replica(), recorder))
    reports = [event for event in recorder.events if isinstance(event, ReplicaActivity)]
    assert [event.time for event in reports] == [float(second) for second in range(1, len(reports) + 1)]
    assert {(event.replica, event.slot_seconds) for event in reports} == {("rollout-0", 2.0)}
    assert {(event.cached_tokens, event.unpinned) for event in reports} == {(7, 1)}


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


def test_a_rank_that_computes_for_hours_is_no_stall_as_long_as_its_work_moves():
    busy, waiting = Rank("actor-0", until=7203, every=4.0), Rank("actor-1")
    says = "Workers: actor-0: train_step for 7210 s, no progress for 10 s; actor-1: .* no progress for 7210 s$"
    assert stalls_at(monitor(Replica(), Recorder(), workers=[busy, waiting]), says) == 7210


def test_nobody_is_asked_while_events_come():
    recorder = Recorder()
    silent = Rank("actor-0")
    silent.answers = False
    assert stalls_at(monitor(Replica(tokens_until=25), recorder, workers=[silent]), "actor-0: no answer") == 45


def test_a_worker_that_does_not_answer_does_not_keep_the_stall_from_being_told():
    """It has as long to answer as nothing may move, at most."""
    silent, idle = Rank("actor-0", until=1e6), Rank("actor-1")
    silent.answers = False
    says = "actor-0: no answer to its heartbeat within 10 s; actor-1"
    assert stalls_at(monitor(Replica(), Recorder(), workers=[silent, idle]), says) == 20


def test_an_event_that_comes_while_a_worker_is_asked_is_progress():
    recorder = Recorder()
    silent = Rank("actor-0")
    silent.answers = False
    made = monitor(Replica(), recorder, workers=[silent])

    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_at(15, lambda: recorder.on_event(Note(time=15.0, level="info", text="still here")))
        with pytest.raises(StallError):
            await made.run()
        return loop.time()

    assert run_virtual(main()) == 35


def test_work_with_files_is_left_to_its_own_limit_which_ends_it_first():
    saving = Rank("actor-0", until=50.0)
    saving.file_nbytes = int(500 * FILE_RATE)
    assert file_stall_s(saving.file_nbytes) == 120 + 500 + 60
    assert stalls_at(monitor(Replica(), Recorder(), workers=[saving])) == 50 + 120 + 500 + 60
