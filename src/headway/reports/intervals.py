"""Lengths of sets of time intervals: unions, intersections, complements.

An interval is ``(start, end)`` in seconds; one whose end is not after its start is empty. A *union* is sorted, disjoint
and has no two intervals that touch. Idle time is always a complement of a union, never a sum of waits: two waits that
overlap are one wait, and time in which nothing was reported is idle.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from headway.events import Span


def union(spans: Iterable[Span]) -> list[Span]:
    """The same set of instants as sorted, disjoint intervals."""
    merged: list[Span] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    """Seconds that lie in at least one of ``spans``."""
    return sum(end - start for start, end in union(spans))


def intersection(a: Iterable[Span], b: Iterable[Span]) -> list[Span]:
    """Instants that lie in both, as a union."""
    left, right = union(a), union(b)
    common: list[Span] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if end > start:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def complement(spans: Iterable[Span], window: Span) -> list[Span]:
    """Instants of ``window`` that lie in none of ``spans``, as a union."""
    gaps: list[Span] = []
    reached = window[0]
    for start, end in intersection(spans, [window]):
        if start > reached:
            gaps.append((reached, start))
        reached = end
    if window[1] > reached:
        gaps.append((reached, window[1]))
    return gaps


class IntervalUnion:
    """A union that grows, built for intervals that arrive nearly in order: adding and measuring are then O(log n)."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._before: list[float] = []
        """Total length of the intervals before the i-th; a valid prefix, extended on demand."""

    def add(self, span: Span) -> None:
        start, end = span
        if end <= start:
            return
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        del self._before[first:]

    def within(self, window: Span) -> float:
        """Seconds of ``window`` that the union covers: at least 0, at most the window's length."""
        start, end = window
        if end <= start:
            return 0.0
        return min(max(self._until(end) - self._until(start), 0.0), end - start)

    @property
    def spans(self) -> Sequence[Span]:
        return list(zip(self._starts, self._ends, strict=True))

    def _until(self, instant: float) -> float:
        """Length of the part before ``instant``."""
        last = bisect_left(self._starts, instant) - 1
        if last < 0:
            return 0.0
        while len(self._before) <= last:
            i = len(self._before)
            self._before.append(self._before[-1] + self._ends[i - 1] - self._starts[i - 1] if i else 0.0)
        return self._before[last] + min(instant, self._ends[last]) - self._starts[last]
