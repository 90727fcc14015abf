from __future__ import annotations

import pytest
from hypothesis import strategies as st

from headway.events import (
    ReplicaActivity,
    ReplicaJoined,
    ReplicaLost,
    Span,
    StageChanged,
    TrainerBusy,
)
from headway.reports.metrics.occupancy import Occupancy
from tests.tiers import searched

times = st.floats(0, 100)
spans = st.tuples(times, times).map(lambda pair: (min(pair), max(pair)))
windows = st.tuples(st.floats(0, 50), st.floats(51, 100))


def busy(what: str, span: Span) -> TrainerBusy:
    return TrainerBusy(time=span[1], what=what, version=0, span=span)


def active(replica: str, *spans: Span, slot_seconds: float = 0.0, time: float | None = None) -> ReplicaActivity:
    return ReplicaActivity(
        time=time if time is not None else max((end for _, end in spans), default=0.0),
        replica=replica,
        busy=list(spans),
        slot_seconds=slot_seconds,
        generated_tokens=0,
        prefilled_tokens=0,
    )


def test_the_trainer_is_busy_in_forward_step_and_gather_counted_once_where_they_overlap() -> None:
    occupancy = Occupancy()
    for what, span in (("forward", (0.0, 2.0)), ("step", (1.0, 4.0)), ("gather", (6.0, 7.0)), ("save", (7.0, 10.0))):
        occupancy.trainer.report(busy(what, span))
    assert occupancy.trainer_idle((0.0, 10.0)) == pytest.approx(0.5)


def test_idle_time_is_measured_inside_the_window_only() -> None:
    occupancy = Occupancy()
    occupancy.trainer.report(busy("step", (0.0, 5.0)))
    occupancy.trainer.report(busy("step", (9.0, 20.0)))
    assert occupancy.trainer_idle((4.0, 10.0)) == pytest.approx(4 / 6)


def test_a_paused_replica_is_idle_because_it_reports_nothing() -> None:
    occupancy = Occupancy()
    occupancy.declare({"a": 4})
    occupancy.replica_active(active("a", (0.0, 3.0)))
    occupancy.replica_active(active("a", time=8.0))  # paused for the weights between 3 and 8
    occupancy.replica_active(active("a", (8.0, 10.0)))
    assert occupancy.rollouter_idle((0.0, 10.0)) == pytest.approx(0.5)


def test_the_rollouters_idle_ratio_averages_replicas_also_those_that_never_reported() -> None:
    occupancy = Occupancy()
    occupancy.declare({"a": 4, "b": 4})
    occupancy.replica_active(active("a", (0.0, 10.0)))
    assert occupancy.rollouter_idle((0.0, 10.0)) == pytest.approx(0.5)


def test_a_replica_counts_from_its_join_to_its_loss_with_the_weight_of_that_time() -> None:
    occupancy = Occupancy()
    occupancy.declare({"a": 2})
    occupancy.replica_active(active("a", (0.0, 4.0), slot_seconds=4.0))
    occupancy.lose(ReplicaLost(time=4.0, replica="a", reason="died"))
    occupancy.join(ReplicaJoined(time=2.0, replica="late", version=1, slots=6))
    occupancy.replica_active(active("late", (5.0, 10.0), slot_seconds=30.0))
    assert occupancy.rollouter_idle((0.0, 10.0)) == pytest.approx((0 + 3) / (4 + 8))
    assert occupancy.slot_utilization((0.0, 10.0)) == pytest.approx((4 + 30) / (2 * 4 + 6 * 8))
    assert occupancy.rollouter_idle((2.0, 5.0)) == pytest.approx(3 / (2 + 3))
    assert occupancy.rollouter_idle((0.0, 1.0)) == 0


def test_while_no_replica_is_part_of_the_run_there_is_no_ratio() -> None:
    occupancy = Occupancy()
    occupancy.declare({"a": 2})
    occupancy.lose(ReplicaLost(time=4.0, replica="a", reason="died"))
    assert occupancy.rollouter_idle((4.0, 10.0)) is None
    assert occupancy.slot_utilization((4.0, 10.0)) is None


def test_neither_a_replica_that_just_joined_nor_a_lost_one_keeps_the_others_reports_back() -> None:
    occupancy = Occupancy()
    occupancy.declare({"a": 1, "b": 1})
    occupancy.replica_active(active("a", time=3.0))
    occupancy.replica_active(active("b", time=8.0))
    assert occupancy.reported_until() == 3.0
    occupancy.lose(ReplicaLost(time=8.0, replica="a", reason="died"))
    assert occupancy.reported_until() == 8.0
    occupancy.join(ReplicaJoined(time=9.0, replica="late", version=1, slots=1))
    assert occupancy.reported_until() == 8.0


def test_slot_utilization_is_busy_slot_time_over_slots_times_wall() -> None:
    occupancy = Occupancy()
    occupancy.declare({"a": 4, "b": 4})
    occupancy.replica_active(active("a", (0.0, 10.0), slot_seconds=30.0))
    occupancy.replica_active(active("b", (0.0, 5.0), slot_seconds=10.0))
    assert occupancy.slot_utilization((0.0, 10.0)) == pytest.approx(40 / 80)


def test_a_report_that_straddles_the_windows_edge_counts_by_the_part_inside() -> None:
    occupancy = Occupancy()
    occupancy.declare({"a": 2})
    occupancy.replica_active(active("a", (0.0, 10.0), slot_seconds=20.0))
    assert occupancy.slot_utilization((5.0, 10.0)) == pytest.approx(1.0)


@searched(100, st.lists(st.tuples(st.sampled_from(["forward", "step", "gather", "save"]), spans)), windows)
def test_the_trainers_idle_ratio_is_a_share(work: list[tuple[str, Span]], window: Span) -> None:
    occupancy = Occupancy()
    for what, span in work:
        occupancy.trainer.report(busy(what, span))
    ratio = occupancy.trainer_idle(window)
    assert ratio is not None
    assert 0 <= ratio <= 1


@searched(100, st.lists(st.tuples(st.sampled_from("abc"), st.lists(spans, max_size=3), st.floats(0, 1e4))), windows)
def test_the_rollouters_ratios_are_shares(reports: list[tuple[str, list[Span], float]], window: Span) -> None:
    occupancy = Occupancy()
    occupancy.declare({"a": 3, "b": 1, "c": 2})
    for replica, busy_spans, slot_seconds in reports:
        occupancy.replica_active(active(replica, *busy_spans, slot_seconds=slot_seconds))
    for ratio in (occupancy.rollouter_idle(window), occupancy.slot_utilization(window)):
        assert ratio is not None
        assert 0 <= ratio <= 1


@searched(100, st.lists(spans, max_size=8), st.randoms(use_true_random=False), windows)
def test_the_order_in_which_spans_arrive_does_not_matter(work: list[Span], rng: object, window: Span) -> None:
    shuffled = work.copy()
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    ratios = []
    for order in (work, shuffled):
        occupancy = Occupancy()
        for span in order:
            occupancy.trainer.report(busy("step", span))
        ratios.append(occupancy.trainer_idle(window))
    assert ratios[0] == pytest.approx(ratios[1])


def test_a_window_without_length_has_no_ratio() -> None:
    occupancy = Occupancy()
    occupancy.declare({"a": 1})
    assert occupancy.trainer_idle((3.0, 3.0)) is None
    assert occupancy.rollouter_idle((3.0, 3.0)) is None
    assert occupancy.slot_utilization((3.0, 3.0)) is None


def stage(time: float, name: str, state: str, waiting_for: str | None = None) -> StageChanged:
    return StageChanged(time=time, stage=name, state=state, waiting_for=waiting_for)


def test_stage_waits_say_who_waited_for_whom_and_how_long() -> None:
    occupancy = Occupancy()
    occupancy.stage_changed(stage(0.0, "ActorTrain", "waiting_input", "groups"))
    occupancy.stage_changed(stage(4.0, "ActorTrain", "processing"))
    occupancy.stage_changed(stage(6.0, "ActorTrain", "waiting_output", "ParamUpdate"))
    occupancy.stage_changed(stage(7.0, "ActorTrain", "waiting_input", "groups"))
    occupancy.stage_changed(stage(9.0, "ActorTrain", "processing"))
    assert occupancy.stage_waits((1.0, 8.0)) == {"ActorTrain": {"ParamUpdate": 1.0, "groups": 4.0}}


def test_a_stage_that_repeats_its_state_has_been_in_it_since_the_first_time() -> None:
    occupancy = Occupancy()
    occupancy.stage_changed(stage(1.0, "Generate", "processing"))
    occupancy.stage_changed(stage(5.0, "Generate", "processing"))
    assert occupancy.stages["Generate"].since == 1.0


def test_the_reward_is_waited_for_only_while_nothing_decodes() -> None:
    occupancy = Occupancy()
    occupancy.declare({"a": 1})
    occupancy.replica_active(active("a", (0.0, 4.0)))
    occupancy.trainer_waits.add((0.0, 10.0))
    occupancy.stage_changed(stage(3.0, "Reward", "processing"))
    occupancy.stage_changed(stage(9.0, "Reward", "waiting_input", "Rollout"))
    assert occupancy.seconds("waited_for_reward", (0.0, 10.0)) == pytest.approx(5.0)
    assert occupancy.trainer_waits.within((0.0, 10.0)) == pytest.approx(10.0)


def test_time_with_a_batch_and_without_work_is_between_steps_unless_it_has_another_reason() -> None:
    occupancy = Occupancy()
    occupancy.stage_changed(stage(0.0, "ActorTrain", "processing"))
    occupancy.trainer.report(busy("step", (2.0, 4.0)))
    occupancy.saves.add((5.0, 6.0))
    occupancy.handovers.add((0.0, 0.5))
    occupancy.stage_changed(stage(8.0, "ActorTrain", "waiting_input", "groups"))
    assert occupancy.seconds("between_steps", (0.0, 10.0)) == pytest.approx(8.0 - 2.0 - 1.0 - 0.5)
    occupancy.sum_up(3.0)
    assert occupancy.seconds("between_steps", (0.0, 10.0)) == pytest.approx(4.5)


def test_a_replica_that_is_back_after_a_resume_has_nothing_to_tell_of_the_time_that_it_was_gone() -> None:
    occupancy = Occupancy()
    occupancy.declare({"a": 1, "b": 1})
    occupancy.begin(0.0)
    occupancy.replica_active(active("a", (0.0, 2.0), time=2.0))
    occupancy.lose(ReplicaLost(time=2.0, replica="a", reason="died"))
    occupancy.replica_active(active("b", (0.0, 8.0), time=8.0))
    occupancy.sum_up(8.0)
    occupancy.declare({"a": 1, "b": 1}, since=9.0)
    assert occupancy.reported_until() == 8.0
    occupancy.replica_active(active("b", time=9.5))
    assert occupancy.reported_until() == 9.0
    assert occupancy.rollouter_idle((0.0, 9.0)) == pytest.approx(1 - (2 + 8) / 18)
