"""Sums of busy time give the figures that all intervals give."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from headway.planner.profiles.job_profile import Profile
from headway.planner.simulation.simulated_run import Simulation, config_for
from headway.reports.metrics.occupancy import Occupancy
from headway.reports.metrics.run_metrics import RunMetrics
from headway.reports.metrics.summary import summary, time_shares
from tests.tiers import mostly_slow

from .jobs import RICH, Recorder, profile


def simulation_of(job: Profile, mode: str, versions: int, observers: list[Any]) -> Simulation:
    config = config_for(job, mode, train_devices=1, replicas=2, versions=versions, activity_interval_s=5.0)
    return Simulation(job, config, observers=observers)


class Rows:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_row(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def close(self) -> None: ...


@mostly_slow("mode", ["async_partial", "overlapped", "colocate_sync"], quick=["overlapped"])
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
