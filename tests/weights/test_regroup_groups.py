"""Places and groups, for every small pair of layouts, against sets of single elements."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.weights.regroup import Coordinates, Layout, consecutive, micro_data_groups, regrouped
from tests.weights.layouts import LAYOUTS, PAIRS, held


def assert_partition(groups: tuple[tuple[int, ...], ...], world: int, size: int) -> None:
    assert sorted(rank for group in groups for rank in group) == list(range(world))
    assert {len(group) for group in groups} == {size}
    assert [min(group) for group in groups] == sorted(min(group) for group in groups)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_are_in_megatrons_order(layout: Layout) -> None:
    ranks = np.arange(layout.world).reshape(layout.pp, layout.dp, layout.tp)
    for (pp, dp, tp), rank in np.ndenumerate(ranks):
        assert layout.coordinates(int(rank)) == Coordinates(pp=pp, dp=dp, tp=tp)


def test_sixteen_ranks_with_two_shards_and_four_stages_form_the_groups_of_megatrons_documentation() -> None:
    training = consecutive(Layout(pp=4, tp=2, dp=2))
    assert training.tensor_groups == tuple((rank, rank + 1) for rank in range(0, 16, 2))
    assert training.pipeline_groups == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    assert training.data_groups == ((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15))
    assert training.model_groups == ((0, 1, 4, 5, 8, 9, 12, 13), (2, 3, 6, 7, 10, 11, 14, 15))


def test_four_shards_become_two_by_joining_every_second_rank() -> None:
    training, generation = Layout(pp=1, tp=4, dp=2), Layout(pp=1, tp=2, dp=4)
    assert consecutive(generation).tensor_groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert regrouped(training, generation).tensor_groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert regrouped(training, generation).data_groups == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert micro_data_groups(training, generation) == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_stages_and_shards_are_joined_together() -> None:
    training, generation = Layout(pp=2, tp=4, dp=1), Layout(pp=1, tp=2, dp=4)
    assert micro_data_groups(training, generation) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert regrouped(training, generation).tensor_groups == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_an_unchanged_layout_is_not_regrouped() -> None:
    for layout in LAYOUTS:
        assert regrouped(layout, layout) == consecutive(layout)
        assert micro_data_groups(layout, layout) == tuple((rank,) for rank in range(layout.world))


def test_the_groups_of_every_kind_partition_the_ranks() -> None:
    for training, generation in PAIRS:
        for placement in (consecutive(training), consecutive(generation), regrouped(training, generation)):
            layout = placement.layout
            assert sorted(set(placement.places)) == sorted(placement.places)
            assert_partition(placement.tensor_groups, layout.world, layout.tp)
            assert_partition(placement.pipeline_groups, layout.world, layout.pp)
            assert_partition(placement.data_groups, layout.world, layout.dp)
            assert_partition(placement.model_groups, layout.world, layout.shards)
        assert_partition(micro_data_groups(training, generation), training.world, training.shards // generation.shards)


def test_a_model_group_holds_the_model_once_and_a_data_group_the_same_part() -> None:
    for training, generation in PAIRS:
        everything = frozenset(product(range(training.world), repeat=2))
        for placement in (consecutive(training), consecutive(generation), regrouped(training, generation)):
            parts = held(placement)
            for group in placement.model_groups:
                assert sum(len(parts[rank]) for rank in group) == len(everything)
                assert everything == frozenset().union(*(parts[rank] for rank in group))
            for group in placement.data_groups:
                assert len({parts[rank] for rank in group}) == 1


def test_members_of_a_group_stand_in_the_order_of_the_coordinate_in_which_alone_they_differ() -> None:
    for training, generation in PAIRS:
        placement, (pp, tp, dp) = regrouped(training, generation), (generation.pp, generation.tp, generation.dp)
        for group in placement.tensor_groups:
            first = placement.places[group[0]]
            assert [placement.places[rank] for rank in group] == [first._replace(tp=i) for i in range(tp)]
        for group in placement.pipeline_groups:
            first = placement.places[group[0]]
            assert [placement.places[rank] for rank in group] == [first._replace(pp=i) for i in range(pp)]
        for group in placement.data_groups:
            first = placement.places[group[0]]
            assert [placement.places[rank] for rank in group] == [first._replace(dp=i) for i in range(dp)]


def test_regrouped_every_training_part_is_inside_its_ranks_generation_part() -> None:
    for training, generation in PAIRS:
        before, after = consecutive(training), regrouped(training, generation)
        for rank, (mine, wanted) in enumerate(zip(held(before), held(after), strict=True)):
            assert mine <= wanted
            assert after.part(rank).covers(before.part(rank))


def test_a_micro_data_group_has_exactly_what_each_of_its_members_generates_with() -> None:
    for training, generation in PAIRS:
        before, after = held(consecutive(training)), held(regrouped(training, generation))
        for group in micro_data_groups(training, generation):
            joined = frozenset().union(*(before[rank] for rank in group))
            assert sum(len(before[rank]) for rank in group) == len(joined)
            assert all(after[rank] == joined for rank in group)


def test_a_micro_data_group_stays_inside_one_training_replica() -> None:
    for training, generation in PAIRS:
        for group in micro_data_groups(training, generation):
            assert len({training.coordinates(rank).dp for rank in group}) == 1


def test_a_micro_data_group_is_in_the_order_of_its_training_parts() -> None:
    for training, generation in PAIRS:
        parts = held(consecutive(training))
        for group in micro_data_groups(training, generation):
            corners = [min(parts[rank]) for rank in group]
            assert corners == sorted(corners)


def test_layouts_of_different_device_counts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pp=1 tp=4 dp=2\) has 8 devices and generation .* has 4"):
        regrouped(Layout(pp=1, tp=4, dp=2), Layout(pp=1, tp=2, dp=2))


@pytest.mark.parametrize(
    ("training", "generation", "message"),
    [
        (Layout(1, 6, 2), Layout(1, 4, 3), "tp=4, which does not divide training's tp=6.* tp=1, 2, 3, 6"),
        (Layout(1, 2, 2), Layout(1, 4, 1), "tp=4, which does not divide training's tp=2.* tp=1, 2"),
        (Layout(1, 4, 1), Layout(2, 2, 1), "pp=2, which does not divide training's pp=1.* pp=1"),
        (Layout(4, 1, 3), Layout(3, 1, 4), "pp=3, which does not divide training's pp=4.* pp=1, 2, 4"),
    ],
    ids=str,
)
def test_a_generation_degree_that_does_not_divide_the_training_degree_is_refused(
    training: Layout, generation: Layout, message: str
) -> None:
    for function in (regrouped, micro_data_groups):
        with pytest.raises(ConfigError, match=message):
            function(training, generation)


@pytest.mark.parametrize("degrees", [(0, 1, 1), (1, -2, 1), (1, 1, 0)])
def test_a_degree_below_one_is_refused(degrees: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="degree below 1"):
        Layout(*degrees)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_layout_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="ranks 0 to 7"):
        Layout(pp=1, tp=4, dp=2).coordinates(rank)
