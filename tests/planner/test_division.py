"""Work of a step is divided over data ranks, and the one with most decides: against tables, and what must hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.data.types import TrainSample, TrajectoryId
from headway.planner.profiles.costs import Division


def samples(*groups: list[int], prompt: int = 0) -> list[TrainSample]:
    return [
        TrainSample(None, k, prompt, length, TrajectoryId(0, row, 0, k))
        for row, lengths in enumerate(groups)
        for k, length in enumerate(lengths)
    ]


def test_one_rank_has_all_tokens_prompts_included() -> None:
    assert Division(1).tokens(samples([5, 7], [9], prompt=2)) == 5 + 7 + 9 + 3 * 2


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [(2, 2 * 220), (3, 3 * 220), (4, 4 * 110), (8, 8 * 110)],
    ids=["a group each", "an answer too many", "an answer each", "more ranks than answers"],
)
def test_the_rank_with_most_answers_decides(ranks: int, expected: int) -> None:
    assert Division(ranks).tokens(samples([100, 100], [100, 100], prompt=10)) == expected


def test_a_part_of_a_batch_stays_with_the_ranks_that_the_batch_was_assigned_to() -> None:
    first, second = samples([100], [100]), samples([0], [0], [60], [60])[2:]
    division = Division(2)
    division.begin([first, second])
    assert division.tokens(first) == 2 * 100
    assert division.tokens([first[0]]) == 2 * 100
    division.end()
    assert division.tokens(first + second) == 2 * 160


@given(
    lengths=st.lists(st.lists(st.integers(1, 1000), min_size=1, max_size=4), min_size=1, max_size=6),
    ranks=st.integers(1, 8),
)
def test_ranks_take_at_least_an_even_share_and_the_longest_answer_and_at_most_everything(
    lengths: list[list[int]], ranks: int
) -> None:
    total = sum(map(sum, lengths))
    longest = max(map(max, lengths))
    assert max(total, ranks * longest) <= Division(ranks).tokens(samples(*lengths)) <= ranks * total
