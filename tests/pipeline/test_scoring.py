"""A stop finishes the version with the scores that come, and waits for none that hang."""

from __future__ import annotations

import asyncio

import pytest

from headway.data.types import Prompt
from headway.events import CheckpointSaved, GroupSettled, Note, ValidationFinished
from headway.pipeline.run import Status
from headway.pipeline.scoring import LEAST_PATIENCE_S, MOST_MISSES, MOST_PATIENCE_S
from tests.pipeline.fakes import FakeReward
from tests.pipeline.scenario import MODES, Run, Scenario

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
