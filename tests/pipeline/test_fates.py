"""What becomes of groups that are not simply trained: filtered, failed, dropped."""

from __future__ import annotations

import asyncio

import pytest

from headway.errors import NonFinite, NothingToTrain
from headway.events import (
    GroupRewarded,
    GroupSettled,
    OptimizerStepped,
    RunFinished,
    TrajectoryFinished,
    UpdateFinished,
)
from headway.pipeline import off_policy_guard
from tests.pipeline.fakes import FakeReward, fails
from tests.pipeline.scenario import MODES, Scenario
from tests.tiers import mostly_slow

# ---------------------------------------------------------------------------------------------- filtered and failed


@mostly_slow("mode", MODES, quick=["one_step_off", "colocate_async"])
def test_filtering_everything_does_not_stall_but_ends_with_the_filters_statistics(mode: str):
    reward = FakeReward(lambda _: [1.0, 1.0])
    run = Scenario(mode, reward=reward, filters=True).run()
    discards = 10 * Scenario(mode).config.groups_per_version
    with pytest.raises(NothingToTrain, match=rf"{discards} groups in a row .*{discards}× filtered: all rewards are 1"):
        raise run.error or AssertionError("no error")
    run.assert_clean()
    assert run.groups["filtered"] == discards
    assert run.groups["trained"] == 0
    assert run.of(RunFinished)[0].status == "failed"


@pytest.mark.slow
def test_the_statistics_are_of_the_groups_in_a_row_alone():
    reward = FakeReward(lambda p: fails("unlucky") if p.row < 4 else [0.0, 1.0] if p.row == 40 else [1.0, 1.0])
    run = Scenario("async_partial", reward=reward, filters=True).run()
    discards = 10 * Scenario("async_partial").config.groups_per_version
    assert isinstance(run.error, NothingToTrain)
    assert f"({discards}× filtered: all rewards are 1)" in str(run.error)
    assert run.groups["failed"] > 0


def test_a_single_good_group_among_many_resets_the_count_of_discards_in_a_row():
    reward = FakeReward(lambda prompt: [0.0, 1.0] if prompt.row % 30 == 0 else [1.0, 1.0])
    run = Scenario("on_policy", total=8, reward=reward, filters=True).run().assert_completed()
    assert run.groups["trained"] == 8
    assert run.groups["filtered"] > 160


def test_failing_rewards_give_failed_fates_with_their_reason_and_the_run_goes_on():
    reward = FakeReward(lambda prompt: fails("timed out after 10 s") if prompt.row % 4 == 1 else [0.0, 1.0])
    run = Scenario("async_partial", reward=reward).run().assert_completed()
    failed = [event for event in run.of(GroupSettled) if event.fate == "failed"]
    assert {event.reason for event in failed} == {"timed out after 10 s"}
    assert {event.lag for event in failed} == {None}
    assert run.groups["trained"] == 96
    assert {event.number for event in failed}.isdisjoint(event.number for event in run.of(GroupRewarded))


@mostly_slow("mode", ["async_partial", "on_policy", "colocate_sync"], quick=["on_policy"])
def test_failed_episodes_are_left_out_and_the_books_of_episodes_balance(mode: str):
    def failing(number: int, k: int) -> str | None:
        return "too slow" if number % 5 == 0 and (k == 1 or number % 10 == 0) else None

    reward = FakeReward(lambda prompt: [0.0, 1.0, 0.0, 1.0])
    sections = {"agent": {"min_episodes": 2}}
    scenario = Scenario(mode, n=4, reward=reward, failing=failing, sections=sections)
    run = scenario.run().assert_completed()
    reasons = {event.reason for event in run.of(GroupSettled) if event.fate == "failed"}
    assert reasons == {"episode failed: too slow"}
    assert run.of(RunFinished)[0].episodes["failed"] == 4 * run.groups["failed"] + 1 * sum(
        event.number % 10 == 5 for event in run.of(GroupSettled)
    )


def test_an_episode_that_failed_before_its_group_was_overdue_has_failed_all_the_same():
    run = Scenario(
        "async_partial",
        async_training={"order": "ready", "max_lag": 0, "on_overdue": "drop", "staleness_threshold": 1},
        lengths=lambda id: 400 if id.row % 5 == 0 else 8,
        failing=lambda number, k: "too slow" if number % 5 == 0 and k == 0 else None,
    ).run()
    run.assert_completed()
    overdue = {event.number for event in run.of(GroupSettled) if event.reason == "overdue"}
    assert overdue & {event.number for event in run.of(TrajectoryFinished) if event.failure is not None}


def test_a_filtered_group_was_rewarded_first():
    reward = FakeReward(lambda prompt: [1.0, 1.0] if prompt.row % 4 == 1 else [0.0, 1.0])
    run = Scenario("async_partial", reward=reward, filters=True).run().assert_completed()
    rewards = {event.number: event.rewards for event in run.of(GroupRewarded)}
    for settled in run.of(GroupSettled):
        assert (rewards[settled.number] == [1.0, 1.0]) == (settled.fate == "filtered")


@pytest.mark.parametrize("mode", ["on_policy", "one_step_off"])
def test_refills_are_waves_too(mode: str):
    reward = FakeReward(lambda prompt: fails("no") if prompt.row in (0, 2) else [0.0, 1.0])
    run = Scenario(mode, reward=reward).run().assert_completed()
    waves = [numbers for _, numbers, _ in run.rollouts[0].submitted]
    assert waves[0] == (0, 1, 2, 3)
    if mode == "on_policy":
        assert waves[1] == (4, 5), "two were discarded, and come together"


def test_discarding_frees_the_place_of_a_group_and_nothing_more():
    reward = FakeReward(lambda prompt: fails("no") if prompt.row % 2 else [0.0, 1.0])
    run = Scenario("async_stale", reward=reward).run().assert_completed()
    admitted = discarded = consumed = 0
    for event in run.events:
        match event:
            case GroupSettled(fate="failed"):
                discarded += 1
            case GroupSettled(fate="trained"):
                consumed += 1
            case _ if event.kind == "group.admitted":
                admitted += 1
        assert admitted - discarded - consumed <= 24, "⌊(1 + η)·B⌋ groups exist behind admission"


# ---------------------------------------------------------------------------------------------- not finite


def test_groups_of_a_step_that_was_not_finite_are_dropped_but_count_as_consumed():
    run = Scenario("async_stale", trainer={"skips": lambda step: step in (1, 2)}).run().assert_completed()
    dropped = [event for event in run.of(GroupSettled) if event.fate == "dropped"]
    assert {event.reason for event in dropped} == {"nonfinite"}
    assert {event.lag for event in dropped} == {None}
    assert run.groups["dropped"] == 8
    assert run.groups["trained"] == 96 - 8
    assert run.groups["admitted"] == 96, "they are not refilled"
    assert [update.version for update in run.of(UpdateFinished)] == [1, 2, 3, 4, 5, 6]


def test_a_group_that_was_trained_in_one_of_several_epochs_was_trained():
    run = Scenario(
        "on_policy", total=8, sections={"actor": {"ppo_epochs": 2}}, trainer={"skips": lambda step: step in (0, 2, 3)}
    ).run()
    run.assert_completed()
    assert run.fates() == {"trained": 4, "dropped": 4}


def test_too_many_steps_in_a_row_that_are_not_finite_end_the_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(off_policy_guard, "MOST_SKIPPED", 3)
    run = Scenario("async_stale", trainer={"skips": lambda step: step >= 2}).run()
    with pytest.raises(NonFinite, match=r"^4 optimizer steps .*actor\.optim\.lr"):
        raise run.error or AssertionError("no error")
    run.assert_clean()
    assert [step.skipped for step in run.of(OptimizerStepped)] == [False, False, True, True, True, True]


def test_steps_that_are_not_finite_now_and_then_do_not_add_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(off_policy_guard, "MOST_SKIPPED", 1)
    Scenario("async_stale", trainer={"skips": lambda step: step % 2 == 0}).run().assert_completed()


# ---------------------------------------------------------------------------------------------- dropped


def test_a_group_that_is_aborted_is_dropped_and_refilled():
    async def beside(run) -> None:
        await asyncio.sleep(1.0)
        await run.pipeline.parts.machinery.episode_workers[0].abort_older_than(1)

    run = Scenario("async_stale", beside=beside).run().assert_completed()
    dropped = {event.number: event.reason for event in run.of(GroupSettled) if event.fate == "dropped"}
    episodes = run.of(TrajectoryFinished)
    aborted = {event.number for event in episodes if event.finish_reason == "aborted"}
    assert dropped == dict.fromkeys(aborted, "aborted") != {}
    assert aborted <= {event.number for event in episodes if event.finish_reason == "stop" and event.finished <= 1.0}
    assert run.groups["trained"] == 96
