"""Weights & Biases. Online and offline alike; ``WANDB_MODE``, ``WANDB_ENTITY`` and its other variables hold as ever.

A point's x is the metric ``version``, not W&B's own step, which only ever grows: a validation that ended late, and the
versions that a resumed run makes again, come at versions that were there before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.reports.trackers.held_samples import HeldSamples
from headway.reports.trackers.tracker import TrackerSetting
from headway.reports.trackers.tracker_tables import COLUMNS, flat, scalars


class WandbTracker:
    """Tracker for W&B: a run, with a table of samples for each version."""

    def __init__(self, setting: TrackerSetting) -> None:
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
        self._run.define_metric("version", hidden=True)
        self._run.define_metric("*", step_metric="version")
        self.samples = HeldSamples()
        files = Path(self._run.dir).parent
        self.entry: str = self._run.id
        self.remedy = f"wandb sync {files}"
        self.where: str = self._run.url or f"{files} (offline; upload it with: {self.remedy})"

    def on_settings(self, config: dict[str, Any]) -> None:
        self._run.config.update(config, allow_val_change=True)

    def on_row(self, row: dict[str, Any]) -> None:
        values = {**scalars(row), "version": row["version"]}
        try:
            self._run.log({**values, **self._tables()})
        except Exception as cause:
            if not self.samples.rows:
                raise
            self._run.log(values)  # raises where it is not the samples that fail: they wait on
            self.samples.drop(cause)
        else:
            self.samples.sent()

    def on_sample(self, sample: dict[str, Any]) -> None:
        self.samples.put(sample)

    def on_summary(self, summary: dict[str, Any]) -> None:
        self.samples.send(lambda _: self._run.log(self._tables()))
        self._run.summary.update({f"run/{name}": value for name, value in flat(summary)})

    def on_model(self, folder: Path) -> None:
        artifact = self._wandb.Artifact(f"model-{self._run.id}", type="model")
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status in ("completed", "interrupted") else 1)

    def _tables(self) -> dict[str, Any]:
        """Return the waiting samples as tables, one for each kind."""
        kinds = dict.fromkeys(row[1] for row in self.samples.rows)
        rows = {kind: [row for row in self.samples.rows if row[1] == kind] for kind in kinds}
        return {f"samples/{kind}": self._wandb.Table(columns=list(COLUMNS), data=some) for kind, some in rows.items()}
