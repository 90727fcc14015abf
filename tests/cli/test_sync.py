"""``headway sync``: what a run's trackers lack, once it is over."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headway.cli import cli
from headway.config.loading import dump
from headway.config.schema import Config
from headway.reports.trackers.tracker_thread import TrackerState, memory_file
from tests.reports.trackers.test_packages import stub

LOGS = "Path(os.environ['LOGGED']).open('a').write(f\"{values['version']} \")"


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
    return [int(word) for word in (path.parent / "logged").read_text().split()]


def test_what_is_lacking_is_sent_and_what_is_there_is_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(tmp_path, monkeypatch, on_log=LOGS)
    monkeypatch.setenv("WANDB_MODE", "offline")
    path = a_run(tmp_path / "run", "wandb", "prometheus")
    (path / "trackers").mkdir()
    TrackerState("stub-1", rows=1).write(memory_file(path / "trackers", "wandb"))
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
    assert "wandb did not get 4 of 4 rows (ConnectionError: no route to host)" in done.stderr
    assert "the run goes on" not in done.stderr


def test_a_run_that_names_no_tracker_which_keeps_anything_is_refused(tmp_path: Path) -> None:
    done = run("sync", str(a_run(tmp_path / "run", "tensorboard")))
    assert done.exit_code == 2
    assert "reports.trackers names none of wandb, mlflow, trackio; name one in" in done.stderr


def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stub(tmp_path, monkeypatch, on_log=LOGS)
    monkeypatch.setenv("WANDB_MODE", "offline")
    return a_run(tmp_path / "run", "wandb")


def test_a_damaged_row_is_named_and_all_others_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = offline(tmp_path, monkeypatch)
    metrics = path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('{"version": 1}', "garbage"))
    done = run("sync", str(path))
    assert done.exit_code == 1
    assert done.stderr == (
        "warning: wandb did not get 1 rows (refused, too many at once, or damaged in the run's directory)\n"
    )
    assert logged(path) == [0, 2, 3]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("metrics.jsonl", None, "cannot be read (No such file or directory), from which trackers get the run's rows"),
        ("summary.json", "{", "take it from a copy of the run, or remove it"),
        ("summary.json", "[]", "take it from a copy of the run, or remove it"),
        ("trackers/wandb.json", "{{", "so that it is not known what wandb has of the run; take the file from a copy"),
        ("trackers/wandb.json", '{"entry": 3, "rows": 99}', "it has other values than an entry, a number of rows"),
        ("trackers/wandb.json", '{"what": 3}', "remove it, to send the run to a new entry"),
    ],
)
def test_a_damaged_file_is_named_before_anything_is_sent(
    name: str, text: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = offline(tmp_path, monkeypatch)
    (path / "trackers").mkdir()
    if text is None:
        (path / name).unlink()
    else:
        (path / name).write_text(text)
    done = run("sync", str(path))
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {path / name} cannot be read (")
    assert told in done.stderr
    assert not (tmp_path / "logged").exists()


def test_a_copied_run_without_logs_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = offline(tmp_path, monkeypatch)
    (path / "logs").rmdir()
    assert run("sync", str(path)).exit_code == 0
    assert logged(path) == [0, 1, 2, 3]


def test_a_run_that_is_all_sent_needs_no_login(tmp_path: Path) -> None:
    path = a_run(tmp_path / "run", "wandb", "mlflow")  # which are not installed here
    (path / "trackers").mkdir()
    for name in ("wandb", "mlflow"):
        TrackerState("there", rows=4, whole=True).write(memory_file(path / "trackers", name))
    assert run("sync", str(path)).stdout == "nothing to send: the trackers have all of this run\n"
