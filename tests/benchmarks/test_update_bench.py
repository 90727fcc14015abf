"""Which updates `make bench-update` compares, and what it makes of a run's metrics."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.table import markdown
from benchmarks.update import PHASES, PLAIN, between, figures, table, ways


def version(number: int, **changes: Any) -> dict[str, Any]:
    """A row of ``metrics.jsonl``: every phase takes 1 s, of 10 s."""
    phases = {f"param_update/{phase}_s": 1.0 for phase in PHASES}
    stalls = {"param_update/trainer_stall_s": 3.0, "param_update/rollout_stall_s": 0.5, "validation/stall_s": 1.0}
    sent = {"param_update/bytes": 1e6, "param_update/bytes_saved": 0.75, "param_update/changed_ratio": 0.25}
    return {"version": number, "time/seconds": 10.0, **phases, **stalls, **sent, **changes}


def test_the_first_and_the_last_versions_are_not_measured() -> None:
    rows = [{"version": 0}, *(version(number) for number in range(1, 8)), {"version": 7, "validation/accuracy": 1.0}]
    assert [row["version"] for row in between(rows)] == [3, 4, 5]


def test_a_run_with_too_few_versions_is_refused() -> None:
    with pytest.raises(ValueError, match="4 versions were made"):
        between([version(number) for number in range(1, 5)])


def test_stalls_are_shares_of_the_measured_time_and_a_validation_is_none() -> None:
    found = figures([version(3), version(4)])
    assert (found["trainer stall ms"], found["of the trainer"]) == (2000.0, pytest.approx(0.2))
    assert (found["rollout stall ms"], found["of the rollout"]) == (500.0, pytest.approx(0.05))
    assert found["gather and stall ms"] == 3000.0


def test_bytes_are_compared_with_those_of_a_full_version() -> None:
    found = figures([version(3), version(4)])
    assert (found["sent MB"], found["sent of full"], found["changed"]) == (1.0, 0.25, 0.25)


def test_everything_that_the_doctor_permits_is_compared_once() -> None:
    names = ways()
    assert {"broadcast overlapped delta", "disk overlapped full", "local synchronous full shared interrupt"} <= {*names}
    assert {"broadcast synchronous full 4 replicas", "broadcast overlapped full longer versions"} <= {*names}
    assert not {"disk synchronous delta", "local synchronous full"} & {*names}


def test_the_table_compares_updates_with_the_plain_one() -> None:
    four = [version(3, **{"param_update/trainer_stall_s": 6.0})]
    rows = table({PLAIN: [version(3)], f"{PLAIN} 4 replicas": four, "disk overlapped": []})
    assert [row["÷ plain"] for row in rows] == [1.0, 2.0]
    assert "| broadcast synchronous full | 10 | 1,000 |" in markdown(rows)
