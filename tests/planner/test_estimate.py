"""The mean of step times and its error: against closed forms and many samples."""

import math
from statistics import fmean, stdev

import numpy as np
import pytest

from headway.planner.measure import MOST_BATCHES, T_QUANTILES, mean_of_times
from tests.tiers import mostly_slow

TIMES = [4.0, 5.0, 4.5, 5.5, 4.2, 5.1, 4.9, 4.4]


def test_the_half_width_is_students_for_few_independent_times():
    mean, half_width = mean_of_times(TIMES[:5])
    assert mean == pytest.approx(fmean(TIMES[:5]))
    assert half_width == pytest.approx(3.298 * stdev(TIMES[:5]) / math.sqrt(5))


def test_fewer_than_two_batches_have_no_error_that_is_known():
    assert mean_of_times([4.0]) == (4.0, math.inf)
    assert mean_of_times([4.0, 5.0, 4.0], 2)[1] == math.inf


@pytest.mark.slow
def test_the_quantiles_are_those_of_students_t():
    draws = np.random.default_rng(0).standard_t(np.arange(1, MOST_BATCHES), (400_000, MOST_BATCHES - 1))
    inside = (np.abs(draws) <= np.array(T_QUANTILES)).mean(axis=0)
    assert inside == pytest.approx(np.full(MOST_BATCHES - 1, 0.97), abs=0.001)


def test_times_that_alternate_are_certain_in_pairs_and_uncertain_one_by_one():
    assert mean_of_times([2.0, 6.0] * 4, 2)[1] == 0
    assert mean_of_times([2.0, 6.0] * 4)[1] > 1


@mostly_slow(("count", "multiple"), [(4, 1), (12, 1), (30, 1), (8, 2), (30, 2)], quick=[(4, 1), (12, 1), (8, 2)])
def test_the_interval_covers_the_true_mean_more_often_than_nineteen_times_in_twenty(count, multiple):
    """It is wider than it had to be for a single look."""
    draws = np.random.default_rng(0)
    found = [mean_of_times((10 + draws.normal(size=count)).tolist(), multiple) for _ in range(1000)]
    assert 0.95 <= fmean(abs(mean - 10) <= half_width for mean, half_width in found) <= 0.985


@mostly_slow("deviation", [0.2, 0.4], quick=[])
def test_an_interval_that_is_looked_at_after_every_version_still_covers_the_mean(deviation):
    """Takes seconds: many random runs of numbers."""
    draws = np.random.default_rng(0)
    covered = []
    for _ in range(1000):
        times = (10 + deviation * draws.normal(size=30)).tolist()
        for count in range(4, 31):
            mean, half_width = mean_of_times(times[:count])
            if half_width <= 0.02 * mean:
                break
        covered.append(abs(mean - 10) <= half_width)
    assert fmean(covered) == pytest.approx(0.95, abs=0.025)
