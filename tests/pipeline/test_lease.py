"""Shared devices: training and generation take turns, and whoever has to go loses nothing."""

from __future__ import annotations

import asyncio
from itertools import pairwise, product
from typing import Any

import pytest

from headway.data.types import TrajectoryId
from headway.errors import UpdateFailed, WorkerDied
from headway.events import (
    BatchTaken,
    LeaseChanged,
    OptimizerStepped,
    ReplicaActivity,
    ReplicaHalted,
    ReplicaLost,
    TrainerBusy,
    TrajectoryFinished,
    UpdateFinished,
    UpdateRetried,
    ValidationFinished,
)
from tests.pipeline.invariants import check_everything
from tests.pipeline.scenario import Run, Scenario
from tests.tiers import mostly_slow

SHARED = ["colocate_sync", "colocate_async"]


def long_or_short(trajectory: TrajectoryId) -> int:
    return 120 if trajectory.row % 3 == 0 else 8


def slow_validation(trajectory: TrajectoryId) -> int:
    """Held-out answers take 25 s."""
    return 200 if trajectory.epoch == -1 else 8


def turns(run: Run) -> list[tuple[float, float]]:
    """When training had the devices."""
    times = [change.time for change in run.of(LeaseChanged)]
    return list(zip(times[::2], times[1::2], strict=True))


def several_fetches(**more: Any) -> Scenario:
    """Four fetches a version, so that three of four turns bring no new weights."""
    values = {"trigger_parameter_sync_step": 4, "staleness_threshold": 0.5}
    return Scenario("colocate_async", async_training=values, total=32, slots=4, **more)


@mostly_slow(("mode", "replicas"), product(SHARED, [1, 3]), quick=[("colocate_async", 1)])
def test_training_and_generation_never_compute_at_once(mode: str, replicas: int):
    scenario = Scenario(mode, replicas=replicas, problems=3, lengths=long_or_short, slots=3)
    run = check_everything(scenario.run().assert_completed())
    decoding = [span for event in run.of(ReplicaActivity) for span in event.busy]
    for busy in run.of(TrainerBusy):
        start, end = busy.span
        assert not any(start < until and since < end for since, until in decoding)
    assert decoding


def test_the_devices_change_hands_only_for_a_whole_batch_and_are_returned_after_each_one():
    run = check_everything(several_fetches(lengths=long_or_short).run().assert_completed())
    fetches = run.of(BatchTaken)
    takes, gives = run.of(LeaseChanged)[::2], run.of(LeaseChanged)[1::2]
    assert [change.asked for change in takes] == [fetch.time for fetch in fetches]
    assert len(gives) == len(fetches) == 8 and len(run.of(UpdateFinished)) == 2, "also when no update is due"
    assert {change.holder for change in takes} == {"train"} and {change.holder for change in gives} == {"generate"}
    steps = [step.time for step in run.of(OptimizerStepped)]
    assert all(step <= end for step, (_, end) in zip(steps, turns(run), strict=True))


def test_generation_goes_on_at_once_when_it_has_the_devices_again():
    run = several_fetches(lengths=lambda _: 40).run().assert_completed()
    busy = [span for event in run.of(ReplicaActivity) for span in event.busy]
    for _, end in turns(run)[:-2]:
        assert any(since == end for since, _ in busy)


def test_what_interrupt_cuts_is_carried_over_and_nothing_is_lost():
    """Every answer is longer than the time between two turns, and has all of its tokens in the end."""
    run = check_everything(several_fetches(lengths=lambda _: 60).run().assert_completed())
    halts = run.of(ReplicaHalted)
    assert sum(halt.interrupted for halt in halts) == run.rollouts[0].cut > 0
    assert {t.tokens for t in run.of(TrajectoryFinished)} == {60}
    assert {t.finish_reason for t in run.of(TrajectoryFinished)} == {"stop"}


def test_an_answer_that_was_cut_only_for_the_lease_has_one_version():
    """A turn without new weights changes nothing for it: it is prefilled again, and goes on under the same version."""
    run = several_fetches(lengths=lambda _: 60).run().assert_completed()
    loads = [time for _, time in run.rollouts[0].loads]
    cut = [
        t
        for t in run.of(TrajectoryFinished)
        if any(t.started < start and end < t.finished for start, end in run.rollouts[0].stood)
    ]
    assert cut
    for t in cut:
        assert len(t.version_spans) == 1 + sum(t.started < time < t.finished for time in loads)


def test_drain_lets_what_is_in_flight_finish_before_it_hands_the_devices_over():
    scenario = several_fetches(lengths=long_or_short)
    scenario.async_training["on_update"] = "drain"
    run = check_everything(scenario.run().assert_completed())
    assert all(halt.interrupted == 0 for halt in run.of(ReplicaHalted))
    for start, end in turns(run):
        assert not any(t.started < start and t.finished > start for t in run.of(TrajectoryFinished))
        assert not any(start < t.finished < end for t in run.of(TrajectoryFinished))


@pytest.mark.parametrize("mode", SHARED)
def test_a_validation_is_done_before_the_devices_change_hands(mode: str):
    run = check_everything(Scenario(mode, problems=2, lengths=slow_validation).run().assert_completed())
    assert run.validated() == [0, 1, 2, 3, 4, 5, 6]
    for validation in run.of(ValidationFinished):
        scored = validation.span[1] - 0.25
        assert not any(validation.span[0] < start < scored for start, _ in turns(run))
    if mode == "colocate_async":  # strictly on-policy, not even the wave begins before
        asked = [change.time - change.asked for change in run.of(LeaseChanged)[::2]]
        assert max(asked) > 20, "the trainer waited for it with its fetch in hand"


def test_new_weights_and_the_lease_halt_a_replica_once_and_the_last_of_both_lets_it_go_on():
    run = Scenario("colocate_async", lengths=long_or_short).run().assert_completed()
    halts = run.of(ReplicaHalted)
    for (_, loaded), halt in zip(run.rollouts[0].loads, [h for h in halts if any_load_in(run, h)], strict=True):
        assert halt.reason == "lease"
        assert halt.span[0] < loaded <= halt.span[1]
    assert all(a.span[1] <= b.span[0] for a, b in pairwise(halts))


def any_load_in(run: Run, halt: ReplicaHalted) -> bool:
    return any(halt.span[0] < time <= halt.span[1] for _, time in run.rollouts[0].loads)


@mostly_slow("moment", [0.5, 2.0, 4.0, 5.5, 6.0, 7.25, 9.0], quick=[0.5, 5.5, 6.0])
def test_one_of_several_replicas_may_die_whoever_has_the_devices(moment: float):
    async def beside(run: Run) -> None:
        await asyncio.sleep(moment)
        run.rollouts[1].die(WorkerDied("rollout-1 was killed"))

    scenario = several_fetches(replicas=3, problems=1, lengths=long_or_short, beside=beside)
    run = check_everything(scenario.run().assert_completed())
    assert [event.replica for event in run.of(ReplicaLost)] == ["rollout-1"]


def test_devices_of_their_own_never_change_hands():
    run = Scenario("async_partial").run().assert_completed()
    assert run.of(LeaseChanged) == []
    assert {halt.reason for halt in run.of(ReplicaHalted)} == {"load"}


def test_a_trainer_that_fails_wakes_nobody_on_its_devices():
    def script(run: Run) -> None:
        run.trainer.raises_at[1] = ArithmeticError("overflow")

    run = Scenario("colocate_async", script=script, lengths=lambda _: 60).run()
    assert "overflow" in str(run.error)
    run.assert_clean()
    assert [change.holder for change in run.of(LeaseChanged)][-1] == "train"
    assert run.rollouts[0].paused


# ---------------------------------------------------------------------------------------------- giving weights up


def test_a_replica_gives_its_weights_up_only_where_new_ones_come_before_it_wakes():
    """Four fetches a version: three turns out of four bring no new weights."""
    run = check_everything(several_fetches(replicas=2, lengths=long_or_short).run().assert_completed())
    for replica in run.rollouts:
        assert [keeps for _, keeps in replica.slept] == [True, True, True, False] * 2


def test_with_one_batch_a_version_the_weights_are_always_given_up():
    run = check_everything(Scenario("colocate_sync").run().assert_completed())
    assert [keeps for _, keeps in run.rollouts[0].slept] == [False] * 6


def test_a_last_batch_that_the_data_left_short_brings_new_weights_too():
    values = {"trigger_parameter_sync_step": 4, "staleness_threshold": 0.5}
    for rows in (21, 22, 24):
        run = Scenario("colocate_async", async_training=values, rows=rows, epochs=1, slots=4).run().assert_completed()
        woke = [time for time, holder in changes(run) if holder == "generate"]
        for (slept, keeps), awake in zip(run.rollouts[0].slept, woke, strict=True):
            loaded = [time for _, time in run.rollouts[0].loads if slept <= time <= awake]
            assert keeps == (not loaded)


def changes(run: Run) -> list[tuple[float, str]]:
    return [(change.time, change.holder) for change in run.of(LeaseChanged)]


@pytest.mark.parametrize("mode", SHARED)
def test_new_weights_come_while_it_sleeps_and_before_it_wakes(mode: str):
    run = check_everything(Scenario(mode, replicas=2).run().assert_completed())
    for replica in run.rollouts:
        for (_, loaded), (start, end) in zip(replica.loads, turns(run), strict=True):
            assert start < loaded <= end


@pytest.mark.parametrize("double_buffered", [False, True])
@pytest.mark.parametrize("mode", SHARED)
def test_a_replica_without_weights_never_goes_on_when_the_transfer_fails_for_good(mode: str, double_buffered: bool):
    def script(run: Run) -> None:
        run.transport.corrupted.add(("rollout-0", 1))

    run = Scenario(mode, script=script, engine={"double_buffered": double_buffered}).run()
    assert isinstance(run.error, UpdateFailed)
    run.assert_clean()
    assert run.rollouts[0].paused and [change.holder for change in run.of(LeaseChanged)] == ["train"]


def test_a_transfer_to_sleeping_replicas_that_fails_once_is_tried_again():
    def script(run: Run) -> None:
        run.rollouts[1].fails_to_receive = [UpdateFailed("corrupted")]

    run = check_everything(Scenario("colocate_async", replicas=2, script=script).run().assert_completed())
    assert len(run.of(UpdateRetried)) == 1 and run.of(ReplicaLost) == []


@mostly_slow("call", ["activate", "resume"], quick=["activate"])
def test_one_of_several_that_stops_answering_asleep_is_fenced_off(call: str):
    def script(run: Run) -> None:
        run.rollouts[1].silent_on.add(call)

    sections = {"param_update": {"timeout_s": 7}}
    run = Scenario("colocate_async", replicas=2, script=script, sections=sections).run().assert_completed()
    assert [event.replica for event in run.of(ReplicaLost)] == ["rollout-1"]
