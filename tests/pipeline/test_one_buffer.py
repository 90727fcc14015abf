"""Engines without a second buffer receive over the weights that they serve: they stand before the first byte comes, and
until a whole version is there. The fake raises where that is not so."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from headway.errors import UpdateFailed, WorkerDied
from headway.events import ReplicaHalted, UpdateFinished, UpdatePhase, UpdateRetried, UpdateSuperseded
from headway.planner.profiles.job_profile import PhaseProfile, UpdateProfile
from tests.pipeline.cases import SCHEDULES as RANDOM
from tests.pipeline.cases import faulty, for_each
from tests.pipeline.fakes import FakeRollout
from tests.pipeline.invariants import check_everything, run_and_check
from tests.pipeline.scenario import MODES, Run, Scenario
from tests.pipeline.test_update_recovery import SCHEDULES, TIMEOUT_S, both_schedules, failed, is_phase, lost, when
from tests.tiers import mostly_slow

GATHER_AND_RECV_S = 0.25 + 2.0


def one_buffer(mode: str = "async_partial", replicas: int = 2, **more: Any) -> Scenario:
    """Two seconds a transfer."""
    sections = {"param_update": {"timeout_s": TIMEOUT_S, "schedule": SCHEDULES.get(mode, "synchronous")}}
    return Scenario(
        mode,
        replicas=replicas,
        engine={"double_buffered": False, **more.pop("engine", {})},
        update=UpdateProfile(gather=PhaseProfile(latency_s=0.25), recv=PhaseProfile(latency_s=2.0)),
        sections=sections,
        **more,
    )


@mostly_slow(
    ("mode", "policy"),
    product(SCHEDULES, ["drain", "interrupt", "keep"]),
    quick=[("async_partial", "drain"), ("overlapped", "interrupt"), ("overlapped", "keep")],
)
def test_nothing_decodes_from_before_the_transfer_to_after_the_load(mode: str, policy: str):
    run = check_everything(one_buffer(mode, async_training={"on_update": policy}).run().assert_completed())
    for replica in run.rollouts:
        loaded = dict(replica.loads)
        for version, (start, end) in replica.received:
            (stood,) = [span for span in replica.stood if span[0] <= start and end <= span[1]]
            assert stood[0] <= start and loaded[version] <= stood[1]
    assert not run.of(UpdateRetried)


@mostly_slow("mode", MODES, quick=["on_policy", "async_stale", "overlapped"])
def test_it_works_in_every_mode(mode: str):
    run = check_everything(Scenario(mode, replicas=2, engine={"double_buffered": False}).run().assert_completed())
    assert run.version == 6


def test_the_stall_has_the_transfer_in_it():
    run = one_buffer(lengths=lambda _: 40).run().assert_completed()
    for update in run.of(UpdateFinished):
        assert update.rollout_stall_s == GATHER_AND_RECV_S + 0.125
        assert update.trainer_stall_s == 2.0 + 0.125, "all but the gather"
    halts = [halt for halt in run.of(ReplicaHalted) if halt.replica == "rollout-0"]
    assert [halt.span[1] - halt.span[0] for halt in halts] == [GATHER_AND_RECV_S + 0.125] * len(run.of(UpdateFinished))


def test_only_the_replica_that_needs_it_is_halted_for_the_transfer():
    def script(run: Run) -> None:
        run.rollouts[1].capabilities = FakeRollout.capabilities

    run = check_everything(one_buffer(script=script).run().assert_completed())
    stalls = [[end - start for start, end in replica.stood] for replica in run.rollouts]
    assert set(stalls[0]) == {GATHER_AND_RECV_S + 0.125} and set(stalls[1]) == {0.125}


@mostly_slow("mode", SCHEDULES, quick=["async_partial"])
def test_after_a_failed_attempt_it_stands_until_a_whole_version_has_come(mode: str):
    """The fake refuses to resume with torn weights."""

    def script(run: Run) -> None:
        run.rollouts[1].fails_to_receive = [UpdateFailed("corrupted")]

    run = check_everything(one_buffer(mode, script=script).run().assert_completed())
    assert len(run.of(UpdateRetried)) == 1 and lost(run) == []
    assert max(end - start for start, end in run.rollouts[1].stood) > 4.0, "both attempts"


@mostly_slow("mode", SCHEDULES, quick=["overlapped"])
def test_it_is_fenced_off_torn_as_it_is_when_the_attempts_keep_failing(mode: str):
    def script(run: Run) -> None:
        run.rollouts[1].fails_to_receive = [UpdateFailed("corrupted") for _ in range(2)]

    run = check_everything(one_buffer(mode, script=script).run().assert_completed())
    assert lost(run) == ["rollout-1"]
    assert run.rollouts[1].torn and run.rollouts[1].paused


@both_schedules
def test_the_only_one_is_not_released_when_the_run_ends_over_it(mode: str):
    def script(run: Run) -> None:
        run.rollouts[0].fails_to_receive = [UpdateFailed("corrupted") for _ in range(2)]

    run = failed(one_buffer(mode, replicas=1, script=script), UpdateFailed, "corrupted")
    assert run.rollouts[0].torn and run.rollouts[0].paused


@mostly_slow("mode", SCHEDULES, quick=["overlapped"])
def test_one_that_does_not_stop_is_fenced_before_anything_is_sent_to_it(mode: str):
    def script(run: Run) -> None:
        run.rollouts[1].silent_on.add("pause")

    run = check_everything(one_buffer(mode, script=script).run().assert_completed())
    assert lost(run) == ["rollout-1"] and run.rollouts[1].received == []


@mostly_slow("mode", SCHEDULES, quick=["overlapped"])
def test_one_that_dies_halted_holds_nobody_up(mode: str):
    def dies(run: Run) -> None:
        run.rollouts[1].die(WorkerDied("rollout-1 was killed"))

    script = when(lambda event: is_phase(event, 2, "gather"), dies, later=0.5)
    run = check_everything(one_buffer(mode, script=script).run().assert_completed())
    assert lost(run) == ["rollout-1"]


def test_a_version_that_is_overtaken_while_a_replica_drains_is_not_sent():
    """An answer of 30 s holds the drain up; meanwhile three versions are made from what the other replica does."""
    values = {"staleness_threshold": 3, "on_update": "drain", "order": "ready", "window": None}
    lengths = lambda t: 240 if t.row == 0 else 4  # noqa: E731
    run = one_buffer("overlapped", async_training=values, lengths=lengths, slots=64, total=40).run()
    check_everything(run.assert_completed())
    superseded = [event.version for event in run.of(UpdateSuperseded) if event.replica == "rollout-0"]
    assert superseded and not set(superseded) & {version for version, _ in run.rollouts[0].received}
    assert 1 in superseded, "it was overtaken after its turn had come"
    assert not {p.version for p in run.of(UpdatePhase) if p.where == "rollout-0"} & set(superseded)


@pytest.mark.slow
@pytest.mark.parametrize("share", [1], ids=["all"])
def test_everything_holds_in_random_runs_whoever_dies_joins_or_receives_corrupted_weights(share: float):
    """A hundred whole runs and more."""
    for_each(
        faulty("dies", "joins", "receives corrupted", double_buffered=False),
        share * RANDOM["one buffer"],
        run_and_check,
    )
