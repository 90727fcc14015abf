"""Failures that real systems had, and that whole runs of this one must not have."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import product

import pytest

from headway.errors import UpdateFailed, WorkerDied
from headway.events import (
    GroupAdmitted,
    GroupSettled,
    OptimizerStepped,
    ReplicaLost,
    TrajectoryFinished,
    UpdateFinished,
    UpdatePhase,
)
from tests.pipeline.fakes import FakeReward, fails
from tests.pipeline.scenario import MODES, Run, Scenario
from tests.tiers import mostly_slow


@mostly_slow(
    ("order", "admission", "on_update"),
    product(["fifo", "window", "ready"], ["group", "batch"], ["drain", "interrupt", "keep"]),
    quick=[("fifo", "group", "drain"), ("window", "batch", "interrupt"), ("ready", "group", "keep")],
)
def test_zero_staleness_makes_progress(order: str, admission: str, on_update: str):
    values = {"staleness_threshold": 0, "order": order, "admission": admission, "on_update": on_update}
    window = {"window": "B" if order == "window" else None}
    run = Scenario("async_partial", async_training={**values, **window}, problems=2).run().assert_completed()
    assert run.lags_by_version() == {version: {0} for version in range(6)}


def test_the_smallest_run_of_all_makes_progress():
    run = Scenario("on_policy", mini_batch=1, total=1, n=1, slots=1).run().assert_completed()
    assert run.groups["trained"] == 1


@mostly_slow("mode", MODES, quick=["one_step_off", "colocate_async"])
def test_filtered_groups_do_not_eat_capacity(mode: str):
    """Three of four groups are filtered, far more than there is room for at once."""
    reward = FakeReward(lambda prompt: [0.0, 1.0] if prompt.row % 4 == 0 else [1.0, 1.0])
    run = Scenario(mode, reward=reward, filters=True).run().assert_completed()
    assert run.groups["filtered"] > 2 * run.groups["trained"]


@mostly_slow("mode", MODES, quick=["on_policy", "async_stale", "overlapped"])
def test_how_much_is_admitted_does_not_depend_on_the_order_in_which_groups_finish(mode: str):
    def admissions(lengths) -> Counter[int]:
        run = Scenario(mode, lengths=lengths, slots=64).run().assert_completed()
        return Counter(event.version for event in run.of(GroupAdmitted))

    oldest_first = admissions(lambda t: 8 + t.row % 16)
    youngest_first = admissions(lambda t: 40 - t.row % 16)
    assert oldest_first == youngest_first


@mostly_slow("mode", MODES, quick=["colocate_sync", "one_step_off", "async_partial", "overlapped"])
def test_a_receiver_killed_in_the_middle_of_an_update_is_a_named_error_in_bounded_time(mode: str):
    """Also where nothing decodes meanwhile, and no other call could notice the death."""
    healthy = Scenario(mode).run().assert_completed()
    loaded = healthy.rollouts[0].loads[1][1]

    async def beside(run: Run) -> None:
        await asyncio.sleep(loaded - 0.3)
        run.rollouts[0].die(WorkerDied("rollout-0 was killed"))

    run = Scenario(mode, beside=beside).run()
    assert isinstance(run.error, WorkerDied)
    assert run.ended <= loaded
    assert run.assert_clean().trainer.saved == []


@mostly_slow("mode", MODES, quick=["one_step_off", "async_stale", "overlapped"])
def test_one_receiver_of_several_killed_in_the_middle_of_an_update_is_left_out_and_the_update_completes(mode: str):
    healthy = Scenario(mode, replicas=2).run().assert_completed()
    loaded = healthy.rollouts[1].loads[1][1]

    async def beside(run: Run) -> None:
        await asyncio.sleep(loaded - 0.3)
        run.rollouts[1].die(WorkerDied("rollout-1 was killed"))

    run = Scenario(mode, replicas=2, beside=beside).run().assert_completed()
    assert [event.replica for event in run.of(ReplicaLost)] == ["rollout-1"]
    assert [version for version, _ in run.rollouts[0].loads] == [version for version, _ in healthy.rollouts[0].loads]


def test_a_receiver_that_silently_never_answers_is_a_named_error_in_bounded_time():
    def script(run: Run) -> None:
        run.rollouts[0].never_receives = True

    run = Scenario("on_policy", script=script, sections={"param_update": {"timeout_s": 5}}).run()
    with pytest.raises(
        UpdateFailed,
        match=r"rollout-0 did not answer .*param_update\.timeout_s = 5 s, .*version 1\b",
    ):
        raise run.error or AssertionError("no error")
    assert run.ended < 20


def test_an_update_takes_as_long_as_its_phases_and_not_a_moment_more():
    run = Scenario("async_partial").run().assert_completed()
    for update in run.of(UpdateFinished):
        phases = {p.phase: p.seconds for p in run.of(UpdatePhase) if p.version == update.version}
        assert update.trainer_stall_s == phases["send"] + phases["recv"] + phases["register"] + phases["load"]
        assert update.rollout_stall_s == phases["load"]


def test_a_reply_that_arrives_after_an_update_keeps_the_version_that_sampled_its_tokens():
    """Every reply takes three seconds, so that updates lie between an answer's last token and its arrival."""

    def script(run: Run) -> None:
        finished = run.rollouts[0].finished

        async def slow_reply(client):
            async for batch in finished(client):
                await asyncio.sleep(batch[0].finished + 3.0 - asyncio.get_running_loop().time())
                yield batch

        run.rollouts[0].finished = slow_reply  # type: ignore[method-assign]

    run = Scenario("async_stale", script=script, trainer={"step_s": lambda _: 0.5}).run().assert_completed()
    loads = [(time, version) for version, time in run.rollouts[0].loads]
    late = 0
    for trajectory in run.of(TrajectoryFinished):
        served = max((version for time, version in loads if time < trajectory.finished), default=0)
        assert trajectory.version_spans == [[0, served]]
        late += any(trajectory.finished < time < trajectory.time for time, _ in loads)
    assert late > 0
    assert max(lag for step in run.of(OptimizerStepped) for lag in step.lags) == 1


def test_requests_that_are_only_queued_at_an_update_do_not_count_as_partial():
    """One slot: all but one of the groups in flight wait inside the engine when new weights arrive."""
    run = Scenario("async_partial", slots=1, n=1).run().assert_completed()
    partial = sum(len(t.version_spans) > 1 for t in run.of(TrajectoryFinished))
    assert 0 < partial <= len(run.of(UpdateFinished))
    assert sum(update.interrupted for update in run.of(UpdateFinished)) == partial


def test_one_failing_environment_does_not_end_the_job():
    reward = FakeReward(lambda prompt: fails("ValueError: no such move") if prompt.row == 7 else [0.0, 1.0])
    run = Scenario("async_partial", reward=reward).run().assert_completed()
    (failed,) = [event for event in run.of(GroupSettled) if event.fate == "failed"]
    assert failed.reason == "ValueError: no such move"
    assert run.groups["trained"] == 96


@pytest.mark.parametrize("order", ["window", "ready"])
def test_one_very_slow_group_is_neither_dropped_nor_forgotten(order: str):
    """Group 3 takes a minute, others two seconds. Nothing is dropped to make room for younger ones."""
    lengths = lambda t: 480 if t.row == 3 else 16  # noqa: E731
    values = {"order": order, "window": "B" if order == "window" else None}
    run = Scenario("async_partial", async_training=values, lengths=lengths, slots=64).run().assert_completed()
    assert run.fates() == {"trained": 96}
    (slow,) = [step for step in run.of(OptimizerStepped) if 3 in _numbers(run, step)]
    assert slow.step > 0


def _numbers(run: Run, step: OptimizerStepped) -> list[int]:
    return next(event.numbers for event in run.events if event.kind == "fetch.taken" and event.fetch == step.fetch)
