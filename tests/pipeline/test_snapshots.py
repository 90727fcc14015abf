"""Snapshots of the trainer's ranks, to which a trainer that was lost goes back, on the virtual clock."""

from __future__ import annotations

import asyncio
from typing import Any

from headway.events import (
    CheckpointCopied,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    Note,
    OptimizerStepped,
    RanksRestarted,
    SnapshotKept,
    VersionReached,
)
from tests.pipeline.mortal_ranks import MortalCritic, Snapshots
from tests.pipeline.scenario import Run, Scenario
from tests.pipeline.test_rank_restarts import MODES, check, trainer
from tests.tiers import a_share_and_all, enough, mostly_slow


def scenario(
    mode: str,
    *moments: float,
    save_freq: int = 50,
    snapshot_freq: int = 1,
    wrong: dict[str, Any] | None = None,
    **further: Any,
) -> Scenario:
    """``moments``: seconds after which the trainer dies, each after the one before; ``wrong``: of the snapshots."""

    def script(run: Run) -> None:
        for name, value in (wrong or {}).items():
            assert hasattr(snapshots(run), name)
            setattr(snapshots(run), name, value)

    async def kills(run: Run) -> None:
        for moment in moments:
            await asyncio.sleep(moment)
            trainer(run).life.die()

    settings = {"save_freq": save_freq, "snapshot": "memory", "snapshot_freq": snapshot_freq}
    given: dict[str, Any] = {
        "sections": {"trainer": settings},
        "trainer_start_s": 3.0,
        "beside": kills if moments else None,
        "mini_batch": 2,
        "script": script,
    }
    return Scenario(mode, **{**given, **further})


def snapshots(run: Run) -> Snapshots:
    return trainer(run).snapshots


async def until(run: Run, kind: type[Event], times: int) -> None:
    """Wait until so many events of this kind have come."""
    came = asyncio.Event()
    run.recorder.on = lambda _: came.set() if len(run.of(kind)) == times else None
    await came.wait()


def warnings(run: Run) -> list[str]:
    return [event.text for event in run.of(Note) if event.level == "warning"]


@a_share_and_all
@mostly_slow("mode", MODES, quick=["one_step_off"])
def test_a_lost_trainer_goes_back_to_the_snapshot_and_ends_with_the_same_weights(mode: str, share: float):
    length = scenario(mode).run().ended
    loaded = 0
    for part in range(1, 12, int(1 / share)):
        run = check(scenario(mode, length * part / 12, 5.0 + part / 8).run())
        loaded += len(snapshots(run).loaded)
        for back in run.of(RanksRestarted):
            batches = run.scenario.config.async_training.trigger_parameter_sync_step
            assert back.batches <= 2 * batches or not snapshots(run).loaded
    assert loaded > enough(6, share)


def test_less_is_done_again_than_since_the_checkpoint():
    async def beside(run: Run) -> None:
        await until(run, VersionReached, 6)
        trainer(run).life.die()

    (back,) = check(scenario("on_policy", beside=beside).run()).of(RanksRestarted)
    assert back.batches == 1


def test_no_snapshot_is_kept_where_a_checkpoint_is_due():
    run = check(scenario("async_partial", 35.0, save_freq=3).run())
    kept = [event.version for event in run.of(SnapshotKept)]
    saved = [event.version for event in run.of(CheckpointSaved)]
    assert set(kept) == {1, 2, 4, 5} and saved == [3, 6]


def test_only_versions_that_snapshot_freq_divides_have_one():
    run = check(scenario("async_partial", 35.0, save_freq=6, snapshot_freq=2).run())
    assert {event.version for event in run.of(SnapshotKept)} == {2, 4}


def test_training_stands_still_for_the_copy_alone():
    run = check(scenario("async_partial", wrong={"send_s": 6.0}).run())
    copied, (kept, *_) = run.of(CheckpointCopied)[0].span, run.of(SnapshotKept)
    assert copied[1] - copied[0] == 0.125
    assert any(kept.span[0] < step.time < kept.span[1] for step in run.of(OptimizerStepped))


def test_one_that_falls_due_while_another_is_on_its_way_is_left_out_and_a_checkpoint_waits():
    run = check(scenario("async_partial", save_freq=3, wrong={"send_s": 12.0}).run())
    kept = [event.version for event in run.of(SnapshotKept)]
    assert kept[0] == 1 and 2 not in kept
    assert [event.version for event in run.of(CheckpointSaved)] == [3, 6]


def test_one_that_is_not_taken_is_told_once_and_ends_nothing():
    run = check(scenario("on_policy", wrong={"fails": ["no episode worker answers"] * 4}).run())
    (text,) = warnings(run)
    assert text == ("the snapshot of version 1 was not kept: no episode worker answers. A lost rank goes back further")
    assert [event.version for event in run.of(SnapshotKept)] == [5]
    assert run.of(CheckpointFailed) == []


def test_without_the_keeper_the_checkpoint_is_loaded_and_that_is_told_once():
    async def beside(run: Run) -> None:
        await until(run, SnapshotKept, 3)
        snapshots(run).kept = {}
        trainer(run).life.die()

    run = check(scenario("on_policy", beside=beside, save_freq=3).run())
    (text,) = warnings(run)
    lost = "cannot be loaded, and the checkpoint of version 3 is: episode-worker-0 is gone"
    assert text.startswith("the snapshot of version ") and text.endswith(lost)
    assert run.of(RanksRestarted)[0].batches >= 1


def test_a_trainer_that_dies_while_its_snapshot_is_sent_goes_back_to_the_one_before():
    async def beside(run: Run) -> None:
        await until(run, CheckpointCopied, 2)
        trainer(run).life.die()

    run = check(scenario("on_policy", beside=beside, wrong={"send_s": 3.0}).run())
    assert snapshots(run).loaded == [1]
    assert warnings(run) == []


def test_it_is_said_once_that_snapshots_are_on_the_ranks_own_machine():
    run = check(scenario("on_policy", wrong={"outlives_machines": False}).run())
    texts = [event.text for event in run.of(Note) if "snapshots" in event.text]
    assert texts == [
        "snapshots of training ranks outlive processes, not a machine: no episode worker is on another one"
    ]


def test_batches_are_kept_until_a_checkpoint_for_a_snapshot_may_be_lost():
    run = check(scenario("on_policy").run())
    assert len(run.of(SnapshotKept)) == 5
    assert run.pipeline._wiring.actor._kept == []  # the last checkpoint

    async def beside(run: Run) -> None:
        await until(run, SnapshotKept, 4)
        assert len(run.pipeline._wiring.actor.since(0)) >= 4

    check(scenario("on_policy", beside=beside).run())


@mostly_slow("shares", [False, True], quick=[True])
def test_a_critic_goes_back_with_the_trainer_where_it_shares_its_ranks(shares: bool):
    """Whole runs on the virtual clock."""

    def one(*moments: float) -> tuple[Run, MortalCritic]:
        critic = MortalCritic()
        run = scenario("on_policy", *moments, critic=critic, critic_on_trainer_ranks=shares).run()
        return check(run), critic

    whole, undisturbed = one()
    loaded = 0
    for part in range(1, 12, 2):
        run, critic = one(whole.ended * part / 12)
        assert trainer(run).weights == trainer(whole).weights
        assert critic.weights == undisturbed.weights
        loaded += len(snapshots(run).loaded)
    assert loaded > 2
