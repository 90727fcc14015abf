"""trackio, in its own files, or on a Space or a server where ``TRACKIO_SPACE_ID`` or ``TRACKIO_SERVER_URL`` says so."""

from __future__ import annotations

import secrets
import warnings
from pathlib import Path
from typing import Any

from headway.reports.trackers.held_samples import HeldSamples
from headway.reports.trackers.tracker import NotKept, TrackerSetting
from headway.reports.trackers.tracker_tables import COLUMNS, flat, is_number, scalars, table

LOST = ("could not be persisted", "may be dropped")
"""Words of the warnings with which trackio says that what it took is lost."""


class TrackioTracker:
    """Tracker for trackio: a run with a name that no other of its project has, by which it is found again.

    trackio writes in a thread, and only warns where that fails, once for each kind: the first of its warnings is raised
    by the next call, as `NotKept` where it says that something is lost.
    """

    def __init__(self, setting: TrackerSetting) -> None:
        import trackio

        self._trackio = trackio
        self._troubles: list[str] = []
        warnings.showwarning = self._on_warning  # of this process, which is the tracker's own
        self.entry = setting.entry or _free_name(trackio, setting)
        resume = "allow" if setting.entry else "never"
        self._run = trackio.init(
            project=setting.project, name=self.entry, config=setting.config, resume=resume, embed=False
        )
        self.remedy = ""
        self.where = f"trackio show --project {setting.project}"
        self._newest = 0
        self.samples = HeldSamples()

    def on_settings(self, config: dict[str, Any]) -> None:
        """Do nothing: trackio takes the settings when a run begins."""

    def on_row(self, row: dict[str, Any]) -> None:
        self._raise_trouble()
        self._newest = max(self._newest, row["version"])
        self._run.log(scalars(row), step=row["version"])

    def on_sample(self, sample: dict[str, Any]) -> None:
        rows = table(sample)
        if rows:
            version, kind, *_ = rows[0]
            values = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
            self._run.log({f"samples/{kind}": self._trackio.Table(data=values)}, step=version)

    def on_summary(self, summary: dict[str, Any]) -> None:
        self._run.log({f"run/{name}": value for name, value in flat(summary) if is_number(value)}, step=self._newest)

    def on_model(self, folder: Path) -> None:
        artifact = self._trackio.Artifact(name=f"model-{self.entry}", type="model")
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact)

    def close(self, status: str) -> None:
        self._run.finish()
        self._raise_trouble()

    def _on_warning(self, message: Warning | str, *args: Any, **named: Any) -> None:
        print(f"warning: {message}", flush=True)
        if "trackio" in str(message):
            self._troubles.append(str(message))

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
