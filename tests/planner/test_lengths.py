"""Lengths are drawn by who asks, and have the distribution that the profile describes."""

from __future__ import annotations

import math
import random
from collections import Counter
from statistics import NormalDist, correlation, fmean, quantiles

import pytest

from headway.data.types import TrajectoryId
from headway.planner.profiles.job_profile import ConstantLengths, EmpiricalLengths, LognormalLengths
from headway.planner.profiles.lengths import LengthSampler, filtered_of, lengths_of


def lognormal(mean: float = 1000, sigma: float = 0.8, max: int = 10**9, within_group: float = 0.0) -> LognormalLengths:
    return LognormalLengths(kind="lognormal", mean=mean, sigma=sigma, max=max, within_group=within_group)


def empirical(groups: list[list[int]], replay: bool = False) -> EmpiricalLengths:
    return EmpiricalLengths(kind="empirical", groups=groups, replay=replay)


def draw(lengths: LengthSampler, groups: int, n: int) -> list[list[int]]:
    """[groups][n]; the rows of one epoch."""
    return [[lengths(TrajectoryId(0, row, 0, k)) for k in range(n)] for row in range(groups)]


@pytest.mark.parametrize("profile", [lognormal(within_group=0.5), empirical([[1, 2], [3, 4, 5], [6]])])
def test_a_length_depends_on_who_asks_and_never_on_when(profile: LognormalLengths | EmpiricalLengths):
    ids = [
        TrajectoryId(epoch, row, attempt, k)
        for epoch in (-1, 0, 1)
        for row in range(20)
        for attempt in range(2)
        for k in range(4)
    ]
    in_order = {id_: lengths_of(profile, seed=3)(id_) for id_ in ids}
    shuffled = random.Random(0).sample(ids, len(ids))
    one_sampler = lengths_of(profile, seed=3)
    assert {id_: one_sampler(id_) for id_ in shuffled} == in_order


def test_each_part_of_an_id_and_the_seed_change_the_draw():
    profile = lognormal(mean=1e6)
    home = TrajectoryId(0, 0, 0, 0)
    others = [TrajectoryId(1, 0, 0, 0), TrajectoryId(0, 1, 0, 0), TrajectoryId(0, 0, 1, 0), TrajectoryId(0, 0, 0, 1)]
    drawn = [lengths_of(profile, 0)(id_) for id_ in [home, *others]] + [lengths_of(profile, 1)(home)]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("replay", [False, True])
def test_a_group_is_filtered_if_the_recorded_one_was_whose_lengths_it_takes(replay: bool):
    groups = [[10], [20], [30], [40]]
    recorded = EmpiricalLengths(kind="empirical", groups=groups, replay=replay, filtered=[1, 3])
    lengths, filtered = lengths_of(recorded, seed=5), filtered_of(recorded, seed=5)
    assert filtered is not None
    fates = {}
    for row in range(40):
        id_ = TrajectoryId(0, row, 0, 0)
        fates.setdefault(lengths(id_), set()).add(filtered(id_))
    assert fates == {10: {False}, 20: {True}, 30: {False}, 40: {True}}


def test_nothing_is_known_of_fates_that_are_not_on_record():
    assert filtered_of(empirical([[1]]), seed=0) is None
    assert filtered_of(lognormal(), seed=0) is None


def test_constant_lengths_are_constant():
    assert draw(lengths_of(ConstantLengths(kind="constant", tokens=7), seed=0), 2, 2) == [[7, 7], [7, 7]]


def test_lognormal_lengths_have_the_quantiles_of_the_distribution():
    profile = lognormal(mean=1000, sigma=0.8, within_group=0.3)
    drawn = [group[0] for group in draw(lengths_of(profile, seed=1), 20_000, 1)]
    assert fmean(drawn) == pytest.approx(1000, rel=0.02)
    normal = NormalDist(math.log(1000) - 0.8**2 / 2, 0.8)
    for share, measured in zip(range(1, 10), quantiles(drawn, n=10), strict=True):
        assert measured == pytest.approx(math.exp(normal.inv_cdf(share / 10)), rel=0.04)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_answers_of_a_group_have_the_given_share_of_the_variance_in_common(share: float):
    groups = draw(lengths_of(lognormal(mean=1e6, within_group=share), seed=2), 4_000, 2)
    logs = [[math.log(length) for length in group] for group in groups]
    assert correlation(*zip(*logs, strict=True)) == pytest.approx(share, abs=0.04)


def test_prompts_of_neighbouring_rows_have_nothing_in_common():
    drawn = [math.log(group[0]) for group in draw(lengths_of(lognormal(mean=1e6), seed=0), 4_000, 1)]
    assert correlation(drawn[:-1], drawn[1:]) == pytest.approx(0, abs=0.05)


def test_lognormal_lengths_are_cut_and_never_empty():
    drawn = [group[0] for group in draw(lengths_of(lognormal(mean=2, sigma=2, max=5), seed=0), 2_000, 1)]
    assert set(drawn) == {1, 2, 3, 4, 5}


def test_without_spread_every_length_is_the_mean():
    groups = draw(lengths_of(lognormal(mean=300, sigma=0), seed=0), 10, 2)
    assert {length for group in groups for length in group} == {300}


def test_recorded_groups_are_drawn_whole_and_equally_often():
    recorded = [[10, 11], [20, 21], [30, 31], [40, 41]]
    drawn = draw(lengths_of(empirical(recorded), seed=5), 4_000, 3)
    counts = Counter(tuple(group) for group in drawn)
    assert set(counts) == {(a, b, a) for a, b in recorded}, "the third answer takes the first length again"
    assert min(counts.values()) > 900


def test_replayed_groups_follow_their_rows_further_attempts_included():
    lengths = lengths_of(empirical([[1, 2], [3, 4]], replay=True), seed=5)
    for attempt in range(2):
        drawn = [[lengths(TrajectoryId(0, row, attempt, k)) for k in range(2)] for row in (0, 1, 2)]
        assert drawn == [[1, 2], [3, 4], [1, 2]]
