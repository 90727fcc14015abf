"""Interval arithmetic against a reference that only looks: is this instant in any of them?

Endpoints are whole numbers, so the instants k + ½ decide every length exactly.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.events import Span
from headway.reports.metrics.intervals import IntervalUnion, Spread, complement, intersection, length, union
from tests.tiers import searched

HORIZON = 30
spans = st.lists(st.tuples(st.integers(0, HORIZON), st.integers(0, HORIZON)), max_size=12)
windows = st.tuples(st.integers(0, HORIZON), st.integers(0, HORIZON)).map(lambda pair: (min(pair), max(pair)))


def instants(of: list[Span]) -> set[int]:
    """Every k for which k + ½ lies in one of the intervals."""
    return {k for k in range(HORIZON) if any(start < k + 0.5 < end for start, end in of)}


@searched(100, spans)
def test_a_union_covers_the_same_instants_with_sorted_intervals_that_do_not_touch(of: list[Span]) -> None:
    merged = union(of)
    assert instants(merged) == instants(of)
    assert all(start < end for start, end in merged)
    assert all(before[1] < after[0] for before, after in pairwise(merged))


@given(spans)
def test_the_length_counts_overlaps_once(of: list[Span]) -> None:
    assert length(of) == len(instants(of))


@searched(100, spans, spans)
def test_an_intersection_has_the_instants_of_both(a: list[Span], b: list[Span]) -> None:
    assert instants(intersection(a, b)) == instants(a) & instants(b)


@searched(100, spans, windows)
def test_a_complement_has_the_instants_of_the_window_that_are_in_none(of: list[Span], window: Span) -> None:
    gaps = complement(of, window)
    assert instants(gaps) == instants([window]) - instants(of)
    assert gaps == union(gaps)


@searched(100, spans, st.lists(windows, min_size=1, max_size=5))
def test_a_growing_union_equals_the_whole_one_in_any_order_of_arrival(of: list[Span], asked: list[Span]) -> None:
    growing = IntervalUnion()
    for number, span in enumerate(of, start=1):
        growing.add(span)
        for window in asked:  # asking in between must not freeze what comes later
            assert growing.within(window) == len(instants(of[:number]) & instants([window]))
    assert list(growing.spans) == union(of)


@searched(
    100, st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), max_size=20), st.floats(0, 1e6), st.floats(0, 1e6)
)
def test_a_covered_part_is_never_negative_nor_longer_than_the_window(of: list[Span], a: float, b: float) -> None:
    growing = IntervalUnion()
    for span in of:
        growing.add(span)
    assert 0 <= growing.within((min(a, b), max(a, b))) <= max(a, b) - min(a, b)
    assert growing.within((max(a, b), min(a, b))) == 0


CUTS = st.lists(st.integers(0, HORIZON), min_size=2, max_size=4).map(sorted)
"""An origin, and instants up to which is summed up, in order."""


@searched(100, spans, CUTS, st.integers(0, HORIZON))
def test_what_was_summed_up_counts_as_before_in_windows_from_the_origin_and_from_there_on(
    of: list[Span], cuts: list[int], end: int
) -> None:
    origin, *until = cuts
    growing = IntervalUnion()
    for span in of:
        growing.add(span)
    growing.begin(origin)
    for cut in until:
        growing.sum_up(cut)
    whole, rest = (origin, max(end, until[-1])), (until[-1], max(end, until[-1]))
    assert growing.within(whole) == len(instants(of) & instants([whole]))
    assert growing.within(rest) == len(instants(of) & instants([rest]))
    assert all(start >= until[-1] for start, _ in growing.spans)


@searched(100, CUTS, st.integers(1, HORIZON), st.integers(0, HORIZON))
def test_amounts_that_were_summed_up_or_come_late_count_as_before(cuts: list[int], length: int, late: int) -> None:
    origin, *until = cuts
    parts = [((start, start + length), 2.0 * length) for start in range(0, HORIZON, length)]  # 2 a second
    spread = Spread()
    for span, amount in parts[late:]:
        spread.add(span, amount)
    spread.begin(origin)
    for cut in until:
        spread.sum_up(cut)
    for span, amount in parts[:late]:
        spread.add(span, amount)
    told = parts[-1][0][1]
    assert spread.within((origin, told)) == pytest.approx(2.0 * max(told - origin, 0))


def test_a_part_of_a_span_that_comes_late_is_added_to_the_sum() -> None:
    growing = IntervalUnion()
    growing.begin(2.0)
    growing.add((4.0, 6.0))
    growing.sum_up(10.0)
    growing.add((1.0, 3.0))
    growing.add((9.0, 12.0))
    assert growing.within((2.0, 20.0)) == 2 + 1 + 3
    assert growing.within((10.0, 20.0)) == 2
