"""A stop finishes the version with the scores that come, and waits for none that hang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from headway.data.types import Prompt
from headway.events import CheckpointSaved, GroupAdmitted, GroupSettled, Note, ValidationFinished
from headway.pipeline.run import Status
from headway.pipeline.stages.reward import LEAST_PATIENCE_S, MOST_MISSES, MOST_PATIENCE_S
from tests.pipeline.fakes import FakeReward
from tests.pipeline.scenario import MODES, Run, Scenario
from tests.tiers import mostly_slow

NEVER = 1e6
"""Seconds that a reward takes which hangs."""


def stopped_after(trained: int, reward: FakeReward, **scenario: object) -> Run:
    """Asked to stop with the first event after so many groups were taken. B = 16 in four fetches, and nothing ahead."""

    def script(run: Run) -> None:
        def on(_: object) -> None:
            if run.pipeline._state.taken >= trained and run.stopped_at is None:
                run.request_stop()

        run.recorder.on = on

    only = {"staleness_threshold": 0}
    run = Scenario("async_partial", only, script=script, reward=reward, **scenario).run()  # type: ignore[arg-type]
    if run.error is not None:
        raise run.error
    assert run.stopped_at is not None
    return run.assert_clean()


def reasons(run: Run) -> set[str | None]:
    return {event.reason for event in run.of(GroupSettled) if event.fate == "dropped"}


def hangs(which: object) -> FakeReward:
    """A reward that hangs for prompts of which ``which`` is true."""
    return FakeReward(seconds=lambda prompt: NEVER if which(prompt) else 0.25)  # type: ignore[operator]


@pytest.mark.parametrize("mode", MODES)
def test_a_reward_that_always_hangs_holds_up_no_stop(mode: str):
    async def beside(run: Run) -> None:
        await asyncio.sleep(60.0)
        run.request_stop()

    run = Scenario(mode, problems=4, reward=hangs(lambda _: True), beside=beside).run()
    assert run.error is None
    run.assert_clean()
    assert run.stopped_at is not None
    assert run.ended - run.stopped_at < LEAST_PATIENCE_S + 1
    assert (run.status, run.version) == (Status.INTERRUPTED, 0)
    assert run.groups["dropped"] + run.groups["in_flight"] == run.groups["admitted"] > 0
    assert [saved.version for saved in run.of(CheckpointSaved)] == [0], "nothing was trained since the boundary"
    assert run.of(ValidationFinished) == []


def test_one_group_that_hangs_is_replaced_and_the_version_finished():
    run = stopped_after(4, hangs(lambda prompt: prompt.row == 5))
    assert (run.version, run.groups["trained"]) == (1, 16)
    assert reasons(run) == {"interrupted"}
    assert run.groups["dropped"] == 1
    assert [saved.version for saved in run.of(CheckpointSaved)] == [1]


def test_a_version_whose_scores_do_not_come_is_given_up_and_not_saved_as_if_it_were_whole():
    run = stopped_after(4, hangs(lambda prompt: prompt.row >= 8))
    assert run.stopped_at is not None
    assert run.ended - run.stopped_at < MOST_MISSES * (LEAST_PATIENCE_S + 1) + 10, "and the answers in between"
    assert run.status is Status.INTERRUPTED
    assert (run.version, run.groups["trained"]) == (0, 8)
    assert run.pipeline.unfinished
    assert run.of(CheckpointSaved) == []
    (end,) = (event for event in run.events if event.kind == "run.finished")
    assert getattr(end, "reason", "").startswith("version 1 was begun and not finished")
    told = [note.text for note in run.of(Note) if note.text.startswith("the stop does not wait for ")]
    assert len(told) == MOST_MISSES


def test_a_version_is_given_up_at_once_though_a_batch_of_it_is_being_trained():
    """The groups of that batch are not among those that may still come."""
    run = stopped_after(12, hangs(lambda prompt: prompt.row >= 12), trainer={"step_s": lambda _: 30.0})
    assert run.stopped_at is not None and run.ended - run.stopped_at < 40, "as long as the step takes"
    assert (run.version, run.groups["trained"], run.status) == (0, 12, Status.INTERRUPTED)
    assert not [note for note in run.of(Note) if "waits no longer" in note.text]


def test_after_a_checkpoint_a_stop_finishes_the_version_where_just_enough_groups_are_under_way():
    run = stopped_after(16 + 4, FakeReward(), sections={"trainer": {"save_freq": 1}})
    assert run.stopped_at is not None
    assert all(event.time <= run.stopped_at for event in run.of(GroupAdmitted))
    assert (run.version, run.groups["trained"], run.groups["admitted"]) == (2, 32, 32)
    assert [saved.version for saved in run.of(CheckpointSaved)] == [1, 2]


def test_scores_that_are_slow_and_come_are_waited_for():
    slow = FakeReward(seconds=lambda prompt: 20.0)
    run = stopped_after(4, slow)
    assert (run.version, run.groups["trained"], run.groups["dropped"]) == (1, 16, 0)
    assert not [note for note in run.of(Note) if "does not wait" in note.text]


def test_a_stop_waits_no_longer_than_half_a_minute_however_slow_scores_were():
    def seconds(prompt: Prompt) -> float:
        return 100.0 if prompt.row < 4 else NEVER

    run = stopped_after(4, FakeReward(seconds=seconds))
    assert run.stopped_at is not None
    assert run.ended - run.stopped_at < MOST_MISSES * (MOST_PATIENCE_S + 1) + 10


def test_a_validation_whose_scores_hang_is_left_unfinished_and_the_training_saved():
    run = stopped_after(4, hangs(lambda prompt: prompt.epoch == -1), problems=4)
    assert (run.version, run.groups["trained"]) == (1, 16)
    assert [saved.version for saved in run.of(CheckpointSaved)] == [1]
    assert run.of(ValidationFinished) == []
    assert any(note.text.startswith("version 0 was not validated") for note in run.of(Note))


def within_a_minute(run: Run) -> Run:
    assert run.error is None, run.error
    run.assert_clean()
    assert run.stopped_at is not None and run.ended - run.stopped_at <= 60.0
    assert run.status is Status.INTERRUPTED
    return run


def stops_at(seconds: float) -> Callable[[Run], Coroutine[object, object, None]]:
    async def beside(run: Run) -> None:
        await asyncio.sleep(seconds)
        run.request_stop()

    return beside


@mostly_slow("save_freq", [1, -1], quick=[1])
def test_a_stop_ends_in_time_where_every_further_group_is_filtered(save_freq: int):
    """After a checkpoint nothing is admitted any more; without one the next boundary is tried for, within the time."""
    reward = FakeReward(
        lambda prompt: [0.0, 1.0] if prompt.row < 20 or prompt.row % 9 == 0 else [1.0, 1.0], lambda _: 5.0
    )
    sections = {"trainer": {"save_freq": save_freq}}
    scenario = Scenario("async_partial", reward=reward, filters=True, sections=sections, beside=stops_at(40.0))
    run = within_a_minute(scenario.run())
    assert run.pipeline.unfinished and run.stopped_at is not None
    later = [event for event in run.of(GroupAdmitted) if event.time > run.stopped_at]
    assert bool(later) == (save_freq == -1)
    assert [saved.version for saved in run.of(CheckpointSaved)] == ([1] if save_freq == 1 else [])


@mostly_slow("mode", MODES, quick=["one_step_off", "async_stale", "colocate_async"])
def test_a_stop_ends_in_time_where_a_step_or_an_episode_never_ends(mode: str):
    step = Scenario(mode, script=lambda run: run.trainer.hangs_at.add(1), problems=2, beside=stops_at(30.0)).run()
    told = [note.text for note in within_a_minute(step).of(Note)]
    assert any(text.startswith("the stop waits no longer (run.stop_timeout_s=60): ") for text in told)
    within_a_minute(Scenario(mode, lengths=lambda t: 10**9 if t.row == 3 else 8, beside=stops_at(30.0)).run())


def test_a_stop_waits_for_a_checkpoint_and_says_how_long_one_takes():
    sections = {"trainer": {"save_freq": 1}}
    scenario = Scenario("on_policy", sections=sections, trainer={"save_s": 200.0}, beside=stops_at(250.0))
    run = scenario.run()
    assert run.error is None and run.status is Status.INTERRUPTED
    assert run.stopped_at is not None and run.ended - run.stopped_at > 60.0
    assert run.of(CheckpointSaved)[-1].version == run.version
    assert any("takes about 200 s, as the last one did" in note.text for note in run.of(Note))
