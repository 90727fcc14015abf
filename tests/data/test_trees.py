"""A line of rows behind their common prefixes: what a token of a row sees in it is what it sees in the row."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headway.data.packing import LEAST_SHARED, Segments, grow
from tests.data.trees import rows_and_prompt, seen_by_parents, seen_by_rows
from tests.tiers import searched

Rows = list[NDArray[np.int32]]


def ids(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


@searched(150, rows_and_prompt(), st.booleans())
def test_every_row_is_found_at_its_places_and_its_tokens_see_those_before_them_in_it_and_no_others(
    given_rows: tuple[Rows, int], shared: bool
) -> None:
    rows, prompt = given_rows
    tree = grow(rows, prompt if shared else None)
    tokens = len(tree.ids)
    assert len(tree.places) == len(rows)
    for row, places in zip(rows, tree.places, strict=True):
        assert np.array_equal(tree.ids[places], row)
        assert np.array_equal(tree.positions[places], np.arange(len(row)))
    assert np.array_equal(np.unique(np.concatenate(tree.places)), np.arange(tokens)), "a token that no row has"
    seen = seen_by_rows(tree.places, tokens)
    assert np.array_equal(seen_by_parents(tree.segments, tokens), seen)
    of = np.searchsorted(tree.segments.starts, np.arange(tokens), side="right") - 1
    q, k = np.indices((tokens, tokens))
    assert np.array_equal((k <= q) & (q < tree.segments.ends[of][k]), seen), "a segment's subtree ends elsewhere"
    assert tree.pairs == seen.sum()


@settings(max_examples=60)
@given(rows_and_prompt())
def test_a_line_has_no_more_tokens_than_its_rows_and_the_prompt_once(given_rows: tuple[Rows, int]) -> None:
    rows, prompt = given_rows
    tokens = sum(map(len, rows))
    assert len(grow(rows, prompt).ids) <= tokens - prompt * (len(rows) - 1)
    assert len(grow(rows, None).ids) == tokens


@settings(max_examples=40)
@given(rows_and_prompt(), st.randoms(use_true_random=False))
def test_rows_that_are_there_already_cost_nothing_and_their_order_does_not_matter(
    given_rows: tuple[Rows, int], random: object
) -> None:
    rows, prompt = given_rows
    once, twice = grow(rows, prompt), [*rows, *rows]
    order = list(range(len(twice)))
    random.shuffle(order)  # type: ignore[attr-defined]
    tree = grow([twice[i] for i in order], prompt)
    assert np.array_equal(tree.ids, once.ids)
    assert np.array_equal(tree.segments.ends, once.segments.ends)
    for place, i in enumerate(order):
        assert np.array_equal(tree.places[place], once.places[i % len(rows)])


@settings(max_examples=20)
@given(rows_and_prompt())
def test_the_same_rows_give_the_same_line_and_stay_as_they_are(given_rows: tuple[Rows, int]) -> None:
    rows, prompt = given_rows
    copies = [row.copy() for row in rows]
    one, other = grow(rows, prompt), grow(copies, prompt)
    assert np.array_equal(one.ids, other.ids)
    assert all(np.array_equal(a, b) for a, b in zip(one.places, other.places, strict=True))
    assert np.array_equal(one.segments.parents, other.segments.parents)
    assert all(np.array_equal(row, copy) for row, copy in zip(rows, copies, strict=True))


def test_a_prompt_is_shared_however_short_and_what_follows_only_where_it_is_long_enough() -> None:
    fork = ids(1, 5, 5, 5, 5)  # behind the prompt of one token: as many as a segment of their own takes
    assert len(fork) - 1 == LEAST_SHARED
    assert len(grow([ids(1, 2), ids(1, 3)], 1).ids) == 3
    assert len(grow([ids(*fork, 6), ids(*fork, 7)], 1).ids) == len(fork) + 2
    assert len(grow([ids(*fork[:-1], 6), ids(*fork[:-1], 7)], 1).ids) == 1 + 2 * len(fork[1:])


def test_rows_of_different_prompts_share_what_they_have_in_common_and_it_is_long() -> None:
    assert len(grow([ids(1, 2, 3), ids(1, 4, 5)], 0).ids) == 6
    assert len(grow([ids(1, 2, 3, 4, 5), ids(1, 2, 3, 4, 6)], 0).ids) == 6


def test_segments_of_several_lines_stand_one_behind_the_other() -> None:
    trees = [grow(rows, 2) for rows in ([ids(1, 2, 3), ids(1, 2, 4)], [ids(9, 9)], [ids(1, 2), ids(1, 2, 8)])]
    joined = Segments.join([tree.segments for tree in trees])
    tokens = [len(tree.ids) for tree in trees]
    seen, at = np.zeros((sum(tokens), sum(tokens)), np.bool_), 0
    for tree, n in zip(trees, tokens, strict=True):
        seen[at : at + n, at : at + n] = seen_by_parents(tree.segments, n)
        at += n
    assert np.array_equal(seen_by_parents(joined, sum(tokens)), seen)
    assert joined.ends.max() == sum(tokens)
