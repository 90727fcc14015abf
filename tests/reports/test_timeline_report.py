"""``headway report``: where files go, and what is said when there is no run to report on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli import cli
from headway.errors import ConfigError, RunError
from headway.events import Event
from headway.reports.record.events_file import EventsFile
from headway.reports.report import report
from headway.reports.run_directory import RunDirectory, RunLock
from tests.full_disk import files_of_at_most
from tests.reports.scripted_run import ScriptedRun
from tests.reports.timelines import cut_short


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return written(tmp_path / "run", ScriptedRun().build())


def written(run: Path, events: Sequence[Event]) -> Path:
    run.mkdir()
    file = EventsFile(run / "events.jsonl", pytest.fail)
    for event in events:
        file.on_event(event)
    file.close()
    return run


def message(run: Path, html: Path | None = None, trace: Path | None = None) -> str:
    with pytest.raises(ConfigError) as raised:
        report(run, html, trace)
    return str(raised.value)


def test_a_report_lies_beside_the_runs_events(run: Path) -> None:
    files = report(run)
    assert (files.html, files.trace) == (run / "timeline.html", run / "trace.json")
    assert files.html.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert json.loads(files.trace.read_text(encoding="utf-8"))["traceEvents"]


def test_a_report_goes_where_it_is_asked_to(run: Path, tmp_path: Path) -> None:
    files = report(run, tmp_path / "a.html", tmp_path / "b.json")
    assert files.html.exists()
    assert files.trace.exists()
    assert not (run / "timeline.html").exists()


def test_a_run_that_was_killed_in_the_middle_of_a_line_is_reported(tmp_path: Path) -> None:
    run = written(tmp_path / "run", cut_short())
    with (run / "events.jsonl").open("a") as file:
        file.write('{"kind": "note", "ti')
    assert report(run).html.exists()


def test_the_badge_of_a_run_says_whether_anybody_trains_it(tmp_path: Path) -> None:
    run = written(tmp_path / "run", cut_short())
    lock = RunLock(RunDirectory(run).lock)
    lock.take()
    assert '"status": {"status": "running"' in report(run).html.read_text(encoding="utf-8")
    lock.release()
    page = report(run).html.read_text(encoding="utf-8")
    assert '"status": {"status": "killed", "reason": "nobody trains this run any more' in page


def test_no_such_run_a_file_and_a_directory_without_events_are_told_apart(run: Path, tmp_path: Path) -> None:
    assert "does not exist" in message(tmp_path / "nowhere")
    assert "is a file" in message(run / "events.jsonl")
    assert f"did you mean {run}?" in message(tmp_path)
    (tmp_path / "empty").mkdir()
    text = message(tmp_path / "empty")
    assert "has no events.jsonl" in text
    assert "did you mean" not in text


def test_a_record_that_does_not_parse_names_the_line(run: Path) -> None:
    events = run / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join([*lines[:3], '{"kind": "no such kind", "time": 1}\n', *lines[3:]]))
    assert f"{events}:4" in message(run)
    events.write_bytes(b"\xff\xfe\n")
    assert str(run) in message(run)


def test_a_record_that_lacks_its_middle_is_said_not_to_add_up(run: Path) -> None:
    assert report(run).adds_up
    events = run / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join([*lines[:30], *lines[60:]]))
    assert not report(run).adds_up
    done = CliRunner().invoke(cli, ["report", str(run)])
    assert done.stderr.startswith(f"warning: the groups in {events} do not add up: lines of it are missing")


def test_a_record_without_any_event_has_nothing_to_report(run: Path) -> None:
    (run / "events.jsonl").write_text("")
    assert "nothing has happened yet" in message(run)


def test_a_disk_without_room_is_said_and_left_without_half_a_page(run: Path) -> None:
    with files_of_at_most(1000), pytest.raises(RunError, match=r"\(File too large\)"):
        report(run)
    assert not (run / "timeline.html").exists()


def test_the_page_is_headed_by_the_name_of_its_run(run: Path) -> None:
    text = report(run).html.read_text(encoding="utf-8")
    assert "<h1>run <small>async_partial</small></h1>" in text


def test_a_file_that_cannot_be_written_is_named_with_its_option(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "no" / "such" / "folder.html"
    assert message(run, html=target).startswith(f"--html: got {target}")
    assert message(run, trace=run).startswith(f"--trace: got {run}")
