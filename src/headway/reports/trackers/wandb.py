"""Weights & Biases. Online and offline alike; ``WANDB_MODE``, ``WANDB_ENTITY`` and its other variables hold as ever.

A point's x is the metric ``version``, not W&B's own step, which only ever grows: a validation that ended late, and the
versions that a resumed run makes again, come at versions that were there before.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from headway.reports.trackers.tables import COLUMNS, flat, scalars, table
from headway.reports.trackers.tracker import Setting


class WandbTracker:
    """Tracker for W&B: a run, with a table of samples for each version."""

    def __init__(self, setting: Setting) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=setting.project,
            name=setting.name,
            id=setting.entry or None,
            resume="allow",
            dir=str(setting.folder),
            settings=wandb.Settings(console="off"),
        )
        self._run.config.update(setting.config, allow_val_change=True)
        self._run.define_metric("version", hidden=True)
        self._run.define_metric("*", step_metric="version")
        self._samples: defaultdict[str, list[list[Any]]] = defaultdict(list)
        """Rows of the tables of samples, by kind, that wait for the next metrics row."""
        files = Path(self._run.dir).parent
        self.entry: str = self._run.id
        self.remedy = f"wandb sync {files}"
        self.where: str = self._run.url or f"{files} (offline; upload it with: {self.remedy})"

    def on_row(self, row: dict[str, Any]) -> None:
        self._run.log({**scalars(row), **self._tables(), "version": row["version"]})

    def on_sample(self, sample: dict[str, Any]) -> None:
        for row in table(sample):
            self._samples[row[1]].append(row)

    def on_summary(self, summary: dict[str, Any]) -> None:
        if self._samples:
            self._run.log(self._tables())
        self._run.summary.update({f"run/{name}": value for name, value in flat(summary)})

    def on_model(self, folder: Path) -> None:
        artifact = self._wandb.Artifact(f"model-{self._run.id}", type="model")
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status in ("completed", "interrupted") else 1)

    def _tables(self) -> dict[str, Any]:
        """Return the waiting samples as tables, which wait no more."""
        samples, self._samples = self._samples, defaultdict(list)
        return {
            f"samples/{kind}": self._wandb.Table(columns=list(COLUMNS), data=rows) for kind, rows in samples.items()
        }
