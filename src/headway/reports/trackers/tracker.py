"""The protocol of a tracker, and what it is made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headway.errors import RunError
from headway.reports.trackers.held_samples import HeldSamples


@dataclass(frozen=True, slots=True)
class TrackerSetting:
    """Arguments of a tracker: the run, and its entry in the tracker."""

    project: str
    """Name of the project, which an experiment of MLflow is, too."""
    name: str
    """Name of the run in the tracker."""
    folder: Path
    """Folder in the run's directory for the tracker's own files; it exists."""
    config: dict[str, Any] = field(default_factory=dict)
    """The run's settings by dotted key."""
    entry: str = ""
    """Id of the entry in which a resumed run goes on; empty for a new one."""
    undone_from: int | None = None
    """Version from which on a resumed run begins anew; None for none. TensorBoard alone deletes its points."""
    prometheus_host: str = "127.0.0.1"
    prometheus_port: int = 0


class NotKept(RunError):
    """Error of a tracker that found that it lost what it had taken: it is made anew, and told all of it again."""


class Tracker(Protocol):
    """Writer of one run into one tool.

        tracker = MlflowTracker(setting)                 a new entry, or the one of ``setting.entry``
        tracker.on_settings(setting.config)              once, after the entry is there
        tracker.on_row({"version": 0, …})                as versions end, in order
        tracker.on_sample({"group": 17, …})              a group or a held-out problem with its answers, cut to a size
        tracker.on_summary(summary)                      once, at the end
        tracker.on_model(folder)                         the exported model, where ``reports.log_model`` is set
        tracker.close("completed")

    Calls come from one thread, one after the other. Each may raise anything, and is then made again later, but for
    `on_sample`. Making a tracker raises nothing once a new entry is there: its id would be lost, and another one made.
    One that raises `NotKept` has lost what it took since it was made.
    A sample that was taken may wait in ``samples`` for the next row, which it never fails. A call may take long: who
    must not wait keeps the tracker in a process of its own (`TrackerApart`).
    A row's version may be lower than that of the row before: a validation that ended late has a row of its own.
    """

    entry: str
    """Id by which a resumed run finds its entry again; empty where a tracker has none."""
    where: str
    """Place to look at the run: a URL, or a folder with the command that shows it."""
    remedy: str
    """Command that sends what the tracker has taken and not delivered; empty for the usual one."""

    samples: HeldSamples
    """Samples that wait here; empty where a tracker sends them at once, or takes none."""

    def on_settings(self, config: dict[str, Any]) -> None:
        """Take the run's settings by dotted key. Rows come whether or not they were taken."""

    def on_row(self, row: dict[str, Any]) -> None: ...

    def on_sample(self, sample: dict[str, Any]) -> None: ...

    def on_summary(self, summary: dict[str, Any]) -> None: ...

    def on_model(self, folder: Path) -> None: ...

    def close(self, status: str) -> None:
        """End the entry. ``status``: the run's, ``completed``, ``interrupted`` or ``failed``."""
