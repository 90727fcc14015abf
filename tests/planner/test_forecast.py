"""The guess that orders a plan: lengths against samples, step times against simulated ones."""

import math

import numpy as np
import pytest

from headway.config.presets import PRESETS
from headway.planner.grid import forecast, longest_length, mean_length
from headway.planner.measure import measure
from headway.planner.profiles.job_profile import ConstantLengths, EmpiricalLengths, LognormalLengths
from tests.planner.planning import profile_of, setting


@pytest.mark.parametrize(("sigma", "most"), [(0.5, 10_000), (1.0, 2_000), (1.5, 1_000)])
def test_the_mean_of_cut_lognormal_lengths_is_that_of_samples(sigma, most):
    lengths = LognormalLengths(kind="lognormal", mean=800, sigma=sigma, max=most)
    draws = np.random.default_rng(0).lognormal(math.log(800) - sigma**2 / 2, sigma, 400_000)
    assert mean_length(lengths) == pytest.approx(np.minimum(draws, most).mean(), rel=0.01)


def test_lengths_that_do_not_vary_are_their_own_mean_and_longest():
    for lengths in (
        ConstantLengths(kind="constant", tokens=70),
        LognormalLengths(kind="lognormal", mean=70, sigma=0, max=100),
        LognormalLengths(kind="lognormal", mean=99, sigma=0, max=70),
        EmpiricalLengths(kind="empirical", groups=[[70], [70, 70]]),
    ):
        assert mean_length(lengths) == pytest.approx(70)
        assert longest_length(lengths, draws=50) == pytest.approx(70)


def test_of_recorded_groups_the_mean_is_of_the_answers_that_are_taken_from_them():
    lengths = EmpiricalLengths(kind="empirical", groups=[[1, 9, 9], [4]])
    assert mean_length(lengths) == pytest.approx((1 + 4) / 2)
    assert mean_length(lengths, answers=4) == pytest.approx(((1 + 9 + 9 + 1) + 4 * 4) / 8)


def test_the_longest_of_many_is_the_cut_and_of_recorded_ones_the_longest():
    assert longest_length(LognormalLengths(kind="lognormal", mean=50, sigma=1, max=100), draws=10_000) == 100
    assert longest_length(EmpiricalLengths(kind="empirical", groups=[[1, 9], [5]]), draws=1000) == 9


@pytest.mark.parametrize("preset", PRESETS)
def test_forecasts_of_even_answers_are_close_to_the_simulation(preset):
    profile, row = profile_of(), setting(preset, *((8, 8) if preset.startswith("colocate") else (4, 4)))
    measured = measure(profile, row)
    assert measured is not None
    assert forecast(profile, row).step_s(row) == pytest.approx(measured.step_s, rel=0.3)


def test_forecasts_know_that_training_speeds_up_with_its_devices_and_generation_with_its_own():
    profile = profile_of(
        train={"points": [{"devices": 1, "token_s": 1e-2}]},
        rollout={"decode": [[1, 0.1], [16, 0.4]]},
    )
    few, many = (forecast(profile, setting("async_partial", train, 8 - train)) for train in (2, 6))
    assert few.training == pytest.approx(3 * many.training)
    assert few.generation < many.generation


def test_the_forecast_of_training_counts_ranks_that_get_no_answer():
    # A mini-batch of 4 answers: three ranks take as long as two.
    train = {"even": True, "parallel": {"tp": 2}, "points": [{"devices": 2, "step_s": 0.0, "token_s": 1.0}]}
    profile = profile_of(train=train)
    two, three = (forecast(profile, setting("on_policy", 2 * ranks, 1)).training for ranks in (2, 3))
    assert two == three == 16 * 14 / 2
