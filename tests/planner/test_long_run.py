"""What the driver holds does not grow with the groups that it has seen; nor does what it knows of them suffer."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import pytest
from rich.console import Console

from headway.events import Event, UpdateFinished
from headway.planner.profiles.job_profile import Profile
from headway.planner.simulation.simulated_run import Simulation, config_for
from headway.reports.metrics.occupancy import Occupancy
from headway.reports.metrics.run_metrics import RunMetrics
from headway.reports.metrics.summary import summary, time_shares
from headway.reports.report_manager import open_reports

from .jobs import RICH, Recorder, profile

EARLY, LATE, VERSIONS = 30, 80, 85
"""Versions, of 8 groups each, after which is counted what is held, before the run begins to run dry; all of them."""
GROWTH = 1.12
"""Groups under way, timers that were cancelled and the few validations are counted, too."""
JOB: dict[str, Any] = {
    "batch": {"groups_per_version": 8, "ppo_mini_batch_size": 2, "n": 2, "ppo_epochs": 1},
    "validation": {"problems": 2, "n": 1, "test_freq": 50},
}


def simulation_of(job: Profile, mode: str, versions: int, observers: list[Any]) -> Simulation:
    config = config_for(job, mode, train_devices=1, replicas=2, versions=versions, activity_interval_s=5.0)
    return Simulation(job, config, observers=observers)


class Counting:
    """An observer that counts what ``roots`` hold after some updates."""

    def __init__(self) -> None:
        self.roots: list[Any] = []
        self.held: dict[int, int] = {}

    def on_event(self, event: Event) -> None:
        if isinstance(event, UpdateFinished) and event.version in (EARLY, LATE):
            self.held[event.version] = sum(1 for _ in reachable(self.roots))

    def close(self) -> None: ...


def reachable(roots: list[Any]) -> Iterator[Any]:
    """All objects that are held by these, directly or not; neither code nor what the interpreter shares."""
    seen, found = {id(root) for root in roots}, list(roots)
    while found:
        one = found.pop()
        yield one
        for held in gc.get_referents(one):
            if id(held) not in seen and not isinstance(held, type | ModuleType | FunctionType | BuiltinFunctionType):
                seen.add(id(held))
                found.append(held)


@pytest.mark.parametrize("mode", ["async_partial", "colocate_sync"])
def test_what_the_driver_holds_does_not_grow_with_the_groups_of_a_run(mode: str, tmp_path: Path) -> None:
    """Counts every object that the driver holds, twice, in a run of dozens of versions."""
    counting = Counting()
    job = profile(RICH, **JOB)
    config = config_for(job, mode, train_devices=1, replicas=2, versions=VERSIONS)
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        reports = open_reports(config, tmp_path / "run", Console(file=nowhere))
        simulation = simulation_of(job, mode, VERSIONS, [reports, counting])
        counting.roots = [reports, simulation]
        simulation.run()
        reports.close()
    assert counting.held[LATE] <= GROWTH * counting.held[EARLY]


class Rows:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_row(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def close(self) -> None: ...


@pytest.mark.parametrize("mode", ["async_partial", "overlapped", "colocate_sync"])
def test_sums_give_the_figures_that_all_intervals_give(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    simulation_of(profile(RICH, batch={"groups_per_version": 8}), mode, 12, [recorder]).run()

    def told() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        rows = Rows()
        metrics = RunMetrics([rows])
        for event in recorder.events:
            metrics.on_event(event)
        shares = time_shares(metrics)
        assert metrics.window is not None and shares is not None
        assert (metrics.occupancy._summed_until > metrics.window[0]) is sums
        return rows.rows, summary(metrics) | {"shares": numbers(asdict(shares))}

    sums = True
    summed_rows, summed = told()
    sums = False
    monkeypatch.setattr(Occupancy, "sum_up", lambda *_: None)
    rows, whole = told()
    assert len(rows) >= 12
    for row, exact in zip(summed_rows, rows, strict=True):
        assert numbers(row) == pytest.approx(numbers(exact))
    assert numbers(summed) == pytest.approx(numbers(whole), nan_ok=True)


def numbers(figures: dict[str, Any]) -> dict[str, float]:
    """All that are in there, with where they were."""
    found: dict[str, float] = {}
    for name, value in figures.items():
        match value:
            case dict():
                found |= {f"{name}/{inner}": number for inner, number in numbers(value).items()}
            case int() | float():
                found[name] = value
    return found
