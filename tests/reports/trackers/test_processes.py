"""Reports of a run whose tracker is a real process, with a package in it that does what no package should."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from headway.config.schema import Config
from headway.reports.report_manager import Reports, open_reports
from headway.reports.trackers import tracker_set
from headway.reports.trackers.tracker_process import TrackerLost, TrackerProcess
from tests.reports.scripted_run import ScriptedRun

STUB = """
import ctypes, os, sys, time
from pathlib import Path

class Values(dict):
    def update(self, *given, **named): {on_config}

class Run:
    id, url, dir = "stub-1", "http://stub/1", "stub/files"
    config, summary = Values(), {{}}
    def define_metric(self, *given, **named): pass
    def log(self, values):
        {on_log}
    def finish(self, exit_code):
        Path(os.environ["FINISHED"]).write_text(str(exit_code))

def Settings(**given): return given

def init(**given):
    print("a library that prints")
    {on_init}
    return Run()
"""
HOLDS_THE_LOCK = "ctypes.PyDLL(None).sleep(1000)"
"""What hangs without letting any other thread of its process run."""


def stub(folder: Path, patch: pytest.MonkeyPatch, **does: str) -> None:
    """Put a package ``wandb`` on the path, whose parts do what ``on_init``, ``on_config`` and ``on_log`` say."""
    (folder / "stub").mkdir()
    parts = {"on_init": "pass", "on_config": "pass", "on_log": "pass"}
    (folder / "stub" / "wandb.py").write_text(STUB.format(**parts | does))
    patch.syspath_prepend(folder / "stub")
    patch.setenv("FINISHED", str(folder / "finished"))


def run_to_the_end(path: Path, versions: int = 3) -> tuple[Reports, str]:
    config = Config.model_validate({"reports": {"trackers": ["wandb"], "live": "off"}})
    output = io.StringIO()
    reports = open_reports(config, path, Console(file=output, width=400))
    for event in ScriptedRun(versions=versions).build():
        reports.emit(event)
    reports.report_end(None)
    return reports, output.getvalue()


def processes_of(text: str) -> list[int]:
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                command = (path / "cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in command:
                found.append(int(path.name))
    return found


@pytest.mark.parametrize(
    ("where", "does", "why"),
    [
        ("on_init", "time.sleep(1000)", "did not answer within 1 s"),
        ("on_log", HOLDS_THE_LOCK, "did not answer within 1 s"),
        ("on_log", "os.kill(os.getpid(), 11)", "its process ended (SIGSEGV)"),
        ("on_init", "sys.exit(1)", "SystemExit: 1"),
        ("on_config", "raise ConnectionError('no route to host')", "ConnectionError: no route to host"),
    ],
)
def test_a_package_that_hangs_or_dies_costs_the_run_nothing(
    where: str, does: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(tmp_path, monkeypatch, **{where: does})
    monkeypatch.setattr(tracker_set, "LIMIT_S", 1.0)
    began = time.monotonic()
    reports, output = run_to_the_end(tmp_path / "r")
    assert time.monotonic() - began < 20
    assert json.loads(reports.directory.summary.read_text())["status"] == "completed"
    assert len(reports.directory.metrics.read_text().splitlines()) == 4
    assert why in output
    assert f"send it with: headway sync {tmp_path / 'r'}" in output
    assert processes_of(str(tmp_path / "stub")) == []


def test_a_package_that_works_gets_the_whole_run_and_its_words_are_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(tmp_path, monkeypatch, on_log="print('logged', sorted(values)[-1], values['version'], flush=True)")
    reports, output = run_to_the_end(tmp_path / "r")
    log = (reports.directory.logs / "wandb.log").read_text()
    assert "a library that prints" in log
    assert [line.split()[-1] for line in log.splitlines() if line.startswith("logged")] == ["0", "1", "2", "3"]
    assert "wandb        http://stub/1" in output
    assert "warning: wandb" not in output
    assert (tmp_path / "finished").read_text() == "0"
    assert json.loads((reports.directory.trackers / "wandb.json").read_text()) == {
        "entry": "stub-1",
        "rows": 4,
        "whole": True,
    }
    assert processes_of(str(tmp_path / "stub")) == []


def test_a_process_that_was_ended_is_told_from_one_that_answers(tmp_path: Path) -> None:
    process = TrackerProcess("prometheus", tmp_path / "log")
    assert process.ask("on_row", {"version": 0}) == {}  # nothing is open
    process.kill()
    process.kill()
    with pytest.raises(TrackerLost, match="its process ended"):
        process.ask("on_row", {})


def test_a_tracker_of_a_run_that_is_killed_is_closed_as_failed_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(tmp_path, monkeypatch)
    program = (
        "import os, sys; from pathlib import Path\n"
        "from headway.reports.trackers.tracker_process import TrackerProcess\n"
        f"process = TrackerProcess('wandb', Path({str(tmp_path / 'log')!r}))\n"
        f"setting = dict(project='p', name='n', folder={str(tmp_path)!r})\n"
        "print(process.ask('open', setting)['entry'], flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline().strip() == "stub-1"
        guard, _ = processes_of(str(tmp_path / "stub"))
        left = os.pidfd_open(guard)
        run.send_signal(signal.SIGKILL)
    assert select.select([left], [], [], 30)[0], "the tracker's process outlived its run"
    os.close(left)
    assert (tmp_path / "finished").read_text() == "1"
