"""Figures of an evaluation: pass@k, means over problems and their errors, what is left out."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import pytest
import torch

from headway.api.eval.figures import Estimate, ScoredAnswer, Solved, figures, pass_at_k, usual_ks


def test_pass_at_k_is_the_share_of_subsets_of_k_answers_with_a_correct_one() -> None:
    for n in range(1, 8):
        for c in range(n + 1):
            correct = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                subsets = list(combinations(correct, k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(10_000, 3, 1000), (10_000, 9, 1), (5000, 2500, 100), (2000, 1, 1999)])
def test_pass_at_k_is_exact_where_binomials_overflow(n: int, c: int, k: int) -> None:
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-10)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_pass_at_k_refuses_counts_that_cannot_be(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="expected 0 <= c <= n"):
        pass_at_k(n, c, k)


def test_the_usual_ks_are_powers_of_two_and_n() -> None:
    assert [usual_ks(n) for n in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


def test_an_estimate_has_the_standard_error_of_a_mean() -> None:
    values = [0.0, 1.0, 0.5, 0.25, 1.0]
    mean = sum(values) / 5
    variance = sum((value - mean) ** 2 for value in values) / 4
    estimate = Estimate.of(values)
    assert estimate.value == pytest.approx(mean)
    assert estimate.error == pytest.approx((variance / 5) ** 0.5)
    assert Estimate.of([0.5]) == Estimate(0.5, None)


def solved(rewards: list[float], failure: str | None = None) -> Solved:
    answers = tuple(
        ScoredAnswer(k, "x", tokens=k + 1, cut_off=k == 0, finish_reason="stop", reward=reward, parts={})
        for k, reward in enumerate(rewards)
    )
    return Solved(0, "s", "p", "a", answers, failure=failure)


def test_rewards_from_the_threshold_on_are_correct_also_when_they_are_single_precision() -> None:
    nine_tenths = float(torch.tensor(0.9))
    assert nine_tenths < 0.9
    assert solved([nine_tenths, 0.8, 1.0]).correct(0.9) == 2
    assert solved([1.0, 1.0], failure="timeout after 10 s").correct(0.0) == 0


def test_figures_are_means_over_problems() -> None:
    found = figures([solved([1.0, 0.0]), solved([0.5, 0.5]), solved([0.0, 0.0], failure="no")], (1, 2), threshold=0.5)
    assert (found.problems, found.answers, found.failed) == (3, 6, 1)
    assert found.accuracy.value == pytest.approx(1 / 3)
    assert found.pass_at[1].value == pytest.approx((0.5 + 1 + 0) / 3)
    assert found.pass_at[2].value == pytest.approx(2 / 3)
    assert (found.mean_tokens, found.max_tokens, found.cut_off) == (1.5, 2, 0.5)


def test_failed_episodes_are_left_out_of_their_problem_s_figures() -> None:
    one, three = solved([1.0, 0.0, 0.0, 0.0]), solved([1.0, 1.0, 0.0, 0.0])
    one = replace(one, answers=tuple(replace(a, failure="no" if a.k else None) for a in one.answers))
    three = replace(three, answers=tuple(replace(a, failure="no" if a.k == 3 else None) for a in three.answers))
    found = figures([one, three, solved([0.0] * 4, failure="episode failed: no")], (1, 2, 4), threshold=1.0)
    assert (found.problems, found.answers, found.failed, found.failed_episodes) == (3, 12, 1, 4)
    assert found.accuracy.value == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert found.pass_at[1].value == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert found.pass_at[2].value == pytest.approx((1 + 0) / 2)  # the first one has no two answers that count
    assert found.pass_at[4] == Estimate(0.0, None)
    assert found.too_few == {1: 0, 2: 1, 4: 2}
    assert 2 not in figures([one], (1, 2), threshold=1.0).pass_at


def test_a_mean_is_an_accuracy_only_where_rewards_are_right_or_wrong() -> None:
    assert figures([solved([1.0, 0.0])], (1,), threshold=1.0).of_right_and_wrong
    assert not figures([solved([1.0, 0.0]), solved([0.5])], (1,), threshold=1.0).of_right_and_wrong
