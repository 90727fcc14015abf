"""What the summary lists of a run's validations stays few, and stays a fair picture of all of them."""

from __future__ import annotations

import pytest

from headway.events import ValidationFinished
from headway.reports.metrics.run_metrics import MOST_VALIDATIONS, RunMetrics
from headway.reports.metrics.summary import summary


def validated(version: int, accuracy: float) -> ValidationFinished:
    return ValidationFinished(
        time=0.0, version=version, accuracy=accuracy, problems=1, mean_tokens=1.0, failed=0, span=(0.0, 1.0)
    )


@pytest.mark.parametrize("count", [1, 2, MOST_VALIDATIONS, MOST_VALIDATIONS + 1, 20 * MOST_VALIDATIONS + 7])
def test_of_many_validations_the_first_the_last_and_the_best_are_listed(count: int) -> None:
    metrics, best = RunMetrics(), count // 3
    for version in range(count):
        metrics.on_event(validated(version, 0.9 if version == best else 0.5))
    found = summary(metrics)
    kept = [one["version"] for one in found["eval"]]
    assert found["validation"]["count"] == count
    assert kept == sorted(kept) and (kept[0], kept[-1]) == (0, count - 1)
    assert best in kept
    assert min(count, MOST_VALIDATIONS // 3) <= len(kept) <= MOST_VALIDATIONS
