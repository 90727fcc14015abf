"""What is known of answers beforehand: against draws, and against simulated runs."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from headway.events import OptimizerStepped, TrajectoryFinished
from headway.planner.control_variates import AnswerControls, mean_longest
from headway.planner.measure import config_of
from headway.planner.profiles.job_profile import ConstantLengths, EmpiricalLengths, LognormalLengths, Profile
from headway.planner.simulation.simulated_run import Simulation
from tests.planner.planning import profile_of, setting
from tests.tiers import mostly_slow


def ended(number: int, tokens: int) -> TrajectoryFinished:
    return TrajectoryFinished(
        time=0.0,
        number=number,
        k=0,
        replica="a",
        prompt_tokens=1,
        tokens=tokens,
        finish_reason="stop",
        version_spans=[],
        started=0.0,
        finished=0.0,
    )


def pairs(**changes: Any) -> Profile:
    """B = 2 groups of two."""
    return profile_of(batch={"groups_per_version": 2, "ppo_mini_batch_size": 2}, **changes)


def test_tokens_count_where_answers_end_and_a_block_where_its_last_one_does():
    controls = AnswerControls(pairs(), Fraction(0))
    for number, tokens in ((0, 5), (0, 30), (1, 7), (2, 50)):
        controls.answer_ended(ended(number, tokens))
    controls.version_ended()
    controls.answer_ended(ended(1, 4))
    tokens, longest = controls.of(0, 2)
    assert tokens.values == [92, 4]
    assert longest.values == [0, 30]
    assert (tokens.expected, longest.expected) == (40, 10)


def test_blocks_begin_behind_the_groups_that_are_ahead_of_the_first_update():
    controls = AnswerControls(pairs(), Fraction(1, 2))
    for number, tokens in ((0, 90), (0, 90), (1, 5), (1, 6), (2, 7), (2, 8)):
        controls.answer_ended(ended(number, tokens))
    assert controls.of(0, 1)[1].values == [8]


def test_filtered_groups_are_generated_too():
    tokens, longest = AnswerControls(pairs(reward={"filtered": 0.5}), Fraction(0)).of(0, 1)
    assert (tokens.expected, longest.expected) == (80, 20)


def test_replayed_answers_are_no_sample():
    response = {"kind": "empirical", "groups": [[3, 4], [5, 6]]}
    assert AnswerControls(pairs(response={**response, "replay": True}), Fraction(0)).of(0, 1) == []
    tokens, longest = AnswerControls(pairs(response=response), Fraction(0)).of(0, 1)
    assert tokens.expected == pytest.approx(18)
    assert longest.expected == pytest.approx(0.25 * 4 + 0.75 * 6)


@pytest.mark.parametrize(
    ("mean", "sigma", "most", "within_group", "groups", "answers"),
    [
        (2000, 0.9, 8192, 0.5, 32, 4),
        (3000, 0.7, 28672, 0.5, 64, 16),
        (3000, 0.7, 28672, 0.0, 64, 8),
        (100, 1.2, 10**6, 1.0, 16, 4),
        (50, 0.3, 60, 0.2, 8, 2),
    ],
)
def test_the_mean_of_the_longest_is_that_of_samples(mean, sigma, most, within_group, groups, answers):
    lengths = LognormalLengths(kind="lognormal", mean=mean, sigma=sigma, max=most, within_group=within_group)
    draws, count = np.random.default_rng(0), 4000
    shared, own = draws.normal(size=(count, groups, 1)), draws.normal(size=(count, groups, answers))
    logs = (
        math.log(mean) - sigma**2 / 2 + sigma * (math.sqrt(within_group) * shared + math.sqrt(1 - within_group) * own)
    )
    longest = np.minimum(np.exp(logs).max(axis=(1, 2)), most)
    error = longest.std() / math.sqrt(count)
    assert abs(mean_longest(lengths, groups=groups, answers=answers) - longest.mean()) < 4 * error


def test_the_longest_of_recorded_groups_is_of_groups_that_are_drawn_whole():
    lengths = EmpiricalLengths(kind="empirical", groups=[[1, 9], [5, 2], [3, 3]])
    assert mean_longest(lengths, groups=1, answers=2) == pytest.approx((9 + 5 + 3) / 3)
    assert mean_longest(lengths, groups=2, answers=2) == pytest.approx((9 * 5 + 5 * 3 + 3 * 1) / 9)
    assert mean_longest(lengths, groups=1, answers=1) == pytest.approx((1 + 5 + 3) / 3)


def test_lengths_that_do_not_vary_are_their_own_longest():
    assert mean_longest(ConstantLengths(kind="constant", tokens=70), groups=5, answers=3) == 70
    assert mean_longest(LognormalLengths(kind="lognormal", mean=70, sigma=0, max=60), groups=5, answers=3) == 60


@mostly_slow(
    "preset",
    ["on_policy", "one_step_off", "async_stale", "async_partial", "stream_off_policy"],
    quick=["one_step_off", "async_partial"],
)
def test_versions_of_a_run_have_the_answers_that_are_expected(preset):
    """At steady state, whatever the order in which answers end, and although some groups are filtered."""
    profile = profile_of(
        response={"kind": "lognormal", "mean": 40, "sigma": 0.8, "max": 300, "within_group": 0.5},
        reward={"filtered": 0.2},
    )
    row, versions = setting(preset), 120
    controls = AnswerControls(profile, row.eta)

    class Observer:
        steps = 0

        def on_event(self, event: object) -> None:
            if isinstance(event, TrajectoryFinished):
                controls.answer_ended(event)
            elif isinstance(event, OptimizerStepped):
                self.steps += 1
                if self.steps % 4 == 0:
                    controls.version_ended()

        def close(self) -> None: ...

    Simulation(profile, config_of(profile, row, versions), observers=(Observer(),)).run()
    for control in controls.of(4, versions - 8):
        error = np.std(control.values) / math.sqrt(len(control.values))
        assert abs(np.mean(control.values) - control.expected) < 3 * error
