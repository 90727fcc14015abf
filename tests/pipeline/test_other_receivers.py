"""Roles that hold a copy of the policy and generate nothing: a stand-in for one that recomputes log-probs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from headway.errors import UpdateFailed, WorkerDied
from headway.events import GroupAdmitted, ReplicaLost, UpdateFinished, UpdatePhase, UpdateSuperseded
from tests.pipeline.fake_policies import FakeReceiver
from tests.pipeline.invariants import check_everything
from tests.pipeline.scenario import MODES, Run, Scenario
from tests.pipeline.test_replicas import at, joins
from tests.pipeline.test_update_recovery import (
    SCHEDULES,
    TIMEOUT_S,
    both_schedules,
    failed,
    hangs_in_recv,
    lost,
    scenario,
)
from tests.tiers import mostly_slow


@mostly_slow("mode", MODES, quick=["on_policy", "async_partial", "overlapped"])
def test_it_gets_every_version_in_order_before_the_update_is_over(mode: str):
    run = check_everything(Scenario(mode, replicas=2, receivers=("logp",)).run().assert_completed())
    (logp,) = run.others
    skipped = [event.version for event in run.of(UpdateSuperseded) if event.replica == "logp"]
    assert sorted([*dict(logp.loads), *skipped]) == [1, 2, 3, 4, 5, 6]
    finished = {update.version: update.time for update in run.of(UpdateFinished)}
    assert all(time <= finished[version] for version, time in logp.loads)
    assert [version for version, _ in logp.loads] == sorted(dict(logp.loads))


@pytest.mark.parametrize("mode", ["on_policy", "async_partial", "colocate_sync"])
def test_where_the_trainer_waits_for_the_update_no_step_is_made_before_it_serves_the_version(mode: str):
    run = Scenario(mode, receivers=("logp",), script=slow_load(3.0)).run().assert_completed()
    (logp,) = run.others
    loaded = dict(logp.loads)
    for what, (start, _) in run.trainer.computed:
        if what == "an optimizer step":
            trained_from = sum(update.time <= start for update in run.of(UpdateFinished))
            assert trained_from == 0 or loaded[trained_from] <= start


def slow_load(seconds: float) -> Callable[[Run], None]:
    def script(run: Run) -> None:
        for other in run.others:
            other._load_s = seconds

    return script


def test_it_does_not_count_for_admission():
    """Overlapped, and it takes ten seconds for a load: replicas go on with the version that they have."""
    slow = Scenario("overlapped", replicas=2, receivers=("logp",), script=slow_load(10.0)).run().assert_completed()
    alone = Scenario("overlapped", replicas=2).run().assert_completed()
    admitted = [[(event.number, event.version) for event in run.of(GroupAdmitted)] for run in (slow, alone)]
    assert admitted[0] == admitted[1]
    assert slow.of(UpdateFinished)[0].time > alone.of(UpdateFinished)[0].time + 9


def test_its_load_stalls_no_replica():
    run = Scenario("overlapped", receivers=("logp",), script=slow_load(2.0)).run().assert_completed()
    assert {update.rollout_stall_s for update in run.of(UpdateFinished)} == {0.125}


@both_schedules
def test_its_death_ends_the_run(mode: str):
    def script(run: Run) -> None:
        run.others[0].dies_on_receive = WorkerDied("logp was killed")

    run = failed(scenario(mode, receivers=("logp",), script=script), WorkerDied, "logp was killed")
    assert lost(run) == []


def never_receives(logp: FakeReceiver) -> None:
    logp.never_receives = True


def never_loads(logp: FakeReceiver) -> None:
    logp.never_loads = True


@mostly_slow(
    ("mode", "hangs"),
    product(SCHEDULES, [never_receives, never_loads]),
    quick=[("async_partial", never_loads), ("overlapped", never_receives)],
)
def test_its_silence_ends_the_run_with_its_name_in_bounded_time(mode: str, hangs: Callable[[FakeReceiver], None]):
    run = failed(
        scenario(mode, receivers=("logp",), script=lambda run: hangs(run.others[0])),
        UpdateFailed,
        "logp .*did not answer within param_update.timeout_s = 7 s",
    )
    assert lost(run) == []
    assert run.ended < scenario(mode).run().of(UpdateFinished)[0].time + 2 * TIMEOUT_S + 2


@both_schedules
def test_it_gets_its_version_though_a_replica_hangs(mode: str):
    run = check_everything(scenario(mode, receivers=("logp",), script=hangs_in_recv).run().assert_completed())
    assert lost(run) == ["rollout-1"]
    assert [version for version, _ in run.others[0].loads][-1] == 6
    assert [event.replica for event in run.of(ReplicaLost)] == ["rollout-1"]


def test_its_phases_are_reported_like_a_replicas():
    run = Scenario("async_partial", receivers=("logp",)).run().assert_completed()
    phases = [event.phase for event in run.of(UpdatePhase) if event.where == "logp" and event.version == 1]
    assert phases == ["recv", "register", "load"]


def test_nobody_may_join_under_its_name():
    def refused(run: Run) -> None:
        with pytest.raises(ValueError, match="'logp' is or was part"):
            run.join("logp")

    Scenario("async_partial", receivers=("logp",), beside=at(1.0, refused)).run().assert_completed()
    Scenario("async_partial", receivers=("logp",), beside=at(1.0, joins)).run().assert_completed()
