"""A run that is asked to stop when it has nothing left to train is complete, whatever its length is given by."""

from __future__ import annotations

from itertools import product

from headway.events import RunFinished
from headway.pipeline.run import Status
from tests.pipeline.fakes import FakeReward, fails
from tests.pipeline.scenario import MODES, Run, Scenario
from tests.tiers import mostly_slow

LENGTHS = {
    "a total": {"total": 32},
    "epochs that end at a boundary": {"rows": 16, "epochs": 2},
    "epochs that end within a version": {"rows": 13, "epochs": 2},
}


def stopped(mode: str, length: dict[str, int], consumed: int, reward: FakeReward | None = None) -> Run:
    """With the first batch of which the run has trained so many groups."""

    def script(run: Run) -> None:
        emit = run.recorder.on

        def on(event: object) -> None:
            if emit is not None:
                emit(event)  # type: ignore[arg-type]
            if run.pipeline._state.taken >= consumed and run.stopped_at is None:
                run.request_stop()

        run.recorder.on = on

    run = Scenario(mode, script=script, reward=reward or FakeReward(), **length).run()
    if run.error is not None:
        raise run.error
    return run.assert_clean()


@mostly_slow(
    ("mode", "name"),
    product(MODES, LENGTHS),
    quick=[*zip(["on_policy", "async_partial", "overlapped"], LENGTHS, strict=True)],
)
def test_a_stop_while_the_last_groups_are_trained_leaves_a_complete_run(mode: str, name: str) -> None:
    length = LENGTHS[name]
    groups = length.get("total") or length["rows"] * length["epochs"]
    run = stopped(mode, length, groups)
    assert run.stopped_at is not None
    assert run.groups["trained"] == groups
    assert (run.status, run.of(RunFinished)[0].status) == (Status.COMPLETED, "completed")


@mostly_slow(
    ("mode", "name"),
    product(MODES, LENGTHS),
    quick=[*zip(["one_step_off", "colocate_async", "async_stale"], LENGTHS, strict=True)],
)
def test_a_stop_before_that_leaves_an_interrupted_one(mode: str, name: str) -> None:
    run = stopped(mode, LENGTHS[name], 1)
    assert run.groups["trained"] < 26
    assert run.status is Status.INTERRUPTED


def test_groups_that_could_not_be_scored_are_not_missing_at_the_end() -> None:
    """With epochs discards are not refilled: the data are trained all the same."""
    reward = FakeReward(lambda p: fails("unlucky") if p.row < 8 and p.epoch == 0 else [0.0, 1.0])
    run = stopped("on_policy", {"rows": 12, "epochs": 2}, 16, reward)
    assert (run.groups["failed"], run.groups["trained"]) == (8, 16)
    assert run.status is Status.COMPLETED
