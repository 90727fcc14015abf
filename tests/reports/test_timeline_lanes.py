"""How lanes are laid out, against a reference that only looks: what lies at the instant k + ½?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from headway.events import ReplicaJoined, ReplicaLost, RunStarted, Span, StageChanged, UpdatePhase
from headway.reports.metrics.intervals import complement, length, union
from headway.reports.timeline.lanes import NOTHING_REPORTED, Lane, LaneSpan, SpanKind, idle, lay_out, side_by_side
from headway.reports.timeline.timeline import build_timeline
from headway.reports.timeline.worker_lanes import STAGES, StageLog, UpdateLanes
from tests.reports.scripted_run import ScriptedRun
from tests.tiers import searched

HORIZON = 24
intervals = st.tuples(st.integers(0, HORIZON), st.integers(0, HORIZON)).map(lambda pair: (min(pair), max(pair)))
sets = st.lists(intervals, max_size=8)


def work(spans: list[Span]) -> list[LaneSpan]:
    return [LaneSpan(*span, SpanKind.STEP, "step") for span in spans]


def found_at(instant: float, spans: Sequence[LaneSpan]) -> str | None:
    return next((span.reason or span.label for span in spans if span.start < instant < span.end), None)


def covers(spans: list[Span], instant: float) -> bool:
    return any(start < instant < end for start, end in spans)


@searched(100, sets, st.lists(sets, max_size=3), intervals)
def test_a_lane_shows_work_and_around_it_the_first_claim_that_covers_the_instant(
    busy: list[Span], claims: list[list[Span]], life: Span
) -> None:
    layers = [[idle(span, f"claim {i}") for span in spans] for i, spans in enumerate(claims)]
    lane = lay_out(work(busy), layers, life)
    for instant in (k + 0.5 for k in range(HORIZON)):
        expected = None
        if life[0] < instant < life[1]:
            names = ["step", *(f"claim {i}" for i in range(len(claims))), NOTHING_REPORTED]
            present = [covers(busy, instant), *(covers(spans, instant) for spans in claims), True]
            expected = names[present.index(True)]
        assert found_at(instant, lane) == expected


@searched(100, sets, st.lists(sets, max_size=3), intervals)
def test_idle_time_is_the_complement_of_the_union_of_work_whatever_was_claimed(
    busy: list[Span], claims: list[list[Span]], life: Span
) -> None:
    layers = [[idle(span, f"claim {i}") for span in spans] for i, spans in enumerate(claims)]
    lane = Lane("group", "lane", lay_out(work(busy), layers, life))
    assert sum(lane.idle_by_reason(life).values()) == length(complement(busy, life))
    assert all(before.end == after.start for before, after in pairwise(lane.spans)), "tiles its life"


def test_work_that_overlaps_is_shown_once() -> None:
    first, second = LaneSpan(0, 4, SpanKind.STEP, "a"), LaneSpan(2, 6, SpanKind.STEP, "b")
    assert [(s.start, s.end, s.label) for s in lay_out([second, first], [], (0, 6))] == [(0, 4, "a"), (4, 6, "b")]


@searched(100, sets)
def test_spans_that_overlap_get_lanes_of_their_own_and_none_is_lost(spans: list[Span]) -> None:
    given_spans = [LaneSpan(*span, SpanKind.TRANSFER, str(i)) for i, span in enumerate(spans) if span[1] > span[0]]
    lanes = side_by_side("group", "send", given_spans)
    assert sorted(span.label for lane in lanes for span in lane.spans) == sorted(span.label for span in given_spans)
    for lane in lanes:
        assert all(before.end <= after.start for before, after in pairwise(lane.spans))
    deepest = max((sum(s.start < k + 0.5 < s.end for s in given_spans) for k in range(HORIZON)), default=0)
    assert len(lanes) == max(deepest, 1)


def changed(time: float, state: str, waiting_for: str | None = None, active: int = 0) -> StageChanged:
    return StageChanged(time=time, stage="Generate", state=state, waiting_for=waiting_for, active=active)


def told(log: StageLog, life: Span) -> list[tuple[float, float, str]]:
    return [(span.start, span.end, span.reason or span.label) for span in log.lane(life).spans]


def stage_log(*events: StageChanged, end: float) -> StageLog:
    log = StageLog("Generate")
    for event in events:
        log.change(event)
    log.end = end
    return log


def test_a_stage_that_takes_on_more_items_stays_in_one_span() -> None:
    log = stage_log(
        changed(1, "processing", active=1),
        changed(2, "processing", active=5),
        changed(3, "processing", active=2),
        changed(4, "waiting_input", "PromptLoader"),
        end=6,
    )
    assert told(log, (0, 6)) == [
        (0, 1, "waits for its first input"),
        (1, 4, "up to 5 items at once"),
        (4, 6, "waits for PromptLoader"),
    ]


def test_a_stage_that_hands_one_item_on_while_it_works_on_others_is_at_work() -> None:
    log = stage_log(changed(0, "processing", active=2), changed(1, "waiting_output", "its consumer", active=2), end=3)
    assert told(log, (0, 3)) == [(0, 3, "up to 2 items at once")]
    alone = stage_log(changed(0, "waiting_output", "its consumer", active=1), end=3)
    assert told(alone, (0, 3)) == [(0, 3, "waits for its consumer")]


def test_a_stage_that_ended_is_not_idle_and_one_that_drains_still_works() -> None:
    log = stage_log(changed(0, "draining", active=3), changed(2, "draining"), changed(3, "stopped"), end=9)
    assert told(log, (0, 9)) == [(0, 2, "up to 3 items at once")]


def test_stages_come_in_the_order_that_the_run_names_them_in_and_unknown_ones_last() -> None:
    started = next(event for event in ScriptedRun().build() if isinstance(event, RunStarted))
    started = replace(started, stages=["PromptLoader", "Reward", "LogProb", "Validate"])
    names = ("Other", "Validate", "Reward", "PromptLoader")
    changes = [StageChanged(time=1.0, stage=name, state="processing") for name in names]
    lanes = build_timeline([started, *changes]).lanes
    assert [lane.name for lane in lanes if lane.group == STAGES] == ["PromptLoader", "Reward", "Validate", "Other"]


def phase(time: float, name: str, seconds: float, where: str = "rollout-0", version: int = 1) -> UpdatePhase:
    return UpdatePhase(time=time, version=version, phase=name, where=where, seconds=seconds)


def placed(*phases: UpdatePhase) -> list[tuple[str, float, float]]:
    updates = UpdateLanes()
    for event in phases:
        updates.on_event(event)
    return [(s.label, s.start, s.end) for spans in updates.phases().values() for s in spans]


def test_phases_that_are_reported_together_follow_each_other_and_end_at_the_report() -> None:
    spans = placed(phase(10, "recv", 3), phase(10, "register", 1), phase(15, "load", 2))
    assert spans == [("recv v1", 6, 9), ("register v1", 9, 10), ("load v1", 13, 15)]


def test_sends_to_several_receivers_lie_side_by_side() -> None:
    updates = UpdateLanes()
    for event in (phase(5, "gather", 1, "actor"), phase(8, "send", 3, "actor"), phase(9, "send", 4, "actor")):
        updates.on_event(event)
    assert [lane.name for lane in updates.lanes()] == ["actor", "actor (2)"]
    assert sorted((s.start, s.end) for lane in updates.lanes() for s in lane.spans) == [(4, 5), (5, 8), (5, 9)]


def test_a_replica_serves_each_version_from_its_load_on_and_is_absent_before_it_joins_and_after_its_loss() -> None:
    updates = UpdateLanes()
    slots = {"rollout-0": 8}
    updates.on_event(
        RunStarted(
            time=0,
            mode="m",
            seed=0,
            groups_per_version=1,
            total_groups=1,
            lag_bound=0,
            order="fifo",
            slots=slots,
        )
    )
    updates.on_event(phase(4, "load", 1))
    updates.on_event(ReplicaLost(time=7, replica="rollout-0", reason="died"))
    updates.on_event(ReplicaJoined(time=5, replica="late", version=2, slots=8))
    assert [(s.label, *s.span) for s in updates.serving("rollout-0", 9)] == [("serves v0", 0, 4), ("serves v1", 4, 7)]
    assert updates.absent("rollout-0", (0, 9)) == [(7, 9)]
    assert updates.absent("late", (0, 9)) == [(0, 5)]
    assert updates.absent("never heard of", (0, 9)) == []
    assert union(span.span for span in updates.serving("late", 9)) == [(5, 9)]
