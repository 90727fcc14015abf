"""Splits of rows over ranks and micro-batches, with episodes of several rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.data.packing import CollatedRow, by_episode, token_budget_batches
from headway.data.types import RowTokens, TrainSample, TrajectoryId, TurnSpan
from tests.data.resolving import resolve
from tests.tiers import searched

episodes = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), max_size=12)
"""The lengths of each episode's rows."""


def units_of(lengths: Sequence[Sequence[int]]) -> list[list[int]]:
    places = iter(range(10**6))
    return [[next(places) for _ in own] for own in lengths]


@given(st.lists(st.integers(1, 30), max_size=20), st.integers(1, 100))
def test_rows_that_belong_to_nobody_are_batched_longest_first(lengths: list[int], budget: int) -> None:
    expected: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if expected and (len(expected[-1]) + 1) * lengths[expected[-1][0]] <= budget:
            expected[-1].append(index)
        else:
            expected.append([index])
    assert token_budget_batches(lengths, budget) == expected
    assert token_budget_batches(lengths, budget, [[index] for index in range(len(lengths))]) == expected


@searched(100, episodes, st.integers(1, 100))
def test_rows_of_a_unit_share_a_batch_unless_they_alone_exceed_the_budget(
    lengths: list[list[int]], budget: int
) -> None:
    flat, units = [length for own in lengths for length in own], units_of(lengths)
    batches = token_budget_batches(flat, budget, units)
    assert sorted(index for batch in batches for index in batch) == list(range(len(flat)))
    for batch in batches:
        assert batch, "no batch is empty"
        assert len(batch) == 1 or len(batch) * max(flat[i] for i in batch) <= budget
    for unit in units:
        if len(unit) * max(flat[i] for i in unit) <= budget:
            assert sum(not set(unit).isdisjoint(batch) for batch in batches) == 1


def test_a_row_has_the_tokens_the_episode_and_the_turns_of_its_sample() -> None:
    prompt = np.array([1, 2], np.int32)
    ids, versions = np.array([5, 6, 7, 8], np.int32), np.array([3, -1, -1, 4], np.int32)
    mask = versions >= 0
    turns = (TurnSpan(0, 0, 1), TurnSpan(2, 3, 4))
    tokens = RowTokens(prompt, ids, np.float32([-1, 0, 0, -2]), versions, mask, turns)
    whose = TrajectoryId(0, 4, 0, 1)
    samples = [TrainSample("at", 1, 2, 4, whose), TrainSample("at", 1, 2, 4, whose, masked=True)]
    row, masked = resolve(samples, {"at": (tokens, tokens)}.__getitem__)
    assert row.input_ids.tolist() == [1, 2, 5, 6, 7, 8]
    assert (row.prompt_length, row.episode, row.turns) == (2, whose, turns)
    assert row.loss_mask is mask and not masked.loss_mask.any()


@pytest.mark.parametrize("none", [True, False])
def test_rows_are_told_apart_by_their_episodes_and_each_is_one_where_none_is_given(none: bool) -> None:
    nothing = np.zeros(1, np.float32)
    rows = [
        CollatedRow(
            np.zeros(2, np.int32), 1, nothing, np.zeros(1, np.int32), nothing == 0, episode=None if none else id
        )
        for id in (TrajectoryId(0, 0, 0, 0), TrajectoryId(0, 0, 0, 1), TrajectoryId(0, 0, 0, 0))
    ]
    assert by_episode(rows) == ([[0], [1], [2]] if none else [[0, 2], [1]])
