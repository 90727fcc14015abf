"""A run's figures by brute force: time as a row of ticks that are painted one by one, groups counted one by one.

Every time in a random run is a multiple of `TICK` (see cases.py), so a tick is wholly busy or wholly idle, and sums of
ticks are exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.events import (
    BatchTaken,
    Event,
    GroupAdmitted,
    GroupSettled,
    OptimizerStepped,
    ReplicaActivity,
    ReplicaJoined,
    ReplicaLost,
    RunFinished,
    Span,
    TrainerBusy,
    TrajectoryFinished,
    UpdateFinished,
)
from headway.pipeline.run import Status
from headway.reports.metrics.run_metrics import RunMetrics
from headway.reports.metrics.summary import summary
from tests.pipeline.cases import TICK
from tests.pipeline.fakes import FakeRollout
from tests.pipeline.machines import is_late
from tests.pipeline.scenario import Run

Ticks = NDArray[np.float64]


class Rows:
    """Keeps the rows of ``metrics.jsonl``."""

    def __init__(self) -> None:
        self.events = 0
        """That were seen so far."""
        self.rows: list[tuple[int, dict[str, Any]]] = []
        """(events that were seen when it was complete, row)"""

    def on_row(self, row: dict[str, Any]) -> None:
        self.rows.append((self.events, row))

    def close(self) -> None: ...


def tick(time: float) -> int:
    ticks = time / TICK
    assert ticks == int(ticks), f"{time} s is no multiple of {TICK} s"
    return int(ticks)


def paint(run: Run, spans: Iterable[Span]) -> Ticks:
    """[ticks of the run] 1 where any span lies, else 0."""
    ticks = np.zeros(tick(run.ended))
    for start, end in spans:
        ticks[tick(start) : tick(end)] = 1
    return ticks


def busy(run: Run, replica: str) -> Ticks:
    return paint(run, (span for event in run.of(ReplicaActivity) if event.replica == replica for span in event.busy))


def trainer(run: Run) -> Ticks:
    return paint(run, (event.span for event in run.of(TrainerBusy)))


def present(run: Run, events: Sequence[Event]) -> dict[str, Ticks]:
    """[ticks of the run] for each replica that took part: 1 from its join to its loss, as far as ``events`` tell."""
    lives = {replica.name: [0.0, run.ended] for replica in run.rollouts if not is_late(replica)}
    for event in events:
        match event:
            case ReplicaJoined():
                lives[event.replica] = [event.time, run.ended]
            case ReplicaLost() if event.replica in lives:
                lives[event.replica][1] = event.time
    return {name: paint(run, [(joined, lost)]) for name, (joined, lost) in lives.items()}


def idle_share(run: Run, there: dict[str, Ticks], events: Sequence[Event], inside: slice) -> float | None:
    """Of the ticks in ``inside`` that each replica was there: it reported no work in them. None without any."""
    ticks = idle = 0.0
    for name, life in there.items():
        reports = [event for event in events if isinstance(event, ReplicaActivity) and event.replica == name]
        busy = paint(run, (span for event in reports for span in event.busy))
        ticks += life[inside].sum()
        idle += (life * (1 - busy))[inside].sum()
    return idle / ticks if ticks else None


def in_slots(run: Run, replica: FakeRollout) -> Ticks:
    """[ticks of the run] How many slots it uses, from what was asked of it: all that it can, unless it stands.

    Without a limit on the cache. Where it prefills nothing starts, so that then only whether there is any is exact.
    """
    work = np.zeros(tick(run.ended) + 1)
    for time, change in replica.work:
        work[tick(time)] += change
    used = np.minimum(np.cumsum(work)[:-1], replica.slots)
    for start, end in [*replica.stood, *([(replica.stopped, run.ended)] if replica.stopped is not None else [])]:
        used[tick(start) : tick(end)] = 0
    return used


def window(run: Run) -> slice | None:
    """From the first admission to the last optimizer step."""
    admitted, steps = run.of(GroupAdmitted), run.of(OptimizerStepped)
    if not steps or steps[-1].time <= admitted[0].time:
        return None
    return slice(tick(admitted[0].time), tick(steps[-1].time))


def replay(run: Run) -> tuple[RunMetrics, list[tuple[int, dict[str, Any]]]]:
    rows = Rows()
    metrics = RunMetrics([rows])
    for rows.events, event in enumerate(run.events, start=1):
        metrics.on_event(event)
    return metrics, rows.rows


def near(told: float, counted: float) -> bool:
    return abs(told - counted) < 1e-9


def check_figures(run: Run) -> None:
    metrics, rows = replay(run)
    told = summary(metrics)
    check_counts(run, told)
    check_rows(run, [row for _, row in rows], told)
    check_replicas_in_rows(run, rows)
    if (inside := window(run)) is not None:
        check_occupancy(run, told, inside)


def check_occupancy(run: Run, told: dict[str, Any], inside: slice) -> None:
    wall = inside.stop - inside.start
    assert told["wall_s"] == wall * TICK
    assert near(told["trainer/idle_ratio"], 1 - trainer(run)[inside].sum() / wall)
    there = present(run, run.events)
    idle = idle_share(run, there, run.events, inside)
    assert told["rollouter/idle_ratio"] is None if idle is None else near(told["rollouter/idle_ratio"], idle)
    slots = sum(replica.slots * there[replica.name][inside].sum() for replica in run.rollouts if replica.name in there)
    used = sum(slot_ticks(run, event, there[event.replica], inside) for event in run.of(ReplicaActivity))
    assert near(told["rollouter/slot_utilization"], min(1.0, used / slots))
    if not run.of(ReplicaLost) and run.status is Status.COMPLETED and run.scenario.engine.get("kv_tokens") is None:
        check_engines(run, told["rollouter/slot_utilization"], float(slots), inside)


def slot_ticks(run: Run, event: ReplicaActivity, there: Ticks, inside: slice) -> float:
    """The slot time of a report, spread evenly over its extent: what lies in the window and in the replica's time."""
    if not event.busy:
        return 0.0
    extent = paint(run, [(event.busy[0][0], event.busy[-1][1])])
    return float(event.slot_seconds / TICK * (extent * there)[inside].sum() / extent.sum())


def check_engines(run: Run, utilization: float, slots: float, inside: slice) -> None:
    """What replicas reported is what they were asked to do."""
    engine = run.scenario.engine
    prefills = engine.get("prefill_s") or engine.get("prefill_token_s")
    exact = straddling = 0.0
    for replica in run.rollouts:
        used = in_slots(run, replica)
        assert np.array_equal(used > 0, busy(run, replica.name) > 0), "busy is not what it had to do"
        if prefills:
            continue
        reports = [event for event in run.of(ReplicaActivity) if event.replica == replica.name]
        assert sum(event.slot_seconds for event in reports) == used.sum() * TICK
        exact += used[inside].sum()
        straddling += replica.slots * run.pipeline.config.reports.activity_interval_s / TICK
    assert prefills or abs(utilization - exact / slots) <= straddling / slots


def check_counts(run: Run, told: dict[str, Any]) -> None:
    trained = {event.number: event.lag for event in run.of(GroupSettled) if event.lag is not None}
    taken_at = {number: event.version for event in run.of(BatchTaken) for number in event.numbers}
    trajectories = run.of(TrajectoryFinished)
    spans = [max(vs) - min(vs) for t in trajectories if (vs := [v for _, v in t.version_spans])]
    lags = Counter(trained.values())
    assert told["balanced"] is True
    assert told["groups"] == run.of(RunFinished)[0].groups
    assert told["lag"]["histogram"] == {str(lag): lags[lag] for lag in sorted(lags)}
    assert told["lag"]["max"] == max(lags, default=None)
    assert told["lag"]["mean"] is None or near(told["lag"]["mean"], sum(trained.values()) / len(trained))
    partial = sum(span > 0 for span in spans)
    assert told["partial"] == {
        "total_partial_num": partial,
        "partial_ratio": partial / len(trajectories) if trajectories else 0.0,
        "max_partial_span": max(spans, default=0),
    }
    stale = [t for t in trajectories if t.number in trained and min(v for _, v in t.version_spans) < taken_at[t.number]]
    assert told["stale"] == {
        "samples_processed": sum(lag > 0 for lag in trained.values()),
        "trajectory_processed": len(stale),
    }
    assert told["trajectories"] == len(trajectories)
    assert told["tokens"]["generated"] == sum(t.tokens for t in trajectories)
    assert told["tokens"]["trained"] == sum(t.tokens for t in trajectories if t.number in trained)
    assert told["fetches"] == sum(bool(event.numbers) for event in run.of(BatchTaken))
    steps = run.of(OptimizerStepped)
    assert (told["optimizer_steps"], told["skipped_steps"]) == (
        sum(not step.skipped for step in steps),
        sum(step.skipped for step in steps),
    )


def check_rows(run: Run, rows: list[dict[str, Any]], told: dict[str, Any]) -> None:
    """Rows tile the run: added up they are the summary, and each one's time is from the last one's end to its own."""
    lags: Counter[str] = Counter()
    for row in rows:
        lags.update(row.get("lag/histogram", {}))
    assert lags == told["lag"]["histogram"]
    for name, total in (("total_partial_num", sum), ("max_partial_span", max)):
        values = [row[f"fully_async/partial/{name}"] for row in rows if f"fully_async/partial/{name}" in row]
        assert (total(values) if values else 0) == told["partial"][name]
    if not run.of(GroupAdmitted):
        return
    works, opened = trainer(run), run.of(GroupAdmitted)[0].time
    closes = [event.time for event in run.of(UpdateFinished)] + [run.of(RunFinished)[0].time]
    for row in rows:
        if (seconds := row.get("time/seconds")) is None:
            continue
        until = opened + seconds
        assert until in closes
        if "trainer/idle_ratio" in row:
            share = works[tick(opened) : tick(until)].sum() * TICK / seconds
            assert near(row["trainer/idle_ratio"], 1 - share)
        opened = until


def check_replicas_in_rows(run: Run, rows: list[tuple[int, dict[str, Any]]]) -> None:
    """A row says how idle replicas were since the last row that said it, as far as all of them had reported by then."""
    if not run.of(GroupAdmitted):
        return
    opened = known_until = run.of(GroupAdmitted)[0].time
    for seen, row in rows:
        if (seconds := row.get("time/seconds")) is None:
            continue
        opened += seconds
        if "trainer/idle_ratio" not in row:
            assert "rollouter/idle_ratio" not in row
            continue
        there = present(run, run.events[:seen])
        until = min([opened, *reported_until(run, run.events[:seen])])
        inside = slice(tick(known_until), max(tick(known_until), tick(until)))
        idle = idle_share(run, there, run.events[:seen], inside)
        told = row.get("rollouter/idle_ratio")
        assert told is None if idle is None else near(told, idle)
        known_until = max(known_until, until)


def reported_until(run: Run, events: Sequence[Event]) -> list[float]:
    """For each replica that takes part, the time of its last report, or of its join."""
    reported = {replica.name: 0.0 for replica in run.rollouts if not is_late(replica)}
    for event in events:
        match event:
            case ReplicaJoined():
                reported[event.replica] = event.time
            case ReplicaActivity() if event.replica in reported:  # an answer may come when its replica is lost already
                reported[event.replica] = event.time
            case ReplicaLost():
                reported.pop(event.replica, None)
    return list(reported.values())
