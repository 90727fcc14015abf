"""Micro-batches: each row in one, none over the budget, groups and episodes whole as far as they fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.data.packing import CollatedRow, Pack, Packing, by_episode, first_fit, grow, token_budget_batches
from headway.data.types import TrajectoryId
from tests.tiers import searched


def row(ids: Sequence[int], prompt: int, episode: TrajectoryId | None = None) -> CollatedRow:
    response = len(ids) - prompt
    return CollatedRow(
        input_ids=np.array(ids, np.int32),
        prompt_length=prompt,
        logprobs=np.zeros(response, np.float32),
        versions=np.zeros(response, np.int32),
        loss_mask=np.ones(response, np.bool_),
        episode=episode,
    )


@st.composite
def fetches(draw: st.DrawFn) -> list[CollatedRow]:
    """Groups of episodes of one to three rows, some of which go on where another is at, and rows without episodes."""
    token = st.integers(2, draw(st.sampled_from([3, 60])))
    rows = []
    for group in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(token, min_size=1, max_size=12))
        for k in range(draw(st.integers(1, 4))):
            begins = prompt
            for _ in range(draw(st.integers(1, 3))):
                ids = begins + draw(st.lists(token, max_size=12))
                rows.append(row(ids, len(begins), TrajectoryId(0, group, 0, k)))
                begins = draw(st.sampled_from([prompt, ids, ids[: max(len(prompt), len(ids) - 2)]]))
    rows += [replace(own, episode=None) for own in rows[: draw(st.integers(0, 2))]]
    return [rows[i] for i in draw(st.permutations(range(len(rows))))]


budgets = st.sampled_from([1, 8, 20, 40, 100, 10_000])
packings = st.builds(Packing, budgets, shared=st.booleans())


def in_line(pack: Pack) -> list[np.ndarray]:
    return [tree.ids[places] for tree in pack.trees for places in tree.places]


@searched(150, fetches(), packings, st.booleans())
def test_each_row_is_in_one_micro_batch_and_none_is_over_the_budget_unless_it_is_one_row(
    rows: list[CollatedRow], packing: Packing, whole: bool
) -> None:
    packs = packing(rows, whole_episodes=whole)
    assert sorted(i for pack in packs for i in pack.rows) == list(range(len(rows)))
    for pack in packs:
        lines = in_line(pack)
        assert [line.tolist() for line in lines] == [rows[i].input_ids.tolist() for i in pack.rows]
        assert pack.tokens == sum(len(tree.ids) for tree in pack.trees)
        assert pack.tokens <= packing.token_budget or len(pack.rows) == 1
        if not packing.shared:
            assert pack.tokens == sum(map(len, lines))


@searched(80, fetches(), budgets, st.booleans())
def test_a_group_that_fits_is_whole_and_its_prompt_is_there_once(
    rows: list[CollatedRow], budget: int, whole: bool
) -> None:
    packs = Packing(budget)(rows, whole_episodes=whole)
    groups: dict[object, list[int]] = {}
    for i, own in enumerate(rows):
        groups.setdefault(own.episode[:-1] if own.episode else i, []).append(i)
    home = {i: number for number, pack in enumerate(packs) for i in pack.rows}
    lines = {
        i: tree
        for pack in packs
        for i, tree in zip(pack.rows, [tree for tree in pack.trees for _ in tree.places], strict=True)
    }
    for group in groups.values():
        tree = grow([rows[i].input_ids for i in group], min(rows[i].prompt_length for i in group))
        if len(tree.ids) <= budget:
            assert len({home[i] for i in group}) == 1
            assert {len(lines[i].ids) for i in group} == {len(tree.ids)}


@searched(80, fetches(), st.booleans(), budgets)
def test_an_episode_that_fits_is_whole_where_that_is_asked_for(
    rows: list[CollatedRow], shared: bool, budget: int
) -> None:
    packing = Packing(budget, shared=shared)
    packs = packing(rows, whole_episodes=True)
    home = {i: number for number, pack in enumerate(packs) for i in pack.rows}
    apart = {i for own in by_episode(rows) if len({home[i] for i in own}) > 1 for i in own}
    assert set(packing.apart(rows, packs)) == apart
    assert len(packing.apart(rows, packs)) == len(apart)
    for own in by_episode(rows):
        if sum(len(rows[i].input_ids) for i in own) <= budget:
            assert apart.isdisjoint(own)


@searched(40, fetches(), packings, st.booleans())
def test_packing_is_a_pure_function_of_the_rows(rows: list[CollatedRow], packing: Packing, whole: bool) -> None:
    one, other = packing(rows, whole_episodes=whole), packing(list(rows), whole_episodes=whole)
    assert [pack.rows for pack in one] == [pack.rows for pack in other]
    for a, b in zip(one, other, strict=True):
        assert all(np.array_equal(x.ids, y.ids) for x, y in zip(a.trees, b.trees, strict=True))
    # Names of groups do not matter, as long as they tell the same rows from each other.
    named = [replace(r, episode=r.episode and TrajectoryId(7, 90 - r.episode[1], 3, r.episode[3])) for r in rows]
    assert [pack.rows for pack in packing(named, whole_episodes=whole)] == [pack.rows for pack in one]


def test_a_group_over_the_budget_is_cut_into_as_few_pieces_as_its_prompt_and_answers_take() -> None:
    prompt = list(range(2, 32))
    rows = [row([*prompt, *[40 + k] * 10], 30, TrajectoryId(0, 0, 0, k)) for k in range(8)]
    assert [pack.tokens for pack in Packing(110)(rows)] == [110]
    assert [pack.tokens for pack in Packing(109)(rows)] == [100, 40]
    assert [pack.tokens for pack in Packing(70)(rows)] == [70, 70]
    assert [pack.tokens for pack in Packing(39)(rows)] == [40] * 8
    assert [pack.tokens for pack in Packing(109, shared=False)(rows)] == [80] * 4


def test_a_prompt_longer_than_the_budget_leaves_each_row_by_itself() -> None:
    prompt = list(range(2, 32))
    rows = [row([*prompt, *[40 + k] * k], 30, TrajectoryId(0, 0, 0, k)) for k in range(4)]
    for budget in (29, 30, 31):
        packs = Packing(budget)(rows)
        assert all(pack.tokens <= budget or len(pack.rows) == 1 for pack in packs)


def test_episodes_of_a_cut_group_keep_their_rows_together_where_sequences_are_looked_at() -> None:
    prompt = list(range(2, 12))
    rows = []
    for k in range(3):
        turn = [*prompt, *[40 + k] * 8]
        rows += [row(ids, n, TrajectoryId(0, 0, 0, k)) for ids, n in ((turn, 10), ([*turn, 50 + k, 60 + k], 18))]
    packing = Packing(35)
    whole, free = packing(rows, whole_episodes=True), packing(rows)
    assert not packing.apart(rows, whole)
    assert all(pack.tokens <= 35 for pack in [*whole, *free])
    tight = Packing(19)
    assert len(tight.apart(rows, tight(rows, whole_episodes=True))) == 6


@searched(40, fetches(), budgets, st.booleans())
def test_rows_that_are_padded_are_batched_by_their_padded_size(
    rows: list[CollatedRow], budget: int, whole: bool
) -> None:
    packs = Packing(budget, packed=False)(rows, whole_episodes=whole)
    assert all(pack.trees == () for pack in packs)
    lengths = [len(r.input_ids) for r in rows]
    units = by_episode(rows) if whole else None
    assert [list(pack.rows) for pack in packs] == token_budget_batches(lengths, budget, units)


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(-3, 40))
def test_what_is_fitted_first_is_the_largest_and_nothing_is_over_the_budget_but_by_itself(
    sizes: list[int], budget: int
) -> None:
    batches = first_fit(sizes, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in batch) <= budget or len(batch) == 1 for batch in batches)
    firsts = [sizes[batch[0]] for batch in batches]
    assert firsts == sorted(firsts, reverse=True)
