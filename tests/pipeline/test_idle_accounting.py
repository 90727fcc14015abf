"""Idle ratios, slot utilization, lags and counts: what reports say against brute force over a run's ticks and groups.

The first part makes up events that real runs seldom have: spans that overlap, repeat, touch, or reach beyond the run's
window. The second compares whole runs; random ones are compared in test_random_runs.py.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from headway.events import (
    Event,
    GroupAdmitted,
    LeaseChanged,
    OptimizerStepped,
    ReplicaActivity,
    ReplicaHalted,
    ReplicaJoined,
    ReplicaLost,
    RunStarted,
    Span,
    StageChanged,
    TrainerBusy,
)
from headway.reports.metrics.run_metrics import RunMetrics
from headway.reports.metrics.summary import summary
from tests.pipeline.fakes import FakeReward
from tests.pipeline.figures import check_figures, near, replay
from tests.pipeline.scenario import MODES, Scenario
from tests.tiers import mostly_slow, searched

TICKS = 64
"""Of a second each, in the made-up runs."""
SLOTS = {"a": 4, "b": 2}

times = st.integers(0, TICKS)
spans = st.tuples(times, times).map(lambda ends: (float(min(ends)), float(max(ends))))


def told(events: list[Event]) -> dict[str, Any]:
    metrics = RunMetrics()
    for event in events:
        metrics.on_event(event)
    return summary(metrics)


def ticks(of: list[Span]) -> list[bool]:
    """Whether each tick lies in any of the spans."""
    return [any(start <= tick < end for start, end in of) for tick in range(TICKS)]


def run_of(first: int, last: int, *events: Event) -> list[Event]:
    """A run whose window reaches from ``first`` to ``last``."""
    started = RunStarted(
        time=0, mode="m", seed=0, groups_per_version=1, total_groups=1, lag_bound=0, order="fifo", slots=SLOTS
    )
    admitted = GroupAdmitted(
        time=first, number=0, epoch=0, row=0, attempt=0, version=0, admitted=1, discarded=0, limit=1
    )
    stepped = OptimizerStepped(time=last, step=0, fetch=0, version=0, skipped=False, tokens=1, trajectories=1, lags=[0])
    return [started, admitted, *events, stepped]


def activity(replica: str, busy: list[Span], slot_seconds: float = 0.0) -> ReplicaActivity:
    return ReplicaActivity(
        time=TICKS,
        replica=replica,
        busy=busy,
        slot_seconds=slot_seconds,
        generated_tokens=0,
        prefilled_tokens=0,
    )


windows = st.tuples(st.integers(0, TICKS // 2), st.integers(TICKS // 2 + 1, TICKS))
works = st.lists(st.tuples(st.sampled_from(["forward", "step", "gather", "save", "send"]), spans), max_size=12)


@searched(150, windows, works)
def test_the_trainers_idle_ratio_is_the_share_of_ticks_in_no_span_of_its_own_work(window, work):
    """Overlaps count once, what lies outside the window not at all, and saving or sending is no work."""
    first, last = window
    events = [TrainerBusy(time=TICKS, what=what, version=0, span=span) for what, span in work]
    busy = ticks([span for what, span in work if what in ("forward", "step", "gather")])[first:last]
    assert near(told(run_of(first, last, *events))["trainer/idle_ratio"], busy.count(False) / len(busy))


@searched(150, windows, st.lists(st.lists(spans, max_size=4), max_size=5), st.lists(spans, max_size=4))
def test_the_rollouters_idle_ratio_is_the_mean_of_each_replicas_idle_ticks(window, reports, other):
    """A replica that reports nothing is idle all the time. Reports may come in any pieces."""
    first, last = window
    events = [*(activity("a", busy) for busy in reports), activity("b", other)]
    idle = [ticks(busy)[first:last].count(False) / (last - first) for busy in ([s for r in reports for s in r], other)]
    assert near(told(run_of(first, last, *events))["rollouter/idle_ratio"], sum(idle) / 2)


@searched(100, windows, st.lists(st.tuples(times, st.integers(1, 8), st.integers(1, 4)), max_size=5))
def test_slot_utilization_is_busy_slots_over_all_slots_tick_by_tick(window, reports):
    """Each report has one span in which a number of slots is busy; its part outside the window does not count."""
    first, last = window
    used, events, until = np.zeros(2 * TICKS + 64), [], 0
    for earliest, length, slots in sorted(reports):
        start = max(earliest, until)
        until = start + length
        used[start:until] = slots
        events.append(activity("a", [(float(start), float(until))], float(slots * length)))
    share = used[first:last].sum() / (sum(SLOTS.values()) * (last - first))
    assert near(told(run_of(first, last, *events))["rollouter/slot_utilization"], share)


def test_paused_time_is_idle_time_whatever_else_is_said_of_it():
    """A halt, a lease and a stage that waits say why a replica was idle. They make it no busier."""
    said: list[Event] = [
        ReplicaHalted(time=40, replica="a", reason="load", span=(10.0, 40.0), interrupted=3),
        LeaseChanged(time=50, holder="train", asked=40.0),
        StageChanged(time=10, stage="Generate", state="processing", active=3),
        StageChanged(time=60, stage="Generate", state="paused", waiting_for="resume"),
    ]
    figures = told(run_of(0, TICKS, activity("a", [(0.0, 8.0)], 8.0), *said))
    assert figures["rollouter/idle_ratio"] == (56 / 64 + 1) / 2
    assert figures["trainer/idle_ratio"] == 1
    assert figures["rollouter/slot_utilization"] == 8 / (6 * 64)


def test_without_a_step_there_is_no_window_and_no_ratio():
    figures = told(run_of(0, TICKS, activity("a", [(0.0, 8.0)], 8.0))[:-1])
    assert figures["trainer/idle_ratio"] is figures["rollouter/idle_ratio"] is None
    assert figures["rollouter/slot_utilization"] is None


def test_the_slots_of_a_late_replica_count_from_its_join():
    joined = ReplicaJoined(time=32, replica="late", version=1, slots=6)
    figures = told(run_of(0, TICKS, joined, activity("late", [(32.0, 64.0)], 192.0)))
    assert figures["rollouter/slot_utilization"] == 192 / (6 * 64 + 6 * 32)


@searched(150, windows, times, times, st.lists(spans, max_size=4), st.lists(spans, max_size=4))
def test_the_ticks_of_a_replica_count_from_its_join_to_its_loss(window, join, loss, early, late):
    """One is lost, another joins; a third, which is there all the time, does nothing."""
    first, last = window
    events = [
        ReplicaJoined(time=join, replica="late", version=1, slots=6),
        activity("a", early),
        activity("late", late),
        ReplicaLost(time=loss, replica="a", reason="died"),
        ReplicaLost(time=loss, replica="never joined", reason="died"),
    ]
    figures = told(run_of(first, last, *events))
    of_a, of_late = ticks(early)[first : min(loss, last)], ticks(late)[max(join, first) : last]
    idle = of_a.count(False) + of_late.count(False) + (last - first)
    assert near(figures["rollouter/idle_ratio"], idle / (len(of_a) + len(of_late) + last - first))


# ---------------------------------------------------------------------------------------------- whole runs


def reward() -> FakeReward:
    """Every fifth group is rewarded late."""
    return FakeReward(seconds=lambda prompt: 4.0 if prompt.row % 5 == 0 else 0.25)


@mostly_slow(
    ("mode", "replicas"),
    product(MODES, [1, 2]),
    quick=[("colocate_sync", 2), ("one_step_off", 1), ("async_partial", 2), ("overlapped", 2)],
)
def test_the_figures_of_a_run_are_those_of_its_ticks(mode: str, replicas: int):
    """Validation after the last step is outside the window; answers are long and short, steps quick and slow."""
    run = Scenario(
        mode,
        problems=3,
        replicas=replicas,
        slots=4,
        lengths=lambda t: 160 if t.epoch == -1 else 60 if t.row % 7 == 0 else 6,
        reward=reward(),
        trainer={"step_s": lambda step: 0.25 if step % 3 else 5.0},
    ).run()
    check_figures(run.assert_completed())


@mostly_slow("mode", MODES, quick=["overlapped", "colocate_async"])
def test_reports_in_any_rhythm_give_the_same_figures(mode: str):
    """Activity is reported every so often; how often says nothing about the run."""

    def figures(interval_s: float) -> dict[str, Any]:
        run = Scenario(mode, slots=4, sections={"reports": {"activity_interval_s": interval_s}}).run()
        return told(run.assert_completed().events)

    often, seldom = figures(0.25), figures(1000.0)
    for name in ("trainer/idle_ratio", "rollouter/idle_ratio", "wall_s"):
        assert near(often[name], seldom[name])
    assert often["rollouter/slot_utilization"] == pytest.approx(seldom["rollouter/slot_utilization"], rel=0.05)


def test_the_trainers_idle_time_in_all_rows_together_is_that_of_the_run():
    run = Scenario("overlapped", replicas=2, slots=4, trainer={"step_s": lambda _: 5.0}).run().assert_completed()
    _, rows = replay(run)
    said = [(row["trainer/idle_ratio"], row["time/seconds"]) for _, row in rows if "trainer/idle_ratio" in row]
    busy = sum((1 - idle) * seconds for idle, seconds in said)
    assert near(busy, sum(event.span[1] - event.span[0] for event in run.of(TrainerBusy)))
