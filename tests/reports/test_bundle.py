from __future__ import annotations

import io
import json
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from headway.config.schema import Config
from headway.errors import UserError
from headway.events import Event, GroupAdmitted, GroupSettled, Note
from headway.reports.record.events_file import read_events
from headway.reports.report_manager import Reports, open_reports
from tests.reports.scripted_run import ScriptedRun


def opened(path: Path, terminal: bool = False, config: Config | None = None) -> tuple[Reports, io.StringIO]:
    output = io.StringIO()
    console = Console(file=output, width=100, height=40, force_terminal=terminal)
    return open_reports(config or Config(), path, console), output


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_leaves_its_events_metrics_summary_and_tensorboard_files(terminal: bool, tmp_path: Path) -> None:
    run = ScriptedRun(versions=3).build()
    reports, output = opened(tmp_path / "r", terminal)
    reports.phase("Making the model")
    for event in run:
        reports.emit(event)
    reports.report_end(tmp_path / "r" / "model")

    directory = reports.directory
    assert list(read_events(directory.events)) == run
    rows = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    assert [row["version"] for row in rows] == [0, 1, 2, 3]
    assert json.loads(directory.summary.read_text()) == json.loads(json.dumps(reports.summary()))
    assert any(directory.tensorboard.iterdir())
    assert "Making the model" in output.getvalue()
    assert "validation reward" in output.getvalue()


def test_a_run_that_failed_early_still_has_a_summary(tmp_path: Path) -> None:
    reports, _ = opened(tmp_path / "r")
    reports.emit(Note(time=0.0, level="warning", text="something is wrong"))
    reports.close()
    written = json.loads(reports.directory.summary.read_text())
    assert written["status"] == "running"
    assert written["warnings"] == ["something is wrong"]


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    reports, _ = opened(tmp_path / "r", terminal=True)
    reports.close()
    reports.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "live-view"]


def test_tensorboard_can_be_switched_off(tmp_path: Path) -> None:
    config = Config.model_validate({"reports": {"trackers": [], "live": "off"}})
    reports, output = opened(tmp_path / "r", terminal=True, config=config)
    for event in ScriptedRun(versions=1).build():
        reports.emit(event)
    reports.report_end(None)
    assert not any(reports.directory.tensorboard.iterdir())
    assert "TensorBoard" not in output.getvalue()
    assert "--logdir" not in output.getvalue()


@pytest.mark.parametrize("trackers", [["tensorboard"], []])
def test_a_tensorboard_folder_that_is_removed_fails_no_run_at_its_end(trackers: list[str], tmp_path: Path) -> None:
    config = Config.model_validate({"reports": {"trackers": trackers, "live": "off"}})
    reports, output = opened(tmp_path / "r", config=config)
    shutil.rmtree(reports.directory.tensorboard)
    reports.report_end(None)
    assert reports.directory.summary.exists()
    assert "--logdir" not in output.getvalue()


def test_a_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    reports, _ = opened(tmp_path / "r")
    reports.close()
    with pytest.raises(UserError, match="already holds a run"):
        opened(tmp_path / "r")


def test_an_event_may_be_delivered_in_the_middle_of_another_one(tmp_path: Path) -> None:
    """A signal handler may run while an event is being delivered, on the same thread."""
    reports, _ = opened(tmp_path / "r")

    class Interrupting:
        def on_event(self, event: object) -> None:
            reports._observers.remove(self)
            reports.emit(Note(time=1.0, level="info", text="stopping"))

        def close(self) -> None: ...

    reports._observers.append(Interrupting())
    reports.emit(Note(time=0.0, level="info", text="running"))
    reports.close()
    assert [event.time for event in read_events(reports.directory.events)] == [0.0, 1.0]


@pytest.mark.parametrize("live", ["off", "on"])
@pytest.mark.parametrize("stdout", ["a full disk", "a pipe whose reader left"])
def test_an_output_that_refuses_ends_what_is_shown_and_not_the_run(
    live: str, stdout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stdout == "a full disk":
        if not Path("/dev/full").exists():
            pytest.skip("this system has no /dev/full")
        output = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115 - its closing is tested
    else:
        reading, writing = os.pipe()
        os.close(reading)
        output = os.fdopen(writing, "w", encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", output)
    reports = open_reports(Config.model_validate({"reports": {"live": live, "trackers": []}}), tmp_path / "r")
    for event in ScriptedRun(versions=1).build():
        reports.emit(event)
    reports.report_end(None)
    output.close()  # as the interpreter does at its end: nothing is left that could be refused
    assert json.loads(reports.directory.summary.read_text())["status"] == "completed"


def test_without_an_output_a_run_has_reports_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    reports = open_reports(Config.model_validate({"reports": {"trackers": []}}), tmp_path / "r")
    reports.report_end(None)
    assert reports.directory.summary.exists()


def admission(number: int, time: float) -> GroupAdmitted:
    return GroupAdmitted(
        time=time, number=number, epoch=0, row=number, attempt=0, version=0, admitted=number + 1, discarded=0, limit=9
    )


def test_what_reports_say_of_the_run_has_its_last_event(tmp_path: Path):
    reports, _ = opened(tmp_path / "r")
    reports.emit(admission(0, 1.0))
    assert reports.metrics.tally.counts()["in_flight"] == 1
    reports.emit(GroupSettled(time=1.0, number=0, fate="trained", lag=0))
    assert reports.summary()["groups"]["trained"] == 1
    reports.emit(admission(1, 1.0))
    reports.close()
    assert len(list(read_events(reports.directory.events))) == 3


def test_an_interrupt_in_the_middle_loses_no_event(tmp_path: Path):
    reports, _ = opened(tmp_path / "r")
    on_event = reports.metrics.on_event

    def interrupted(event: Event) -> None:
        reports.metrics.on_event = on_event  # type: ignore[method-assign]
        raise KeyboardInterrupt

    reports.metrics.on_event = interrupted  # type: ignore[method-assign]
    told = [admission(0, 1.0), admission(1, 1.0), Note(time=1.0, level="info", text="a line")]
    with pytest.raises(KeyboardInterrupt):
        reports.emit(told[0])
    for event in told[1:]:
        reports.emit(event)
    reports.close()
    assert list(read_events(reports.directory.events)) == told
