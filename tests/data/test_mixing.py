"""Mixing sources: what an epoch holds, that it follows from (seed, epoch) alone, and that a cursor leads back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import floor

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st

from headway.data.files import Record
from headway.data.mixing import Mixture, SourceShare, generator, quotas
from headway.data.sources import RowSource
from headway.data.tokenize import LeftOut, Reason, total
from headway.errors import DataError
from tests.data.conftest import row_source
from tests.tiers import searched


def parts_of(*rows_and_weights: tuple[int, int | str | None]) -> list[SourceShare]:
    return [
        SourceShare(f"part {i}", rows, None if weight is None else Fraction(weight))
        for i, (rows, weight) in enumerate(rows_and_weights)
    ]


@st.composite
def weighted_parts(draw: st.DrawFn) -> list[SourceShare]:
    """Up to four parts, each with a place in an epoch."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    weights = st.fractions(min_value=Fraction(1, 20), max_value=20, max_denominator=20)
    parts = [SourceShare(str(i), rows, draw(weights)) for i, rows in enumerate(sizes)]
    total, whole = sum(sizes), sum(part.weight or 0 for part in parts)
    assume(all(total * (part.weight or 0) >= whole for part in parts))
    return parts


def stream_of(part: int, mixture: Mixture, parts: Sequence[SourceShare], epochs: int) -> list[list[int]]:
    """The rows of one part that each epoch has, by an independent count of where the part's records lie."""
    start = sum(one.rows for one in parts[:part])
    return [
        [i - start for i in mixture.epoch(epoch).indices.tolist() if start <= i < start + parts[part].rows]
        for epoch in range(epochs)
    ]


# ---------------------------------------------------------------------------------------------- shares


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (parts_of((3, None), (5, None)), [3, 5]),
        (parts_of((3, 1), (5, 1)), [4, 4]),
        (parts_of((90, "0.1"), (10, "0.9")), [10, 90]),
        (parts_of((10, 1), (10, 1), (10, 1)), [10, 10, 10]),
        (parts_of((5, 1), (5, 2)), [3, 7]),
        (parts_of((3, 1), (3, 1), (4, 1)), [4, 3, 3]),  # 10/3 each: equal remainders go to the first
        (parts_of((3, 30), (5, 50)), [3, 5]),
        (parts_of((7, "1/3")), [7]),
    ],
)
def test_an_epoch_has_as_many_draws_as_there_are_rows_shared_out_by_weight(parts, expected) -> None:
    assert quotas(parts) == expected


@searched(100, weighted_parts())
def test_every_share_is_its_exact_one_rounded_up_or_down(parts: list[SourceShare]) -> None:
    total, whole = sum(part.rows for part in parts), sum(part.weight for part in parts)
    shared = quotas(parts)
    assert sum(shared) == total
    assert all(
        floor(total * part.weight / whole) <= n <= floor(total * part.weight / whole) + 1
        for part, n in zip(parts, shared, strict=True)
    )


def test_a_weight_that_gives_nothing_of_an_epoch_is_refused_with_the_numbers() -> None:
    with pytest.raises(DataError, match=r"part 1: its weight 1 of 1001 .*10 prompts"):
        quotas(parts_of((5, 1000), (5, 1)))


def test_a_source_whose_rows_are_all_held_out_is_refused() -> None:
    with pytest.raises(DataError, match=r"part 0: .*held out \(data\.val_size\)"):
        quotas(parts_of((0, None), (5, None)))


# ---------------------------------------------------------------------------------------------- epochs


@searched(
    100,
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    epoch=st.integers(0, 9),
    shuffle=st.booleans(),
)
def test_without_weights_every_row_comes_once_an_epoch(sizes, seed: int, epoch: int, shuffle: bool) -> None:
    draws = Mixture(parts_of(*((rows, None) for rows in sizes)), seed=seed, shuffle=shuffle).epoch(epoch)
    assert sorted(draws.indices.tolist()) == list(range(sum(sizes)))
    assert not draws.turns.any()
    assert draws.first.all() if epoch == 0 else not draws.first.any()


@searched(100, parts=weighted_parts(), seed=st.integers(0, 99), epoch=st.integers(0, 9), shuffle=st.booleans())
def test_with_weights_every_epoch_has_each_parts_quota(parts, seed: int, epoch: int, shuffle: bool) -> None:
    mixture = Mixture(parts, seed=seed, shuffle=shuffle)
    counts = [len(stream_of(i, mixture, parts, epoch + 1)[epoch]) for i in range(len(parts))]
    assert counts == mixture.quotas


@searched(100, parts=weighted_parts(), seed=st.integers(0, 99), shuffle=st.booleans(), epochs=st.integers(1, 6))
def test_no_row_comes_again_before_all_others_of_its_part_did(parts, seed: int, shuffle: bool, epochs: int) -> None:
    """How often two rows of one part were drawn by the end of any epoch differs by one at most."""
    mixture = Mixture(parts, seed=seed, shuffle=shuffle)
    for i, part in enumerate(parts):
        drawn: Counter[int] = Counter()
        for of_epoch in stream_of(i, mixture, parts, epochs):
            drawn.update(of_epoch)
            counts = [drawn[row] for row in range(part.rows)]
            assert max(counts) - min(counts) <= 1


@searched(100, parts=weighted_parts(), seed=st.integers(0, 99), shuffle=st.booleans())
def test_every_draw_of_an_epoch_is_one_of_its_own_and_each_row_is_new_once(parts, seed: int, shuffle: bool) -> None:
    mixture = Mixture(parts, seed=seed, shuffle=shuffle)
    new: list[int] = []
    epochs_of_a_pass = max(-(-part.rows // quota) for part, quota in zip(parts, mixture.quotas, strict=True))
    for epoch in range(2 * epochs_of_a_pass):
        draws = mixture.epoch(epoch)
        assert len(set(zip(draws.indices.tolist(), draws.turns.tolist(), strict=True))) == mixture.rows
        new += draws.indices[draws.first].tolist()
    assert sorted(new) == list(range(mixture.rows))


def test_weights_in_proportion_to_the_rows_are_the_same_as_none() -> None:
    weighted = Mixture(parts_of((4, 2), (6, 3)), seed=5, shuffle=True)
    plain = Mixture(parts_of((4, None), (6, None)), seed=5, shuffle=True)
    for epoch in range(3):
        assert weighted.epoch(epoch).indices.tolist() == plain.epoch(epoch).indices.tolist()


def test_an_epochs_draws_do_not_depend_on_what_was_drawn_before() -> None:
    parts = parts_of((7, 1), (20, 3), (3, 2))
    one, other = (Mixture(parts, seed=5, shuffle=True) for _ in range(2))
    for epoch in range(4):
        one.epoch(epoch)
    np.random.seed(0)
    assert one.epoch(9).indices.tolist() == other.epoch(9).indices.tolist()
    assert one.epoch(9).indices.tolist() != Mixture(parts, seed=6, shuffle=True).epoch(9).indices.tolist()


def test_a_part_that_is_cut_by_epochs_comes_in_another_order_each_pass() -> None:
    parts = parts_of((8, 1), (8, 3))
    mixture = Mixture(parts, seed=5, shuffle=True)
    assert mixture.quotas == [4, 12]
    halves = [frozenset(rows) for rows in stream_of(0, mixture, parts, 8)]
    passes = [(halves[i], halves[i + 1]) for i in range(0, 8, 2)]
    assert all(a | b == set(range(8)) for a, b in passes)
    assert len({a for a, _ in passes}) > 1


def test_unshuffled_sources_follow_each_other_or_are_spread_evenly_by_weight() -> None:
    plain = Mixture(parts_of((2, None), (3, None)), seed=0, shuffle=False)
    assert plain.epoch(3).indices.tolist() == [0, 1, 2, 3, 4]
    weighted = Mixture(parts_of((2, 1), (6, 3)), seed=0, shuffle=False)
    assert weighted.epoch(0).indices.tolist() == [2, 0, 3, 4, 5, 1, 6, 7]


def test_one_source_without_weights_is_ordered_by_numpys_permutation_of_seed_and_epoch() -> None:
    expected = np.random.default_rng(np.random.SeedSequence(3, spawn_key=(1, 4))).permutation(10)
    assert Mixture([SourceShare("", 10)], seed=3, shuffle=True).epoch(4).indices.tolist() == expected.tolist()
    assert generator(3, 1, 4).permutation(10).tolist() == expected.tolist()


# ---------------------------------------------------------------------------------------------- prompts and cursors


class CharacterTokenizer:
    """Stands in for `PromptTokenizer`: one token per character."""

    max_length = 5

    def __call__(self, records: Sequence[Record]) -> list:
        return [
            (r.prompt, np.zeros(len(r.prompt), np.int32)) if len(r.prompt) <= 5 else LeftOut(Reason.TOO_LONG, r.source)
            for r in records
        ]


def source_of(
    parts: Sequence[SourceShare], too_long: frozenset[int] = frozenset(), seed: int = 0, **options
) -> RowSource:
    rows = [(part.name, i) for part in parts for i in range(part.rows)]
    records = [Record("too long" if n in too_long else "ok", n, name) for n, (name, _) in enumerate(rows)]
    return row_source(records, CharacterTokenizer(), seed=seed, parts=parts, **options)


def drain(source: RowSource) -> list[tuple[int, int, int]]:
    return [(prompt.epoch, prompt.row, prompt.answer) for prompt in iter(source.next, None)]


@searched(100, parts=weighted_parts(), seed=st.integers(0, 9), held_out=st.integers(0, 5))
def test_a_row_number_is_unique_in_its_epoch_and_leads_back_to_the_row(parts, seed: int, held_out: int) -> None:
    stride = sum(part.rows for part in parts) + held_out
    source = source_of(parts, seed=seed, epochs=4, held_out=held_out)
    drawn = drain(source)
    assert len({(epoch, row) for epoch, row, _ in drawn}) == len(drawn) == 4 * sum(part.rows for part in parts)
    assert all(row % stride == answer for _, row, answer in drawn)
    assert all(source.find(epoch, row).answer == answer for epoch, row, answer in drawn)


@searched(
    100,
    parts=weighted_parts(),
    data=st.data(),
    taken=st.integers(0, 60),
    prefetch=st.integers(0, 9),
    other_prefetch=st.integers(0, 9),
    seed=st.integers(0, 99),
    shuffle=st.booleans(),
)
def test_a_restored_mixture_goes_on_where_the_saved_one_stood(
    parts, data, taken: int, prefetch: int, other_prefetch: int, seed: int, shuffle: bool
) -> None:
    starts = np.cumsum([0, *(part.rows for part in parts)]).tolist()
    rows = range(starts[-1])
    too_long = data.draw(st.frozensets(st.sampled_from(rows)))
    assume(all(set(range(a, b)) - too_long for a, b in pairwise(starts)))
    options = {"too_long": too_long, "seed": seed, "shuffle": shuffle}
    source = source_of(parts, prefetch=prefetch, epochs=5, **options)
    for _ in range(taken):
        source.next()
    state = json.loads(json.dumps(source.state()))
    resumed = source_of(parts, prefetch=other_prefetch, epochs=5, **options)
    resumed.restore(state)
    assert resumed.state() == state
    assert drain(resumed) == drain(source)
    assert resumed.left_out.counts == source.left_out.counts
    assert total(source.left_out.counts) <= len(too_long)


def test_too_long_prompts_are_counted_by_source_and_once_each_however_often_they_are_drawn() -> None:
    parts = parts_of((4, 3), (12, 1))
    source = source_of(parts, too_long=frozenset({0, 5, 6}), epochs=1)
    drain(source)
    assert source.left_out.counts["part 0"] == {"too_long": 1}  # drawn three times
    later = source_of(parts, too_long=frozenset({0, 5, 6}), epochs=9)
    drain(later)
    assert later.left_out.counts == {"part 0": {"too_long": 1}, "part 1": {"too_long": 2}}
    assert total(later.left_out.counts) == 3


def test_one_source_of_nothing_but_too_long_prompts_is_an_error_that_names_it() -> None:
    with pytest.raises(DataError, match=r"all 2 prompts of part 1 .*data\.max_prompt_length=5 tokens"):
        source_of(parts_of((3, None), (2, None)), too_long=frozenset({3, 4}))


def test_one_source_of_nothing_but_bad_prompts_is_an_error_that_says_what_is_wrong_with_them() -> None:
    """It said that they were too long."""

    class Refusing(CharacterTokenizer):
        def __call__(self, records: Sequence[Record]) -> list:
            return [
                LeftOut(Reason.EMPTY, r.source, "no tokens") if r.source == "part 1" else one
                for r, one in zip(records, super().__call__(records), strict=True)
            ]

    parts = parts_of((3, None), (2, None))
    records = [Record("ok", n, part.name) for part in parts for n in range(part.rows)]
    with pytest.raises(DataError, match=r"all 2 rows of part 1 cannot be used \(empty 2\): no tokens"):
        row_source(records, Refusing(), parts=parts)


def test_the_only_prompt_that_fits_is_found_however_small_its_sources_share() -> None:
    """Of part 1 one row in 40 fits; an epoch draws 2 of its rows."""
    parts = parts_of((2, 20), (40, 1))
    source = source_of(parts, too_long=frozenset(range(2, 41)), prefetch=1)
    seen = {source.next().answer for _ in range(2000)}
    assert seen == {0, 1, 41}


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (parts_of((4, 1), (4, 3)), r"sources .* then, .* now"),
        (parts_of((3, None), (5, None)), r"sources .* then, .* now"),
        (parts_of((4, None), (5, None)), r"rows 8 then, 9 now"),
    ],
)
def test_a_cursor_over_another_mix_is_refused(other, difference: str) -> None:
    state = source_of(parts_of((4, None), (4, None))).state()
    with pytest.raises(DataError, match=difference):
        source_of(other).restore(state)


def test_a_cursor_of_a_shuffled_order_is_refused_by_an_unshuffled_one() -> None:
    with pytest.raises(DataError, match="shuffle True then, False now"):
        source_of(parts_of((4, None)), shuffle=False).restore(source_of(parts_of((4, None))).state())
