"""MLflow, at the tracking server of ``MLFLOW_TRACKING_URI``, or in its own files where that is not set."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from headway.errors import said_by
from headway.reports.trackers.held_samples import HeldSamples
from headway.reports.trackers.tracker import TrackerSetting
from headway.reports.trackers.tracker_tables import COLUMNS, flat, scalars

LONGEST_PARAM = 500
"""Most characters of a setting: servers before MLflow 2.8 take no more."""
AT_ONCE = 100
"""Most parameters that a server takes at once."""
STATUS = {"completed": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MlflowTracker:
    """Tracker for MLflow: a run of an experiment, with a file of samples for each version."""

    def __init__(self, setting: TrackerSetting) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        self._metric, self._param, self._tag = Metric, Param, RunTag
        self._client = MlflowClient()
        if setting.entry:
            run = self._client.get_run(setting.entry)
            self._client.update_run(setting.entry, status="RUNNING")
        else:
            run = self._create(setting)  # from here on nothing may fail: who asked would make another run
        self.entry: str = run.info.run_id
        self.remedy = ""
        self.samples = HeldSamples()
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
            except Exception as cause:  # one parameter that is refused costs its batch, not the others
                refused.append(cause)
        for key, value in params.items():
            if told.get(key, value) != value:
                self._client.set_tag(self.entry, f"changed.{key}", value)
        if refused:
            raise refused[0]

    def on_row(self, row: dict[str, Any]) -> None:
        now, version = int(time.time() * 1000), row["version"]
        metrics = [self._metric(_name(name), value, now, version) for name, value in scalars(row).items()]
        for some in _batches(metrics, AT_ONCE * 10):
            self._client.log_batch(self.entry, metrics=some)
        self._log_samples(version)

    def on_sample(self, sample: dict[str, Any]) -> None:
        self.samples.put(sample)

    def on_summary(self, summary: dict[str, Any]) -> None:
        self._log_samples(summary.get("version") or 0)
        tags = [self._tag(f"run.{_name(name)}", str(value)[:LONGEST_PARAM]) for name, value in flat(summary)]
        for some in _batches(tags, AT_ONCE):
            self._client.log_batch(self.entry, tags=some)
        try:
            self._client.log_dict(self.entry, summary, "summary.json")
        except Exception as cause:  # no place for files: the tags have it all the same
            print(f"summary.json could not be stored: {said_by(cause)}", file=sys.stderr)

    def on_model(self, folder: Path) -> None:
        self._client.log_artifacts(self.entry, str(folder), "model")

    def close(self, status: str) -> None:
        self._client.set_terminated(self.entry, STATUS.get(status, "FAILED"))

    def _log_samples(self, version: int) -> None:
        """Write the waiting samples as a table of MLflow's form, under the last version that ended."""

        def write(rows: list[list[Any]]) -> None:
            text = json.dumps({"columns": list(COLUMNS), "data": rows})
            self._client.log_text(self.entry, text, f"samples/version-{version:06d}.json")

        self.samples.send(write)


def _name(name: str) -> str:
    """Return ``name`` with what MLflow does not allow in the names of metrics and parameters replaced."""
    return re.sub(r"[^\w\-. /]", "_", name)


def _batches(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    waiting = iter(items)
    while some := list(islice(waiting, size)):
        yield some
