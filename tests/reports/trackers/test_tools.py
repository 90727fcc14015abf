"""Trackers of W&B, MLflow and Prometheus over packages that are scripted, which refuse one thing and take another."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from headway.reports.trackers.tracker import TrackerSetting, table
from headway.reports.trackers.tracker_tools import AT_ONCE, MlflowTracker, PrometheusTracker, WandbTracker

SAMPLE: dict[str, Any] = {"group": 3, "version": 0, "prompt": "?", "episodes": [{"k": 0, "text": "!"}]}
ROW: dict[str, Any] = {"version": 0, "reward/mean": 0.5}


def put_in(patch: pytest.MonkeyPatch, name: str, **parts: Any) -> None:
    """Make a package of these parts the one that ``import name`` finds."""
    module = ModuleType(name)
    vars(module).update(parts)
    patch.setitem(sys.modules, name, module)


@dataclass
class Server:
    """MLflow's, with what it has and what it raises at a call."""

    raises: dict[str, str] = field(default_factory=dict)
    runs: int = 0
    metrics: list[tuple[str, int]] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)

    tracking_uri = "http://server"

    def _called(self, name: str) -> None:
        if why := self.raises.get(name):
            raise ConnectionError(why)

    def _run(self) -> SimpleNamespace:
        return SimpleNamespace(
            info=SimpleNamespace(run_id="r", experiment_id="e"), data=SimpleNamespace(params=self.params)
        )

    def get_experiment_by_name(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(experiment_id="e")

    def create_run(self, experiment: str, run_name: str) -> SimpleNamespace:
        self.runs += 1
        return self._run()

    def get_run(self, entry: str) -> SimpleNamespace:
        self._called("get_run")
        return self._run()

    def log_batch(self, entry: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        if any(value == "refused" for _, value in params):
            raise ValueError("a parameter is refused")
        self.metrics += [(name, step) for name, _, _, step in metrics]
        self.params.update(dict(params))
        self.tags.update(dict(tags))

    def set_tag(self, entry: str, key: str, value: str) -> None:
        self.tags[key] = value

    def log_dict(self, entry: str, value: dict[str, Any], path: str) -> None:
        self._called("log_dict")

    def log_text(self, entry: str, text: str, path: str) -> None:
        self._called("log_text")
        self.texts.append(path)


def mlflow(server: Server, patch: pytest.MonkeyPatch, folder: Path) -> MlflowTracker:
    put_in(patch, "mlflow", MlflowClient=lambda: server)
    pack = lambda *values: values  # noqa: E731
    put_in(patch, "mlflow.entities", Metric=pack, Param=pack, RunTag=pack)
    return MlflowTracker(TrackerSetting(project="p", name="n", folder=folder))


def test_mlflow_takes_rows_where_no_file_can_be_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(raises={"log_text": "no artifact store"})
    tracker = mlflow(server, monkeypatch, tmp_path)
    with pytest.raises(ConnectionError):
        tracker.on_sample(table(SAMPLE))
    tracker.on_row(ROW)
    assert server.metrics == [("reward/mean", 0)]
    server.raises.clear()
    tracker.on_sample(table(SAMPLE))
    assert server.texts == ["samples/training-000000-000003.json"]


def test_mlflow_s_entry_is_whole_though_no_file_can_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(raises={"log_dict": "no artifact store"})
    mlflow(server, monkeypatch, tmp_path).on_summary({"status": "completed", "version": 3})
    assert server.tags == {"run.status": "completed", "run.version": "3"}
    assert "summary.json could not be stored: ConnectionError: no artifact store" in caplog.text


def test_mlflow_s_new_run_is_there_whatever_comes_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(raises={"get_run": "away"})
    tracker = mlflow(server, monkeypatch, tmp_path)
    assert (tracker.entry, tracker.where, server.runs) == ("r", "http://server/#/experiments/e/runs/r", 1)
    with pytest.raises(ConnectionError):
        tracker.on_settings({"run.seed": 7})


def test_a_parameter_that_mlflow_refuses_costs_its_batch_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(params={"old": "1"})
    tracker = mlflow(server, monkeypatch, tmp_path)
    with pytest.raises(ValueError, match="a parameter is refused"):
        tracker.on_settings({"old": 2, "first": "refused"} | {f"p{number}": 0 for number in range(AT_ONCE)})
    assert (server.params, server.tags) == ({"old": "1", f"p{AT_ONCE - 1}": "0"}, {"changed.old": "2"})


@dataclass
class WandbRun:
    """A run of W&B, with what it was logged."""

    logged: list[dict[str, Any]] = field(default_factory=list)
    id = "w"
    url = "http://w"
    dir = "folder/files"

    def define_metric(self, *given: Any, **named: Any) -> None: ...

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)


def test_wandb_has_a_table_for_each_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = WandbRun()
    put_in(monkeypatch, "wandb", init=lambda **_: run, Settings=dict, Table=lambda columns, data: len(data))
    tracker = WandbTracker(TrackerSetting(project="p", name="n", folder=tmp_path))
    tracker.on_sample(table(SAMPLE))
    tracker.on_row(ROW)
    assert run.logged == [{"version": 0, "samples/training": 1}, ROW]


def test_prometheus_has_no_figure_that_comes_when_its_port_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    class Gauge:
        def __init__(self, name: str, *given: Any, **named: Any) -> None:
            made.append(name)

        def labels(self, **named: str) -> Gauge:
            return self

        def set(self, value: float) -> None: ...

    server = SimpleNamespace(server_port=9464)
    put_in(
        monkeypatch,
        "prometheus_client",
        CollectorRegistry=dict,
        Gauge=Gauge,
        start_http_server=lambda *given, **named: (server, None),
    )
    tracker = PrometheusTracker(TrackerSetting(project="p", name="n", folder=tmp_path))
    tracker.on_row(ROW)
    tracker.on_summary({"groups": {"trained": 64}})
    assert made == ["headway_version", "headway_reward_mean"]
