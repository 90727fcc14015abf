"""Prometheus: the newest row's figures on a port, for a server that scrapes them during the run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from headway.reports.trackers.held_samples import HeldSamples
from headway.reports.trackers.tracker import TrackerSetting
from headway.reports.trackers.tracker_tables import scalars

PREFIX = "headway_"


class PrometheusTracker:
    """Exporter of the run's figures. Its only label is ``run``, the run's name."""

    def __init__(self, setting: TrackerSetting) -> None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        self._gauge = Gauge
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._run = setting.name
        self._newest = -1
        self.samples = HeldSamples()
        try:
            self._server, self._thread = start_http_server(
                setting.prometheus_port, addr=setting.prometheus_host, registry=self._registry
            )
        except OSError as cause:
            place = f"{setting.prometheus_host}:{setting.prometheus_port}"
            raise OSError(f"cannot listen on {place} ({cause.strerror or cause})") from cause
        self.entry = self.remedy = ""
        self.where = f"http://{setting.prometheus_host}:{self._server.server_port}/metrics"

    def on_settings(self, config: dict[str, Any]) -> None:
        """Do nothing: Prometheus has no texts."""

    def on_row(self, row: dict[str, Any]) -> None:
        self._newest = max(self._newest, row["version"])
        self._set("version", "version of the newest row", self._newest)
        for name, value in scalars(row).items():
            self._set(name, f"{name} of the newest version that has it", value)

    def on_sample(self, sample: dict[str, Any]) -> None:
        """Do nothing: Prometheus has no texts."""

    def on_summary(self, summary: dict[str, Any]) -> None:
        """Do nothing: the port closes with the run, before anybody could scrape it."""

    def on_model(self, folder: Path) -> None:
        """Do nothing: Prometheus has no artifacts."""

    def close(self, status: str) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _set(self, name: str, told: str, value: float) -> None:
        key = PREFIX + re.sub(r"\W", "_", name, flags=re.ASCII)
        if key not in self._gauges:
            self._gauges[key] = self._gauge(key, told, ["run"], registry=self._registry).labels(run=self._run)
        self._gauges[key].set(value)
