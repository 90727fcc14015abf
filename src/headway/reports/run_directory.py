"""A run's directory: what lies where, made once, never shared by two runs.

config.yaml    the resolved configuration       events.jsonl   everything that happened
metrics.jsonl  one row per version              summary.json   the run in one object
tensorboard/   checkpoints/   logs/             model/         the exported model
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config.loading import dump
from headway.config.schema import Config
from headway.errors import UserError


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths inside a run's directory."""

    path: Path

    @classmethod
    def create(cls, path: Path, config: Config) -> RunDirectory:
        """Make the directory and write the resolved ``config`` into it.

        Raises `UserError` when it already holds a run or cannot be written.
        """
        run = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(file.exists() for file in (run.events, run.metrics, run.summary)):
                raise FileExistsError
            with run.config.open("x", encoding="utf-8") as file:  # of two runs that start at once, one gets here first
                file.write(dump(config))
            for folder in (run.tensorboard, run.checkpoints, run.logs):
                folder.mkdir(exist_ok=True)
        except FileExistsError as cause:
            raise UserError(_occupied(run)) from cause
        except OSError as cause:
            raise UserError(
                f"run.dir={path} cannot be written ({cause.strerror or cause}); give a run.dir that you may write to"
            ) from cause
        return run

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replace ``summary.json`` in one step: whoever reads it sees the old one or the new one, whole."""
        draft = self.summary.with_suffix(".json.tmp")
        draft.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        draft.replace(self.summary)


def _occupied(run: RunDirectory) -> str:
    if not run.path.is_dir():
        return f"run.dir={run.path} is a file; give the path of a directory, new or empty"
    return f"run.dir={run.path} already holds a run; give another run.dir, or remove that one first"
