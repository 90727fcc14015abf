"""The reports of a run that was killed and resumed, against those of one that nobody killed."""

from __future__ import annotations

import io
import json
import shutil
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from headway.errors import DataError, UserError
from headway.events import (
    CheckpointSaved,
    Event,
    Note,
    RunResumed,
    RunStarted,
    UpdateFinished,
    ValidationFinished,
    VersionReached,
)
from headway.pipeline.recovery.checkpoint_manager import balance
from headway.reports.checkpoint_folders import CheckpointRetention, Checkpoints
from headway.reports.record.events_file import read_events
from headway.reports.report import report
from headway.reports.report_manager import Reports, open_reports, reopen_reports
from headway.reports.run_directory import RunDirectory, RunLock
from headway.reports.trackers.tracker_thread import TrackerState, memory_file
from tests.full_disk import files_of_at_most
from tests.pipeline.scenario import Run, Scenario
from tests.reports.stories import only_late
from tests.tiers import mostly_slow

SCENARIO = Scenario("on_policy", sections={"trainer": {"save_freq": 1}}, problems=3)
TIMES = ("idle_ratio", "slot_utilization")
"""What replicas report once a second, of which the last report before the kill is lost."""


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100)


def observed(scenario: Scenario, reports: Reports, killed_at: float | None = None) -> Run:
    def script(run: Run) -> None:
        run.recorder.on = reports.emit

    return replace(scenario, script=script, validated=reports.validated).run(killed_at)


def rows(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.endswith(TIMES)} for line in lines]


def summary(directory: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return loaded


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    reports = open_reports(SCENARIO.config, directory, quiet())
    observed(SCENARIO, reports).assert_completed()
    reports.close()
    return directory


def killed(folder: Path, at: float, checkpoint: int = -1) -> tuple[Path, dict[str, Any]]:
    """What a kill leaves, the last line half written; and the driver's state of a checkpoint, by default the last."""
    reports = open_reports(SCENARIO.config, folder / "before", quiet())
    run = observed(SCENARIO, reports, at)
    reports._states._thread.submit(int).result(60)  # a kill may come earlier; this one finds all states, every time
    until = time.monotonic() + 60.0
    for tracker in reports._trackers._threads:  # and all rows with the trackers, which are threads, too
        state = memory_file(tracker._setting.folder, tracker.name)
        while TrackerState.read(state).rows < tracker._rows:
            assert time.monotonic() < until, f"{tracker.name} has {tracker._sent} of {tracker._rows} rows"
            time.sleep(0.005)
    left = Path(shutil.copytree(folder / "before", folder / "run"))
    reports.close()
    with (left / "events.jsonl").open("a") as file:
        file.write('{"kind": "note", "ti')
    return left, json.loads(json.dumps(run.trainer.saved[checkpoint][1]))


def resumed(
    directory: Path, state: dict[str, Any], killed_at: float | None = None, *, keeps_validation: bool = False
) -> Run:
    lock = RunLock(directory / "run.lock")
    lock.take()
    reports = reopen_reports(
        SCENARIO.config,
        RunDirectory.existing(directory),
        lock,
        state["version"],
        balance(state),
        quiet(),
        keeps_validation=keeps_validation,
    )
    reports.emit(Note(time=1e6, level="info", text="workers are up"))
    run = observed(replace(SCENARIO, resume_from=state), reports, killed_at)
    reports.close()
    return run


@mostly_slow(("at", "large"), product([14.0, 24.0, 33.0], [False, True]), quick=[(24.0, False), (33.0, True)])
def test_a_resumed_run_reports_what_an_undisturbed_one_does(
    undisturbed: Path, tmp_path: Path, at: float, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr("headway.reports.report_manager.LARGE", 1)
    directory, state = killed(tmp_path, at)
    assert large == any((directory / "events").glob("*.state"))
    resumed(directory, state)
    assert rows(directory) == rows(undisturbed)
    told, expected = summary(directory), summary(undisturbed)
    assert (told["resumed"], expected["resumed"]) == (1, 0)
    for key in ("status", "groups", "balanced", "eval", "lag", "version", "optimizer_steps", "fetches", "wall_s"):
        assert told[key] == expected[key], key
    assert told["balanced"]


def test_a_validation_that_had_ended_is_not_made_again(undisturbed: Path, tmp_path: Path) -> None:
    directory, state = killed(tmp_path, 18.0)
    run = resumed(directory, state, keeps_validation=True)
    told = [event for event in read_events(directory / "events.jsonl") if isinstance(event, ValidationFinished)]
    assert [event.version for event in told] == list(range(7))
    assert summary(directory)["eval"] == summary(undisturbed)["eval"]
    assert state["version"] == 1 and run.validated()[0] == 2
    took = told[1].span[1] - told[1].span[0]
    assert summary(directory)["wall_s"] < summary(undisturbed)["wall_s"] - 0.9 * took, "nothing waited for it"


@mostly_slow("large", [False, True], quick=[True])
def test_the_row_of_a_validation_that_ends_late_is_there_once_whether_it_survives_or_is_undone(
    undisturbed: Path, tmp_path: Path, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run trains what it kept at once, beside its first validation, whose version's row is then closed first."""
    if large:
        monkeypatch.setattr("headway.reports.report_manager.LARGE", 1)
    emit, late = Reports.emit, {0, 2}
    held: dict[int, Event] = {}

    def emit_late(reports: Reports, event: Event) -> None:
        if isinstance(event, ValidationFinished) and event.version in late:
            held[event.version] = event
            return
        emit(reports, event)
        if isinstance(event, UpdateFinished) and event.version - 1 in held:
            emit(reports, replace(held.pop(event.version - 1), time=event.time))

    monkeypatch.setattr(Reports, "emit", emit_late)
    directory, state = killed(tmp_path, 33.0, checkpoint=-2)
    assert [row["version"] for row in rows(directory)] == [0, 0, 1, 2, 2]
    assert state["version"] == 2, "of the late rows the first survives, and the second is undone"
    resumed(directory, state)
    expected = rows(undisturbed)
    assert [row["version"] for row in rows(directory)] == [0, 0, 1, 2, 2, *(row["version"] for row in expected[3:])]
    whole: dict[int, dict[str, Any]] = {}
    for row in rows(directory):
        whole.setdefault(row["version"], {}).update(row)
    assert list(whole.values()) == expected


@pytest.mark.slow
def test_a_run_may_be_resumed_and_killed_again_and_again(undisturbed: Path, tmp_path: Path) -> None:
    directory, state = killed(tmp_path, 14.0)
    for _ in range(3):
        run = resumed(directory, state, killed_at=14.0)
        assert run.trainer.saved[-1][1]["version"] > state["version"]
        state = json.loads(json.dumps(run.trainer.saved[-1][1]))
    resumed(directory, state)
    assert rows(directory) == rows(undisturbed)
    assert (summary(directory)["resumed"], summary(directory)["groups"]) == (4, summary(undisturbed)["groups"])


def test_a_moment_is_placed_where_the_record_has_it_before_and_after_a_resume(tmp_path: Path) -> None:
    directory, state = killed(tmp_path, 14.0)
    lock = RunLock(directory / "run.lock")
    lock.take()
    reports = reopen_reports(
        SCENARIO.config, RunDirectory.existing(directory), lock, state["version"], balance(state), quiet()
    )
    before = reports.since_first(7e5)  # the clock stands still
    (start,) = (event for event in read_events(directory / "events.jsonl") if isinstance(event, RunStarted))
    reports.emit(replace(start, time=1e6))
    reports.emit(Note(time=1e6 + 3.0, level="info", text="later"))
    placed = reports.since_first(1e6 + 3.0)
    reports.close()
    first, *_, last = read_events(directory / "events.jsonl")
    assert isinstance(last, Note) and placed == pytest.approx(last.time - first.time)
    assert placed == pytest.approx(before + 3.0)


def test_the_clock_stands_still_between_the_boundary_and_the_new_start(tmp_path: Path) -> None:
    directory, state = killed(tmp_path, 14.0)
    resumed(directory, state)
    events = list(read_events(directory / "events.jsonl"))
    times = [event.time for event in events]
    assert times == sorted(times)
    boundary = next(e.time for e in events if isinstance(e, VersionReached) and e.version == state["version"])
    at_boundary = {type(event) for event in events if event.time == boundary}
    assert at_boundary >= {VersionReached, RunResumed, Note, RunStarted}
    assert next(event for event in events if isinstance(event, RunResumed)).times == 1


def points(directory: Path, name: str) -> list[int]:
    accumulator = EventAccumulator(str(directory / "tensorboard"))
    accumulator.Reload()
    return sorted(point.step for point in accumulator.Scalars(name))


def test_tensorboard_forgets_what_is_undone(undisturbed: Path, tmp_path: Path) -> None:
    """As its own reader has it: one point for each version."""
    directory, state = killed(tmp_path, 18.0)
    assert points(directory, "reward/mean") == [0]
    resumed(directory, state)
    assert points(directory, "reward/mean") == [row["version"] for row in rows(undisturbed) if "reward/mean" in row]


@pytest.mark.slow
def test_a_tensorboard_folder_that_was_removed_is_made_again(undisturbed: Path, tmp_path: Path) -> None:
    directory, state = killed(tmp_path, 33.0)
    shutil.rmtree(directory / "tensorboard")
    resumed(directory, state)
    first = state["version"] - 1  # its row was not complete at the boundary
    assert first > 0
    told = [row["version"] for row in rows(undisturbed) if "reward/mean" in row]
    assert points(directory, "reward/mean") == [version for version in told if version >= first]


def test_views_of_the_record_read_a_resumed_run(tmp_path: Path) -> None:
    directory, state = killed(tmp_path, 14.0)
    resumed(directory, state)
    written = report(directory)
    assert f"resumed from the checkpoint of v{state['version']}" in written.html.read_text()


def test_there_is_no_going_back_to_what_the_record_does_not_have(tmp_path: Path) -> None:
    directory, _ = killed(tmp_path, 14.0)
    lock = RunLock(directory / "run.lock")
    with pytest.raises(DataError, match=r"events\.jsonl .*no boundary of version 17"):
        reopen_reports(SCENARIO.config, RunDirectory.existing(directory), lock, 17, {}, quiet())


def test_reports_say_from_which_version_their_run_could_be_resumed(tmp_path: Path) -> None:
    directory, state = killed(tmp_path, 14.0)
    told: list[int] = []

    def look(run: Run) -> None:
        run.recorder.on = lambda event: (reports.emit(event), told.append(reports.resumable))

    lock = RunLock(directory / "run.lock")
    lock.take()
    version = state["version"]
    reports = reopen_reports(SCENARIO.config, RunDirectory.existing(directory), lock, version, balance(state), quiet())
    assert reports.resumable == version > 0
    run = replace(SCENARIO, resume_from=state, script=look).run()
    reports.close()
    assert run.error is None
    assert sorted(set(told)) == list(range(version, run.version + 1))


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_checkpoint_of_another_balance_is_refused_before_anything_changes(tmp_path: Path) -> None:
    directory, state = killed(tmp_path, 14.0)
    for version in (state["version"], state["version"] + 1):
        make_checkpoints(directory / "checkpoints", [f"version_{version}"], [])
    (directory / "summary.json").write_text("{}")
    before = contents(directory)
    other = {**balance(state), "trained": 1}
    with pytest.raises(UserError, match=r"not the checkpoint .*events\.jsonl tells: .*groups"):
        reopen_reports(
            SCENARIO.config,
            RunDirectory.existing(directory),
            RunLock(directory / "run.lock"),
            state["version"],
            other,
            quiet(),
        )
    assert contents(directory) == before


def test_rows_that_cannot_be_rewritten_refuse_the_resume_and_change_nothing(tmp_path: Path) -> None:
    directory, state = killed(tmp_path, 33.0)
    before = contents(directory)
    why = r"metrics\.jsonl\.tmp could not be written \(File too large\), .*; make room$"
    with files_of_at_most(0), pytest.raises(UserError, match=why):
        reopen_reports(
            SCENARIO.config,
            RunDirectory.existing(directory),
            RunLock(directory / "run.lock"),
            state["version"],
            balance(state),
            quiet(),
        )
    assert contents(directory) == before


# ---------------------------------------------------------------------------------------------- the directory


def test_two_processes_cannot_train_the_same_run(tmp_path: Path) -> None:
    first, second = RunLock(tmp_path / "run.lock"), RunLock(tmp_path / "run.lock")
    first.take()
    with pytest.raises(UserError, match=r"process \d+ on .* trains this run"):
        second.take()
    first.release()
    second.take()
    second.release()


def test_a_run_holds_its_lock_until_its_reports_are_closed(tmp_path: Path) -> None:
    reports = open_reports(SCENARIO.config, tmp_path / "run", quiet())
    with pytest.raises(UserError, match="right now"):
        RunLock(tmp_path / "run" / "run.lock").take()
    reports.close()
    lock = RunLock(tmp_path / "run" / "run.lock")
    lock.take()
    lock.release()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text(""), "is a file"),
        (lambda path: path.mkdir(), "has no config.yaml"),
        (lambda path: (path.mkdir(), (path / "config.yaml").write_text("")), "has no events.jsonl"),
    ],
)
def test_only_a_runs_directory_is_one(make: Any, message: str, tmp_path: Path) -> None:
    make(tmp_path / "run")
    with pytest.raises(UserError, match=message):
        RunDirectory.existing(tmp_path / "run")


# ---------------------------------------------------------------------------------------------- checkpoints


def make_checkpoints(folder: Path, actor: list[str], critic: list[str]) -> Checkpoints:
    for name in actor:
        (folder / name).mkdir(parents=True)
        (folder / name / "state.json").write_text("{}")
    for name in critic:
        (folder / "critic" / name).mkdir(parents=True)
    return Checkpoints(folder)


def test_a_checkpoint_is_complete_with_its_critic(tmp_path: Path) -> None:
    checkpoints = make_checkpoints(
        tmp_path, ["version_2", "version_10", ".version_12.partial", "version_x"], ["version_10", "version_12"]
    )
    assert checkpoints.complete(with_critic=False) == [2, 10]
    assert checkpoints.complete(with_critic=True) == [10]


def test_what_is_undone_or_half_written_is_removed(tmp_path: Path) -> None:
    checkpoints = make_checkpoints(
        tmp_path,
        ["version_2", "version_4", "version_6", ".version_8.partial", ".version_1.old"],
        ["version_2", "version_4", "version_6", ".version_8.partial"],
    )
    checkpoints.forget_above(4)
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*version*"))
    assert left == ["critic/version_2", "critic/version_4", "version_2", "version_4"]


def saved(version: int) -> CheckpointSaved:
    return CheckpointSaved(time=0.0, version=version, path="", span=(0.0, 0.0))


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    names = ["version_2", "version_9", "version_10", "version_11"]
    retention = CheckpointRetention(make_checkpoints(tmp_path, names, names), keep=2, recorded_version=lambda: 11)
    retention.on_event(saved(11))
    retention.close()
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*version*"))
    assert left == ["critic/version_10", "critic/version_11", "version_10", "version_11"]


def test_the_newest_checkpoint_of_which_the_record_tells_is_kept_until_it_tells_of_a_newer_one(tmp_path: Path) -> None:
    checkpoints = make_checkpoints(tmp_path, [f"version_{n}" for n in (1, 2, 3, 4, 5)], [])
    told = 3
    retention = CheckpointRetention(checkpoints, keep=1, recorded_version=lambda: told)
    retention.on_event(saved(5))
    assert checkpoints.complete(with_critic=False) == [3, 5]
    assert checkpoints.newest({1, 2, 3}, with_critic=False) == 3
    told = 5
    retention.on_event(saved(5))
    retention.close()
    assert checkpoints.complete(with_critic=False) == [5]


def test_the_version_to_resume_is_complete_and_told(tmp_path: Path) -> None:
    checkpoints = make_checkpoints(tmp_path, ["version_2", "version_4", "version_6"], ["version_2", "version_6"])
    assert checkpoints.newest({0, 1, 2, 3, 4}, with_critic=False) == 4
    assert checkpoints.newest({0, 1, 2, 3, 4}, with_critic=True) == 2
    assert checkpoints.newest({0, 1}, with_critic=True) is None


def test_all_checkpoints_are_kept_where_nobody_says_how_many(tmp_path: Path) -> None:
    checkpoints = make_checkpoints(tmp_path, ["version_1", "version_2"], [])
    retention = CheckpointRetention(checkpoints, keep=None, recorded_version=lambda: 2)
    retention.on_event(saved(2))
    retention.close()
    assert checkpoints.complete(with_critic=False) == [1, 2]


def test_a_large_run_is_resumed_from_its_newest_state_without_its_early_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.reports.report_manager.LARGE", 1)
    directory, state = killed(tmp_path, 33.0)
    only_late(directory, versions=0)
    resumed(directory, state)
    assert summary(directory)["balanced"]
    for path in (directory / "events").glob("*.state"):
        path.unlink()
    console, lock = quiet(), RunLock(directory / "run.lock")
    with pytest.raises(DataError, match="other fields"):
        reopen_reports(
            SCENARIO.config, RunDirectory.existing(directory), lock, state["version"], balance(state), console
        )
    assert isinstance(console.file, io.StringIO)
    assert "all events are read again" in console.file.getvalue()
