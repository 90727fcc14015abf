"""A run as its trackers see it: rows, samples, a summary and a model, through the run's own objects and processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.config.schema import Config
from headway.reports.run_directory import RunDirectory
from headway.reports.trackers.tracker_set import open_trackers
from headway.reports.trackers.tracker_thread import TrackerMessages

PATIENCE_S = 100.0
"""Seconds for packages to be imported, a database to be made and a run to be sent, on a busy machine."""


def row(version: int, times: float = 1.0) -> dict[str, Any]:
    return {"version": version, "reward/mean": version / 10 * times, "lag/histogram": {"0": 3}, "actor/entropy": None}


def sample(version: int) -> dict[str, Any]:
    episode = {"k": 0, "reward": 1.0, "parts": {"exact": 1.0}, "text": "is it 4?", "length": 7, "rows": [{"ids": [1]}]}
    return {
        "group": 10 + version,
        "version": version,
        "source": "sums",
        "fate": "trained",
        "prompt": "2 + 2",
        "answer": 4,
        "episodes": [{**episode, "k": k, "turns": 1, "finish": "stop"} for k in range(2)],
    }


class Tracked:
    """The directory of one run, in which it may go on."""

    def __init__(self, folder: Path, tracker: str, **reports: Any) -> None:
        self.config = self.with_settings(tracker, **reports)
        self.directory = RunDirectory.create(folder / "first", self.config)
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def with_settings(self, tracker: str, seed: int = 0, **reports: Any) -> Config:
        return Config.model_validate({"run": {"seed": seed}, "reports": {"trackers": [tracker], **reports}})

    @property
    def entry(self) -> str:
        (memory,) = self.directory.trackers.glob("*.json")
        entry: str = json.loads(memory.read_text())["entry"]
        return entry

    def go(
        self,
        versions: Sequence[int],
        times: float = 1.0,
        undone_from: int | None = None,
        status: str = "completed",
        model: Path | None = None,
    ) -> None:
        """Train ``versions``, whose figures are ``times`` the usual ones."""
        metrics = self.directory.metrics
        if undone_from is not None:
            kept = [line for line in metrics.read_text().splitlines() if json.loads(line)["version"] < undone_from]
            metrics.write_text("".join(f"{line}\n" for line in kept))
        say = TrackerMessages(self.warnings.append, self.notes.append, lambda text: None)
        trackers = open_trackers(self.config, self.directory, say, undone_from=undone_from)
        trackers.start()
        for version in versions:
            with metrics.open("a") as file:
                file.write(json.dumps(row(version, times)) + "\n")
            trackers.on_sample(sample(version))
            trackers.on_row(row(version, times))
        summary = {"status": status, "version": max(versions), "groups": {"trained": 64}, "eval": [{"accuracy": 0.5}]}
        trackers.finish(summary, model, limit_s=PATIENCE_S)


def model_folder(folder: Path) -> Path:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "none"}')
    return folder / "model"
