"""Checks that a run has recorded enough for a profile."""

from __future__ import annotations

from pathlib import Path

from headway.errors import ConfigError
from headway.planner.measurement.recording import Recording
from headway.reports.run_directory import RunDirectory

MIN_VERSIONS = 2


def check_directory(run: Path) -> RunDirectory:
    """Return the directory of ``run``. Raises `ConfigError` where that is none."""
    directory = RunDirectory(run)
    if not run.is_dir():
        raise ConfigError(f"{run} is not a directory; give the directory of a run, as run.dir named it")
    for file in (directory.config, directory.events):
        if not file.is_file():
            raise ConfigError(
                f"{run} has no {file.name}, so it is not the directory of a run; give one that headway train made"
            )
    return directory


def check_enough(run: Path, recording: Recording) -> None:
    """Raise `ConfigError` unless everything that a profile must have was measured at least once."""
    if recording.started is None:
        raise ConfigError(f"{run} never began to train, so it measured nothing; give a run that did")
    needed = f"a profile needs a run with at least {MIN_VERSIONS} versions; train for longer, or give another run"
    if recording.versions < MIN_VERSIONS:
        raise ConfigError(f"{run} ended after {recording.versions} parameter update(s); {needed}")
    if not any(step.tokens for step in recording.training.steps):
        raise ConfigError(f"{run} made no optimizer step; {needed}")
    active = {report.replica for report in recording.activity if report.generated_tokens}
    if silent := sorted(set(recording.started.slots) - active):
        raise ConfigError(
            f"{run} says nothing about what {', '.join(silent)} did; a profile needs a run in which every replica "
            "generated"
        )
    if not recording.warm_activity("decode_steps"):
        raise ConfigError(
            f"{run} does not say how long its decode steps took, so there is no decode curve; give a run of a rollout "
            "engine that measures them, such as rollout.name=native"
        )
