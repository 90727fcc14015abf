"""Trackers against the packages themselves: what is sent is read back by the package's own reader, or its server."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headway.errors import ConfigError
from headway.reports.trackers.tracker import TrackerSetting
from headway.reports.trackers.tracker_set import check_trackers
from headway.reports.trackers.tracker_thread import TrackerState, memory_file
from headway.reports.trackers.tracker_tools import PrometheusTracker
from tests.environments.trackers.tracked import Tracked, model_folder, row
from tests.full_disk import files_of_at_most

pytestmark = pytest.mark.timeout(300)


# ---------------------------------------------------------------------------------------------- W&B


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


def records(run: Tracked) -> list[Any]:
    """All records of the run's ``.wandb`` files, in the order of the files' making.

    W&B's messages are parsed by its own classes. Its reader of the files is not written in Python any more.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    read = []
    for path in sorted(
        run.directory.trackers.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime
    ):
        read += [Record.FromString(data) for data in messages(path.read_bytes())]
    return read


BLOCK = 32768
"""Bytes of a block of LevelDB's log format, which the files have (github.com/google/leveldb, doc/log_format.md)."""


def messages(content: bytes) -> Iterator[bytes]:
    """Yield the messages of a log: each is one piece, or several, a piece never lies in two blocks."""
    assert content[:4] == b":W&B"
    at, message = 7, b""
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:  # no room for a header
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        message += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield message
            message = b""


def items(updates: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in updates}


def history(run: Tracked) -> list[dict[str, Any]]:
    return [items(record.history.item) for record in records(run) if record.HasField("history")]


def test_wandb_has_the_whole_run_in_its_own_file(offline: None, tmp_path: Path) -> None:
    """Over 5 s: starts W&B's service."""
    run = Tracked(tmp_path, "wandb", project="sorting", log_model=True)
    run.go([0, 1, 2], model=model_folder(tmp_path))
    assert run.warnings == []
    assert [(one["version"], one["reward/mean"]) for one in history(run) if "reward/mean" in one] == [
        (0, 0.0),
        (1, 0.1),
        (2, 0.2),
    ]
    assert "lag/histogram" not in history(run)[0]
    (started,) = [record.run for record in records(run) if record.HasField("run")]
    assert (started.project, started.display_name, started.run_id) == ("sorting", "first", run.entry)
    configs = [record.config.update for record in records(run) if record.HasField("config")]
    assert {key: value for config in configs for key, value in items(config).items()}["reports.project"] == "sorting"
    summaries = [record.summary.update for record in records(run) if record.HasField("summary")]
    told = {key: value for summary in summaries for key, value in items(summary).items()}
    assert (told["run/status"], told["run/groups.trained"]) == ("completed", 64)
    points = [one for one in history(run) if one.get("version") == 1 and "samples/training._type" in one]
    assert [(one["samples/training._type"], one["samples/training.nrows"]) for one in points] == [("table-file", 2)]
    files = list(run.directory.trackers.rglob("*.table.json"))
    texts = [json.loads(path.read_text()) for path in files]
    assert len(texts) == 3
    assert {text["data"][0][text["columns"].index("text")] for text in texts} == {"is it 4?"}
    artifacts = {record.artifact.type: record.artifact for record in records(run) if record.HasField("artifact")}
    assert artifacts["model"].name == f"model-{run.entry}"
    assert [entry.path for entry in artifacts["model"].manifest.contents] == ["config.json"]


def test_wandb_goes_on_in_the_same_run(offline: None, tmp_path: Path) -> None:
    """Over 5 s: starts W&B's service twice."""
    run = Tracked(tmp_path, "wandb")
    run.go([0, 1, 2, 3], status="failed")
    entry = run.entry
    time.sleep(1.1)  # W&B names a folder by the second
    run.go([2, 3], times=2.0, undone_from=2)
    assert run.warnings == []
    assert {record.run.run_id for record in records(run) if record.HasField("run")} == {entry}
    points = [(one["version"], one["reward/mean"]) for one in history(run) if "reward/mean" in one]
    assert points == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3), (2, 0.4), (3, 0.6)]


def test_wandb_leaves_a_run_of_the_user_alone(offline: None, tmp_path: Path) -> None:
    """Over 5 s: starts W&B's service."""
    import wandb

    with wandb.init(dir=str(tmp_path), settings=wandb.Settings(console="off", silent=True)) as theirs:
        run = Tracked(tmp_path, "wandb")
        run.go([0])
        assert run.entry != theirs.id
        theirs.log({"still": 1})
    assert [one["reward/mean"] for one in history(run) if "reward/mean" in one] == [0.0]


def test_wandb_without_a_login_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 5 s: W&B itself is asked."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="W&B has no login here"):
        check_trackers(Tracked(tmp_path, "wandb").config)


# ---------------------------------------------------------------------------------------------- MLflow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real tracking server on loopback."""
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/db", "--artifacts-destination", str(folder / "artifacts")]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True) as process,
    ):
        try:
            uri = f"http://127.0.0.1:{port}"
            _wait_for(f"{uri}/health", process, folder / "log")
            yield uri
        finally:
            os.killpg(process.pid, 9)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(url, timeout=5)
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"no answer from MLflow's server:\n{log.read_text()}")


def test_mlflow_has_the_whole_run_and_goes_on_in_it(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 5 s: starts MLflow's server, which makes a database."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    run = Tracked(tmp_path, "mlflow", project="sorting", log_model=True)
    run.go([0, 1, 2], status="interrupted")
    client = MlflowClient(server)
    stored = client.get_run(run.entry)
    assert client.get_experiment(stored.info.experiment_id).name == "sorting"
    assert (stored.info.run_name, stored.info.status) == ("first", "KILLED")
    assert stored.data.params["run.seed"] == "0"
    assert run.notes == [f"mlflow: {server}/#/experiments/{stored.info.experiment_id}/runs/{run.entry}"]

    run.config = run.with_settings("mlflow", seed=1, project="sorting", log_model=True)
    run.go([2, 3], times=2.0, undone_from=2, model=model_folder(tmp_path))
    assert run.warnings == []
    stored = client.get_run(run.entry)
    assert stored.info.status == "FINISHED"
    assert (stored.data.params["run.seed"], stored.data.tags["changed.run.seed"]) == ("0", "1")
    points = [(one.step, one.value) for one in client.get_metric_history(run.entry, "reward/mean")]
    assert sorted(points) == [(0, 0.0), (1, 0.1), (2, 0.2), (2, 0.4), (3, 0.6)]
    assert stored.data.tags["run.groups.trained"] == "64"
    assert "lag/histogram" not in stored.data.metrics
    assert [one.path for one in client.list_artifacts(run.entry, "model")] == ["model/config.json"]
    samples = Path(client.download_artifacts(run.entry, "samples/training-000001-000011.json", str(tmp_path)))
    table = json.loads(samples.read_text())
    assert [line[table["columns"].index("prompt")] for line in table["data"]] == ["2 + 2"] * 2
    summary = Path(client.download_artifacts(run.entry, "summary.json", str(tmp_path)))
    assert json.loads(summary.read_text())["version"] == 3


def test_a_server_that_is_away_is_said_and_the_rest_is_sent_once_it_is_there(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 5 s: imports MLflow twice."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = Tracked(tmp_path, "mlflow")
    run.go([0, 1])
    assert len(run.warnings) == 2
    assert "did not get 2 of 2 rows, the settings, the summary" in run.warnings[-1]
    assert "headway sync" in run.warnings[-1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    run.go([2])
    points = MlflowClient(server).get_metric_history(run.entry, "reward/mean")
    assert sorted((one.step, one.value) for one in points) == [(0, 0.0), (1, 0.1), (2, 0.2)]


# ---------------------------------------------------------------------------------------------- trackio


@pytest.fixture(scope="module", autouse=True)
def trackio_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One folder for all runs: trackio reads ``TRACKIO_DIR`` when it is imported. Each test has its own project."""
    folder = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder))
        yield folder


def stored(project: str, run: str) -> list[dict[str, Any]]:
    """The run's logs by trackio's own reader, in a process, which shares no connection with the run's."""
    program = (
        "import json, sys; from trackio.sqlite_storage import SQLiteStorage\n"
        "print(json.dumps(SQLiteStorage.get_logs(*sys.argv[1:]), default=str))"
    )
    done = subprocess.run([sys.executable, "-c", program, project, run], capture_output=True, text=True, check=True)
    logs: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return logs


def test_trackio_has_the_whole_run_and_goes_on_in_it(trackio_folder: Path, tmp_path: Path) -> None:
    """Over 5 s: imports trackio three times."""
    run = Tracked(tmp_path, "trackio", project="sorting", log_model=True)
    run.go([0, 1, 2])
    assert run.notes == ["trackio: trackio show --project sorting"]
    run.go([2, 3], times=2.0, undone_from=2, model=model_folder(tmp_path))
    assert run.warnings == []
    assert run.entry == "first"
    logs = stored("sorting", "first")
    points = [(one["step"], one["reward/mean"]) for one in logs if "reward/mean" in one]
    assert sorted(points) == [(0, 0.0), (1, 0.1), (2, 0.2), (2, 0.4), (3, 0.6)]
    tables = [one["samples/training"] for one in logs if "samples/training" in one]
    assert len(tables) == 5
    assert tables[0]["_value"][0]["text"] == "is it 4?"
    assert [one["run/groups.trained"] for one in logs if "run/groups.trained" in one] == [64, 64]
    assert any(path.read_bytes() == b'{"model_type": "none"}' for path in trackio_folder.rglob("*") if path.is_file())


def test_a_second_run_of_the_same_name_is_another_one_in_trackio(tmp_path: Path) -> None:
    """Over 5 s: imports trackio three times."""
    entries = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        run = Tracked(tmp_path / folder, "trackio", project="twice")
        run.go([0])
        assert run.warnings == []
        entries.append(run.entry)
    assert entries[0] == "first"
    assert entries[1].startswith("first-")
    assert [len([one for one in stored("twice", entry) if "reward/mean" in one]) for entry in entries] == [1, 1]


# ---------------------------------------------------------------------------------------------- a full disk


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_a_disk_that_is_full_is_said_and_the_run_goes_on(tracker: str, offline: None, tmp_path: Path) -> None:
    """Over 5 s: imports the package."""
    run = Tracked(tmp_path, tracker, project="full")
    with files_of_at_most(3000):
        run.go([0, 1, 2])
    first, last = run.warnings
    assert first.startswith(f"{tracker}: ") and "the run goes on" in first
    # W&B may have taken the rows before it finds the disk full; what it has is then sent with its own command.
    commands = ("headway sync", "wandb sync") if tracker == "wandb" else ("headway sync",)
    assert last.startswith(f"{tracker} did not get ") and any(command in last for command in commands)


def test_what_trackio_could_not_write_is_sent_later(tmp_path: Path) -> None:
    """Over 5 s: imports trackio a few times. Warnings are off, as in many a notebook."""
    run = Tracked(tmp_path, "trackio", project="later")
    for versions in ([0], [1, 2]):
        with files_of_at_most(3000), warnings.catch_warnings(action="ignore"):
            run.go(versions)
        memory = TrackerState.read(memory_file(run.directory.trackers, "trackio"))
        assert (memory.rows, memory.whole) == (0, False)
    run.go([3])  # there is room again
    logs = stored("later", run.entry)
    assert sorted({one["step"] for one in logs if "reward/mean" in one}) == [0, 1, 2, 3]
    assert TrackerState.read(memory_file(run.directory.trackers, "trackio")).whole


# ---------------------------------------------------------------------------------------------- Prometheus


def scraped(where: str) -> dict[str, tuple[dict[str, str], float]]:
    text = urllib.request.urlopen(where, timeout=10).read().decode()
    families = list(text_string_to_metric_families(text))
    assert all(family.type == "gauge" and family.documentation for family in families)
    return {one.name: (one.labels, one.value) for family in families for one in family.samples}


def test_prometheus_scrapes_the_newest_figures(tmp_path: Path) -> None:
    tracker = PrometheusTracker(TrackerSetting(project="p", name="first run", folder=tmp_path))
    for version in range(3):
        tracker.on_row(row(version))
    tracker.on_row({"version": 1, "validation/accuracy": 0.75})
    labels = {"run": "first run"}
    assert scraped(tracker.where) == {
        "headway_version": (labels, 2.0),
        "headway_reward_mean": (labels, 0.2),
        "headway_validation_accuracy": (labels, 0.75),
    }
    tracker.on_summary({"status": "completed", "groups": {"trained": 64}, "balanced": True})
    assert len(scraped(tracker.where)) == 3
    tracker.close("completed")


def test_a_port_that_is_taken_meanwhile_is_said_once_and_the_run_goes_on(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = Tracked(tmp_path, "prometheus", prometheus_port=port)
        run.go([0, 1])
    first, last = run.warnings
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in first
    assert last.startswith("prometheus did not get 2 of 2 rows")
    assert "send it with" not in last
