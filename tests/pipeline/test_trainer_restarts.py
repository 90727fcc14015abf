"""A trainer whose ranks are lost is started again inside the run, on the virtual clock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headway.errors import StallError, WorkerDied
from headway.events import (
    BatchTaken,
    CheckpointSaved,
    Event,
    OptimizerStepped,
    ReplicaLost,
    TrainerLost,
    TrainerRestarted,
    TrajectoryFinished,
)
from headway.pipeline.recovery.liveness import ProcessLook
from tests.pipeline.fake_policies import FakeReference
from tests.pipeline.mortal_trainer import MortalTrainer
from tests.pipeline.scenario import Run, Scenario

MODES = ["on_policy", "one_step_off", "stream_off_policy", "async_stale", "async_partial", "overlapped"]


def scenario(mode: str, *moments: float, save_freq: int = 2, **further: Any) -> Scenario:
    """``moments``: seconds after which the trainer dies, each after the one before."""

    async def kills(run: Run) -> None:
        for moment in moments:
            await asyncio.sleep(moment)
            trainer(run).die()

    given: dict[str, Any] = {
        "sections": {"trainer": {"save_freq": save_freq, "max_restarts": 3}},
        "trainer_start_s": 3.0,
        "beside": kills if moments else None,
        "mini_batch": 2,
    }
    return Scenario(mode, **{**given, **further})


def trainer(run: Run) -> MortalTrainer:
    assert isinstance(run.trainer, MortalTrainer)
    return run.trainer


def check(run: Run) -> Run:
    """Every group is trained once, by steps that are told once; versions that were sent are those of their steps."""
    run.assert_completed()
    told = [(event.version, event.step) for event in run.of(OptimizerStepped)]
    assert [step for _, step in told] == list(range(len(told)))
    weights = trainer(run).weights
    assert [version for _, version, *_ in weights] == [version for version, _ in told]
    for version, sent in trainer(run).sent.items():
        assert sent == weights[: sum(of < version for of, _ in told)], f"version {version} was sent with other weights"
    for replica in run.rollouts:
        versions = [version for version, _ in replica.loads]
        assert versions == sorted(set(versions)), "a version was loaded twice"
    assert len(run.of(TrainerLost)) == len(run.of(TrainerRestarted)) <= trainer(run).restarts
    assert run.of(ReplicaLost) == []
    return run


@pytest.mark.parametrize("mode", MODES)
def test_it_may_be_lost_at_any_moment_in_every_mode(mode: str):
    """Some twenty whole runs on the virtual clock."""
    length = scenario(mode).run().ended
    restarts = redone = 0
    for part in range(1, 24):
        run = check(scenario(mode, length * part / 24, 5.0 + part / 8).run())
        restarts += trainer(run).restarts
        redone += sum(event.batches for event in run.of(TrainerRestarted))
    assert restarts > 30 and redone > 10


def test_on_policy_is_trained_on_the_same_batches_with_the_same_steps_as_if_nothing_had_happened():
    whole = scenario("on_policy").run().assert_completed()

    def batches(run: Run) -> list[Any]:
        return [(event.fetch, event.version, event.numbers) for event in run.of(BatchTaken)]

    for part in range(1, 12):
        run = check(scenario("on_policy", whole.ended * part / 12).run())
        assert batches(run) == batches(whole)
        assert trainer(run).weights == trainer(whole).weights


def test_replicas_and_episodes_go_on_meanwhile():
    run = check(scenario("async_partial", 20.0, trainer_start_s=8.0).run())
    (back,) = run.of(TrainerRestarted)
    assert back.span[1] - back.span[0] >= 8.0
    assert any(back.span[0] < event.time < back.span[1] for event in run.of(TrajectoryFinished))
    assert not any(back.span[0] < event.time < back.span[1] for event in run.of(OptimizerStepped))


def test_batches_before_the_newest_checkpoint_are_not_trained_again_and_not_kept():
    run = check(scenario("async_partial", 30.0, save_freq=1).run())
    (back,) = run.of(TrainerRestarted)
    assert back.batches <= 8
    newest = run.pipeline._wiring.actor._learned
    assert all(learned.batch.version >= run.version for learned in newest)


def test_before_the_first_checkpoint_it_begins_with_the_initial_model():
    run = check(scenario("async_partial", 20.0, save_freq=50).run())
    assert [event.version for event in run.of(CheckpointSaved)] == [6]
    assert run.of(TrainerRestarted)[0].batches >= 1


def test_columns_of_the_trainers_ranks_are_computed_again_and_those_of_others_kept():
    recompute = {"use_rollout_log_probs": False}
    for further in ({"reference": FakeReference()}, {"reference_on_trainer_ranks": True}):
        undisturbed = scenario("on_policy", async_training=recompute, **further).run().assert_completed()
        run = check(scenario("on_policy", undisturbed.ended / 2, async_training=recompute, **further).run())
        assert trainer(run).weights == trainer(undisturbed).weights
        assert "prox_logprobs" in str(trainer(run).weights[0]) and "ref_logprobs" in str(trainer(run).weights[0])


@pytest.mark.parametrize("mode", ["on_policy", "async_partial", "overlapped"])
def test_ranks_that_answer_no_heartbeat_are_lost_though_no_process_ended(mode: str):
    async def stops(run: Run) -> None:
        await asyncio.sleep(20.0)
        trainer(run).silent = True

    run = check(scenario(mode, beside=stops).run())
    (lost,) = run.of(TrainerLost)
    assert "gave no answer to its heartbeat for 60 s" in lost.reason


def test_a_rank_that_is_stopped_is_lost_within_seconds_though_the_others_answer():
    stopped: list[float] = []

    async def stops(run: Run) -> None:
        await asyncio.sleep(20.0)
        stopped.append(asyncio.get_running_loop().time())
        trainer(run).silent, trainer(run).looks = True, ProcessLook("TTTT", 1.0)

    run = check(scenario("async_partial", beside=stops).run())
    (lost,) = run.of(TrainerLost)
    assert "has been stopped for 2 s (SIGSTOP)" in lost.reason
    assert lost.time - stopped[0] < 6.0


def test_a_start_that_fails_is_tried_again():
    def script(run: Run) -> None:
        trainer(run).fails_to_start = 2

    run = check(scenario("async_partial", 20.0, script=script).run())
    assert len(run.of(TrainerLost)) == 1


def test_the_run_ends_when_restarts_are_used_up():
    run = scenario("async_partial", 10.0, 10.0, 10.0, 10.0).run()
    run.assert_clean()
    assert isinstance(run.error, WorkerDied)
    assert str(run.error).endswith("It is not started again: trainer.max_restarts is used up")
    assert len(run.of(TrainerRestarted)) == 3


def test_a_trainer_that_cannot_be_started_ends_the_run_with_why():
    def script(run: Run) -> None:
        trainer(run).fails_to_start = 9

    run = scenario("async_partial", 20.0, script=script).run()
    assert isinstance(run.error, StallError) and "was not up again" in str(run.error)


def test_it_is_lost_while_it_is_started():
    def script(run: Run) -> None:
        def on(event: Event) -> None:
            if isinstance(event, TrainerLost):
                asyncio.get_running_loop().call_later(4.5, trainer(run).die)

        run.recorder.on = on

    run = scenario("async_partial", 25.0, save_freq=50, script=script).run().assert_completed()
    assert trainer(run).restarts >= 2
