"""Overlapped updates: the trainer waits for a copy of its weights and for nothing else; replicas follow as they can."""

from __future__ import annotations

import asyncio
from fractions import Fraction
from itertools import pairwise
from math import floor
from typing import Any

import pytest
from hypothesis import strategies as st

from headway.data.types import TrajectoryId
from headway.errors import WorkerDied
from headway.events import (
    BatchTaken,
    GroupAdmitted,
    OptimizerStepped,
    TrainerBusy,
    UpdateFinished,
    UpdatePhase,
    UpdateSuperseded,
)
from headway.planner.profiles.job_profile import PhaseProfile, UpdateProfile
from tests.pipeline.cases import SCHEDULES, Case, cases, for_each
from tests.pipeline.fakes import FakeReward, FakeRollout, fails
from tests.pipeline.invariants import check_everything, run_and_check
from tests.pipeline.scenario import Run, Scenario
from tests.tiers import a_twentieth_and_all, enough, mostly_slow


def overlapped(eta: int = 1, recv_s: float = 0.25, load_s: float = 0.125, **more: object) -> Scenario:
    return Scenario(
        "overlapped",
        async_training={"staleness_threshold": eta},
        update=UpdateProfile(gather=PhaseProfile(latency_s=0.25), recv=PhaseProfile(latency_s=recv_s)),
        engine={"load_s": load_s},
        **more,  # type: ignore[arg-type]
    )


def slow_validation(trajectory: TrajectoryId) -> int:
    """Held-out answers take 25 s, training answers one."""
    return 200 if trajectory.epoch == -1 else 8


def gathers(run: Run) -> list[tuple[float, float]]:
    return [busy.span for busy in run.of(TrainerBusy) if busy.what == "gather"]


def test_the_trainer_goes_on_after_gather_while_replicas_receive_and_load():
    run = check_everything(overlapped(replicas=2).run().assert_completed())
    for update, (_, gathered), fetch in zip(run.of(UpdateFinished), gathers(run), run.of(BatchTaken)[1:], strict=False):
        assert update.trainer_stall_s == 0
        assert fetch.waited[0] == gathered < update.time
    for replica in run.rollouts:
        for version, (start, end) in replica.received:
            assert not any(stood[0] < end and start < stood[1] for stood in replica.stood), "decoding goes on meanwhile"
            assert (start, end) == (gathers(run)[version - 1][1], gathers(run)[version - 1][1] + 0.25)


def test_a_replica_stands_for_the_swap_alone():
    run = overlapped(recv_s=2.0, replicas=2).run().assert_completed()
    assert all(update.rollout_stall_s == 0.125 for update in run.of(UpdateFinished))
    for replica in run.rollouts:
        assert [end - start for start, end in replica.stood] == [0.125] * len(replica.loads)


def test_a_validation_that_a_replica_waits_for_counts_against_the_trainer_only_while_that_waits():
    run = overlapped(problems=1, lengths=slow_validation).run().assert_completed()
    for update in run.of(UpdateFinished):
        assert update.validation_stall_s <= update.trainer_stall_s


def test_there_is_one_copy_and_gather_waits_until_it_was_sent():
    """A transfer takes eight seconds, a version one: the next gather begins when the last byte has arrived."""
    run = check_everything(overlapped(eta=2, recv_s=8.0, replicas=3, slots=32).run().assert_completed())
    arrived = [
        max(end for replica in run.rollouts for received, (_, end) in replica.received if received == version)
        for version in range(1, 7)
    ]
    waited = [gather[0] - arrival for gather, arrival in zip(gathers(run)[1:], arrived, strict=False)]
    assert waited.count(0) >= 3 and min(waited) == 0
    assert any(update.trainer_stall_s > 4 for update in run.of(UpdateFinished))


def far_behind(**more: object) -> Scenario:
    """A replica loads for thirty seconds; four versions' worth of groups are there: versions overtake each other."""
    return overlapped(eta=3, load_s=30.0, slots=64, lengths=lambda _: 8, **more)


def test_of_the_versions_that_wait_for_a_replica_only_the_newest_is_sent():
    run = check_everything(far_behind().run().assert_completed())
    superseded = [event.version for event in run.of(UpdateSuperseded)]
    loaded = [version for version, _ in run.rollouts[0].loads]
    assert superseded == [2, 3]
    assert loaded == [1, 4, 5, 6]
    assert not {2, 3} & {phase.version for phase in run.of(UpdatePhase) if phase.phase != "gather"}


def test_an_update_that_was_superseded_still_counts_and_is_finished():
    run = far_behind().run().assert_completed()
    assert [update.version for update in run.of(UpdateFinished)] == [1, 2, 3, 4, 5, 6]
    assert run.version == 6
    finished = {update.version: update for update in run.of(UpdateFinished)}
    assert finished[2].rollout_stall_s == finished[3].rollout_stall_s == 0


@pytest.mark.parametrize("sections", [{}, {"agent": {"program": "x.py:run"}}], ids=["answers", "programs"])
def test_a_version_that_is_due_and_superseded_is_validated_with_the_next_one_that_is_served(sections: dict[str, Any]):
    run = far_behind(problems=1, test_freq=3, sections=sections).run().assert_completed()
    assert [event.version for event in run.of(UpdateSuperseded)] == [2, 3]
    assert run.validated() == [0, 4, 6]


@mostly_slow("eta", [1, 2, 3], quick=[2])
def test_replicas_differ_by_at_most_one_plus_eta_versions_and_that_much_is_reached(eta: int):
    """Replica 0 validates for 25 s what it has loaded, and loads nothing meanwhile."""
    scenario = overlapped(eta=eta, replicas=2, problems=1, slots=64, lengths=slow_validation, total=48)
    run = check_everything(scenario.run().assert_completed())
    loads = sorted((time, replica.name, version) for replica in run.rollouts for version, time in replica.loads)
    serves, apart = {"rollout-0": 0, "rollout-1": 0}, 0
    for _, name, version in loads:
        serves[name] = version
        apart = max(apart, abs(serves["rollout-0"] - serves["rollout-1"]))
    assert apart == floor(1 + eta)


class Sharing(FakeRollout):
    """The first two load from one copy."""

    def __init__(self, name: str, *arguments: Any, **more: Any) -> None:
        super().__init__(name, *arguments, **more)
        if name in ("rollout-0", "rollout-1"):
            self.copy = "here"


def test_receivers_of_one_copy_get_a_version_together_and_the_next_one_when_all_have_loaded():
    """Replica 0 validates for 25 s what it has loaded; replica 1 waits for it, and replica 2 does not."""
    scenario = overlapped(eta=3, replicas=3, rollout=Sharing, problems=1, slots=64, lengths=slow_validation, total=48)
    run = check_everything(scenario.run().assert_completed())
    slow, other, alone = run.rollouts
    assert slow.received == other.received
    assert [version for version, _ in slow.loads] == [version for version, _ in other.loads]
    last: dict[int, float] = {}
    for version, time in [*slow.loads, *other.loads]:
        last[version] = max(time, last.get(version, 0.0))
    for (before, _), (_, (start, _)) in pairwise(slow.received):
        assert start >= last[before]
    waited = [dict(other.loads)[version] - time for version, time in alone.loads if version in dict(other.loads)]
    assert max(waited) > 20
    superseded = {event.replica for event in run.of(UpdateSuperseded)}
    assert superseded in (set(), {"rollout-0", "rollout-1"})


def test_of_those_who_load_from_one_copy_one_that_dies_holds_the_others_not_up():
    def script(run: Run) -> None:
        def on(event: object) -> None:
            if isinstance(event, UpdatePhase) and (event.version, event.phase) == (2, "gather"):
                run.rollouts[0].die(WorkerDied("rollout-0 was killed"))

        run.recorder.on = on

    scenario = overlapped(replicas=3, rollout=Sharing, recv_s=4.0, script=script)
    run = check_everything(scenario.run().assert_completed())
    for replica in run.rollouts[1:]:
        assert [version for version, _ in replica.loads][-1] == 6


def test_the_slowest_replica_decides_how_much_may_be_admitted():
    run = overlapped(replicas=2, problems=1, slots=64, lengths=slow_validation, total=48).run().assert_completed()
    loads = {replica.name: [(0, 0.0), *replica.loads] for replica in run.rollouts}
    for event in run.of(GroupAdmitted):
        has = [max(version for version, time in of if time <= event.time) for of in loads.values()]
        assert event.version == min(has)


def test_new_groups_go_to_replicas_that_are_not_halted():
    """Under `drain` replica 0 finishes a long answer before it loads; what comes in meanwhile goes to replica 1."""
    scenario = overlapped(eta=2, replicas=2, slots=64, lengths=lambda t: 300 if t.row == 0 else 8)
    scenario.async_training |= {"on_update": "drain", "order": "ready", "window": None}
    scenario.reward = FakeReward(
        lambda prompt: fails("late") if prompt.row == 11 else [0.0, 1.0],
        lambda prompt: 20.0 if prompt.row == 11 else 0.25,
    )
    run = scenario.run().assert_completed()
    slow = run.rollouts[0]
    halted = slow.stood[0][0]
    _, (_, arrived) = slow.received[0]
    assert halted - arrived > 20, "the drain"
    assert not any(arrived < time < halted for time, *_ in slow.submitted)
    assert any(time == 21.0 for time, *_ in run.rollouts[1].submitted), "the refill of group 11"


def test_a_replica_that_dies_while_it_receives_holds_nobody_up():
    def script(run: Run) -> None:
        def on(event: object) -> None:
            if isinstance(event, UpdatePhase) and (event.version, event.phase) == (2, "gather"):
                run.rollouts[1].die(WorkerDied("rollout-1 was killed"))

        run.recorder.on = on

    run = check_everything(overlapped(replicas=2, recv_s=4.0, script=script).run().assert_completed())
    assert [version for version, _ in run.rollouts[0].loads][-1] == 6


def test_the_last_version_is_validated_though_the_validating_replica_died_before_it_had_it():
    """Replica 1 has version 4 for long when replica 0, which validated version 0 until then, dies over its load."""

    async def beside(run: Run) -> None:
        await asyncio.sleep(26.0)
        run.rollouts[0].die(WorkerDied("rollout-0 was killed"))

    scenario = overlapped(eta=3, replicas=2, problems=1, slots=64, load_s=4.0, lengths=slow_validation, total=16)
    scenario.test_freq, scenario.beside = -1, beside
    run = check_everything(scenario.run().assert_completed())
    assert run.rollouts[0].loads == []
    assert run.validated() == [0, 4]


def test_a_synchronous_update_is_loaded_everywhere_before_the_trainer_goes_on():
    scenario = overlapped(replicas=3, problems=1, lengths=slow_validation)
    scenario.sections = {"param_update": {"schedule": "synchronous", "transport": "auto"}}
    run = check_everything(scenario.run().assert_completed())
    assert run.of(UpdateSuperseded) == []
    for update, fetch in zip(run.of(UpdateFinished), run.of(BatchTaken)[1:], strict=False):
        assert max(dict(replica.loads)[update.version] for replica in run.rollouts) == update.time == fetch.waited[0]


@a_twentieth_and_all
def test_everything_holds_where_versions_overtake_each_other(share: float):
    """A hundred whole runs and more."""
    superseded = 0

    @st.composite
    def far_ahead(draw: st.DrawFn) -> Case:
        return draw(
            cases(
                shared=False,
                overlapped=True,
                eta=draw(st.sampled_from([Fraction(2), Fraction(5, 2), Fraction(3)])),
                step_s=draw(st.sampled_from([0.0, 0.5])),
                load_s=draw(st.sampled_from([2.0, 8.0])),
                versions=draw(st.integers(4, 8)),
                slots=8,
                longest=20,
                by_epochs=False,
            )
        )

    def check(case: Case) -> None:
        nonlocal superseded
        run = run_and_check(case)
        versions = [event.version for event in run.of(UpdateSuperseded)]
        assert all(a <= b for a, b in pairwise(versions)) or case.replicas > 1
        superseded += bool(versions)

    for_each(far_ahead(), share * SCHEDULES["overlapped"], check)
    assert superseded > enough(10, share)


def test_with_one_version_ahead_overlapped_updates_keep_the_bound_of_a_window():
    run = check_everything(overlapped(replicas=2, slots=4, total=64, trainer={"step_s": lambda _: 0.25}).run())
    lags = {lag for step in run.of(OptimizerStepped) for lag in step.lags}
    assert max(lags) <= floor(2 + Fraction(2, 4))
