"""A run as Python has it, from the files of its directory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import headway
from headway.api.run_handle import Run, Table, table
from headway.config.loading import dump
from headway.config.schema import Config
from headway.errors import DataError, UserError
from headway.reports.run_directory import RunDirectory, RunLock


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.config.write_text(dump(Config()))
    run.events.write_text("")
    rows = [{"version": 0, "reward/mean": 0.5}, {"version": 1, "reward/mean": 0.75}, {"version": 0, "late": 1}]
    run.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"version": 2, "rew')
    return run


def test_metrics_have_a_row_for_each_version_and_leave_out_what_is_being_written(directory: RunDirectory) -> None:
    run = headway.load(directory.path)
    assert run.rows == [{"version": 0, "reward/mean": 0.5, "late": 1}, {"version": 1, "reward/mean": 0.75}]
    assert list(run.metrics["reward/mean"]) == [0.5, 0.75]
    assert run.config == Config()
    assert headway.load(run) is run


def test_a_run_says_how_far_it_came(directory: RunDirectory) -> None:
    run, lock = Run(directory.path), RunLock(directory.lock)
    assert (run.status, run.summary, run.model, len(run.samples())) == ("killed", {}, None, 0)
    lock.take()
    assert repr(run) == f"<Run {directory.path}: status running, version 1>"
    lock.release()
    directory.lock.unlink()
    directory.lock.mkdir()
    assert run.status == "running"  # as far as is known: the lock cannot be read
    evaluations = [{"version": 0, "accuracy": 0.25}, {"version": 2, "accuracy": 0.5}]
    directory.summary.write_text(json.dumps({"status": "completed", "version": 2, "eval": evaluations}))
    directory.model.mkdir()
    assert run.model == directory.model
    assert "status completed, version 2, validation reward 0.250 → 0.500" in repr(run)
    directory.summary.write_text("{")
    with pytest.raises(DataError, match=r"summary\.json cannot be read"):
        _ = run.status


def test_a_run_is_found_from_another_working_directory(
    directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run("run")
    assert repr(run) == "<Run run: status killed, version 1>"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert repr(run) == f"<Run {directory.path}: status killed, version 1>"


@pytest.mark.slow
async def test_a_plan_is_made_where_a_loop_runs_already_as_in_a_notebook() -> None:
    """Simulates for as long as it takes to get a row on a busy machine."""
    made = headway.plan("plan/long-tail", gpus=2, budget=5)
    assert made.rows and made.settings["mode"]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere, which does not exist"):
        headway.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"^RUN: got None"):
        headway.load(None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"has no config\.yaml"):
        headway.train(resume=tmp_path)


def test_without_pandas_a_table_reads_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"version": 0, "a<b": 0.5}, {"version": 1, "x": "two"}]
    frame = table(rows)
    monkeypatch.setitem(sys.modules, "pandas", None)
    small = table(rows)
    assert isinstance(small, Table)
    assert (list(small), len(small)) == (list(frame), len(frame)) == (["version", "a<b", "x"], 2)
    assert list(small["version"]) == list(frame["version"])
    assert small["x"] == [None, "two"]
    assert repr(Table([{"n": i} for i in range(100)])).splitlines()[-2:] == ["59", "… 40 more rows"]
    with pytest.raises(KeyError):
        small["nothing"]


def test_the_interface_is_imported_when_it_is_used() -> None:
    assert all(getattr(headway, name) is not None for name in headway.__all__)
    assert {*headway.__all__, "__version__"} <= {*dir(headway)}
    with pytest.raises(AttributeError, match=r"'headway' .*'trian'"):
        headway.trian  # type: ignore[attr-defined]  # noqa: B018
