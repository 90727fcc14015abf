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
from headway.reports.timeline.timeline import MarkKind, Timeline

TraceEvent = dict[str, Any]
EVENTS = "Events"
"""Name of the trace's process that holds marks and counters."""
GLOBAL_MARKS = frozenset({MarkKind.UPDATE, MarkKind.FINISHED})
"""Kinds of marks that are drawn over all lanes."""


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write ``timeline`` as JSON to ``path``, which is replaced."""
    # At one time the longer span first: viewers nest the next one into it.
    events = [*_names(timeline), *sorted(_events(timeline), key=lambda event: (event["ts"], -event.get("dur", 0.0)))]
    figures = {name: value for name, value in timeline.summary.items() if isinstance(value, str | int | float)}
    with whole_file(path) as file:
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {to_json_line(figures)}, "traceEvents": [\n')
        file.write(",\n".join(to_json_line(event) for event in events))
        file.write("\n]}\n")


def _pids(timeline: Timeline) -> dict[str, int]:
    """Return the process id of each group of lanes, from 1, and of `EVENTS`."""
    groups = dict.fromkeys(lane.group for lane in timeline.lanes) | {EVENTS: None}
    return {group: pid for pid, group in enumerate(groups, start=1)}


def _names(timeline: Timeline) -> Iterator[TraceEvent]:
    """Yield metadata: what processes and threads are called, and the order to show them in."""
    pids = _pids(timeline)
    for group, pid in pids.items():
        yield _metadata("process_name", pid, {"name": group})
        yield _metadata("process_sort_index", pid, {"sort_index": pid})
    for tid, lane in enumerate(timeline.lanes, start=1):
        yield _metadata("thread_name", pids[lane.group], {"name": lane.name}, tid)
        yield _metadata("thread_sort_index", pids[lane.group], {"sort_index": tid}, tid)
    there = {mark.kind for mark in timeline.marks}
    for tid, kind in enumerate(MarkKind, start=1):
        if kind in there:
            yield _metadata("thread_name", pids[EVENTS], {"name": kind}, tid)


def _events(timeline: Timeline) -> Iterator[TraceEvent]:
    pids = _pids(timeline)

    def at(time: float) -> float:
        return _rounded((time - timeline.window[0]) * 1e6)

    for tid, lane in enumerate(timeline.lanes, start=1):
        for span in lane.spans:
            start, end = at(span.start), at(span.end)
            event = {"ph": "X", "name": span.label, "cat": span.kind, "ts": start, "dur": _rounded(end - start)}
            reason = {} if span.reason is None else {"args": {"reason": span.reason}}
            yield event | {"pid": pids[lane.group], "tid": tid} | reason
    here = {"pid": pids[EVENTS]}
    tids = {kind: tid for tid, kind in enumerate(MarkKind, start=1)}
    for mark in timeline.marks:
        scope = "g" if mark.kind in GLOBAL_MARKS else "t"
        event = {"ph": "i", "name": mark.label, "cat": mark.kind, "s": scope, "ts": at(mark.time)}
        yield event | here | {"tid": tids[mark.kind]}
    for counter in timeline.counters:
        for time, value in counter.points:
            yield {"ph": "C", "name": counter.name, "ts": at(time)} | here | {"tid": 0, "args": {"value": value}}


def _metadata(name: str, pid: int, args: dict[str, Any], tid: int = 0) -> TraceEvent:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _rounded(microseconds: float) -> float:
    """Round to whole nanoseconds: finer digits are noise and make the file larger."""
    return round(microseconds, 3)
