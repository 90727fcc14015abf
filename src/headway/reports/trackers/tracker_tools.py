"""Trackers that talk to services: W&B, MLflow, trackio, Prometheus.

Their own environment variables (``WANDB_MODE``, ``MLFLOW_TRACKING_URI``, ``TRACKIO_SPACE_ID``, …) apply.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from headway.errors import said_by
from headway.reports.trackers.tensorboard import TensorBoardTracker
from headway.reports.trackers.tracker import NotKept, Tracker, TrackerSetting, flat, is_number, scalars

log = logging.getLogger(__name__)


class WandbTracker(Tracker):
    """Tracker for W&B: a run, with a table for each sample."""

    def __init__(self, setting: TrackerSetting) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=setting.project,
            name=setting.name,
            id=setting.entry or None,
            resume="allow",
            reinit="create_new",  # the user may have a run in this process, too
            dir=str(setting.folder),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("version", hidden=True)
        self._run.define_metric("*", step_metric="version")
        files = Path(self._run.dir).parent
        self.entry: str = self._run.id
        self.remedy = f"wandb sync {files}"
        self.where: str = self._run.url or f"{files} (offline; upload it with: {self.remedy})"

    def on_settings(self, config: dict[str, Any]) -> None:
        self._run.config.update(config, allow_val_change=True)

    def on_row(self, row: dict[str, Any]) -> None:
        self._run.log({**scalars(row), "version": row["version"]})

    def on_sample(self, rows: list[dict[str, Any]]) -> None:
        shown = self._wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({"version": rows[0]["version"], f"samples/{rows[0]['kind']}": shown})

    def on_summary(self, summary: dict[str, Any]) -> None:
        self._run.summary.update({f"run/{name}": value for name, value in flat(summary)})

    def on_model(self, folder: Path) -> None:
        artifact = self._wandb.Artifact(f"model-{self._run.id}", type="model")
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status in ("completed", "interrupted") else 1)


LONGEST_PARAM = 500
"""Most characters of a setting: servers before MLflow 2.8 take no more."""
AT_ONCE = 100
"""Most parameters that a server takes at once."""
STATUS = {"completed": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MlflowTracker(Tracker):
    """Tracker for MLflow: a run of an experiment, with a file for each sample."""

    def __init__(self, setting: TrackerSetting) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        self._metric, self._param, self._tag = Metric, Param, RunTag
        self._client = MlflowClient()
        if setting.entry:
            run = self._client.get_run(setting.entry)
            self._client.update_run(setting.entry, status="RUNNING")
        else:
            run = self._create(setting)  # nothing may fail after this: the caller would create another run
        self.entry: str = run.info.run_id
        uri = str(self._client.tracking_uri)
        shown = f"{uri}/#/experiments/{run.info.experiment_id}/runs/{self.entry}"
        self.where = shown if uri.startswith("http") else f"run {self.entry} in {uri}"

    def _create(self, setting: TrackerSetting) -> Any:
        experiment = self._client.get_experiment_by_name(setting.project)
        number = self._client.create_experiment(setting.project) if experiment is None else experiment.experiment_id
        return self._client.create_run(number, run_name=setting.name)

    def on_settings(self, config: dict[str, Any]) -> None:
        """Log the settings. MLflow's parameters never change: one that a resumed run changed becomes a tag."""
        told = dict(self._client.get_run(self.entry).data.params)
        params = {_name(key): str(value)[:LONGEST_PARAM] for key, value in config.items()}
        new = [self._param(key, value) for key, value in params.items() if key not in told]
        refused: list[Exception] = []
        for some in _batches(new, AT_ONCE):
            try:
                self._client.log_batch(self.entry, params=some)
            except Exception as cause:  # a refused parameter costs its batch, not the others
                refused.append(cause)
        for key, value in params.items():
            # As a tag: MLflow refuses another value of a parameter, and a resumed run may have changed some.
            if told.get(key, value) != value:
                self._client.set_tag(self.entry, f"changed.{key}", value)
        if refused:
            raise refused[0]

    def on_row(self, row: dict[str, Any]) -> None:
        now, version = int(time.time() * 1000), row["version"]
        metrics = [self._metric(_name(name), value, now, version) for name, value in scalars(row).items()]
        for some in _batches(metrics, AT_ONCE * 10):
            self._client.log_batch(self.entry, metrics=some)

    def on_sample(self, rows: list[dict[str, Any]]) -> None:
        """Write a sample as a table of MLflow's form."""
        text = json.dumps({"columns": list(rows[0]), "data": [list(row.values()) for row in rows]})
        self._client.log_text(self.entry, text, "samples/{kind}-{version:06d}-{number:06d}.json".format(**rows[0]))

    def on_summary(self, summary: dict[str, Any]) -> None:
        tags = [self._tag(f"run.{_name(name)}", str(value)[:LONGEST_PARAM]) for name, value in flat(summary)]
        for some in _batches(tags, AT_ONCE):
            self._client.log_batch(self.entry, tags=some)
        try:
            self._client.log_dict(self.entry, summary, "summary.json")
        except Exception as cause:  # no place for files: the tags have it all the same
            log.warning("mlflow: summary.json could not be stored: %s", said_by(cause))

    def on_model(self, folder: Path) -> None:
        self._client.log_artifacts(self.entry, str(folder), "model")

    def close(self, status: str) -> None:
        self._client.set_terminated(self.entry, STATUS.get(status, "FAILED"))


def _name(name: str) -> str:
    """Return ``name`` with what MLflow does not allow in the names of metrics and parameters replaced."""
    return re.sub(r"[^\w\-. /]", "_", name)


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[at : at + size] for at in range(0, len(items), size))


LOST = ("could not be persisted", "may be dropped")
"""Texts in trackio's warnings of lost data."""


class TrackioTracker(Tracker):
    """Tracker for trackio: a run with a name that no other of its project has, by which it is found again. It takes the
    settings when a run begins.

    trackio writes in a thread, and only warns where that fails: the first of its run's warnings is raised by the next
    call, as `NotKept` where it says that something is lost. They are taken where its run gives them: this process may
    show no warnings at all.
    """

    def __init__(self, setting: TrackerSetting) -> None:
        import trackio

        self._trackio, self._module = trackio, cast(Any, import_module("trackio.run"))
        self._troubles: list[str] = []
        self.entry = setting.entry or _free_name(trackio, setting)
        resume = "allow" if setting.entry else "never"
        self._run = trackio.init(
            project=setting.project, name=self.entry, config=setting.config, resume=resume, embed=False
        )
        # trackio reports lost rows only by a warning: with warnings off, a loss was never noticed.
        self._run._warn_once = lambda key, message: self._troubles.append(message)
        self.where = f"trackio show --project {setting.project}"
        self._newest = 0

    def on_row(self, row: dict[str, Any]) -> None:
        self._raise_trouble()
        self._newest = max(self._newest, row["version"])
        self._run.log(scalars(row), step=row["version"])

    def on_sample(self, rows: list[dict[str, Any]]) -> None:
        self._run.log({f"samples/{rows[0]['kind']}": self._trackio.Table(data=rows)}, step=rows[0]["version"])

    def on_summary(self, summary: dict[str, Any]) -> None:
        self._run.log({f"run/{name}": value for name, value in flat(summary) if is_number(value)}, step=self._newest)

    def on_model(self, folder: Path) -> None:
        artifact = self._trackio.Artifact(name=f"model-{self.entry}", type="model")
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact)

    def close(self, status: str) -> None:
        # `finish` warns by a function of trackio's module, not by the run's method.
        warn, self._module._emit_nonfatal_warning = self._module._emit_nonfatal_warning, self._troubles.append
        try:
            self._run.finish()
        finally:
            self._module._emit_nonfatal_warning = warn
        self._raise_trouble()

    def _raise_trouble(self) -> None:
        if self._troubles:
            trouble, self._troubles = self._troubles[0], []
            raise NotKept(trouble) if any(words in trouble for words in LOST) else RuntimeError(trouble)


def _free_name(trackio: Any, setting: TrackerSetting) -> str:
    """Return the run's name, or one made from it where the project has a run of that name."""
    try:
        taken = {run.name for run in trackio.Api().runs(setting.project)}
    except ValueError:  # there is no such project yet
        taken = set()
    return f"{setting.name}-{secrets.token_hex(3)}" if setting.name in taken else setting.name


PREFIX = "headway_"


class PrometheusTracker(Tracker):
    """Exporter of the run's metrics only. Its only label is ``run``, the run's name."""

    def __init__(self, setting: TrackerSetting) -> None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        self._gauge = Gauge
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._run = setting.name
        self._newest = -1
        try:
            self._server, self._thread = start_http_server(
                setting.prometheus_port, addr=setting.prometheus_host, registry=self._registry
            )
        except OSError as cause:
            place = f"{setting.prometheus_host}:{setting.prometheus_port}"
            raise OSError(f"cannot listen on {place} ({cause.strerror or cause})") from cause
        self.where = f"http://{setting.prometheus_host}:{self._server.server_port}/metrics"

    def on_row(self, row: dict[str, Any]) -> None:
        self._newest = max(self._newest, row["version"])
        self._set("version", "version of the newest row", self._newest)
        for name, value in scalars(row).items():
            self._set(name, f"{name} of the newest version that has it", value)

    def close(self, status: str) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _set(self, name: str, told: str, value: float) -> None:
        key = PREFIX + re.sub(r"\W", "_", name, flags=re.ASCII)
        if key not in self._gauges:
            self._gauges[key] = self._gauge(key, told, ["run"], registry=self._registry).labels(run=self._run)
        self._gauges[key].set(value)


PACKAGES: Mapping[str, str] = {
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "prometheus": "prometheus_client",
}
"""Tracker -> package that it needs, from the extra with the tracker's name."""
KEPT = ("wandb", "mlflow", "trackio")
"""Trackers that store data, so that a finished run can be sent to them."""

ADDRESSES: Mapping[str, tuple[str, ...]] = {
    "wandb": ("WANDB_BASE_URL",),
    "mlflow": ("MLFLOW_TRACKING_URI",),
    "trackio": ("TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID"),
}
"""Tracker -> environment variables with its address, for the message if it does not answer."""

TRACKERS: Mapping[str, Callable[[TrackerSetting], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
    "prometheus": PrometheusTracker,
}


def make_tracker(name: str, setting: TrackerSetting) -> Tracker:
    """Make the tracker ``name``, which imports its package. Raises `ValueError` for a name that is not known."""
    if name not in TRACKERS:
        raise ValueError(f"no tracker {name!r}; there are {', '.join(TRACKERS)}")
    return TRACKERS[name](setting)
