"""Assignment of fetches to data ranks: balanced, whole groups where that pays, one function of its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.assignment import Cost, assign, by_group, split
from headway.data.types import TrainSample, TrajectoryId
from tests.tiers import searched

COST = Cost(64)
Groups = Sequence[tuple[int, Sequence[int]]]
"""Each group's prompt length, and the lengths of its answers."""
groups_of = st.lists(st.tuples(st.integers(1, 200), st.lists(st.integers(0, 200), min_size=1, max_size=5)), max_size=6)


def samples_of(groups: Groups, first: int = 0) -> list[TrainSample]:
    return [
        TrainSample(None, k, prompt, length, TrajectoryId(0, first + number, 0, k))
        for number, (prompt, lengths) in enumerate(groups)
        for k, length in enumerate(lengths)
    ]


def loads(
    samples: Sequence[TrainSample], owners: Mapping[TrajectoryId, int], ranks: int, cost: Cost = COST
) -> list[float]:
    """The cost of each rank's work, each prompt of a group once."""
    result = []
    for share in split(samples, owners, ranks):
        own = [samples[i] for i in share]
        prompts = {(sample.episode[:3], sample.prompt_length) for sample in own}
        result.append(
            sum(cost.prompt(length) for _, length in prompts)
            + sum(cost.response(sample.prompt_length, sample.length) for sample in own)
        )
    return result


def ranks_of_groups(samples: Sequence[TrainSample], owners: Mapping[TrajectoryId, int]) -> list[int]:
    """The number of ranks that each group is on."""
    return [len({owners[samples[i].episode] for i in group}) for group in by_group(samples)]


def test_a_pair_of_tokens_costs_a_sixth_of_a_width_of_a_token() -> None:
    cost = Cost(hidden_size=10)
    assert cost.prompt(4) == pytest.approx(4 + (1 + 2 + 3 + 4) / 60)
    assert cost.response(4, 3) == pytest.approx(3 + (5 + 6 + 7) / 60)
    assert cost.prompt(4) + cost.response(4, 3) == pytest.approx(cost.prompt(7))


@searched(100, groups_of, groups_of, st.integers(1, 4))
def test_each_episode_is_on_one_rank_and_each_sample_in_one_share(one: Groups, two: Groups, ranks: int) -> None:
    mini_batches = [samples_of(one), samples_of(two, first=len(one))]
    samples = [sample for of in mini_batches for sample in of]
    owners = assign(mini_batches, ranks, COST)
    shares = split(samples, owners, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(samples)))
    assert all(share == sorted(share) for share in shares)
    assert owners == assign(mini_batches, ranks, COST)
    with pytest.raises(KeyError):
        split(samples_of([(1, [1])], first=99), owners, ranks)


def test_the_rows_of_an_episode_are_on_one_rank_however_long_they_are() -> None:
    episode = TrajectoryId(0, 0, 0, 0)
    rows = [TrainSample(None, i, prompt, 1000, episode) for i, prompt in enumerate((10, 1200, 2300))]
    owners = assign([[*rows, *samples_of([(10, [5, 5])], first=1)]], 3, COST)
    assert len(split(rows, owners, 3)[owners[episode]]) == 3


def whole_loads(samples: Sequence[TrainSample], ranks: int) -> float:
    """The least makespan of whole groups, by trying all placements."""
    groups = by_group(samples)
    return min(
        max(loads(samples, {samples[i].episode: to[g] for g, group in enumerate(groups) for i in group}, ranks))
        for to in product(range(ranks), repeat=len(groups))
    )


@settings(max_examples=40, deadline=None)
@given(groups_of.filter(len))
def test_the_longest_rank_is_near_the_best_placement_of_whole_groups_or_better(groups: Groups) -> None:
    samples = samples_of(groups)
    owners = assign([samples], 3, COST)
    longest, best = max(loads(samples, owners, 3)), whole_loads(samples, 3)
    assert longest <= (4 / 3) * best * (1 + 1e-9), "what placing the costliest first guarantees"
    if any(ranks > 1 for ranks in ranks_of_groups(samples, owners)):
        assert longest < (4 / 3) * best


def test_many_groups_stay_whole_and_the_ranks_are_even_in_each_mini_batch_and_in_the_batch() -> None:
    rng = np.random.default_rng(0)
    groups = [(int(rng.integers(50, 500)), rng.integers(20, 2000, 16).tolist()) for _ in range(256)]
    mini_batches = [samples_of(groups[i : i + 64], first=i) for i in range(0, 256, 64)]
    samples = [sample for of in mini_batches for sample in of]
    owners = assign(mini_batches, 8, COST)
    assert set(ranks_of_groups(samples, owners)) == {1}
    for some, within in [*((of, 1.02) for of in mini_batches), (samples, 1.005)]:
        of_ranks = loads(some, owners, 8)
        assert max(of_ranks) <= within * np.mean(of_ranks)


def test_bins_of_mini_batches_that_are_not_even_make_an_even_batch() -> None:
    """Three groups on two ranks in each mini-batch: the rank with two of them changes."""
    mini_batches = [samples_of([(1000, [1])] * 3, first=3 * number) for number in range(4)]
    owners = assign(mini_batches, 2, COST)
    samples = [sample for of in mini_batches for sample in of]
    assert all(sorted(map(len, split(of, owners, 2))) == [1, 2] for of in mini_batches)
    assert [len(share) for share in split(samples, owners, 2)] == [6, 6]


def test_fewer_groups_than_ranks_are_cut_so_that_all_ranks_work() -> None:
    samples = samples_of([(10, [100] * 8), (10, [100] * 8)])
    owners = assign([samples], 4, COST)
    assert [len(share) for share in split(samples, owners, 4)] == [4, 4, 4, 4]
    assert ranks_of_groups(samples, owners) == [2, 2], "no more ranks compute a prompt than are needed"


def test_a_group_that_is_larger_than_a_ranks_share_is_cut_and_the_others_are_not() -> None:
    samples = samples_of([(10, [400] * 8), *[(10, [40] * 8)] * 8])
    owners = assign([samples], 4, COST)
    assert ranks_of_groups(samples, owners) == [4, *[1] * 8]
    of_ranks = loads(samples, owners, 4)
    assert max(of_ranks) <= 1.05 * np.mean(of_ranks)


def test_a_group_whose_prompt_is_most_of_its_work_stays_whole_though_ranks_are_idle() -> None:
    samples = samples_of([(5000, [3] * 8)])
    assert set(assign([samples], 4, COST).values()) == {0}
    assert len(set(assign([samples_of([(5, [300] * 8)])], 4, COST).values())) == 4


def test_long_rows_are_balanced_by_attentions_square_and_not_by_their_tokens() -> None:
    groups = [(1, [3000]), *[(1, [1000])] * 6]
    samples = samples_of(groups)
    shares = split(samples, assign([samples], 2, Cost(64)), 2)
    assert min(map(len, shares)) == 1, "9 M pairs are more than 6 times 1 M"
    shares = split(samples, assign([samples], 2, Cost(10**9)), 2)
    assert sorted(sum(samples[i].length for i in share) for share in shares) == [4000, 5000]


def test_pieces_that_meet_on_a_rank_compute_their_prompt_there_once() -> None:
    """A group of six long answers takes three ranks, two answers each: in halves, or with a rank more, it is worse."""
    samples = samples_of([(1000, [400] * 6), (1, [10] * 5), (300, [10] * 7), (1000, [100] * 5)])
    of_ranks = loads(samples, assign([samples], 4, COST), 4)
    assert max(of_ranks) <= (COST.prompt(1000) + 2 * COST.response(1000, 400)) * 1.01
