"""Trackers by name: the packages they need, and the classes that are in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headway.reports.trackers.tracker import Tracker, TrackerSetting

PACKAGES: Mapping[str, str] = {
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "prometheus": "prometheus_client",
}
"""Trackers in processes of their own → the package that each needs. The extra has the tracker's name."""

ADDRESSES: Mapping[str, tuple[str, ...]] = {
    "wandb": ("WANDB_BASE_URL",),
    "mlflow": ("MLFLOW_TRACKING_URI",),
    "trackio": ("TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID"),
}
"""Variables that say where a tracker is, which is named where it does not answer."""


def make_tracker(name: str, setting: TrackerSetting) -> Tracker:
    """Make the tracker ``name``, which imports its package. Raises `ValueError` for a name that is not known."""
    return _class(name)(setting)


def _class(name: str) -> Callable[[TrackerSetting], Tracker]:
    match name:
        case "wandb":
            from headway.reports.trackers.wandb import WandbTracker

            return WandbTracker
        case "mlflow":
            from headway.reports.trackers.mlflow import MlflowTracker

            return MlflowTracker
        case "trackio":
            from headway.reports.trackers.trackio import TrackioTracker

            return TrackioTracker
        case "prometheus":
            from headway.reports.trackers.prometheus import PrometheusTracker

            return PrometheusTracker
    raise ValueError(f"no tracker {name!r}; there are tensorboard, {', '.join(PACKAGES)}")
