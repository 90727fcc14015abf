"""Closed forms against sums, and what lies between and beyond the measured points."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.planner.profiles.costs import DecodeCost, decode_cost, phase_seconds, train_cost
from headway.planner.profiles.job_profile import PhaseProfile, RolloutProfile, TrainPoint, TrainProfile
from tests.tiers import searched

COST = DecodeCost(curve=(0.01, 0.01, 0.015, 0.03), kv_token_s=2e-6)

actives = st.integers(1, 3)
caches = st.integers(3, 100_000)
steps = st.floats(0, 5_000)


@searched(100, actives, caches, st.integers(0, 500))
def test_whole_steps_take_the_sum_of_the_steps(active: int, kv: int, count: int):
    one_by_one = sum(COST.step_s(active, kv + active * step) for step in range(count))
    assert COST.seconds(active, kv, count) == pytest.approx(one_by_one, rel=1e-12)


@given(actives, caches, steps, steps)
def test_decoding_in_two_parts_takes_as_long_as_in_one(active: int, kv: int, first: float, second: float):
    apart = COST.seconds(active, kv, first) + COST.seconds(active, kv + active * first, second)
    assert COST.seconds(active, kv, first + second) == pytest.approx(apart, rel=1e-12)


@given(actives, caches, steps, st.sampled_from([0.0, 1e-9, 1e-3]))
def test_steps_is_the_inverse_of_seconds(active: int, kv: int, count: float, kv_token_s: float):
    cost = DecodeCost(COST.curve, kv_token_s)
    assert cost.steps(active, kv, cost.seconds(active, kv, count)) == pytest.approx(count, rel=1e-9, abs=1e-9)


def test_the_decode_curve_is_level_before_its_first_point_and_goes_on_with_its_last_slope():
    cost = decode_cost(RolloutProfile(slots=10, decode=[(2, 1.0), (4, 2.0), (8, 3.0)]))
    assert cost.curve == (1.0, 1.0, 1.0, 1.5, 2.0, 2.25, 2.5, 2.75, 3.0, 3.25, 3.5)


def test_a_decode_curve_of_one_point_is_level():
    assert decode_cost(RolloutProfile(slots=3, decode=[(2, 0.5)])).curve == (0.5,) * 4


TRAIN = TrainProfile(
    points=[
        TrainPoint(devices=4, step_s=1.0, token_s=8e-3, forward_token_s=2e-3),
        TrainPoint(devices=16, step_s=4.0, token_s=2e-3, forward_token_s=0.0),
    ]
)


def test_training_takes_what_was_measured_at_the_measured_numbers_of_devices():
    for point in TRAIN.points:
        cost = train_cost(TRAIN, point.devices)
        assert (cost.step_s, cost.token_s, cost.forward_token_s) == (point.step_s, point.token_s, point.forward_token_s)


def test_between_two_points_training_is_interpolated_on_logarithms():
    cost = train_cost(TRAIN, 8)
    assert cost.step_s == pytest.approx(2.0)
    assert cost.token_s == pytest.approx(4e-3)
    assert cost.forward_token_s == pytest.approx(1e-3), "half way to zero, which has no logarithm"


@pytest.mark.parametrize(("devices", "step_s", "token_s"), [(2, 1.0, 16e-3), (32, 4.0, 1e-3)])
def test_outside_the_points_only_seconds_per_token_scale_with_devices(devices: int, step_s: float, token_s: float):
    cost = train_cost(TRAIN, devices)
    assert (cost.step_s, cost.token_s) == pytest.approx((step_s, token_s))


def test_a_phase_takes_its_latency_and_its_bytes_time():
    assert phase_seconds(PhaseProfile(latency_s=0.5, bytes_per_s=100), 50) == 1.0
    assert phase_seconds(PhaseProfile(latency_s=0.5), 50) == 0.5
