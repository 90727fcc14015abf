"""Replicas whose core hangs while they answer: silence with work open is what fences them, and nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headway.config.sizing.timeouts import Timeouts
from headway.data.interfaces.rollout import EngineStats
from headway.errors import StallError
from headway.events import Event, ReplicaActivity, ReplicaLost, TrajectoryFinished
from headway.pipeline.episode_workers import EpisodeWorkers
from headway.pipeline.recovery.run_monitor import RunMonitor
from headway.pipeline.remote_workers import WorkerUnavailable
from headway.pipeline.update.replica_pool import ReplicaPool
from headway.planner.simulation.virtual_clock import run_virtual
from headway.runtime.progress import OpenWork
from tests.pipeline.invariants import check_everything
from tests.pipeline.scenario import Run, Scenario
from tests.tiers import mostly_slow

TIMEOUT_S = 45.0
"""More than an engine needs here for its longest prefill, so that this is how long it may be silent."""


def hangs_when(happens: Callable[[Event], bool], number: int) -> Callable[[Run], None]:
    def script(run: Run) -> None:
        done = False

        def on(event: Event) -> None:
            nonlocal done
            if not done and happens(event):
                done = True
                run.rollouts[number].hang_core()

        run.recorder.on = on

    return script


def tokens_of(replica: str, number: int) -> Callable[[Event], bool]:
    """Tell of an event with which ``replica`` is in the middle of its calls."""
    seen = 0

    def happens(event: Event) -> bool:
        nonlocal seen
        seen += isinstance(event, ReplicaActivity) and event.replica == replica and event.generated_tokens > 0
        return seen == number

    return happens


def scenario(mode: str, replicas: int, script: Callable[[Run], None], **more: Any) -> Scenario:
    sections = {"param_update": {"timeout_s": TIMEOUT_S}, "data": {"max_response_length": 4000}}
    return Scenario(mode, replicas=replicas, script=script, sections=sections, lengths=lambda _: 200, **more)


@mostly_slow("mode", ["on_policy", "async_partial"], quick=["on_policy"])
def test_a_replica_whose_core_hangs_while_it_answers_is_fenced_off_and_the_others_go_on(mode: str) -> None:
    run = scenario(mode, 2, hangs_when(tokens_of("rollout-1", 3), 1)).run().assert_completed()
    (lost,) = run.of(ReplicaLost)
    assert lost.replica == "rollout-1" and "answers, but computed no token for" in lost.reason
    last = max(e.time for e in run.of(ReplicaActivity) if e.replica == "rollout-1" and e.generated_tokens)
    assert TIMEOUT_S - 3 <= lost.time - last <= TIMEOUT_S
    assert not any(t.replica == "rollout-1" and t.finished > lost.time for t in run.of(TrajectoryFinished))
    check_everything(run)


def test_the_only_replica_whose_core_hangs_ends_the_run_with_its_name_and_not_with_a_stall_of_the_whole() -> None:
    run = scenario("async_partial", 1, hangs_when(tokens_of("rollout-0", 3), 0)).run()
    with pytest.raises(StallError, match=r"rollout-0 answers, .*no token"):
        raise run.error or AssertionError("the run went on as if nothing had happened")
    run.assert_clean()


# ---------------------------------------------------------------------------------------------- one replica alone

LIMITS = Timeouts(60, 20, 1000, compiles=True)


class Scripted:
    """A replica that says one thing after the other of itself; and the pool that it is all of."""

    name = "rollout-0"
    losing = ReplicaPool.losing

    def __init__(self, said: Iterator[EngineStats], stands: Callable[[float], bool]) -> None:
        self._said = said
        self.timeouts = LIMITS
        self.episode_workers = EpisodeWorkers([], cast(Any, None), timeout_s=1.0)
        self.pauses = SimpleNamespace(stands=lambda replica: stands(asyncio.get_running_loop().time()))
        self.serving = [self]
        self.lost: list[tuple[float, WorkerUnavailable]] = []

    async def stats(self) -> EngineStats:
        return next(self._said)

    async def lose(self, gone: WorkerUnavailable) -> None:
        self.lost.append((asyncio.get_running_loop().time(), gone))
        self.serving = []


def lost_at(said: Iterator[EngineStats], stands: Callable[[float], bool] = lambda time: False) -> float | None:
    """Return the time at which such a replica was fenced off within 900 s; None where it was not."""
    pool = Scripted(said, stands)

    async def main() -> None:
        monitor = RunMonitor(
            cast(Any, pool),
            [],
            [],
            lambda event: None,
            interval_s=1.0,
        )
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(monitor.run(), 900)

    run_virtual(main())
    return pool.lost[0][0] if pool.lost else None


def says(*parts: tuple[int, EngineStats]) -> Iterator[EngineStats]:
    """Say each part so many times, once a second, and the last one for ever."""
    for seconds, stats in parts:
        for _ in range(seconds):
            yield stats
    while True:
        yield parts[-1][1]


DECODES = EngineStats(generated_tokens=5, running=2)
READS = EngineStats(prefilled_tokens=500, running=1)
SILENT = EngineStats(running=2, waiting=1)
QUEUED = EngineStats(waiting=3)
IDLE = EngineStats()


@pytest.mark.parametrize("silent", [SILENT, QUEUED])
def test_silence_with_work_open_fences_a_replica_whatever_it_answers(silent: EngineStats) -> None:
    at = lost_at(says((10, DECODES), (0, silent)))
    assert at is not None and 10 < at <= 10 + LIMITS.silence_s


def test_an_idle_replica_is_never_fenced_for_its_silence_and_has_all_its_time_once_it_has_work() -> None:
    assert lost_at(says((10, DECODES), (0, IDLE))) is None
    at = lost_at(says((10, DECODES), (400, IDLE), (0, SILENT)))
    assert at is not None and 410 < at <= 411 + LIMITS.silence_s


def test_a_replica_that_reads_prompts_is_not_silent() -> None:
    assert lost_at(says((0, READS))) is None


def test_a_replica_that_stands_for_new_weights_owes_no_tokens() -> None:
    assert lost_at(says((10, DECODES), (0, SILENT)), stands=lambda time: True) is None
    at = lost_at(says((10, DECODES), (0, SILENT)), stands=lambda time: time < 300)
    assert at is not None and 300 < at <= 301 + LIMITS.silence_s


def test_a_replica_that_compiles_its_first_step_has_the_time_for_that_and_once_only() -> None:
    at = lost_at(says((0, SILENT)))
    assert at is not None and LIMITS.silence_s + 500 < at <= LIMITS.first_silence_s
    at = lost_at(says((500, SILENT), (1, DECODES), (0, SILENT)))
    assert at is not None and at <= 501 + LIMITS.silence_s


def test_silence_is_counted_from_the_last_progress_or_the_last_moment_without_work() -> None:
    work = OpenWork()
    assert work.silent_s(5.0, is_open=True, moved=False) == 0.0, "nobody knows what was before the first look"
    assert work.silent_s(7.0, is_open=True, moved=False) == 2.0 and not work.began
    assert work.silent_s(8.0, is_open=True, moved=True) == 0.0 and work.began
    assert work.silent_s(9.0, is_open=False, moved=False) == 0.0
    assert work.silent_s(500.0, is_open=True, moved=False) == 0.0, "looks may be far apart, and the work just came"
    assert work.silent_s(503.0, is_open=True, moved=False) == 3.0
