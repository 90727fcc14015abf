"""Lanes: the work of one worker or stage over time, as spans, and the reasons for its idle time in between.

    work spans ──────────────┐
    claims, most telling first ┼─▶ lay_out() ─▶ spans of a lane: sorted, disjoint, without a gap
    the lane's life ─────────┘

A lane's idle time is its life without its work. A claim gives the reason for a part of it; where claims overlap, the
first one counts. So the idle spans of a lane add up to its idle time, however many claims there are.

`Counters` are numbers over the same time, as step functions: answers being generated, groups in the queue, the lag.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Self

import numpy as np

from headway import events
from headway.events import Span
from headway.reports.metrics.intervals import complement

NOTHING_REPORTED = "nothing reported"


class Named(StrEnum):
    """A kind with ``words`` for it on the page."""

    words: str

    def __new__(cls, value: str, words: str = "") -> Self:
        kind = str.__new__(cls, value)
        kind._value_, kind.words = value, words
        return kind


class SpanKind(Named):
    """Kind of a span."""

    STEP = "step", "optimizer step"
    FORWARD = "forward", "forward pass"
    GATHER = "gather", "gather weights"
    DECODE = "decode", "prefill or decode"
    PROCESS = "process", "stage at work"
    ENVIRONMENT = "environment", "steps of environments"
    TRANSFER = "transfer", "weights on their way"
    LOAD = "load", "load weights"
    VALIDATE = "validate", "validation"
    CHECKPOINT = "checkpoint", "checkpoint"
    SERVE = "serve", "version served"
    TRAIN_LEASE = "train_lease", "devices lent to training"
    GENERATE_LEASE = "generate_lease", "devices lent to generation"
    HALTED = "halted", "idle: halted"
    IDLE = "idle", "idle: waits"


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """Interval of a lane: work, or idle time with its reason. Times are on the event clock.

    ``label`` describes this span (its version, its number of items). ``reason``, for idle time only, has a fixed
    wording, so that seconds can be summed by reason.
    """

    start: float
    end: float
    kind: SpanKind
    label: str
    reason: str | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def span(self) -> Span:
        return self.start, self.end


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of a timeline. ``spans`` are sorted and disjoint; a lane of a party's own time has no gaps either."""

    group: str
    name: str
    spans: tuple[LaneSpan, ...] = ()
    annotates: bool = False
    """True if the lane describes the lane above it, and no work of its own."""

    def seconds(self, window: Span) -> float:
        """Seconds of ``window`` that the lane's spans cover."""
        return sum(max(min(span.end, window[1]) - max(span.start, window[0]), 0.0) for span in self.spans)

    def idle_by_reason(self, window: Span) -> dict[str, float]:
        """Return reason -> idle seconds within ``window``."""
        totals: dict[str, float] = {}
        for span in self.spans:
            seconds = min(span.end, window[1]) - max(span.start, window[0])
            if span.reason is not None and seconds > 0:
                totals[span.reason] = totals.get(span.reason, 0.0) + seconds
        return totals


ROUNDING_S = 1e-9
"""Longest gap in seconds that counts as rounding of sums in different orders."""


def idle(span: Span, reason: str, label: str | None = None, kind: SpanKind = SpanKind.IDLE) -> LaneSpan:
    """Make a claim: during ``span`` nothing was done, for ``reason``."""
    return LaneSpan(*span, kind, reason if label is None else label, reason)


def lay_out(work: Iterable[LaneSpan], claims: Sequence[Iterable[LaneSpan]], life: Span) -> tuple[LaneSpan, ...]:
    """Return a lane's spans: ``work``, and idle time with the reason of the first of ``claims`` that covers it.

    The spans tile ``life`` exactly. Idle time without a claim gets the reason that nothing was reported.
    """
    placed: list[LaneSpan] = []
    free = complement([], life)
    for layer in (work, *claims):
        fitting = clipped(layer, free)
        if fitting:
            placed += fitting
            gaps = complement((span.span for span in placed), life)
            free = [gap for gap in gaps if gap[1] - gap[0] > ROUNDING_S]
    placed += [idle(gap, NOTHING_REPORTED) for gap in free]
    return joined(sorted(placed, key=lambda span: span.start))


def joined(spans: Iterable[LaneSpan]) -> tuple[LaneSpan, ...]:
    """Join sorted spans: neighbours that touch and say the same become one; empty ones are left out."""
    result: list[LaneSpan] = []
    for span in spans:
        if span.end <= span.start:
            continue
        last = result[-1] if result else None
        said = (span.kind, span.label, span.reason)
        if last is not None and span.start <= last.end and said == (last.kind, last.label, last.reason):
            result[-1] = replace(last, end=max(last.end, span.end))
        else:
            result.append(span)
    return tuple(result)


def side_by_side(group: str, name: str, spans: Iterable[LaneSpan]) -> list[Lane]:
    """Make as few lanes as it takes for spans that overlap, at least one: ``name``, ``name (2)``, …

    Spans without length are left out.
    """
    rows: list[list[LaneSpan]] = [[]]
    for span in sorted((span for span in spans if span.end > span.start), key=lambda span: span.start):
        row = next((row for row in rows if not row or row[-1].end <= span.start), None)
        if row is None:
            rows.append(row := [])
        row.append(span)
    return [Lane(group, name if i == 0 else f"{name} ({i + 1})", tuple(row)) for i, row in enumerate(rows)]


def clipped(spans: Iterable[LaneSpan], free: Sequence[Span]) -> list[LaneSpan]:
    """Return the parts of ``spans`` within ``free``, a union. Of two that overlap, the earlier one keeps its time."""
    fitting: list[LaneSpan] = []
    reached = float("-inf")
    first = 0
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        start = max(span.start, reached)
        while first < len(free) and free[first][1] <= start:
            first += 1
        at = first
        while at < len(free) and free[at][0] < span.end:
            piece = (max(start, free[at][0]), min(span.end, free[at][1]))
            if piece[1] > piece[0]:
                fitting.append(replace(span, start=piece[0], end=piece[1]))
            at += 1
        reached = max(reached, span.end)
    return fitting


@dataclass(frozen=True, slots=True)
class Counter:
    """A number over time: ``values[i]`` holds from ``times[i]`` (event clock, ascending) until the next time."""

    name: str
    times: tuple[float, ...]
    values: tuple[float, ...]
    limit: float | None = None
    """Largest possible value; None if unknown."""

    @property
    def points(self) -> Iterator[tuple[float, float]]:
        return zip(self.times, self.values, strict=True)

    def since(self, begin: float) -> Counter:
        """Return the counter from ``begin`` on."""
        last = bisect_right(self.times, begin) - 1
        points = [(max(time, begin), value) for time, value in list(self.points)[max(last, 0) :]]
        return replace(self, times=tuple(time for time, _ in points), values=tuple(value for _, value in points))


@dataclass(slots=True)
class Overlapping:
    """Accumulates overlapping spans, and counts them at each instant."""

    _starts: array[float] = field(default_factory=lambda: array("d"))
    _ends: array[float] = field(default_factory=lambda: array("d"))

    def add(self, start: float, end: float) -> None:
        self._starts.append(start)
        self._ends.append(end)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def stretches(self) -> list[tuple[Span, int]]:
        """Return the intervals of the spans' union, each with the largest number of spans that overlap in it."""
        found: list[tuple[Span, int]] = []
        since, most = 0.0, 0
        for time, level in zip(*self.levels(), strict=True):
            if level and not most:
                since = time
            most = max(most, int(level)) if level else most
            if not level and most:
                found.append(((since, time), most))
                most = 0
        return found

    def levels(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return times, ascending, and the number of spans from each of them until the next one."""
        # `concatenate` copies: nothing can be appended to an array while a view of it exists.
        times = np.concatenate([np.frombuffer(self._starts), np.frombuffer(self._ends)])
        steps = np.repeat([1.0, -1.0], [len(self._starts), len(self._ends)])
        order = np.argsort(times, kind="stable")
        times, levels = times[order], np.cumsum(steps[order])
        # Of several steps at one time the level after the last one counts.
        last = np.append(times[1:] != times[:-1], True) if len(times) else np.zeros(0, bool)
        return tuple(times[last].tolist()), tuple(levels[last].tolist())


@dataclass(slots=True)
class Counters:
    """Accumulates counters from events. Answers that were still being generated when the run ended are not counted."""

    slots: int = 0
    _generated: Overlapping = field(default_factory=Overlapping)
    in_steps: Overlapping = field(default_factory=Overlapping)
    _in_turns: Overlapping = field(default_factory=Overlapping)
    waiting: Overlapping = field(default_factory=Overlapping)
    _queued: set[int] = field(default_factory=set)
    _queue: list[tuple[float, float]] = field(default_factory=list)
    _lags: list[tuple[float, float]] = field(default_factory=list)

    def on_event(self, event: events.Event) -> None:
        match event:
            case events.RunStarted():
                self.slots = sum(event.slots.values())
            case events.ReplicaJoined():
                self.slots += event.slots
            case events.TrajectoryFinished():
                self._finish(event)
            case events.GroupRewarded():
                self._queued.add(event.number)
                self._queue.append((event.time, len(self._queued)))
            case events.BatchTaken():
                self._leave_queue(event.time, event.numbers)
            case events.GroupSettled() if event.number in self._queued:
                self._leave_queue(event.time, [event.number])
            case events.OptimizerStepped() if event.lags:
                self._lags.append((event.time, max(event.lags)))

    def _leave_queue(self, time: float, numbers: Sequence[int]) -> None:
        self._queued.difference_update(numbers)
        self._queue.append((time, len(self._queued)))

    def _finish(self, event: events.TrajectoryFinished) -> None:
        """Note an answer, or the steps and waits of a program's episode: it waits for the policy between steps."""
        if not event.steps:
            self._generated.add(event.started, event.finished)
        for start, end in event.steps:
            self.in_steps.add(start, end)
        for (_, start), (end, _) in pairwise(event.steps):
            self._in_turns.add(start, end)
        for start, end in event.waits:
            self.waiting.add(start, end)

    def all(self) -> tuple[Counter, ...]:
        """The counters that have at least one point."""
        generating = Counter("answers being generated", *self._generated.levels(), limit=self.slots or None)
        found = (
            generating,
            Counter("episodes at the policy", *self._in_turns.levels()),
            Counter("episodes in environments", *self.in_steps.levels()),
            Counter("episodes not begun", *self.waiting.levels()),
            _counter("groups in the queue", self._queue),
            _counter("largest lag trained", self._lags),
        )
        return tuple(counter for counter in found if counter.times)


def _counter(name: str, points: list[tuple[float, float]]) -> Counter:
    """Make a counter from (time, value) points; of several at the same time the last one counts."""
    latest = dict(points)
    return Counter(name, tuple(latest), tuple(latest.values()))
