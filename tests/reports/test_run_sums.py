"""What is kept of a run's validations stays few, and stays a fair picture of all of them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from headway.events import ValidationFinished
from headway.reports.metrics.run_sums import MOST_EVALUATIONS, Evaluations


def validated(version: int) -> ValidationFinished:
    return ValidationFinished(
        time=0.0, version=version, accuracy=0.5, problems=1, mean_tokens=1.0, failed=0, span=(0.0, 1.0)
    )


@pytest.mark.parametrize("count", [1, 2, MOST_EVALUATIONS, MOST_EVALUATIONS + 1, 20 * MOST_EVALUATIONS + 7])
def test_of_many_validations_the_first_the_last_and_some_of_all_times_are_kept(count: int) -> None:
    evaluations = Evaluations()
    for version in range(count):
        evaluations.add(validated(version))
    kept = [event.version for event in evaluations]
    assert evaluations.count == count
    assert kept == sorted(kept) and (kept[0], kept[-1]) == (0, count - 1)
    assert min(count, MOST_EVALUATIONS // 2) <= len(kept) <= MOST_EVALUATIONS
    gaps = {after - before for before, after in pairwise(kept[:-1])}
    assert len(gaps) <= 1, "spread evenly"
