"""Ranks that are lost are started again inside the run, on the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import product
from typing import Any

import pytest

from headway.errors import StallError, TokensLost, WorkerDied
from headway.events import (
    BatchTaken,
    CheckpointSaved,
    CriticStepped,
    Event,
    Note,
    OptimizerStepped,
    RanksLost,
    RanksRestarted,
    ReplicaLost,
    TrajectoryFinished,
    ValidationFinished,
)
from headway.pipeline.recovery.liveness import ProcessLook
from tests.pipeline.fake_policies import FakeReference
from tests.pipeline.mortal_ranks import MortalCritic, MortalReference, MortalTrainer
from tests.pipeline.scenario import Run, Scenario
from tests.tiers import a_share_and_all, enough, mostly_slow

MODES = ["on_policy", "one_step_off", "stream_off_policy", "async_stale", "async_partial", "overlapped"]


def scenario(mode: str, *moments: float, save_freq: int = 2, max_restarts: int = 3, **further: Any) -> Scenario:
    """``moments``: seconds after which the trainer dies, each after the one before."""

    async def kills(run: Run) -> None:
        for moment in moments:
            await asyncio.sleep(moment)
            trainer(run).life.die()

    given: dict[str, Any] = {
        "sections": {"trainer": {"save_freq": save_freq, "max_restarts": max_restarts}},
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
    assert sum(event.role == "actor" for event in run.of(RanksLost)) == restarted(run, "actor")
    assert restarted(run, "actor") <= trainer(run).life.restarts
    assert run.of(ReplicaLost) == []
    return run


@a_share_and_all
@mostly_slow("mode", MODES, quick=["on_policy", "overlapped"])
def test_it_may_be_lost_at_any_moment_in_every_mode(mode: str, share: float):
    """Some twenty whole runs on the virtual clock, or a share of them."""
    length = scenario(mode).run().ended
    restarts = redone = 0
    for part in range(1, 24, int(1 / share)):
        run = check(scenario(mode, length * part / 24, 5.0 + part / 8).run())
        restarts += trainer(run).life.restarts
        redone += sum(event.batches for event in run.of(RanksRestarted))
    assert restarts > enough(30, share) and redone > enough(10, share)


def test_on_policy_is_trained_on_the_same_batches_with_the_same_steps_as_if_nothing_had_happened():
    whole = scenario("on_policy").run().assert_completed()

    def batches(run: Run) -> list[Any]:
        return [(event.fetch, event.version, event.numbers) for event in run.of(BatchTaken)]

    for part in range(1, 12):
        run = check(scenario("on_policy", whole.ended * part / 12).run())
        assert batches(run) == batches(whole)
        assert trainer(run).weights == trainer(whole).weights


SHARED = [("colocate_sync", {}), ("colocate_sync", {"trigger_parameter_sync_step": 3}), ("colocate_async", {})]


def on_shared_devices(mode: str, settings: dict[str, Any], *moments: float, **further: Any) -> Scenario:
    engine = {"double_buffered": False}
    given = {"in_one_process": True, "supervised": True, "engine": engine, "problems": 3, "replicas": 2, **further}
    return scenario(mode, *moments, async_training=settings, **given)


def check_shared(run: Run) -> Run:
    """As `check`; replicas are lost with the ranks and at no other time, and none decodes with a trainer's turn."""
    lost, ranks = [event.replica for event in run.of(ReplicaLost)], run.of(RanksLost)
    assert len(lost) == len(set(lost)) and set(lost) <= {replica.name for replica in run.rollouts}
    assert len(lost) <= 2 * len(ranks) + 2 * (trainer(run).life.restarts - len(ranks))
    run.events[:] = [event for event in run.events if not isinstance(event, ReplicaLost)]
    run._by_kind.clear()
    run._indexed = 0
    check(run)
    served = run.pipeline._wiring.pool.serving
    assert len(served) == 2 and not any(replica.engine._asleep for replica in served)  # type: ignore[attr-defined]
    assert sorted(run.validated()) == sorted(set(run.validated()))
    return run


@a_share_and_all
@mostly_slow(("mode", "settings"), SHARED, quick=SHARED[2:])
def test_on_shared_devices_replicas_come_back_with_the_ranks_at_any_moment(
    mode: str, settings: dict[str, Any], share: float
):
    """Some twenty whole runs on the virtual clock, or a share of them."""
    whole = on_shared_devices(mode, settings).run().assert_completed()
    restarts = 0
    for part in range(1, 24, int(1 / share)):
        run = check_shared(on_shared_devices(mode, settings, whole.ended * part / 24, 5.0 + part / 8).run())
        restarts += trainer(run).life.restarts
        assert sorted(run.validated()) == sorted(whole.validated())
    assert restarts > enough(30, share)


@a_share_and_all
@mostly_slow("settings", [{}, {"trigger_parameter_sync_step": 3}], quick=[{"trigger_parameter_sync_step": 3}])
def test_on_shared_devices_each_batch_has_the_steps_of_a_run_that_nothing_happened_to(
    settings: dict[str, Any], share: float
):
    whole = on_shared_devices("colocate_sync", settings).run().assert_completed()
    for part in range(1, 12, int(1 / share)):
        run = check_shared(on_shared_devices("colocate_sync", settings, whole.ended * part / 12).run())
        assert trainer(run).weights == trainer(whole).weights
        versions = {event.number: event.version_spans for event in whole.of(TrajectoryFinished)}
        assert versions == {event.number: event.version_spans for event in run.of(TrajectoryFinished)}


def test_a_validation_that_is_lost_with_its_replica_begins_anew_and_no_wave_starts_beside_it():
    whole = on_shared_devices("colocate_sync", {}).run().assert_completed()
    for start, end in [event.span for event in whole.of(ValidationFinished)][:-1]:
        run = check_shared(on_shared_devices("colocate_sync", {}, (start + end) / 2).run())
        for event in run.of(ValidationFinished):
            # Scores come in while the next wave is decoded: 0.25 s of each validation.
            began = [time for time in run.launches().values() if event.span[0] < time < event.span[1] - 0.25]
            assert began == [], f"groups reached a replica that validated version {event.version}"


@pytest.mark.parametrize("call", ["pause", "resume", "activate"])
def test_a_replica_that_hangs_takes_the_ranks_of_its_process_with_it(call: str):
    def hang(run: Run) -> None:
        run.rollouts[0].silent_on.add(call)

    run = check_shared(on_shared_devices("colocate_async", {}, script=hang).run())
    assert restarted(run, "actor") == 1


def test_new_ranks_that_are_lost_before_they_are_back_are_started_once_more():
    async def twice(run: Run) -> None:
        await asyncio.sleep(20.0)
        trainer(run).life.die()
        await asyncio.sleep(3.5)  # while batches are redone
        trainer(run).life.die()

    run = check_shared(on_shared_devices("colocate_sync", {}, beside=twice, save_freq=50).run())
    assert trainer(run).life.restarts == 2


def test_replicas_and_episodes_go_on_meanwhile():
    run = check(scenario("async_partial", 20.0, trainer_start_s=8.0).run())
    (back,) = run.of(RanksRestarted)
    assert back.span[1] - back.span[0] >= 8.0
    assert any(back.span[0] < event.time < back.span[1] for event in run.of(TrajectoryFinished))
    assert not any(back.span[0] < event.time < back.span[1] for event in run.of(OptimizerStepped))


def test_batches_before_the_newest_checkpoint_are_not_trained_again_and_not_kept():
    run = check(scenario("async_partial", 30.0, save_freq=1).run())
    (back,) = run.of(RanksRestarted)
    assert back.batches <= 8
    newest = run.pipeline._wiring.actor._kept
    assert all(batch.version >= run.version for batch in newest)


def test_before_the_first_checkpoint_it_begins_with_the_initial_model():
    run = check(scenario("async_partial", 20.0, save_freq=50).run())
    assert [event.version for event in run.of(CheckpointSaved)] == [6]
    assert run.of(RanksRestarted)[0].batches >= 1


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
        trainer(run).life.silent = True

    run = check(scenario(mode, beside=stops).run())
    (lost,) = run.of(RanksLost)
    assert "gave no answer to its heartbeat for 60 s" in lost.reason


def test_a_rank_that_is_stopped_is_lost_within_seconds_though_the_others_answer():
    stopped: list[float] = []

    async def stops(run: Run) -> None:
        await asyncio.sleep(20.0)
        stopped.append(asyncio.get_running_loop().time())
        trainer(run).life.silent, trainer(run).life.looks = True, ProcessLook("TTTT", 1.0)

    run = check(scenario("async_partial", beside=stops).run())
    (lost,) = run.of(RanksLost)
    assert "has been stopped for 2 s (SIGSTOP)" in lost.reason
    assert lost.time - stopped[0] < 6.0


def test_a_start_that_fails_is_tried_again():
    def script(run: Run) -> None:
        trainer(run).life.fails_to_start = 2

    run = check(scenario("async_partial", 20.0, script=script).run())
    assert len(run.of(RanksLost)) == 1


def test_the_run_ends_when_restarts_are_used_up():
    run = scenario("async_partial", 10.0, 10.0, 10.0, 10.0).run()
    run.assert_clean()
    assert isinstance(run.error, WorkerDied)
    assert str(run.error).endswith("It is not started again: trainer.max_restarts is used up")
    assert len(run.of(RanksRestarted)) == 3


def test_a_trainer_that_cannot_be_started_ends_the_run_with_why():
    def script(run: Run) -> None:
        trainer(run).life.fails_to_start = 9

    run = scenario("async_partial", 20.0, script=script).run()
    assert isinstance(run.error, StallError) and "was not up again" in str(run.error)


def test_it_is_lost_while_it_is_started():
    def script(run: Run) -> None:
        def on(event: Event) -> None:
            if isinstance(event, RanksLost):
                asyncio.get_running_loop().call_later(4.5, trainer(run).life.die)

        run.recorder.on = on

    run = scenario("async_partial", 25.0, save_freq=50, script=script).run().assert_completed()
    assert trainer(run).life.restarts >= 2


def test_it_is_stopped_while_its_batches_are_trained_on_again():
    def script(run: Run) -> None:
        def stop() -> None:
            trainer(run).life.silent, trainer(run).life.looks = True, ProcessLook("TTTT", 1.0)

        def on(event: Event) -> None:
            if isinstance(event, RanksLost):
                run.recorder.on = lambda event: None
                asyncio.get_running_loop().call_later(4.5, stop)

        run.recorder.on = on

    run = scenario("async_partial", 25.0, save_freq=50, script=script).run().assert_completed()
    assert trainer(run).life.restarts == 2
    assert any("has been stopped for 2 s (SIGSTOP)" in note.text for note in run.of(Note))


def kills(role: str, *moments: float) -> Callable[[Run], Coroutine[Any, Any, None]]:
    """Kill the ranks of ``role`` after so many seconds, each after the one before."""

    async def beside(run: Run) -> None:
        lives = {"ref": run.scenario.reference, "logp": run.logp, "critic": run.scenario.critic, "actor": run.trainer}
        for moment in moments:
            await asyncio.sleep(moment)
            lives[role].life.die()  # type: ignore[union-attr]

    return beside


def restarted(run: Run, role: str) -> int:
    return sum(event.role == role for event in run.of(RanksRestarted))


@a_share_and_all
@mostly_slow("mode", MODES, quick=["one_step_off", "async_partial"])
def test_a_reference_may_be_lost_at_any_moment(mode: str, share: float):
    whole = check(scenario(mode, reference=MortalReference()).run())
    lost = 0
    for part in range(1, 12, int(1 / share)):
        beside = kills("ref", whole.ended * part / 12, 4.0)
        run = check(scenario(mode, reference=MortalReference(), beside=beside).run())
        assert "ref_logprobs" in str(trainer(run).weights[0])
        lost += restarted(run, "ref")
    assert lost > enough(6, share)


@a_share_and_all
@mostly_slow("mode", MODES, quick=["one_step_off", "async_stale"])
def test_ranks_of_log_probs_may_be_lost_at_any_moment_and_compute_under_the_version_they_are_asked_for(
    mode: str, share: float
):
    """Whole runs on the virtual clock. `FakeLogProb` refuses what its receivers do not serve, and `check` that the
    trainer sends a version with other weights than those of its steps."""
    whole = check(scenario(mode, logp_ranks=2).run())
    lost = 0
    for part in range(1, 24, int(1 / share)):
        beside = kills("logp", whole.ended * part / 24, 4.0 + part / 8)
        run = check(scenario(mode, logp_ranks=2, beside=beside, max_restarts=6).run())
        assert run.logp is not None
        assert "prox_logprobs" in str(trainer(run).weights[0])
        lost += restarted(run, "logp")
    assert lost > enough(6, share)


def test_a_trainer_that_has_gone_on_is_brought_back_to_the_version_that_log_probs_need():
    """Stream: several batches to a version, so that the trainer has made steps of it when the next one is asked for."""
    found = 0
    for part in range(1, 24, 3):
        run = check(scenario("stream_off_policy", logp_ranks=1, beside=kills("logp", part)).run())
        found += any("need version" in event.reason for event in run.of(RanksLost))
    assert found


@a_share_and_all
@mostly_slow(
    ("mode", "role", "shares"),
    product(["on_policy", "stream_off_policy"], ["actor", "critic"], [False, True]),
    quick=[("on_policy", "critic", False), ("on_policy", "actor", True), ("stream_off_policy", "actor", False)],
)
def test_policy_and_critic_are_trained_as_if_nothing_had_happened(mode: str, role: str, shares: bool, share: float):
    """Whole runs on the virtual clock."""
    if shares and role == "critic":
        pytest.skip("these are the trainer's ranks")

    def one(beside: Any = None) -> tuple[Run, MortalCritic]:
        critic = MortalCritic()
        run = check(scenario(mode, critic=critic, critic_on_trainer_ranks=shares, beside=beside).run())
        told = [event.step for event in run.of(CriticStepped)]
        assert told == list(range(len(told)))
        return run, critic

    whole, undisturbed = one()
    redone = 0
    for part in range(1, 24, int(1 / share)):
        run, critic = one(kills(role, whole.ended * part / 24, 6.0 + part / 8))
        if mode == "on_policy":  # else the moments at which groups are finished decide on batches
            assert trainer(run).weights == trainer(whole).weights
            assert critic.weights == undisturbed.weights
        before = [valued for step in critic.weights for *_, valued in step]
        assert before == [valued for step in undisturbed.weights for *_, valued in step]
        assert len(run.of(CriticStepped)) == len(whole.of(CriticStepped))
        redone += sum(event.batches for event in run.of(RanksRestarted))
    assert redone > enough(3, share)


def test_restarts_of_all_roles_count_together():
    async def beside(run: Run) -> None:
        await kills("ref", 5.0, 10.0)(run)
        await kills("actor", 10.0, 10.0)(run)

    run = scenario("async_partial", reference=MortalReference(), beside=beside).run()
    run.assert_clean()
    assert str(run.error).endswith("It is not started again: trainer.max_restarts is used up")
    assert (restarted(run, "ref"), restarted(run, "actor")) == (2, 1)


def test_tokens_that_were_on_a_lost_machine_end_the_run_at_once_with_one_message():
    def script(run: Run) -> None:
        def on(event: Event) -> None:
            if isinstance(event, RanksLost):
                gone = TokensLost("the tokens of 4 groups were on 10.0.0.7, a machine that Ray has no more")
                trainer(run).raises_at[len(trainer(run).steps)] = gone

        run.recorder.on = on

    run = scenario("async_partial", 20.0, save_freq=50, script=script).run()
    run.assert_clean()
    assert isinstance(run.error, TokensLost)
    assert str(run.error) == (
        "worker trainer died: its process ended. What it was trained on cannot be redone: "
        "the tokens of 4 groups were on 10.0.0.7, a machine that Ray has no more"
    )
    assert run.of(Note) == [] and trainer(run).life.restarts == 1
