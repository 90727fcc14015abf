"""``headway sync``: what a run's trackers lack, once it is over."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headway.cli import cli
from headway.config.loading import dump
from headway.config.schema import Config
from headway.reports.trackers.apart import Memory, memory_file
from tests.reports.trackers.test_processes import stub

LOGS = "print('logged', values['version'], flush=True)"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def a_run(path: Path, *trackers: str) -> Path:
    config = Config.model_validate({"reports": {"trackers": list(trackers)}})
    (path / "logs").mkdir(parents=True)
    (path / "config.yaml").write_text(dump(config))
    (path / "events.jsonl").write_text("")
    (path / "metrics.jsonl").write_text("".join(f'{{"version": {version}}}\n' for version in range(4)))
    return path


def logged(path: Path) -> list[int]:
    lines = (path / "logs" / "wandb.log").read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("logged")]


def test_what_is_lacking_is_sent_and_what_is_there_is_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(tmp_path, monkeypatch, on_log=LOGS)
    monkeypatch.setenv("WANDB_MODE", "offline")
    path = a_run(tmp_path / "run", "wandb", "prometheus")
    (path / "trackers").mkdir()
    Memory("stub-1", rows=1).write(memory_file(path / "trackers", "wandb"))
    done = run("sync", str(path))
    lines = [
        line for line in done.stdout.splitlines() if not line.startswith("waiting for")
    ]  # said where it takes long
    assert (lines, done.exit_code) == (["wandb: http://stub/1", "sent to wandb"], 0)
    assert logged(path) == [1, 2, 3]
    done = run("sync", str(path))
    assert (done.stdout, done.exit_code) == ("nothing to send: the trackers have all of this run\n", 0)
    assert logged(path) == [1, 2, 3]


def test_what_cannot_be_sent_is_said_and_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(tmp_path, monkeypatch, on_log="raise ConnectionError('no route to host')")
    monkeypatch.setenv("WANDB_MODE", "offline")
    done = run("sync", str(a_run(tmp_path / "run", "wandb")))
    assert done.exit_code == 1
    assert "wandb did not get 4 of 4 rows, the summary (ConnectionError: no route to host)" in done.stderr


def test_a_run_that_names_no_tracker_which_keeps_anything_is_refused(tmp_path: Path) -> None:
    done = run("sync", str(a_run(tmp_path / "run", "tensorboard")))
    assert done.exit_code == 2
    assert "reports.trackers names none of wandb, mlflow, trackio; name one in" in done.stderr
