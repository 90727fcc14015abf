"""Numbers over time, as step functions: how many answers are being generated, groups in the queue, the lag."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from headway.events import Event, FetchTaken, GroupRewarded, GroupSettled, OptimizerStepped, TrajectoryFinished


@dataclass(frozen=True, slots=True)
class Counter:
    """A number over time: ``values[i]`` holds from ``times[i]`` (event clock, ascending) until the next time."""

    name: str
    times: tuple[float, ...]
    values: tuple[float, ...]
    limit: float | None = None
    """The largest value that there can be, where that is known."""

    @property
    def points(self) -> Iterator[tuple[float, float]]:
        return zip(self.times, self.values, strict=True)

    def since(self, begin: float) -> Counter:
        """Return the counter from ``begin`` on."""
        last = bisect_right(self.times, begin) - 1
        points = [(max(time, begin), value) for time, value in list(self.points)[max(last, 0) :]]
        return replace(self, times=tuple(time for time, _ in points), values=tuple(value for _, value in points))

    def thinned(self, resolution: float) -> Counter:
        """Return the counter with only the lowest, highest and last point of each stretch of ``resolution`` seconds."""
        kept: list[tuple[float, float]] = []
        stretch: list[tuple[float, float]] = []
        for point in self.points:
            if stretch and point[0] >= stretch[0][0] + resolution:
                kept += _extremes(stretch)
                stretch = []
            stretch.append(point)
        kept += _extremes(stretch)
        return replace(self, times=tuple(time for time, _ in kept), values=tuple(value for _, value in kept))


@dataclass(slots=True)
class Overlapping:
    """Spans of which many overlap: how many there are at each instant."""

    _starts: array[float] = field(default_factory=lambda: array("d"))
    _ends: array[float] = field(default_factory=lambda: array("d"))

    def add(self, start: float, end: float) -> None:
        self._starts.append(start)
        self._ends.append(end)

    def levels(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return times, ascending, and the number of spans from each of them until the next one."""
        times = np.concatenate([np.frombuffer(self._starts), np.frombuffer(self._ends)])
        steps = np.repeat([1.0, -1.0], [len(self._starts), len(self._ends)])
        order = np.argsort(times, kind="stable")
        times, levels = times[order], np.cumsum(steps[order])
        last = np.append(times[1:] != times[:-1], True) if len(times) else np.zeros(0, bool)
        return tuple(times[last].tolist()), tuple(levels[last].tolist())


@dataclass(slots=True)
class Counters:
    """Accumulates counters from events. Answers that were still being generated when the run ended are not counted."""

    slots: int = 0
    _generated: Overlapping = field(default_factory=Overlapping)
    _in_steps: Overlapping = field(default_factory=Overlapping)
    _in_turns: Overlapping = field(default_factory=Overlapping)
    _waiting: Overlapping = field(default_factory=Overlapping)
    _queued: set[int] = field(default_factory=set)
    _queue: list[tuple[float, float]] = field(default_factory=list)
    _lags: list[tuple[float, float]] = field(default_factory=list)

    def on_event(self, event: Event) -> None:
        match event:
            case TrajectoryFinished():
                self._finish(event)
            case GroupRewarded():
                self._queued.add(event.number)
                self._queue.append((event.time, len(self._queued)))
            case FetchTaken():
                self._queued.difference_update(event.numbers)
                self._queue.append((event.time, len(self._queued)))
            case GroupSettled() if event.number in self._queued:
                self._queued.remove(event.number)
                self._queue.append((event.time, len(self._queued)))
            case OptimizerStepped() if event.lags:
                self._lags.append((event.time, max(event.lags)))

    def _finish(self, event: TrajectoryFinished) -> None:
        """Note an answer, or what an episode of a program did all the time: it waits for the policy between steps."""
        if not event.steps:
            self._generated.add(event.started, event.finished)
        for start, end in event.steps:
            self._in_steps.add(start, end)
        for (_, start), (end, _) in pairwise(event.steps):
            self._in_turns.add(start, end)
        for start, end in event.waits:
            self._waiting.add(start, end)

    def all(self) -> tuple[Counter, ...]:
        """The counters that have at least one point."""
        generating = Counter("answers being generated", *self._generated.levels(), limit=self.slots or None)
        found = (
            generating,
            Counter("episodes at the policy", *self._in_turns.levels()),
            Counter("episodes in environments", *self._in_steps.levels()),
            Counter("episodes not begun", *self._waiting.levels()),
            _counter("groups in the queue", self._queue),
            _counter("largest lag trained", self._lags),
        )
        return tuple(counter for counter in found if counter.times)


def _counter(name: str, points: list[tuple[float, float]]) -> Counter:
    """Make a counter from (time, value) points; of several at the same time the last one counts."""
    latest = dict(points)
    return Counter(name, tuple(latest), tuple(latest.values()))


def _extremes(stretch: list[tuple[float, float]]) -> list[tuple[float, float]]:
    values = [value for _, value in stretch]
    places = {values.index(min(values)), values.index(max(values)), len(values) - 1} if values else set()
    return [stretch[place] for place in sorted(places)]
