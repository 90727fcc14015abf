"""Reports of a run with a tracker whose package does what no package should."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from headway.config.schema import Config
from headway.reports.report_manager import Reports, open_reports
from headway.reports.trackers import tracker_set
from tests.reports.scripted_run import ScriptedRun

STUB = """
import os, sys, time
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
    {on_init}
    return Run()
"""


def stub(folder: Path, patch: pytest.MonkeyPatch, **does: str) -> None:
    """Put a package ``wandb`` on the path, whose parts do what ``on_init``, ``on_config`` and ``on_log`` say."""
    (folder / "stub").mkdir()
    parts = {"on_init": "pass", "on_config": "pass", "on_log": "pass"}
    (folder / "stub" / "wandb.py").write_text(STUB.format(**parts | does))
    patch.syspath_prepend(folder / "stub")
    patch.setitem(sys.modules, "wandb", None)  # the one that is imported goes with the test
    del sys.modules["wandb"]
    patch.setenv("LOGGED", str(folder / "logged"))
    patch.setenv("FINISHED", str(folder / "finished"))


def run_to_the_end(path: Path, versions: int = 3) -> tuple[Reports, str]:
    config = Config.model_validate({"reports": {"trackers": ["wandb"], "live": "off"}})
    output = io.StringIO()
    reports = open_reports(config, path, Console(file=output, width=400))
    for event in ScriptedRun(versions=versions).build():
        reports.emit(event)
    reports.report_end(None)
    return reports, output.getvalue()


@pytest.mark.parametrize(
    ("where", "does", "why"),
    [
        pytest.param("on_init", "time.sleep(5)", "did not answer within 1 s", marks=pytest.mark.slow),
        ("on_init", "sys.exit(1)", "SystemExit: 1"),
        ("on_config", "raise ConnectionError('no route to host')", "ConnectionError: no route to host"),
    ],
)
def test_a_package_that_raises_or_hangs_costs_the_run_nothing(
    where: str, does: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(tmp_path, monkeypatch, **{where: does})
    monkeypatch.setattr(tracker_set, "LIMIT_S", 1.0 if "sleep" in does else 60.0)
    began = time.monotonic()
    reports, output = run_to_the_end(tmp_path / "r")
    assert time.monotonic() - began < 20
    assert json.loads(reports.directory.summary.read_text())["status"] == "completed"
    assert len(reports.directory.metrics.read_text().splitlines()) == 4
    assert why in output
    assert f"send it with: headway sync {tmp_path / 'r'}" in output


def test_a_package_that_works_gets_the_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(tmp_path, monkeypatch, on_log="Path(os.environ['LOGGED']).open('a').write(f\"{values['version']} \")")
    reports, output = run_to_the_end(tmp_path / "r")
    assert (tmp_path / "logged").read_text().split() == ["0", "1", "2", "3"]
    assert "wandb        http://stub/1" in output
    assert "warning: wandb" not in output
    assert (tmp_path / "finished").read_text() == "0"
    assert json.loads((reports.directory.trackers / "wandb.json").read_text()) == {
        "entry": "stub-1",
        "rows": 4,
        "whole": True,
    }
