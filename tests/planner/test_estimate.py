"""The mean of step times and its error: against closed forms, another library's regression, and many samples."""

import math
from itertools import product
from statistics import fmean, stdev

import numpy as np
import pytest

from headway.planner.estimate import FEWEST_FREE, MOST_BATCHES, T_QUANTILES, ControlVariate, estimate
from tests.tiers import mostly_slow

TIMES = [4.0, 5.0, 4.5, 5.5, 4.2, 5.1, 4.9, 4.4]


def test_the_half_width_is_students_for_few_independent_times():
    found = estimate(TIMES[:5])
    assert found.mean == pytest.approx(fmean(TIMES[:5]))
    assert found.half_width == pytest.approx(3.298 * stdev(TIMES[:5]) / math.sqrt(5))


def test_fewer_than_two_batches_have_no_error_that_is_known():
    assert estimate([4.0]).half_width == math.inf
    assert estimate([4.0, 5.0, 4.0], multiple=2).half_width == math.inf


def test_the_quantiles_are_those_of_students_t():
    draws = np.random.default_rng(0).standard_t(np.arange(1, MOST_BATCHES), (400_000, MOST_BATCHES - 1))
    inside = (np.abs(draws) <= np.array(T_QUANTILES)).mean(axis=0)
    assert inside == pytest.approx(np.full(MOST_BATCHES - 1, 0.97), abs=0.001)


def test_times_that_alternate_are_certain_in_pairs_and_uncertain_one_by_one():
    assert estimate([2.0, 6.0] * 4, multiple=2).half_width == 0
    assert estimate([2.0, 6.0] * 4).half_width > 1


def test_with_a_control_the_mean_is_the_regression_line_at_its_expectation():
    values = [40.0, 52.0, 44.0, 55.0, 43.0, 50.0, 48.0, 46.0]
    found = estimate(TIMES, [ControlVariate(values, 50.0)])
    slope, intercept = np.polyfit(values, TIMES, 1)
    assert found.mean == pytest.approx(slope * 50 + intercept)
    residuals = np.array(TIMES) - slope * np.array(values) - intercept
    spread = (50 - fmean(values)) ** 2 / sum((value - fmean(values)) ** 2 for value in values)
    error = math.sqrt(residuals @ residuals / 6 * (1 / 8 + spread))
    assert found.half_width == pytest.approx(2.829 * error)


def test_two_controls_are_used_where_one_does_not_suffice():
    draws = np.random.default_rng(1)
    first, second = draws.normal(10, 1, 12), draws.normal(20, 2, 12)
    times = (3 + first + 2 * second).tolist()
    found = estimate(times, [ControlVariate(first.tolist(), 10), ControlVariate(second.tolist(), 20)])
    assert found.mean == pytest.approx(53)
    assert found.half_width == pytest.approx(0, abs=1e-9)


def test_a_control_that_says_nothing_does_not_widen_the_interval():
    control = ControlVariate([5.0, 3.0, 4.0, 5.0, 3.0, 4.0, 6.0, 3.0], 400.0)
    assert estimate(TIMES, [control]) == estimate(TIMES)


def test_a_control_is_not_used_with_few_batches_nor_when_it_does_not_vary():
    few = FEWEST_FREE + 1
    assert estimate(TIMES[:few], [ControlVariate(TIMES[:few], 5.0)]) == estimate(TIMES[:few])
    assert estimate(TIMES[: few + 1], [ControlVariate(TIMES[: few + 1], 5.0)]).half_width == pytest.approx(0, abs=1e-9)
    assert estimate(TIMES, [ControlVariate([3.0] * 8, 4.0)]) == estimate(TIMES)


@pytest.mark.parametrize(("count", "multiple"), [(4, 1), (12, 1), (30, 1), (8, 2), (30, 2)])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_the_interval_covers_the_true_mean_nineteen_times_in_twenty(count, multiple, share):
    """``share`` of the variance is the control's; the interval is wider than it had to be for a single look."""
    draws = np.random.default_rng(0)
    covered = []
    for _ in range(1000):
        control, own = draws.normal(size=count), draws.normal(size=count)
        times = (10 + math.sqrt(share) * control + math.sqrt(1 - share) * own).tolist()
        found = estimate(times, [ControlVariate((5 + control).tolist(), 5)], multiple=multiple)
        covered.append(abs(found.mean - 10) <= found.half_width)
    assert 0.945 <= fmean(covered) <= 0.985


@mostly_slow(("share", "deviation"), product([0.0, 0.8], [0.2, 0.4]), quick=[(0.8, 0.4)])
def test_an_interval_that_is_looked_at_after_every_version_still_covers_the_mean(share, deviation):
    """Takes seconds: many random runs of numbers."""
    draws = np.random.default_rng(0)
    covered = []
    for _ in range(1000):
        control, own = draws.normal(size=30), draws.normal(size=30)
        times = (10 + deviation * (math.sqrt(share) * control + math.sqrt(1 - share) * own)).tolist()
        for count in range(4, 31):
            found = estimate(times[:count], [ControlVariate((5 + control[:count]).tolist(), 5)])
            if found.half_width <= 0.02 * found.mean:
                break
        covered.append(abs(found.mean - 10) <= found.half_width)
    assert fmean(covered) == pytest.approx(0.95, abs=0.025)
