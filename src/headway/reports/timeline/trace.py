"""A timeline as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

Groups of lanes are processes, lanes are threads, spans are complete events (``X``), marks are instants (``i``) and
counters are counters (``C``). Times are microseconds since the run's first event. Format: "Trace Event Format",
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.reports.record.events_file import to_json_line
from headway.reports.record.file_access import whole_file
from headway.reports.timeline.lanes import Lane, LaneSpan
from headway.reports.timeline.timeline import MarkKind, Timeline

TraceEvent = dict[str, Any]
EVENTS = "Events"
"""Name of the trace's process that holds marks and counters."""
GLOBAL_MARKS = frozenset({MarkKind.UPDATE, MarkKind.FINISHED})
"""Kinds of marks that are drawn over all lanes."""


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write ``timeline`` as JSON to ``path``, which is replaced."""
    events = [*_names(timeline), *sorted(_events(timeline), key=lambda event: (event["ts"], -event.get("dur", 0.0)))]
    figures = {name: value for name, value in timeline.summary.items() if isinstance(value, str | int | float)}
    with whole_file(path) as file:
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {to_json_line(figures)}, "traceEvents": [\n')
        file.write(",\n".join(to_json_line(event) for event in events))
        file.write("\n]}\n")


def _names(timeline: Timeline) -> Iterator[TraceEvent]:
    """Yield metadata: what processes and threads are called, and the order to show them in."""
    for pid, group in enumerate(_groups(timeline), start=1):
        yield _metadata("process_name", pid, {"name": group})
        yield _metadata("process_sort_index", pid, {"sort_index": pid})
    for pid, tid, lane in _places(timeline):
        yield _metadata("thread_name", pid, {"name": lane.name}, tid)
        yield _metadata("thread_sort_index", pid, {"sort_index": tid}, tid)
    for tid, kind in enumerate(MarkKind, start=1):
        if any(mark.kind is kind for mark in timeline.marks):
            yield _metadata("thread_name", _marks_pid(timeline), {"name": kind}, tid)


def _events(timeline: Timeline) -> Iterator[TraceEvent]:
    origin, marks_pid = timeline.window[0], _marks_pid(timeline)
    for pid, tid, lane in _places(timeline):
        for span in lane.spans:
            yield _complete(span, pid, tid, origin)
    tids = {kind: tid for tid, kind in enumerate(MarkKind, start=1)}
    for mark in timeline.marks:
        at, tid = _microseconds(mark.time, origin), tids[mark.kind]
        scope = "g" if mark.kind in GLOBAL_MARKS else "t"
        yield {"ph": "i", "name": mark.label, "cat": mark.kind, "s": scope, "ts": at, "pid": marks_pid, "tid": tid}
    for counter in timeline.counters:
        for time, value in counter.points:
            at = _microseconds(time, origin)
            yield {"ph": "C", "name": counter.name, "ts": at, "pid": marks_pid, "tid": 0, "args": {"value": value}}


def _groups(timeline: Timeline) -> list[str]:
    return [*dict.fromkeys(lane.group for lane in timeline.lanes), EVENTS]


def _marks_pid(timeline: Timeline) -> int:
    return len(_groups(timeline))


def _places(timeline: Timeline) -> Iterator[tuple[int, int, Lane]]:
    """Each lane with its process and thread ids, which start at 1."""
    pids = {group: pid for pid, group in enumerate(_groups(timeline), start=1)}
    for tid, lane in enumerate(timeline.lanes, start=1):
        yield pids[lane.group], tid, lane


def _metadata(name: str, pid: int, args: dict[str, Any], tid: int = 0) -> TraceEvent:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _complete(span: LaneSpan, pid: int, tid: int, origin: float) -> TraceEvent:
    start, end = _microseconds(span.start, origin), _microseconds(span.end, origin)
    event = {"ph": "X", "name": span.label, "cat": span.kind, "ts": start, "dur": _rounded(end - start)}
    event |= {"pid": pid, "tid": tid}
    return event if span.reason is None else event | {"args": {"reason": span.reason}}


def _microseconds(time: float, origin: float) -> float:
    return _rounded((time - origin) * 1e6)


def _rounded(microseconds: float) -> float:
    """Round to whole nanoseconds: finer digits are noise and make the file larger."""
    return round(microseconds, 3)
