"""Runs to draw timelines of: simulated ones in every mode, and some that ended badly."""

from __future__ import annotations

from functools import cache

from headway.config.presets import preset
from headway.events import Event, Note, RunFinished, RunStarted
from headway.planner.simulation.simulated_run import Simulation, config_for
from headway.reports.timeline.timeline import Timeline, build_timeline
from tests.planner.jobs import RICH, Recorder, profile
from tests.reports.scripted_run import ScriptedRun


@cache
def simulated_events(mode: str, versions: int = 5) -> tuple[Event, ...]:
    """Four replicas, or eight that share the trainer's devices, validation and a filter included."""
    shared = preset(mode)["cluster.placement"] == "shared"
    job = profile(RICH)
    config = config_for(
        job,
        mode,
        train_devices=8 if shared else 4,
        replicas=8 if shared else 4,
        versions=versions,
        activity_interval_s=3.0,
    )
    recorder = Recorder()
    Simulation(job, config, observers=[recorder]).run()
    return tuple(recorder.events)


@cache
def simulated(mode: str) -> Timeline:
    return build_timeline(simulated_events(mode))


def started(**changes: object) -> RunStarted:
    values: dict[str, object] = {
        "time": 0.0,
        "mode": "async_partial",
        "seed": 0,
        "groups_per_version": 4,
        "total_groups": 8,
        "lag_bound": 2,
        "order": "window",
        "slots": {"rollout-0": 8},
        "on_update": "interrupt",
    }
    return RunStarted(**{**values, **changes})  # type: ignore[arg-type]


def cut_short() -> list[Event]:
    """A run that was killed: no `RunFinished`, no last report of any replica."""
    run = ScriptedRun().build()
    return run[: len(run) * 2 // 3]


def failed(reason: str = "WorkerDied: rollout-0 ended") -> list[Event]:
    """A run that failed before anything was trained."""
    note = Note(time=1.0, level="warning", text="the reward is slow")
    return [started(), note, RunFinished(time=2.0, status="failed", reason=reason, version=0, groups={"admitted": 0})]
