"""The five presets as shipped, each a handful of values, from the first event to the last."""

from __future__ import annotations

from itertools import cycle, product

import pytest

from headway.events import (
    BatchTaken,
    GroupRewarded,
    OptimizerStepped,
    RunStarted,
    TrainerBusy,
    TrajectoryFinished,
    UpdateFinished,
    UpdatePhase,
    ValidationFinished,
)
from tests.pipeline.fakes import FakeReward
from tests.pipeline.scenario import MODES, Run, Scenario
from tests.tiers import mostly_slow

MANY_SPEEDS = [0.125, 1.0, 8.0]
"""Seconds of an optimizer step: the trainer starves, keeps up, is the bottleneck."""


def spans_more_than_one_version(run: Run) -> list[TrajectoryFinished]:
    return [t for t in run.of(TrajectoryFinished) if len({version for _, version in t.version_spans}) > 1]


@mostly_slow("mode", MODES, quick=["one_step_off", "stream_off_policy", "colocate_async"])
def test_every_group_has_exactly_one_fate_and_the_exact_number_is_trained(mode: str):
    run = Scenario(mode, problems=3).run().assert_completed()
    total = run.of(RunStarted)[0].total_groups
    nothing = {"filtered": 0, "dropped": 0, "failed": 0, "in_flight": 0}
    assert run.groups == {"admitted": total, "trained": total, **nothing}
    assert run.version == 6
    assert run.validated() == [0, 1, 2, 3, 4, 5, 6]


@mostly_slow(
    ("mode", "step_s"),
    product(MODES, MANY_SPEEDS),
    quick=[*zip(["colocate_sync", "one_step_off", "async_stale", "overlapped"], cycle(MANY_SPEEDS), strict=False)],
)
def test_no_group_exceeds_the_bound_on_lag(mode: str, step_s: float):
    run = Scenario(mode, trainer={"step_s": lambda _: step_s}).run().assert_completed()
    bound = run.of(RunStarted)[0].lag_bound
    assert bound is not None
    assert max(lag for step in run.of(OptimizerStepped) for lag in step.lags) <= bound


@mostly_slow("mode", MODES, quick=["async_stale", "overlapped", "colocate_async"])
def test_drain_never_cuts_an_answer_short(mode: str):
    run = Scenario(mode, async_training={"on_update": "drain"}, slots=3).run().assert_completed()
    assert spans_more_than_one_version(run) == []
    assert sum(update.interrupted for update in run.of(UpdateFinished)) == 0


@mostly_slow("step_s", MANY_SPEEDS, quick=[1.0])
def test_on_policy_every_group_has_lag_zero(step_s: float):
    run = Scenario("on_policy", problems=3, trainer={"step_s": lambda _: step_s}).run().assert_completed()
    assert run.lags_by_version() == {version: {0} for version in range(6)}


@pytest.mark.parametrize("reward_s", [0.0, 5.0])
def test_on_policy_a_wave_starts_together_after_the_validation_of_its_version(reward_s: float):
    reward = FakeReward(seconds=lambda _: reward_s)
    run = Scenario("on_policy", problems=5, slots=16, reward=reward).run().assert_completed()
    waves = [(t, numbers) for t, numbers, priority in run.rollouts[0].submitted if priority == "training"]
    assert [numbers for _, numbers in waves] == [tuple(range(4 * v, 4 * v + 4)) for v in range(6)]
    started = {t.number: t.started for t in run.of(TrajectoryFinished)}
    for _, numbers in waves:
        assert len({started[number] for number in numbers}) == 1
    validations = [v for v in run.rollouts[0].submitted if v[2] == "validation"]
    for (validated, *_), (launched, _) in zip(validations, waves, strict=False):
        assert launched > validated
    loads = [0.0, *(time for _, time in run.rollouts[0].loads)]
    for version, (launched, _) in enumerate(waves):
        assert launched >= loads[version]


def test_on_policy_a_wave_has_the_engine_to_itself():
    """Validation answers are long here: no wave may start before the last of them is done."""
    lengths = lambda t: 200 if t.epoch == -1 else 5  # noqa: E731
    run = Scenario("on_policy", problems=5, slots=16, lengths=lengths).run().assert_completed()
    launches = run.launches()
    for version in range(6):
        validated = next(v for v in run.of(ValidationFinished) if v.version == version)
        assert launches[4 * version] >= validated.span[1] - 0.25  # scores come in while the wave already runs


@pytest.mark.parametrize("step_s", MANY_SPEEDS)
def test_one_step_off_has_lags_0_1_1_1(step_s: float):
    run = Scenario("one_step_off", trainer={"step_s": lambda _: step_s}).run().assert_completed()
    assert run.lags_by_version() == {0: {0}, 1: {1}, 2: {1}, 3: {1}, 4: {1}, 5: {1}}
    assert run.fates() == {"trained": 24}


def test_one_step_off_generates_each_batch_with_the_version_before():
    run = Scenario("one_step_off").run().assert_completed()
    for trajectory in run.of(TrajectoryFinished):
        batch = trajectory.number // 4
        assert {version for _, version in trajectory.version_spans} == {max(0, batch - 1)}


@pytest.mark.parametrize("step_s", MANY_SPEEDS)
def test_one_step_off_training_a_batch_never_delays_the_launch_of_the_next(step_s: float):
    run = Scenario("one_step_off", trainer={"step_s": lambda _: step_s}).run().assert_completed()
    launches = run.launches()
    loads = {0: 0.0, **dict(run.rollouts[0].loads)}
    rewarded = [max(e.time for e in run.of(GroupRewarded) if e.number // 4 == batch) for batch in range(6)]
    for batch in range(1, 6):
        assert launches[4 * batch] == max(loads[batch - 1], rewarded[batch - 1]), (
            "wait for one, update, launch the next"
        )
    fetches = {fetch.version: fetch for fetch in run.of(BatchTaken)}
    for batch in range(1, 5):
        assert launches[4 * (batch + 1)] <= fetches[batch].time


@mostly_slow("step_s", MANY_SPEEDS, quick=[8.0])
def test_stream_off_policy_streams_within_a_version_at_lag_zero(step_s: float):
    run = Scenario("stream_off_policy", trainer={"step_s": lambda _: step_s}).run().assert_completed()
    assert run.lags_by_version() == {version: {0} for version in range(6)}
    # Training starts while the version is still being generated: that is what streaming is for.
    first_fetch = run.of(BatchTaken)[0]
    assert first_fetch.time < max(t.finished for t in run.of(TrajectoryFinished) if t.number < 16)


def test_async_stale_generates_ahead_while_the_trainer_works():
    run = Scenario("async_stale").run().assert_completed()
    assert 1 in set().union(*run.lags_by_version().values())
    launches = run.launches()
    assert sum(time == 0 for time in launches.values()) == 24, "⌊(0 + 1 + 0.5)·16⌋ groups at once"


def test_async_partial_has_trajectories_with_tokens_of_two_versions():
    run = Scenario("async_partial", trainer={"step_s": lambda _: 0.5}).run().assert_completed()
    partial = spans_more_than_one_version(run)
    assert partial
    assert sum(update.interrupted for update in run.of(UpdateFinished)) == run.rollouts[0].cut > 0
    for trajectory in partial:
        starts = [start for start, _ in trajectory.version_spans]
        versions = [version for _, version in trajectory.version_spans]
        assert starts[0] == 0 and starts == sorted(set(starts)) and starts[-1] < trajectory.tokens
        assert versions == sorted(set(versions))


def test_keep_goes_on_in_place():
    run = Scenario("async_partial", async_training={"on_update": "keep"}).run().assert_completed()
    assert spans_more_than_one_version(run)


@mostly_slow("mode", MODES, quick=["on_policy", "async_partial", "overlapped"])
def test_several_replicas_load_every_version_and_share_the_work(mode: str):
    run = Scenario(mode, replicas=3, problems=2, slots=4).run().assert_completed()
    for rollout in run.rollouts:
        assert [version for version, _ in rollout.loads] == [1, 2, 3, 4, 5, 6]
        assert rollout.submitted
    assert run.validated() == [0, 1, 2, 3, 4, 5, 6]
    assert {t.replica for t in run.of(TrajectoryFinished)} == {"rollout-0", "rollout-1", "rollout-2"}


@mostly_slow("mode", MODES, quick=["one_step_off", "overlapped", "colocate_sync"])
def test_each_update_has_its_five_phases_and_its_stalls(mode: str):
    run = Scenario(mode, replicas=2).run().assert_completed()
    for version in range(1, 7):
        phases = [(p.phase, p.where) for p in run.of(UpdatePhase) if p.version == version]
        at_each = [(phase, f"rollout-{i}") for i in range(2) for phase in ("recv", "register", "load")]
        overlapped = run.pipeline.config.param_update.schedule == "overlapped"
        sends = [("send", f"rollout-{i}") for i in range(2)] if overlapped else [("send", "actor")]
        assert sorted(phases) == sorted([("gather", "actor"), *sends, *at_each])
    for update in run.of(UpdateFinished):
        assert update.rollout_stall_s == 0.125, "the swap alone"
        if overlapped:
            assert update.trainer_stall_s == 0, "gather is the trainer's own work, and all that it waits for"
        else:
            assert update.trainer_stall_s >= 0.25 + 0.125, "recv and load"


def test_the_trainer_reports_what_it_did_and_when():
    run = Scenario("on_policy", total=8).run().assert_completed()
    busy = [(b.what, b.version, b.span[1] - b.span[0]) for b in run.of(TrainerBusy)]
    assert busy == [("step", 0, 1.0), ("gather", 1, 0.25), ("step", 1, 1.0), ("gather", 2, 0.25)]


def test_require_batches_makes_several_optimizer_steps_of_one_batch():
    run = Scenario(
        "async_stale", async_training={"require_batches": 2, "trigger_parameter_sync_step": 2}, total=32
    ).run()
    run.assert_completed()
    assert [len(fetch.numbers) for fetch in run.of(BatchTaken)] == [8, 8, 8, 8]
    steps = run.of(OptimizerStepped)
    assert [(s.step, s.fetch, s.version, len(s.lags)) for s in steps] == [
        (i, i // 2, i // 4, 4) for i in range(8)
    ]  # fmt: skip


def test_ppo_epochs_repeat_the_mini_batches_of_a_batch_and_count_groups_once():
    run = Scenario("on_policy", total=8, sections={"actor": {"ppo_epochs": 3}}).run().assert_completed()
    assert [(s.step, s.fetch) for s in run.of(OptimizerStepped)] == [(i, i // 3) for i in range(6)]
    assert run.groups["trained"] == 8


def test_the_histogram_of_token_lags_counts_each_token_once():
    run = Scenario("async_partial", trainer={"step_s": lambda _: 0.5}).run().assert_completed()
    for step in run.of(OptimizerStepped):
        assert sum(step.token_lag.values()) == step.tokens
        assert max(step.token_lag) == max(step.lags)
        assert min(step.token_lag) >= 0
