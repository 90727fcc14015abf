"""The timeline of one setting, as a page: a few versions of it, simulated once more with every event kept."""

from __future__ import annotations

from math import ceil
from pathlib import Path

from headway.events import Event
from headway.planner.grid import PlanSetting
from headway.planner.measure import config_of, fill_versions
from headway.planner.profiles.job_profile import Profile
from headway.planner.simulation.simulated_run import Simulation
from headway.reports.timeline.html_timeline import write_html
from headway.reports.timeline.timeline import build_timeline

VERSIONS_SHOWN = 6
"""Number of versions in the picture, after the pipeline has filled."""


class EventRecorder:
    """An observer that keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None: ...


def write_timeline(profile: Profile, setting: PlanSetting, path: Path) -> None:
    """Simulate ``setting`` for a few versions and write its timeline to ``path``, as an HTML page."""
    recorder = EventRecorder()
    versions = fill_versions(setting.eta) + VERSIONS_SHOWN + ceil(setting.eta)
    Simulation(profile, config_of(profile, setting, versions), observers=(recorder,)).run()
    write_html(build_timeline(recorder.events, simulated=True), path)
