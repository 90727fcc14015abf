"""Data that the page's script draws: lanes as lists of integers beside a table of strings, merged where there are too
many.

lanes ─▶ merged(): at most ``most`` spans, totals kept ─▶ page_data(): microseconds since the run's first event
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.events import Span
from headway.reports.timeline.device_lanes import REPLICAS, TRAINER
from headway.reports.timeline.environment_lanes import ENVIRONMENTS
from headway.reports.timeline.lanes import Lane, LaneSpan, SpanKind
from headway.reports.timeline.stage_lanes import GROUP as STAGES
from headway.reports.timeline.timeline import MarkKind, Timeline

MAX_SPANS = 100_000
"""Most spans that a page holds; of more, the shortest are merged first."""
MAX_POINTS = 4_000
"""Most points that a page draws of a counter."""
WORDS = {
    SpanKind.STEP: "optimizer step",
    SpanKind.FORWARD: "forward pass",
    SpanKind.GATHER: "gather weights",
    SpanKind.DECODE: "prefill or decode",
    SpanKind.PROCESS: "stage at work",
    SpanKind.ENVIRONMENT: "steps of environments",
    SpanKind.TRANSFER: "weights on their way",
    SpanKind.LOAD: "load weights",
    SpanKind.VALIDATE: "validation",
    SpanKind.CHECKPOINT: "checkpoint",
    SpanKind.SERVE: "version served",
    SpanKind.TRAIN_LEASE: "devices lent to training",
    SpanKind.GENERATE_LEASE: "devices lent to generation",
    SpanKind.HALTED: "idle: halted",
    SpanKind.IDLE: "idle: waits",
}
ROWS = {
    MarkKind.DISCARDED: "groups discarded",
    MarkKind.SUPERSEDED: "updates superseded",
    MarkKind.JOINED: "replicas joined",
    MarkKind.LOST: "replicas lost",
    MarkKind.WARNING: "warnings",
    MarkKind.NOTE: "notes",
}
"""Kinds of marks that have a row of their own → the row's name."""
TIMED = (TRAINER, REPLICAS, ENVIRONMENTS, STAGES)
"""Groups of lanes that cover every instant from their beginning to their end: what is not idle is busy."""
IDLE = frozenset({SpanKind.IDLE, SpanKind.HALTED})


def merged(lanes: Sequence[Lane], window: Span, most: int) -> tuple[tuple[Lane, ...], float]:
    """Lanes with at most ``most`` spans in all, and the seconds below which neighbours were merged (0 for none).

    The limit cannot be kept where there are more lanes than that, or where no span is short.
    """
    resolution, wall = 0.0, window[1] - window[0]
    result = tuple(lanes)
    while sum(len(lane.spans) for lane in result) > most and resolution < wall / 100:
        resolution = max(4 * resolution, wall / 1e6)
        result = tuple(replace(lane, spans=tuple(merge_short(lane.spans, resolution))) for lane in lanes)
    return result, resolution


def merge_short(spans: Iterable[LaneSpan], resolution: float) -> Iterator[LaneSpan]:
    """Merge each run of neighbours shorter than ``resolution``, and within it, into one span for each kind.

    The seconds of each kind and reason stay what they were; within ``resolution`` their order is lost.
    """
    short: list[LaneSpan] = []
    for span in spans:
        if short and (span.seconds >= resolution or span.end - short[0].start > resolution):
            yield from _one_for_each_kind(short)
            short = []
        if span.seconds >= resolution:
            yield span
        else:
            short.append(span)
    yield from _one_for_each_kind(short)


def _one_for_each_kind(short: list[LaneSpan]) -> Iterator[LaneSpan]:
    if len(short) <= 2:
        yield from short
        return
    alike: dict[tuple[SpanKind, str | None], list[LaneSpan]] = {}
    for span in short:
        alike.setdefault((span.kind, span.reason), []).append(span)
    start = short[0].start
    for (kind, reason), those in alike.items():
        end = start + sum(span.seconds for span in those)
        label = those[0].label if len(those) == 1 else f"{reason or WORDS[kind]} ({len(those)} short spans)"
        yield LaneSpan(start, end, kind, label, reason)
        start = end


class _Strings:
    """Table of strings that stores each one once."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def place(self, text: str) -> int:
        return self.places.setdefault(text, len(self.places))


@dataclass(frozen=True, slots=True)
class _Microseconds:
    """Conversion of times to whole microseconds since ``origin``."""

    origin: float

    def __call__(self, time: float) -> int:
        return round((time - self.origin) * 1e6)


def page_data(timeline: Timeline, lanes: Sequence[Lane], resolution: float) -> dict[str, Any]:
    strings, clock = _Strings(), _Microseconds(timeline.window[0])
    used = {span.kind for lane in lanes for span in lane.spans}
    kinds = [kind for kind in SpanKind if kind in used]
    thinned = [counter.thinned((timeline.window[1] - timeline.window[0]) / MAX_POINTS) for counter in timeline.counters]
    return {
        "end": clock(timeline.window[1]),
        "resolution": 1e6 * resolution,
        "measured": None if timeline.measured is None else [clock(time) for time in timeline.measured],
        "kinds": [{"name": kind, "words": WORDS[kind], "idle": kind in IDLE} for kind in kinds],
        "lanes": [_packed(lane, timeline, clock, strings, kinds) for lane in lanes],
        "marks": [
            _marks(timeline, kind, clock, strings)
            for kind in MarkKind
            if any(mark.kind is kind for mark in timeline.marks)
        ],
        "counters": [
            {
                "name": counter.name,
                "limit": counter.limit,
                "most": max(counter.values),
                "times": [clock(time) for time in counter.times],
                "values": [round(value, 6) for value in counter.values],
            }
            for counter in thinned
        ],
        "strings": list(strings.places),
    }


def _packed(
    lane: Lane, timeline: Timeline, clock: _Microseconds, strings: _Strings, kinds: list[SpanKind]
) -> dict[str, Any]:
    """Pack a lane. ``spans`` holds four integers a span: time since the last one's end, length, kind, label."""
    spans: list[int] = []
    reached = 0
    for span in lane.spans:
        start, end = max(clock(span.start), reached), clock(span.end)
        if end > start:
            # The reason is told where it says more than the label.
            reason = "" if span.reason is None or span.reason in span.label else f" ({span.reason})"
            spans += (start - reached, end - start, kinds.index(span.kind), strings.place(span.label + reason))
            reached = end
    busy = busy_share(lane, timeline)
    return {"group": lane.group, "name": lane.name, "annotates": lane.annotates, "busy": busy, "spans": spans}


def busy_share(lane: Lane, timeline: Timeline) -> float | None:
    """Share of the measured wall time that the lane was busy; of the whole run where nothing was trained."""
    window = timeline.measured or timeline.window
    if lane.group not in TIMED or lane.annotates or (told := lane.seconds(window)) <= 0:
        return None
    return max(1.0 - lane.idle_seconds(window) / told, 0.0)


def _marks(timeline: Timeline, kind: MarkKind, clock: _Microseconds, strings: _Strings) -> dict[str, Any]:
    points = [[clock(mark.time), strings.place(mark.label)] for mark in timeline.marks if mark.kind is kind]
    return {"kind": kind, "name": ROWS.get(kind, kind), "row": kind in ROWS, "points": points}
