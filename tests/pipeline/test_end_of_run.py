"""How a run ends: by its number of groups, by its data, or because it was asked to."""

from __future__ import annotations

import asyncio
from itertools import product

import pytest

from headway.events import BatchTaken, CheckpointSaved, GroupAdmitted, RunFinished, RunStarted, UpdateFinished
from headway.pipeline.run import Status
from tests.pipeline.fakes import FakeReward, fails
from tests.pipeline.scenario import MODES, Run, Scenario
from tests.tiers import a_share_and_all, mostly_slow

# ---------------------------------------------------------------------------------------------- by number of groups


@mostly_slow("mode", MODES, quick=["colocate_sync", "async_stale", "overlapped"])
def test_with_a_total_no_surplus_is_admitted(mode: str):
    run = Scenario(mode).run().assert_completed()
    assert run.groups["trained"] == run.groups["admitted"] == run.of(RunStarted)[0].total_groups


@mostly_slow("mode", MODES, quick=["one_step_off", "async_partial", "colocate_async"])
def test_with_a_total_discards_are_refilled_and_the_exact_number_is_trained(mode: str):
    reward = FakeReward(lambda p: fails("unlucky") if p.row % 5 == 2 else [1.0, 1.0] if p.row % 7 == 3 else [0.0, 1.0])
    run = Scenario(mode, reward=reward, filters=True).run().assert_completed()
    groups = run.groups
    total = run.of(RunStarted)[0].total_groups
    assert groups["trained"] == total
    assert groups["failed"] > 0 and groups["filtered"] > 0 and groups["in_flight"] == 0
    assert groups["admitted"] == total + groups["failed"] + groups["filtered"]
    assert run.version == 6


def test_the_last_checkpoint_is_saved_once_and_holds_the_books():
    run = Scenario("async_partial", sections={"trainer": {"save_freq": 2}}).run().assert_completed()
    assert [saved.version for saved in run.of(CheckpointSaved)] == [2, 4, 6]
    path, state = run.trainer.saved[-1]
    assert path.name == "version_6"
    assert (state["version"], state["consumed"], state["admitted"], state["discarded"]) == (6, 96, 96, 0)
    assert state["ledger"] == {
        "admitted": 96,
        "fates": {"trained": 96},
        "episode_fates": {"failed": 0, "trained": 192},
        "open": [],
        "open_episodes": [],
    }
    assert state["source"] == {"given": 96}


def test_a_checkpoint_in_between_tells_which_rows_are_open():
    run = Scenario("async_stale", sections={"trainer": {"save_freq": 1}}, rows=10).run().assert_completed()
    _, state = run.trainer.saved[0]
    settled = sum(state["ledger"]["fates"].values())
    assert state["consumed"] == 16 and settled == 16
    assert len(state["ledger"]["open"]) == state["admitted"] - 16 > 0
    assert all(row == number % 10 and epoch == number // 10 for number, epoch, row, _ in state["ledger"]["open"])
    assert state["source"]["given"] == state["admitted"], "the cursor stands behind the last admitted prompt"


# ---------------------------------------------------------------------------------------------- by data

ENDS = {
    "exactly at a version's boundary": 32,
    "exactly at a batch's boundary inside a version": 40,
    "inside a batch": 42,
    "before the first batch is full": 3,
}
"""Rows of one epoch, for four fetches of four groups a version."""


@mostly_slow(
    ("rows", "mode", "test_freq"),
    product(ENDS.values(), ["stream_off_policy", "async_stale", "async_partial"], [1, 7]),
    quick=[(32, "stream_off_policy", 1), (40, "async_stale", 7), (42, "async_partial", 1), (3, "stream_off_policy", 7)],
)
def test_when_the_data_ends_everything_is_trained_and_the_last_version_validated(rows: int, mode: str, test_freq: int):
    run = Scenario(mode, rows=rows, epochs=1, problems=2, test_freq=test_freq).run().assert_completed()
    versions = -(-rows // 16)
    assert run.groups["trained"] == run.groups["admitted"] == rows
    assert run.version == versions
    assert [update.version for update in run.of(UpdateFinished)] == list(range(1, versions + 1))
    assert run.validated() == ([*range(versions + 1)] if test_freq == 1 else [0, versions])
    assert [saved.version for saved in run.of(CheckpointSaved)] == [versions]


@pytest.mark.parametrize("rows", [1, 4, 7, 8])
@pytest.mark.parametrize("mode", ["on_policy", "one_step_off"])
def test_the_last_wave_may_be_short(mode: str, rows: int):
    run = Scenario(mode, rows=rows, epochs=1, problems=2).run().assert_completed()
    assert run.groups["trained"] == rows
    assert run.validated() == list(range(-(-rows // 4) + 1))


def test_only_the_last_batch_is_short_and_none_is_empty():
    for rows in ENDS.values():
        run = Scenario("async_stale", rows=rows, epochs=1).run().assert_completed()
        sizes = [len(fetch.numbers) for fetch in run.of(BatchTaken)]
        assert sizes == [4] * (rows // 4) + [rows % 4] * (rows % 4 > 0)
        assert [fetch.fetch for fetch in run.of(BatchTaken)] == list(range(len(sizes)))


def test_with_epochs_discards_are_not_refilled():
    reward = FakeReward(lambda p: fails("unlucky") if p.row % 3 == 0 else [0.0, 1.0])
    run = Scenario("async_partial", rows=30, epochs=2, reward=reward, problems=1).run().assert_completed()
    assert run.groups["admitted"] == 60
    assert run.groups["failed"] == 20
    assert run.groups["trained"] == 40
    assert run.validated() == [0, 1, 2, 3]


def test_data_of_which_every_group_is_discarded_ends_at_version_0():
    reward = FakeReward(lambda _: fails("unlucky"))
    run = Scenario("async_partial", rows=30, epochs=1, reward=reward, problems=1).run()
    run.assert_completed()
    assert run.groups["failed"] == 30
    assert run.version == 0
    assert run.validated() == [0]


# ---------------------------------------------------------------------------------------------- because it was asked to


def stop_at(seconds: float):
    async def beside(run: Run) -> None:
        await asyncio.sleep(seconds)
        run.pipeline.request_stop()

    return beside


def interrupted(scenario: Scenario, seconds: float) -> Run:
    scenario.beside = stop_at(seconds)
    run = scenario.run()
    if run.error is not None:
        raise run.error
    return run.assert_clean()


@a_share_and_all
@mostly_slow(
    ("mode", "by"),
    product(MODES, ["total", "epochs"]),
    quick=[
        ("on_policy", "epochs"),
        ("stream_off_policy", "total"),
        ("overlapped", "epochs"),
        ("colocate_async", "total"),
    ],
)
def test_a_stop_at_any_moment_ends_at_a_version_boundary_with_a_checkpoint_and_balanced_books(
    mode: str, by: str, share: float
):
    length = {"total": 48} if by == "total" else {"rows": 43, "epochs": 1}

    def scenario() -> Scenario:
        return Scenario(mode, problems=2, test_freq=2, slots=6, sections={"trainer": {"save_freq": -1}}, **length)

    whole = scenario().run().assert_completed()
    per_version = whole.of(RunStarted)[0].groups_per_version
    for moment in range(0, 13, int(1 / share)):
        run = interrupted(scenario(), moment / 12 * whole.ended)
        groups = run.groups
        assert run.version == -(-groups["trained"] // per_version)
        if by == "total" or groups["in_flight"]:
            assert groups["trained"] % per_version == 0
        assert [saved.version for saved in run.of(CheckpointSaved)] == [run.version]
        assert run.trainer.saved[-1][1]["consumed"] == groups["trained"]
        assert run.validated() == sorted(set(run.validated()) & set(range(run.version + 1)))
        assert run.validated() and run.validated()[0] == 0


def test_a_stopped_run_says_so():
    run = interrupted(Scenario("async_partial"), 5.0)
    assert run.status is Status.INTERRUPTED
    assert run.of(RunFinished)[0].status == "interrupted"


def test_a_stop_before_the_first_batch_leaves_at_version_0_without_waiting_for_answers():
    run = interrupted(Scenario("async_partial", lengths=lambda _: 10_000), 2.0)
    assert run.version == 0
    assert run.groups["in_flight"] == run.groups["admitted"] == 24
    assert run.ended < 4


def test_a_stop_finishes_the_version_that_was_begun():
    run = interrupted(Scenario("async_partial", trainer={"step_s": lambda _: 10.0}), 15.0)
    assert run.groups["trained"] == 16
    assert run.version == 1


def test_after_a_stop_nothing_is_admitted_beyond_the_version():
    scenario = Scenario("async_partial", trainer={"step_s": lambda _: 10.0})
    run = interrupted(scenario, 15.0)
    assert all(event.time <= 15.0 for event in run.of(GroupAdmitted))


def test_stopping_twice_is_stopping_once():
    async def beside(run: Run) -> None:
        for seconds in (15.0, 2.0, 4.0):
            await asyncio.sleep(seconds)
            run.pipeline.request_stop()

    run = Scenario("async_stale", beside=beside, trainer={"step_s": lambda _: 10.0}).run()
    assert run.error is None
    run.assert_clean()
    assert run.version == 1


def test_a_stop_before_the_run_begins_trains_nothing():
    run = Scenario("on_policy", script=lambda run: run.pipeline.request_stop(), problems=1).run()
    assert run.error is None
    run.assert_clean()
    assert (run.version, run.groups["admitted"], run.validated()) == (0, 0, [0])


def test_a_cancelled_run_leaves_at_once_with_its_books_closed():
    run = Scenario("async_partial").run(cancelled_at=7.0)
    assert run.ended == 7.0
    run.assert_clean()
    assert run.of(RunFinished)[0].status == "interrupted"
    assert run.of(RunFinished)[0].reason == "left at once"
    assert run.groups["in_flight"] > 0
    assert run.of(CheckpointSaved) == []


def test_shutdown_goes_in_order_admission_pause_books_checkpoint():
    """Before the checkpoint is written nothing decodes any more, and nothing is admitted."""
    states: list[tuple[int, bool]] = []

    def script(run: Run) -> None:
        save = run.trainer.save
        engine = run.rollouts[0]

        async def watched_save(path, driver_state) -> None:
            states.append((len(run.of(GroupAdmitted)), engine.paused))
            await save(path, driver_state)

        run.trainer.save = watched_save  # type: ignore[method-assign]

    scenario = Scenario("async_partial", script=script, lengths=lambda t: 16 if t.row < 20 else 4000)
    run = interrupted(scenario, 8.0)
    assert states == [(run.groups["admitted"], True)]
    ends = [(e.kind, getattr(e, "fate", "")) for e in run.events if e.kind in ("checkpoint.saved", "group.settled")]
    assert ends[16:] == [("checkpoint.saved", ""), *[("group.settled", "in_flight")] * run.groups["in_flight"]]
    number, *_ = run.trainer.saved[-1][1]["ledger"]["open"][0]
    assert number == 16, "the checkpoint names the rows that were open"
