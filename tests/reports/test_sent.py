"""What a row says of the bytes of its update, and of the probe after it."""

from __future__ import annotations

from typing import Any

import pytest

from headway.events import Event, OptimizerStepped, UpdateFinished, UpdatePhase
from headway.reports.metrics.run_metrics import RunMetrics

NAMES = ("bytes", "bytes_saved", "changed_ratio", "probe_difference")


class Rows(list[dict[str, Any]]):
    def on_row(self, row: dict[str, Any]) -> None:
        self.append(row)

    def close(self) -> None: ...


def step(version: int, time: float) -> Event:
    return OptimizerStepped(
        time=time, step=version, fetch=version, version=version, skipped=False, tokens=1, trajectories=1, lags=[]
    )


def phase(version: int, time: float, what: str, where: str, **more: Any) -> Event:
    return UpdatePhase(time=time, version=version, phase=what, where=where, seconds=0.5, **more)


def finished(version: int, time: float, **more: Any) -> Event:
    return UpdateFinished(time=time, version=version, trainer_stall_s=0.0, rollout_stall_s=0.0, interrupted=0, **more)


def sent(*events: Event) -> list[dict[str, Any]]:
    rows = Rows()
    metrics = RunMetrics([rows])
    for event in events:
        metrics.on_event(event)
    metrics.close()
    return [{name: row[f"param_update/{name}"] for name in NAMES if f"param_update/{name}" in row} for row in rows]


def test_a_delta_tells_what_it_saved_and_how_much_changed():
    events = [
        step(0, 1.0),
        phase(1, 2.0, "send", "actor", nbytes=150),
        phase(1, 3.0, "load", "rollout-0", probe_difference=2e-4),
        phase(1, 3.0, "load", "rollout-1", probe_difference=1e-4),
        finished(1, 4.0, full_nbytes=1000, changed=0.03),
    ]
    (row,) = sent(*events)
    assert row == pytest.approx({"bytes": 150, "bytes_saved": 0.85, "changed_ratio": 0.03, "probe_difference": 2e-4})


def test_where_everything_is_sent_nothing_is_said_of_savings():
    (row,) = sent(step(0, 1.0), phase(1, 2.0, "send", "actor", nbytes=1000), finished(1, 4.0))
    assert row == {"bytes": 1000}


def test_of_transfers_to_one_replica_each_the_largest_counts():
    transfers = [phase(1, 2.0, "send", f"rollout-{k}", nbytes=100 * (k + 1)) for k in range(3)]
    (row,) = sent(step(0, 1.0), *transfers, finished(1, 4.0, full_nbytes=600))
    assert row == {"bytes": 300, "bytes_saved": 0.5}


def test_an_update_that_nobody_received_says_nothing():
    (row,) = sent(step(0, 1.0), finished(1, 4.0))
    assert row == {}


def test_a_probe_that_comes_after_its_updates_row_counts_in_the_next_one():
    late = phase(1, 5.0, "load", "rollout-0", probe_difference=3e-4)
    rows = sent(step(0, 1.0), finished(1, 4.0), late, step(1, 6.0), finished(2, 8.0))
    assert rows == [{}, {"probe_difference": 3e-4}]
