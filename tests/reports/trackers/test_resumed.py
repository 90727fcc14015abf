"""Trackers of a run that was killed and resumed: the same entry, and every row of the surviving history in it."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from headway.pipeline.recovery.checkpoint_manager import balance
from headway.reports.report_manager import Reports, open_reports, reopen_reports
from headway.reports.run_directory import RunDirectory, RunLock
from headway.reports.trackers import tracker_set
from headway.reports.trackers.tracker_tools import TRACKERS
from tests.pipeline.scenario import Run, Scenario
from tests.reports.trackers.fakes import SOON_S, Tool
from tests.tiers import mostly_slow

SCENARIO = Scenario(
    "on_policy",
    sections={"trainer": {"save_freq": 1}, "reports": {"trackers": ["wandb"], "live": "off"}},
    problems=3,
)


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> list[Tool]:
    """The tool of each part of the run, for a test to fill."""
    there: list[Tool] = []
    monkeypatch.setitem(TRACKERS, "wandb", lambda setting: there[-1].make("wandb", setting))  # type: ignore[arg-type]
    monkeypatch.setattr(tracker_set, "LIMIT_S", SOON_S)
    return there


def observed(scenario: Scenario, reports: Reports, killed_at: float | None = None) -> Run:
    def script(run: Run) -> None:
        run.recorder.on = reports.emit

    return replace(scenario, script=script).run(killed_at)


def rows_in(directory: Path) -> list[int]:
    return [json.loads(line)["version"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


@mostly_slow("hangs_at", ["", "on_row"], quick=["on_row"])
def test_a_resumed_run_goes_on_in_its_entry(hangs_at: str, tools: list[Tool], tmp_path: Path) -> None:
    """Killed at a time when the tool has all rows, or none of them."""
    before = tmp_path / "before"
    tools.append(Tool(hangs_at=hangs_at))
    reports = open_reports(SCENARIO.config, before, Console(file=io.StringIO()))
    run = observed(SCENARIO, reports, killed_at=33.0)
    (tracker,) = reports._trackers._threads
    if hangs_at:
        assert tools[0].hanging.wait(SOON_S)
        tracker.give_up()
        tools[0].released.set()
    else:
        tools[0].wait_for(2 + tracker._rows)  # the opening, the settings, and the rows
        reports.close()  # and a row more: that of the version in which it was killed
    assert tracker.join(SOON_S)
    sent = tools[0].rows
    directory = Path(shutil.copytree(before, tmp_path / "run"))
    (directory / "run.lock").unlink()
    state = json.loads(json.dumps(run.trainer.saved[-1][1]))

    tools.append(Tool())
    lock = RunLock(directory / "run.lock")
    lock.take()
    reports = reopen_reports(
        SCENARIO.config,
        RunDirectory.existing(directory),
        lock,
        state["version"],
        balance(state),
        Console(file=io.StringIO()),
    )
    surviving = len(rows_in(directory))
    observed(replace(SCENARIO, resume_from=state), reports)
    reports.close()
    (opened,) = tools[1].opened_with
    assert opened.entry == "entry-1"
    assert surviving > 0
    assert sent[:surviving] + tools[1].rows == rows_in(directory)
    assert hangs_at or len(sent) > surviving


def test_a_tracker_that_is_named_at_the_resume_gets_the_run_from_its_beginning(
    tools: list[Tool], tmp_path: Path
) -> None:
    alone = replace(SCENARIO, sections={"trainer": {"save_freq": 1}, "reports": {"trackers": [], "live": "off"}})
    reports = open_reports(alone.config, tmp_path / "run", Console(file=io.StringIO()))
    run = observed(alone, reports, killed_at=33.0)
    reports.close()
    state = json.loads(json.dumps(run.trainer.saved[-1][1]))
    tools.append(Tool())
    lock = RunLock(tmp_path / "run" / "run.lock")
    lock.take()
    reports = reopen_reports(
        SCENARIO.config,
        RunDirectory.existing(tmp_path / "run"),
        lock,
        state["version"],
        balance(state),
        Console(file=io.StringIO()),
    )
    observed(replace(SCENARIO, resume_from=state), reports)
    reports.close()
    assert tools[0].opened_with[0].entry == ""
    assert tools[0].rows == rows_in(tmp_path / "run")
    assert min(tools[0].rows) == 0
