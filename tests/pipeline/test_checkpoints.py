"""Checkpoints that are written while training goes on, on the virtual clock."""

from __future__ import annotations

import asyncio
from typing import Any

from headway.errors import RunError, WorkerDied
from headway.events import CheckpointCopied, CheckpointFailed, CheckpointSaved, Note, OptimizerStepped, VersionReached
from headway.pipeline.run import Status
from tests.pipeline.fake_policies import FakeCritic
from tests.pipeline.scenario import Run, Scenario
from tests.tiers import mostly_slow

SAVES: dict[str, Any] = {"trainer": {"save_freq": 1}}
MODES = ["on_policy", "colocate_sync", "async_partial", "overlapped"]


def scenario(mode: str = "async_partial", fails: tuple[str, ...] = (), **further: Any) -> Scenario:
    def script(run: Run) -> None:
        run.trainer.fails_to_save = list(fails)

    return Scenario(mode, **{"sections": SAVES, "script": script, **further})


@mostly_slow("mode", MODES, quick=["on_policy", "overlapped"])
def test_training_stands_still_for_the_copy_alone(mode: str):
    run = scenario(mode, trainer={"save_s": 30.0, "copy_s": 0.25}).run().assert_completed()
    first, *_ = run.trainer.writes
    assert any(first[0] < step.time < first[1] for step in run.of(OptimizerStepped))
    copied = run.of(CheckpointCopied)[0].span
    assert copied[1] - copied[0] == 0.25
    assert not any(span[0] < copied[1] and copied[0] < span[1] for _, span in run.trainer.computed if span != copied)


@mostly_slow("mode", MODES, quick=["colocate_sync", "async_partial"])
def test_a_checkpoint_has_the_state_of_its_boundary_whatever_was_trained_meanwhile(mode: str):
    run = scenario(mode, trainer={"save_s": 4.0}).run().assert_completed()
    reached = {event.version: event.groups for event in run.of(VersionReached)}
    assert len(run.trainer.saved) == 6
    for _, state in run.trainer.saved:
        version = state["version"]
        assert state["consumed"] == version * run.scenario.config.groups_per_version
        assert state["trainer"]["steps"] == sum(step.version < version for step in run.of(OptimizerStepped))
        assert state["ledger"]["fates"]["trained"] == reached[version]["trained"]


def test_one_that_falls_due_waits_for_the_one_that_is_written_and_says_so():
    run = scenario(trainer={"save_s": 50.0}).run().assert_completed()
    assert all(a[1] <= b[0] for a, b in zip(run.trainer.writes, run.trainer.writes[1:], strict=False))
    texts = [event.text for event in run.of(Note) if "is due, and waits for the one before" in event.text]
    assert texts[0].startswith("the checkpoint of version 2 is due")
    waited = run.of(CheckpointCopied)[1].span
    assert waited[1] - waited[0] > 30


def test_the_run_ends_after_its_last_checkpoint_is_written():
    run = scenario(trainer={"save_s": 50.0}).run().assert_completed()
    assert [event.version for event in run.of(CheckpointSaved)] == [1, 2, 3, 4, 5, 6]
    assert run.ended >= run.trainer.writes[-1][1]


@mostly_slow("what", ["write", "copy"], quick=["write"])
def test_a_failure_is_told_and_the_next_one_is_saved(what: str):
    run = scenario(fails=("", what, what)).run().assert_completed()
    assert [event.version for event in run.of(CheckpointSaved)] == [1, 4, 5, 6]
    assert [(event.version, event.in_row) for event in run.of(CheckpointFailed)] == [(2, 1), (3, 2)]
    assert run.groups["trained"] == 96


def test_failures_that_do_not_follow_each_other_never_end_a_run():
    run = scenario(fails=("write", "write", "", "write", "write", "")).run().assert_completed()
    assert [event.in_row for event in run.of(CheckpointFailed)] == [1, 2, 1, 2]


def test_the_third_failure_in_a_row_ends_the_run_with_one_message():
    run = scenario(fails=("", "write", "write", "write")).run()
    run.assert_clean()
    assert isinstance(run.error, RunError)
    assert str(run.error) == (
        "could not write the checkpoint checkpoints/version_4: No space left on device; make room there. No checkpoint "
        "could be saved 3 times in a row"
    )


def test_the_last_checkpoint_is_tried_once_more_after_a_failure_of_its_own_version():
    """A run that is stopped at a boundary whose checkpoint has just failed."""

    async def beside(run: Run) -> None:
        failed = asyncio.Event()
        run.recorder.on = lambda event: failed.set() if isinstance(event, CheckpointFailed) else None
        await failed.wait()
        run.request_stop()

    run = scenario("on_policy", fails=("write",), trainer={"save_s": 0.25}, beside=beside).run()
    assert run.error is None and run.status is Status.INTERRUPTED
    assert run.of(CheckpointSaved)


def test_a_rank_that_dies_while_a_checkpoint_is_written_is_no_failure_of_the_checkpoint():
    def script(run: Run) -> None:
        async def save(*_: object) -> None:
            raise WorkerDied("worker actor-0 died")

        run.trainer.save = save  # type: ignore[method-assign]

    run = scenario(script=script).run()
    assert isinstance(run.error, WorkerDied)
    assert run.of(CheckpointFailed) == []


def test_a_critic_of_its_own_learns_on_while_its_checkpoint_is_written():
    critic = FakeCritic(save_s=4.0)
    run = scenario(critic=critic).run().assert_completed()
    _, first = critic.saved[0]
    assert any(first[0] < turn.span[1] < first[1] for turn in critic.turns if turn.what == "train")
    assert [state["critic"]["steps"] for _, state in run.trainer.saved] == [
        sum(step.version < state["version"] for step in run.of(OptimizerStepped)) for _, state in run.trainer.saved
    ]
