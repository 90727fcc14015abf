"""Lengths of sets of time intervals: unions, intersections, complements.

An interval is ``(start, end)`` in seconds; one whose end is not after its start is empty. A *union* is sorted, disjoint
and has no two intervals that touch. Idle time is always a complement of a union, never a sum of waits: two waits that
overlap are one wait, and time in which nothing was reported is idle.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from math import inf

from headway.events import Span


def union(spans: Iterable[Span]) -> list[Span]:
    """The union of intervals: the same instants as sorted, disjoint intervals."""
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
    """Instants that lie in both sets of intervals, as a union."""
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
    """A growing union of intervals that arrive nearly in order: adding and measuring are then O(log n).

    For the time before the last `sum_up` only a sum is kept. A window that begins in that time counts the whole sum, so
    windows should begin at the origin or after that time.

    Example:
        >>> busy = IntervalUnion()
        >>> for span in ((0.0, 2.0), (1.0, 3.0), (5.0, 6.0)):
        ...     busy.add(span)
        >>> busy.spans, busy.within((2.0, 10.0))
        ([(0.0, 3.0), (5.0, 6.0)], 2.0)
    """

    def __init__(self, origin: float = -inf) -> None:
        """Begin with an empty union; instants before ``origin`` are not counted."""
        self._origin = self._summed_until = origin
        self._summed = 0.0
        """Seconds that the union covers from the origin to ``_summed_until``."""
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._before: list[float] = []
        """Total length of the intervals before the i-th; a valid prefix, extended on demand."""

    def begin(self, origin: float) -> None:
        """Forget all instants before ``origin``, added already or later."""
        self.sum_up(origin)
        self._origin, self._summed = origin, 0.0

    def sum_up(self, until: float) -> None:
        """Replace the intervals before ``until`` by the sum of their lengths."""
        if until <= self._summed_until:
            return
        self._summed += self._until(until)
        passed = bisect_right(self._ends, until)
        del self._starts[:passed], self._ends[:passed]
        if self._starts and self._starts[0] < until:
            self._starts[0] = until
        self._before.clear()
        self._summed_until = until

    def add(self, span: Span) -> None:
        """Add an interval. A part of it before the last `sum_up` must be new: it is added to the sum."""
        start, end = max(span[0], self._origin), span[1]
        if start < self._summed_until:
            self._summed += max(min(end, self._summed_until) - start, 0.0)
            start = self._summed_until
        if end <= start:
            return
        # left and right, so that touching intervals are joined: gaps of zero length are not idle time.
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        # Prefix sums from the changed interval on are wrong now.
        del self._before[first:]

    def within(self, window: Span) -> float:
        """Seconds of ``window`` that the union covers: at least 0, at most the window's length."""
        start, end = window
        if end <= start:
            return 0.0
        # A window that begins in the summed-up time counts the whole sum.
        before = -self._summed if start < self._summed_until else self._until(start)
        return min(max(self._until(end) - before, 0.0), end - start)

    @property
    def spans(self) -> Sequence[Span]:
        """The intervals that were not summed up."""
        return list(zip(self._starts, self._ends, strict=True))

    def _until(self, instant: float) -> float:
        """Length of the intervals before ``instant``, without those summed up."""
        last = bisect_left(self._starts, instant) - 1
        if last < 0:
            return 0.0
        while len(self._before) <= last:
            i = len(self._before)
            self._before.append(self._before[-1] + self._ends[i - 1] - self._starts[i - 1] if i else 0.0)
        return self._before[last] + min(instant, self._ends[last]) - self._starts[last]


class Spread:
    """Amounts spread evenly over spans, which come in order. `begin` and `sum_up` work as in `IntervalUnion`."""

    def __init__(self, origin: float = -inf) -> None:
        self._origin = self._summed_until = origin
        self._summed = 0.0
        self._parts: deque[tuple[float, float, float]] = deque()
        """Amounts that were not summed up, as (start, end, amount)."""

    def begin(self, origin: float) -> None:
        """Forget everything before ``origin``, added already or later."""
        self.sum_up(origin)
        self._origin, self._summed = origin, 0.0

    def sum_up(self, until: float) -> None:
        """Replace the amounts before ``until`` by their sum."""
        if until <= self._summed_until:
            return
        while self._parts and self._parts[0][0] < until:
            start, end, amount = self._parts.popleft()
            inside = amount * (min(end, until) - start) / (end - start)
            self._summed += inside
            if end > until:
                self._parts.appendleft((until, end, amount - inside))
                break
        self._summed_until = until

    def add(self, span: Span, amount: float) -> None:
        """Add an amount. A part before the origin is left out; one before the last `sum_up` is added to the sum."""
        start, end = span
        if end <= max(start, self._origin):
            return
        if start < self._origin:
            start, amount = self._origin, amount * (end - self._origin) / (end - start)
        if start < self._summed_until:
            late = amount * (min(end, self._summed_until) - start) / (end - start)
            start, amount, self._summed = self._summed_until, amount - late, self._summed + late
        if end > start:
            self._parts.append((start, end, amount))

    def within(self, window: Span) -> float:
        """Return the amount inside ``window``; a part that straddles its edge counts by what lies inside."""
        total = self._summed if window[0] < self._summed_until and window[1] > window[0] else 0.0
        for start, end, amount in self._parts:
            if (inside := min(end, window[1]) - max(start, window[0])) > 0:
                total += amount * inside / (end - start)
        return total
