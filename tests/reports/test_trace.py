"""The trace's structure, by the rules of the Trace Event Format that Perfetto's importer relies on."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headway.reports.timeline.timeline import Timeline, build_timeline
from headway.reports.timeline.trace import write_trace
from tests.reports.timelines import cut_short, failed, simulated, started
from tests.tiers import mostly_slow

TICK = 1e-3
"""Microseconds: times are rounded to whole nanoseconds."""


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def written(timeline: Timeline, folder: Path) -> dict[str, Any]:
    path = folder / "trace.json"
    write_trace(timeline, path)
    trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    return trace


def of(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def names(trace: dict[str, Any], kind: str) -> dict[tuple[int, int], str]:
    found = {(event["pid"], event["tid"]): event["args"]["name"] for event in of(trace, "M") if event["name"] == kind}
    assert len(set(found)) == len(found)
    return found


@mostly_slow("mode", ["async_partial", "overlapped", "colocate_async"], quick=["overlapped"])
def test_every_event_has_what_its_phase_asks_for(mode: str, tmp_path: Path) -> None:
    trace = written(simulated(mode), tmp_path)
    assert trace["displayTimeUnit"] == "ms"
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        match event["ph"]:
            case "X":
                assert event["ts"] >= 0
                assert event["dur"] >= 0
                assert isinstance(event["cat"], str)
            case "i":
                assert event["s"] in ("g", "t")
            case "C":
                assert all(math.isfinite(value) for value in event["args"].values())
            case phase:
                assert phase == "M"


def test_names_come_first_and_all_else_by_time(tmp_path: Path) -> None:
    events = written(simulated("async_partial"), tmp_path)["traceEvents"]
    timed = [event for event in events if event["ph"] != "M"]
    assert events[-len(timed) :] == timed
    assert all(before["ts"] <= after["ts"] for before, after in pairwise(timed))


@pytest.mark.parametrize("mode", ["async_partial", "overlapped", "colocate_async"])
def test_spans_of_one_thread_nest_or_are_disjoint(mode: str, tmp_path: Path) -> None:
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in of(written(simulated(mode), tmp_path), "X"):
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        open_until: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start + TICK / 2:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + TICK / 2
            open_until.append(end)


def test_groups_are_processes_and_lanes_are_threads_in_the_timelines_order(tmp_path: Path) -> None:
    timeline = simulated("overlapped")
    trace = written(timeline, tmp_path)
    processes, threads = names(trace, "process_name"), names(trace, "thread_name")
    shown = [(processes[pid, 0], name) for (pid, tid), name in sorted(threads.items(), key=lambda item: item[0][1])]
    lanes = [(lane.group, lane.name) for lane in timeline.lanes]
    assert [entry for entry in shown if entry[0] != "Events"] == lanes
    orders = [e["args"]["sort_index"] for e in of(trace, "M") if e["name"] == "process_sort_index"]
    assert orders == sorted(orders)
    used = {(event["pid"], event["tid"]) for event in of(trace, "X") + of(trace, "i")}
    assert used <= set(threads)


def test_times_are_microseconds_since_the_runs_start(tmp_path: Path) -> None:
    timeline = simulated("async_partial")
    trace = written(timeline, tmp_path)
    seconds = sum(span.seconds for lane in timeline.lanes for span in lane.spans)
    assert sum(event["dur"] for event in of(trace, "X")) == pytest.approx(1e6 * seconds, rel=1e-6)
    last = max(event["ts"] + event.get("dur", 0.0) for event in trace["traceEvents"] if event["ph"] != "M")
    assert last == pytest.approx(1e6 * (timeline.window[1] - timeline.window[0]))


def test_idle_spans_carry_their_reason_and_updates_are_drawn_over_all_lanes(tmp_path: Path) -> None:
    timeline = simulated("async_partial")
    trace = written(timeline, tmp_path)
    idle = [event["args"]["reason"] for event in of(trace, "X") if event["cat"] in ("idle", "halted")]
    assert "waits for groups from the message queue" in idle
    updates = [event for event in of(trace, "i") if event["cat"] == "update"]
    assert [event["name"] for event in updates] == [f"v{version}" for version in range(1, 6)]
    assert {event["s"] for event in updates} == {"g"}
    assert {event["name"] for event in of(trace, "C")} == {counter.name for counter in timeline.counters}


def test_runs_that_ended_badly_have_traces_too(tmp_path: Path) -> None:
    assert of(written(build_timeline(cut_short()), tmp_path), "X")
    assert of(written(build_timeline(failed("ümläut </script> ✗")), tmp_path), "i")[-1]["name"].endswith("✗")
    assert of(written(build_timeline([started()]), tmp_path), "X") == []
    assert of(written(build_timeline([]), tmp_path), "X") == []
