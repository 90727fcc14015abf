"""Fits of costs, against closed forms, brute force and what must hold for any measurements."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.events import PrefillSteps, add_prefill
from headway.planner.profile_fitting.cost_fitting import (
    KNOT_TOLERANCE,
    MAX_KNOTS,
    DecodeSample,
    evenly,
    few_knots,
    fit_decode,
    fit_line,
    fit_prefill,
    not_falling,
    rounded,
    service_seconds,
    without_outliers,
)
from headway.planner.profiles.costs import DecodeCost
from tests.tiers import searched

SIZES = st.lists(st.integers(1, 10_000), min_size=1, max_size=30)
SECONDS = st.floats(1e-4, 1e3)


# ---------------------------------------------------------------------------------------------- lines


def test_a_line_is_recovered_exactly() -> None:
    sizes = [100, 250, 300, 900]
    line = fit_line(sizes, [0.5 + 0.002 * size for size in sizes])
    assert (line.fixed_s, line.unit_s, line.separated) == (pytest.approx(0.5), pytest.approx(0.002), True)


@searched(100, st.data())
def test_a_line_keeps_the_total_and_is_nowhere_negative(data: st.DataObject) -> None:
    sizes = data.draw(SIZES)
    seconds = data.draw(st.lists(SECONDS, min_size=len(sizes), max_size=len(sizes)))
    line = fit_line(sizes, seconds)
    assert line.fixed_s >= 0 and line.unit_s >= 0
    assert sum(line.fixed_s + line.unit_s * size for size in sizes) == pytest.approx(sum(seconds))


def test_a_cost_that_sizes_do_not_explain_is_taken_as_proportional() -> None:
    rng = np.random.default_rng(0)
    line = fit_line([1000] * 20, list(rng.uniform(0.9, 1.1, 20)))
    assert not line.separated and line.fixed_s == 0 and line.unit_s == pytest.approx(1e-3, rel=0.05)


def test_a_cost_that_grows_faster_than_its_size_has_no_negative_fixed_part() -> None:
    sizes = [10, 20, 30, 40]
    line = fit_line(sizes, [size**2 for size in sizes])
    assert (line.fixed_s, line.separated) == (0.0, True)
    assert line.unit_s == pytest.approx(sum(size**2 for size in sizes) / sum(sizes))


def test_differences_that_add_up_to_nothing_cost_nothing() -> None:
    line = fit_line([10, 20, 30], [-0.2, 0.1, -0.1])
    assert (line.fixed_s, line.unit_s) == (0.0, 0.0)


# ---------------------------------------------------------------------------------------------- decoding


def samples_of(curve: dict[int, float], kv_token_s: float, caches: list[float]) -> list[DecodeSample]:
    return [
        DecodeSample(active, 10, seconds + kv_token_s * active * cached, active * cached)
        for active, seconds in curve.items()
        for cached in caches
    ]


def test_the_curve_and_the_price_of_the_cache_are_told_apart() -> None:
    curve = {1: 0.010, 4: 0.016, 8: 0.020}
    fitted, kv_token_s = fit_decode(samples_of(curve, 1e-6, [100.0, 700.0, 400.0]))
    assert kv_token_s == pytest.approx(1e-6)
    assert fitted == [(active, pytest.approx(seconds)) for active, seconds in curve.items()]


def test_without_any_change_in_the_cache_its_price_stays_in_the_curve() -> None:
    curve, kv_token_s = fit_decode(samples_of({1: 0.01, 8: 0.02}, 1e-6, [500.0] * 5))
    assert kv_token_s == 0.0
    assert curve == [(1, pytest.approx(0.0105)), (8, pytest.approx(0.024))]


def test_a_price_that_would_leave_nothing_for_the_step_is_an_accident() -> None:
    samples = samples_of({4: 1e-9}, 1e-5, [10.0, 20.0, 30.0]) + samples_of({8: 1e-9}, 0.0, [1000.0] * 3)
    curve, kv_token_s = fit_decode(samples)
    assert kv_token_s == 0.0 and all(seconds > 0 for _, seconds in curve)


def test_a_moment_in_which_the_machine_was_busy_with_something_else_does_not_count() -> None:
    usual = [DecodeSample(4, 100, 0.01, 50.0)] * 9
    assert fit_decode([*usual, DecodeSample(4, 100, 0.2, 50.0)]) == fit_decode(usual)


@given(
    st.lists(st.builds(DecodeSample, st.integers(1, 64), st.integers(1, 50), SECONDS, st.floats(0, 1e6)), min_size=1)
)
def test_whatever_was_measured_the_curve_is_positive_and_does_not_fall(samples: list[DecodeSample]) -> None:
    curve, kv_token_s = fit_decode(samples)
    counts, seconds = zip(*curve, strict=True)
    assert list(counts) == sorted(set(counts)) and list(seconds) == sorted(seconds)
    assert seconds[0] > 0 and kv_token_s >= 0


def test_a_start_costs_what_its_step_took_longer_than_a_plain_one() -> None:
    decode = DecodeCost((0.0, 0.01, 0.012, 0.014), kv_token_s=1e-5)
    steps = [
        (1, active, tokens, decode.step_s(active, cached) + 0.003 + 2e-5 * tokens, cached)
        for active, tokens, cached in [(1, 10, 10), (3, 40, 90), (2, 25, 70), (3, 100, 400)]
    ]
    line = fit_prefill(steps, decode)
    assert (line.fixed_s, line.unit_s) == (pytest.approx(0.003), pytest.approx(2e-5))


def test_prefills_that_were_added_up_cost_what_the_single_ones_cost() -> None:
    decode = DecodeCost(tuple(0.01 + 0.0002 * active for active in range(65)), kv_token_s=1e-7)
    rng = random.Random(1)
    merged: list[PrefillSteps] = []
    for _ in range(20):  # reports
        report: dict[int, PrefillSteps] = {}
        for _ in range(50):
            active, tokens, cached = rng.randint(1, 64), round(rng.lognormvariate(4, 1)) + 1, rng.randint(0, 10_000)
            seconds = decode.step_s(active, cached) + 0.003 + 2e-5 * tokens
            add_prefill(report, active, tokens, seconds, cached)
        assert len(report) <= 12
        merged += report.values()
    line = fit_prefill(merged, decode)
    assert (line.fixed_s, line.unit_s) == (pytest.approx(0.003), pytest.approx(2e-5))


def test_a_long_prompt_is_no_outlier_but_one_that_took_too_long_for_its_length_is() -> None:
    def step(tokens: int, slower: float = 1.0) -> PrefillSteps:
        return 1, 8, tokens, slower * (0.01 + 0.004 + 1e-4 * tokens), 0

    cost = DecodeCost((0.01,) * 9, kv_token_s=0.0)
    usual = [step(tokens) for tokens in (10, 12, 15, 20, 1000)] * 20
    line = fit_prefill([*usual, step(10, slower=40.0)], cost)
    assert (line.fixed_s, line.unit_s) == (pytest.approx(0.004), pytest.approx(1e-4))


def test_prefills_that_are_cheaper_than_a_plain_step_cost_nothing() -> None:
    line = fit_prefill([(4, 4, 40, 0.02, 0)], DecodeCost((0.0, 0.01), kv_token_s=0.0))
    assert (line.fixed_s, line.unit_s) == (0.0, 0.0)
    assert fit_prefill([], DecodeCost((0.0, 0.01), kv_token_s=0.0)) == line


# ---------------------------------------------------------------------------------------------- curves


@given(st.lists(st.tuples(SECONDS, st.integers(1, 100)), min_size=1, max_size=40))
def test_a_sequence_that_does_not_fall_keeps_the_weighted_total(points: list[tuple[float, int]]) -> None:
    values, weights = zip(*points, strict=True)
    fitted = not_falling(values, weights)
    assert fitted == sorted(fitted)
    assert np.dot(fitted, weights) == pytest.approx(np.dot(values, weights))
    assert not_falling(sorted(values), weights) == pytest.approx(sorted(values))


@given(st.lists(st.tuples(st.floats(1, 10), st.integers(1, 5)), min_size=1, max_size=6))
def test_no_other_sequence_that_does_not_fall_is_nearer(points: list[tuple[float, int]]) -> None:
    """The solution of isotonic regression in closed form: a maximum of minima of weighted means."""
    values, weights = (np.array(column, float) for column in zip(*points, strict=True))

    def mean(i: int, j: int) -> float:
        return float(np.average(values[i : j + 1], weights=weights[i : j + 1]))

    n = len(values)
    expected = [max(min(mean(i, j) for j in range(k, n)) for i in range(k + 1)) for k in range(n)]
    assert not_falling(values.tolist(), weights.tolist()) == pytest.approx(expected)


@given(st.lists(SECONDS, min_size=1, max_size=120).map(sorted))
def test_few_knots_are_points_of_the_curve_and_near_all_others(seconds: list[float]) -> None:
    points = list(enumerate(seconds, start=1))
    knots = few_knots(points)
    assert len(knots) <= MAX_KNOTS and set(knots) <= set(points)
    assert knots[0] == points[0] and knots[-1] == points[-1]
    if len(knots) < MAX_KNOTS:
        interpolated = np.interp([x for x, _ in points], [x for x, _ in knots], [y for _, y in knots])
        assert np.abs(interpolated / seconds - 1).max() <= KNOT_TOLERANCE


def test_a_straight_curve_has_two_knots() -> None:
    assert few_knots([(active, 1.0 + active) for active in range(1, 65)]) == [(1, 2.0), (64, 65.0)]


# ---------------------------------------------------------------------------------------------- the rest


def test_waiting_for_a_worker_is_no_service() -> None:
    # Two workers: the third waits until 3 for the first one to be free, the fourth until 4.
    assert service_seconds([(0, 3), (0, 4), (1, 5), (2, 8)], workers=2) == [3, 4, 2, 4]


def test_outliers_are_measured_against_the_median() -> None:
    assert without_outliers([1.0, 2.0, 2.0, 6.0, 6.1], float) == [1.0, 2.0, 2.0, 6.0]
    assert without_outliers([], float) == []


@given(st.integers(0, 300), st.integers(1, 100))
def test_a_selection_is_spread_evenly(count: int, limit: int) -> None:
    chosen = evenly(count, limit)
    assert len(chosen) == min(count, limit) and chosen == sorted(set(chosen))
    gaps = {b - a for a, b in pairwise(chosen)}
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert not chosen or chosen[0] == 0


def test_numbers_are_rounded_to_what_they_are_worth() -> None:
    assert [rounded(x) for x in (0.0, 0.00123456, 12345.6, 1e-12)] == [0.0, 0.001235, 12350.0, 1e-12]
