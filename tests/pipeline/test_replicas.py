"""Several replicas: who gets what, late ones, split groups, and those that are halted or gone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest

from headway.errors import WorkerDied
from headway.events import (
    Event,
    GroupAdmitted,
    GroupSettled,
    Note,
    ReplicaJoined,
    ReplicaLost,
    TrajectoryFinished,
    UpdateFinished,
    UpdatePhase,
)
from headway.pipeline.run import Status
from tests.pipeline.invariants import check_everything
from tests.pipeline.scenario import MODES, Run, Scenario
from tests.tiers import a_share_and_all, mostly_slow

SPLIT = [mode for mode in MODES if not mode.startswith("colocate")]
"""Modes in which a replica may join."""


def at(seconds: float, what: Callable[[Run], object]):
    async def beside(run: Run) -> None:
        await asyncio.sleep(seconds)
        what(run)

    return beside


def joins(run: Run) -> None:
    run.join("late")


# ---------------------------------------------------------------------------------------------- joining


@mostly_slow("mode", SPLIT, quick=["one_step_off", "async_partial", "overlapped"])
def test_a_late_replica_serves_nothing_before_it_has_the_current_version(mode: str):
    run = check_everything(Scenario(mode, problems=1, beside=at(1.0, joins)).run().assert_completed())
    (joined,) = run.of(ReplicaJoined)
    late = run.rollouts[-1]
    assert joined.replica == "late" and joined.slots == late.slots
    assert (joined.version, joined.time) == late.loads[0]
    assert late.submitted and min(time for time, *_ in late.submitted) >= joined.time
    assert {
        version for t in run.of(TrajectoryFinished) if t.replica == "late" for _, version in t.version_spans
    } <= set(dict(late.loads))


@a_share_and_all
@mostly_slow("mode", SPLIT, quick=["on_policy", "overlapped"])
def test_a_replica_may_join_at_any_moment_of_an_update(mode: str, share: float):
    """Before it begins, while weights are gathered, sent, registered and loaded, and after it: every 1/8 s, or 10/8."""
    healthy = Scenario(mode).run().assert_completed()
    first = min(phase.time for phase in healthy.of(UpdatePhase) if phase.version == 2) - 0.5
    for eighth in range(0, 12, int(1 / share)):
        run = Scenario(mode, beside=at(first + eighth / 8, joins)).run().assert_completed()
        (joined,) = check_everything(run).of(ReplicaJoined)
        assert joined.version in (2, 3)


def test_a_replica_that_joins_after_the_last_update_serves_nothing_and_harms_nothing():
    ends = Scenario("async_stale").run().assert_completed().ended
    run = check_everything(Scenario("async_stale", beside=at(ends - 0.25, joins)).run().assert_completed())
    assert run.of(ReplicaJoined) == [] and run.rollouts[-1].submitted == []


def test_a_replica_that_dies_before_it_joined_costs_nothing():
    def joins_and_dies(run: Run) -> None:
        run.join("late").die(WorkerDied("late was killed"))

    run = check_everything(Scenario("async_partial", beside=at(1.0, joins_and_dies)).run().assert_completed())
    assert [event.replica for event in run.of(ReplicaLost)] == ["late"]
    assert run.groups["dropped"] == 0


def test_a_load_that_ends_when_its_replica_is_lost_or_was_overtaken_counts_for_nothing():
    """Admission would go by a version that nobody serves."""
    seen: list[dict[str, int]] = []

    async def beside(run: Run) -> None:
        pool, state = run.pipeline._wiring.pool, run.pipeline._state
        await state.changed.until(lambda: state.staleness.served_version == 2)
        lost, late = pool.serving[1], run.join("late")
        await pool.died(lost.engine, WorkerDied("was killed"))
        pool.serve(lost, 2)
        pool.serve(pool.joining[0], 1)
        assert [replica.engine for replica in pool.joining] == [late]
        seen.append(dict(state.staleness.loaded))

    Scenario("on_policy", replicas=2, beside=beside).run().assert_completed()
    assert seen == [{"rollout-0": 2}]


def test_a_late_replica_may_take_over_when_the_first_one_dies():
    async def beside(run: Run) -> None:
        run.join("late")
        await asyncio.sleep(20.0)
        run.rollouts[0].die(WorkerDied("rollout-0 was killed"))

    run = check_everything(Scenario("async_partial", problems=2, beside=beside).run().assert_completed())
    assert run.groups["trained"] == 96
    assert run.validated()[-1] == 6


@pytest.mark.parametrize("name", ["rollout-0", "late", "gone"])
def test_a_name_is_given_once(name: str):
    def script(run: Run) -> None:
        run.join("late")

    async def beside(run: Run) -> None:
        run.join("gone").die(WorkerDied("gone was killed"))
        await asyncio.sleep(10.0)
        with pytest.raises(ValueError, match=f"'{name}' is or was part"):
            run.join(name)

    Scenario("async_partial", script=script, beside=beside).run().assert_completed()


# ---------------------------------------------------------------------------------------------- who gets what


@mostly_slow("mode", MODES, quick=["one_step_off", "stream_off_policy", "colocate_async"])
def test_a_group_stays_on_one_replica_that_has_free_slots(mode: str):
    run = check_everything(Scenario(mode, replicas=3, n=4, slots=64).run().assert_completed())
    where: dict[int, set[str]] = {}
    for t in run.of(TrajectoryFinished):
        where.setdefault(t.number, set()).add(t.replica)
    assert all(len(replicas) == 1 for replicas in where.values())
    assert len(set().union(*where.values())) == 3


def test_a_wave_is_spread_by_load():
    """Sixteen groups at once, on four replicas: four each."""
    run = Scenario("one_step_off", mini_batch=16, replicas=4, slots=64, total=32).run().assert_completed()
    first = Counter(t.replica for t in run.of(TrajectoryFinished) if t.number < 16)
    assert first == {f"rollout-{i}": 8 for i in range(4)}


def test_the_replica_with_the_least_in_flight_gets_the_next_group():
    """Replica 0 has the one long answer: of the short ones that follow, the other gets most."""
    lengths = lambda t: 400 if t.row == 0 else 8  # noqa: E731
    values = {"staleness_threshold": 0.5, "order": "ready", "window": None}
    run = Scenario("async_partial", async_training=values, replicas=2, n=4, slots=4, lengths=lengths).run()
    run.assert_completed()
    long = next(t for t in run.of(TrajectoryFinished) if t.number == 0)
    beside = Counter(t.replica for t in run.of(TrajectoryFinished) if 6 < t.finished < long.finished)
    assert long.replica == "rollout-0"
    assert beside["rollout-1"] > beside["rollout-0"]


# ---------------------------------------------------------------------------------------------- dying


def test_what_a_dead_replica_was_generating_is_taken_over_by_another_and_keeps_its_number():
    def dies(run: Run) -> None:
        run.rollouts[1].die(WorkerDied("rollout-1 was killed"))

    scenario = Scenario("async_partial", replicas=2, beside=at(1.0, dies))
    run = check_everything(scenario.run().assert_completed())
    assert not [event for event in run.of(GroupSettled) if event.fate == "dropped"]
    there = {number for time, numbers, _ in run.rollouts[1].submitted if time <= 1.0 for number in numbers}
    over = [t for t in run.of(TrajectoryFinished) if t.number in there and t.finished > 1.0]
    assert there and over and {t.replica for t in over} == {"rollout-0"}
    asked = [numbers for time, numbers, _ in run.rollouts[0].submitted if time == 1.0]
    assert {t.number for t in over} <= {number for numbers in asked for number in numbers}, "at once"


def test_the_death_of_the_replica_that_lags_behind_opens_admission():
    """Overlapped, and replica 0 still has version 0, for which the others wait; then it is gone."""
    values = {"staleness_threshold": 1}
    lengths = lambda t: 200 if t.epoch == -1 else 8  # noqa: E731

    def dies(run: Run) -> None:
        run.rollouts[0].die(WorkerDied("rollout-0 was killed"))

    scenario = Scenario("overlapped", async_training=values, replicas=2, problems=1, slots=64, lengths=lengths)
    scenario.beside = at(15.0, dies)
    run = check_everything(scenario.run().assert_completed())
    versions = [(event.time, event.version) for event in run.of(GroupAdmitted)]
    assert max(version for time, version in versions if time < 15.0) == 0
    assert next(version for time, version in versions if time == 15.0) == 2


def test_a_stop_succeeds_though_a_replica_has_died_unnoticed():
    """At the same moment: the shutdown is the first to ask the dead one for anything."""

    def stops(run: Run) -> None:
        run.rollouts[1].die(WorkerDied("rollout-1 was killed"))
        run.request_stop()

    scenario = Scenario("async_partial", replicas=2, lengths=lambda _: 4000, beside=at(2.0, stops))
    run = scenario.run()
    assert run.error is None and run.status is Status.INTERRUPTED
    assert [event.replica for event in check_everything(run).of(ReplicaLost)] == ["rollout-1"]


@a_share_and_all
@mostly_slow(
    ("mode", "joined_before"),
    product(SPLIT, [True, False]),
    quick=[("on_policy", True), ("one_step_off", False), ("overlapped", False)],
)
def test_the_only_replica_dies_at_any_moment_and_the_run_goes_on_with_another(
    mode: str, joined_before: bool, share: float
):
    """Also between two steps of a version, and in the last validation: nobody waits for a next version."""
    healthy = Scenario(mode, problems=2).run().assert_completed()
    for k in range(1, 12, int(1 / share)):
        at_s = int(healthy.ended * k / 12)

        async def beside(run: Run, at_s: float = at_s) -> None:
            await asyncio.sleep(at_s)
            if joined_before:
                run.join("late")
            run.rollouts[0].die(WorkerDied("rollout-0 was killed"))

        start_s = None if joined_before else 2.0
        scenario = Scenario(mode, problems=2, replica_start_s=start_s, supervised=True, beside=beside)
        run = check_everything(scenario.run().assert_completed())
        assert [event.replica for event in run.of(ReplicaLost)] == ["rollout-0"]
        assert run.groups["trained"] == healthy.groups["trained"]
        assert run.validated()[-1] == healthy.validated()[-1]


def test_a_run_without_a_replica_says_who_waits_for_whom_and_ends_when_restarts_are_used_up():
    async def beside(run: Run) -> None:
        while True:
            await asyncio.sleep(5.0)
            run.rollouts[-1].die(WorkerDied(f"{run.rollouts[-1].name} was killed"))

    sections = {"cluster": {"max_replica_restarts": 2}}
    run = Scenario("async_partial", sections=sections, replica_start_s=1.0, supervised=True, beside=beside).run()
    told = [note.text for note in run.of(Note)]
    waits = "rollout-0 is gone; it was the last replica, and the run waits for another one to start in its place, for "
    assert any(text.startswith(f"{waits}cluster.start_timeout_s = 120 s") for text in told)
    assert str(run.error).startswith("rollout-0+1+1 was killed. It was the last replica")
    assert "cluster.max_replica_restarts is used up" in str(run.error)
    run.assert_clean()


def test_in_one_process_the_end_of_the_only_replica_is_that_of_the_run():
    dies = at(3.0, lambda run: run.rollouts[0].die(WorkerDied("rollout-0 was killed")))
    inline = {"cluster": {"backend": "inline"}}
    run = Scenario("on_policy", sections=inline, replica_start_s=1.0, supervised=True, beside=dies).run()
    assert (str(run.error), run.ended) == ("rollout-0 was killed", 3.0)


def test_a_start_that_takes_longer_than_the_stall_limit_is_no_stall():
    sections = {"cluster": {"stall_timeout_s": 50.0, "start_timeout_s": 1000.0}, "param_update": {"timeout_s": 40.0}}
    dies = at(3.0, lambda run: run.rollouts[0].die(WorkerDied("rollout-0 was killed")))
    scenario = Scenario("async_partial", sections=sections, replica_start_s=900.0, supervised=True, beside=dies)
    check_everything(scenario.run().assert_completed())


@a_share_and_all
@mostly_slow("mode", MODES, quick=["on_policy", "async_partial", "overlapped", "colocate_sync"])
def test_the_last_replicas_death_is_the_error_whatever_notices_it_first(mode: str, share: float):
    """Also when a wave is on its way to it at that moment."""
    for k in range(20, 400, int(19 / share)):

        def script(run: Run, k: int = k) -> None:
            def on(_: Event) -> None:
                if len(run.events) == k:
                    asyncio.get_running_loop().call_soon(run.rollouts[0].die, WorkerDied("rollout-0 was killed"))

            run.recorder.on = on

        run = Scenario(mode, script=script, problems=1, lengths=lambda _: 1).run()
        assert isinstance(run.error, WorkerDied | None), run.error
        run.assert_clean()


def test_two_replicas_that_die_at_once_are_both_lost():
    def both_die(run: Run) -> None:
        for replica in run.rollouts[1:]:
            replica.die(WorkerDied(f"{replica.name} was killed"))

    run = check_everything(Scenario("async_partial", replicas=3, beside=at(2.0, both_die)).run().assert_completed())
    assert {event.replica for event in run.of(ReplicaLost)} == {"rollout-1", "rollout-2"}
    assert [update.version for update in run.of(UpdateFinished)] == [1, 2, 3, 4, 5, 6]
