"""The timeline of whole runs: what it says of idle time is what the run's figures say."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from headway.config.presets import PRESETS
from headway.events import (
    CheckpointCopied,
    CheckpointSaved,
    Event,
    GroupAdmitted,
    GroupRewarded,
    GroupSettled,
    LeaseChanged,
    OptimizerStepped,
    ProfileTaken,
    ReplicaActivity,
    ReplicaHalted,
    ReplicaJoined,
    ReplicaLost,
    Span,
    StageChanged,
    TrajectoryFinished,
    UpdateFinished,
    UpdatePhase,
    UpdateSuperseded,
)
from headway.reports.timeline.html_timeline import MAX_POINTS, busy_share, page_data
from headway.reports.timeline.lanes import Counter, Lane, SpanKind
from headway.reports.timeline.timeline import MarkKind, Timeline, build_timeline, idle_reasons
from headway.reports.timeline.worker_lanes import REPLICAS, TRAINER
from tests.reports.scripted_run import ScriptedRun
from tests.reports.timelines import cut_short, failed, simulated, simulated_events, started
from tests.tiers import mostly_slow

MODES = tuple(PRESETS)
in_modes = mostly_slow("mode", MODES, quick=["stream_off_policy", "overlapped", "colocate_async"])


def lane(timeline: Timeline, name: str, group: str | None = None) -> Lane:
    return next(lane for lane in timeline.lanes if lane.name == name and group in (None, lane.group))


def told(shown: Lane) -> list[tuple[float, float, str]]:
    return [(round(s.start, 6), round(s.end, 6), s.label) for s in shown.spans]


def values(counter: Counter) -> list[tuple[float, float]]:
    return list(counter.points)


def counter(timeline: Timeline, name: str) -> Counter:
    return next(counter for counter in timeline.counters if counter.name == name)


@in_modes
def test_spans_of_a_lane_are_disjoint_and_lie_within_the_run(mode: str) -> None:
    timeline = simulated(mode)
    assert timeline.spans > 100
    for shown in timeline.lanes:
        assert all(span.end > span.start for span in shown.spans)
        assert all(before.end <= after.start for before, after in pairwise(shown.spans)), shown.name
        if shown.spans:
            assert timeline.window[0] <= shown.spans[0].start
            assert shown.spans[-1].end <= timeline.window[1] + 1e-9


@in_modes
def test_idle_time_with_its_reasons_adds_up_to_the_idle_ratios(mode: str) -> None:
    timeline = simulated(mode)
    shares = {TRAINER: 0.0, REPLICAS: 0.0}
    for found in idle_reasons(timeline):
        shares[found.who] += found.share
    assert shares[TRAINER] == pytest.approx(timeline.summary["trainer/idle_ratio"], abs=1e-9)
    assert shares[REPLICAS] == pytest.approx(timeline.summary["rollouter/idle_ratio"], abs=1e-9)


@in_modes
def test_nearly_all_idle_time_has_a_reason(mode: str) -> None:
    unknown = sum(found.share for found in idle_reasons(simulated(mode)) if found.reason == "nothing reported")
    assert unknown < 0.01


@in_modes
def test_every_update_is_marked_and_every_replica_shows_the_versions_that_it_served(mode: str) -> None:
    events, timeline = simulated_events(mode), simulated(mode)
    updates = [f"v{event.version}" for event in events if isinstance(event, UpdateFinished)]
    assert [mark.label for mark in timeline.marks if mark.kind is MarkKind.UPDATE] == updates
    for shown in timeline.lanes:
        if shown.annotates:
            versions = [int(span.label.removeprefix("serves v")) for span in shown.spans]
            assert versions[0] == 0
            assert versions == sorted(set(versions))


def test_a_mode_with_shared_devices_shows_who_holds_them_and_why_replicas_stand_still() -> None:
    timeline = simulated("colocate_async")
    kinds = [span.kind for span in lane(timeline, "shared devices").spans]
    assert kinds[:3] == [SpanKind.GENERATE_LEASE, SpanKind.TRAIN_LEASE, SpanKind.GENERATE_LEASE]
    reasons = {found.reason for found in idle_reasons(timeline)}
    assert "halted: training has the shared devices" in reasons
    assert "waits for the shared devices" in reasons


def test_a_scripted_run_shows_what_its_script_says() -> None:
    timeline = build_timeline(ScriptedRun(versions=2).build())
    shown = [span for span in lane(timeline, "trainer").spans if span.reason is None]
    assert [span.kind for span in shown] == [SpanKind.FORWARD, SpanKind.STEP] * 2
    assert [span.seconds for span in shown] == pytest.approx([0.5, 2.0] * 2)
    waits = lane(timeline, "trainer").idle_by_reason(timeline.window)
    assert waits["waits for groups from the message queue"] == pytest.approx(2.0 + 1.0)  # it waits from the start on
    assert "mean reward 0.520 on " in lane(timeline, "validation").spans[0].label


# ------------------------------------------------------------------------------------------ reasons, one by one


def stage(time: float, name: str, state: str, waiting_for: str | None = None, active: int = 0) -> StageChanged:
    return StageChanged(time=time, stage=name, state=state, waiting_for=waiting_for, active=active)


def active(busy: list[Span], time: float = 20.0, replica: str = "rollout-0") -> ReplicaActivity:
    return ReplicaActivity(
        time=time, replica=replica, busy=busy, slot_seconds=1.0, generated_tokens=1, prefilled_tokens=1
    )


def halted(span: Span, reason: str = "load", interrupted: int = 0) -> ReplicaHalted:
    return ReplicaHalted(time=span[1], replica="rollout-0", reason=reason, span=span, interrupted=interrupted)


def phase(time: float, name: str, seconds: float, where: str) -> UpdatePhase:
    return UpdatePhase(time=time, version=3, phase=name, where=where, seconds=seconds)


def update_finished(time: float, validation_stall_s: float = 0.0) -> UpdateFinished:
    return UpdateFinished(
        time=time,
        version=3,
        trainer_stall_s=1.0,
        rollout_stall_s=1.0,
        interrupted=0,
        validation_stall_s=validation_stall_s,
    )


def admitted(time: float, count: int, discarded: int = 0) -> GroupAdmitted:
    return GroupAdmitted(
        time=time,
        number=count - 1,
        epoch=0,
        row=0,
        attempt=0,
        version=0,
        admitted=count,
        discarded=discarded,
        limit=99,
    )


def test_a_halted_replica_says_which_version_it_loads_and_how_many_answers_were_cut() -> None:
    events = [started(), phase(5.5, "load", 1, "rollout-0"), halted((4, 6), interrupted=7), active([(0, 4), (6, 20)])]
    assert told(lane(build_timeline(events), "rollout-0", REPLICAS)) == [
        (0, 4, "decodes"),
        (4, 6, "halted: loads v3; 7 answers were cut and go on"),
        (6, 20, "decodes"),
    ]


def test_a_replica_without_requests_says_whether_the_limit_or_the_runs_length_is_why() -> None:
    waits = stage(0, "PromptLoader", "waiting_input", "room under the staleness limit")
    events = [started(), waits, admitted(1, 7), admitted(12, 8), active([(0, 5), (14, 20)]), stage(30, "X", "stopped")]
    assert told(lane(build_timeline(events), "rollout-0", REPLICAS)) == [
        (0, 5, "decodes"),
        (5, 12, "no requests: the staleness limit is reached"),
        (12, 14, "no requests: all groups of the run are admitted"),
        (14, 20, "decodes"),
        (20, 30, "no requests: all groups of the run are admitted"),
    ]


def test_the_trainers_wait_for_an_update_says_what_the_update_waited_for() -> None:
    events: list[Event] = [
        started(on_update="drain"),
        stage(0, "ActorTrain", "waiting_output", "ParamUpdate", 1),
        phase(4, "send", 3, "actor"),
        phase(4, "recv", 2, "rollout-0"),
        phase(4, "register", 1, "rollout-0"),
        phase(12, "load", 1, "rollout-0"),
        update_finished(12, validation_stall_s=2.0),
        stage(12, "ActorTrain", "stopped"),
    ]
    assert told(lane(build_timeline(events), "trainer")) == [
        (0, 1, "waits for the parameter update: answers in flight finish first"),
        (1, 4, "waits for the parameter update: weights are sent and received"),
        (4, 6, "waits for the parameter update: a validation finishes first"),
        (6, 11, "waits for the parameter update: answers in flight finish first"),
        (11, 12, "waits for the parameter update: replicas load"),
    ]


def test_the_trainer_waits_for_rewards_where_nothing_decodes_and_some_are_being_computed() -> None:
    events = [
        started(),
        stage(0, "ActorTrain", "waiting_input", "groups from the message queue"),
        stage(0, "Reward", "processing", active=1),
        active([(0, 6)]),
    ]
    assert told(lane(build_timeline(events), "trainer")) == [
        (0, 6, "waits for groups from the message queue"),
        (6, 20, "waits for groups: rewards are being computed, and nothing decodes"),
    ]


def test_copying_the_state_for_a_checkpoint_is_idle_time_with_a_reason() -> None:
    copied = CheckpointCopied(time=4, version=2, span=(3, 4))
    saved = CheckpointSaved(time=9, version=2, path="checkpoints/version_2", span=(4, 9))
    timeline = build_timeline([started(), copied, saved])
    (shown,) = (span for span in lane(timeline, "trainer").spans if span.kind is SpanKind.CHECKPOINT)
    assert (shown.start, shown.end, shown.reason, shown.label) == (
        3,
        4,
        "saves a checkpoint",
        "copies the state of v2",
    )
    (written,) = lane(timeline, "checkpoints").spans
    assert (written.start, written.end) == (4, 9)


def test_handing_shared_devices_over_is_the_trainers_wait() -> None:
    events = [
        started(),
        LeaseChanged(time=4, holder="train", asked=2),
        LeaseChanged(time=9, holder="generate", asked=8),
    ]
    timeline = build_timeline(events)
    assert (2, 4, "waits for the shared devices") in told(lane(timeline, "trainer"))
    assert (8, 9, "hands the shared devices back") in told(lane(timeline, "trainer"))
    held = [(0, 4, "generate holds the devices"), (4, 9, "train holds the devices")]
    assert told(lane(timeline, "shared devices")) == held


def test_a_replica_has_a_lane_from_its_join_to_its_loss_and_both_leave_marks() -> None:
    events = [
        started(),
        ReplicaJoined(time=5, replica="late", version=1, slots=4),
        UpdateSuperseded(time=6, version=2, replica="late"),
        ReplicaLost(time=8, replica="rollout-0", reason="out of memory"),
        active([(0, 8)], time=9),
        active([(5, 10)], time=10, replica="late"),
    ]
    timeline = build_timeline(events)
    assert told(lane(timeline, "rollout-0", REPLICAS)) == [(0, 8, "decodes")]
    assert told(lane(timeline, "late")) == [(5, 10, "decodes")]
    assert [(mark.kind, mark.label) for mark in timeline.marks] == [
        (MarkKind.JOINED, "late joins with v1"),
        (MarkKind.SUPERSEDED, "late never gets v2: newer was ready"),
        (MarkKind.LOST, "rollout-0 is lost, what it was generating runs again elsewhere: out of memory"),
    ]


def test_idle_time_adds_up_to_the_ratio_when_replicas_join_late_or_die() -> None:
    timeline = build_timeline(
        [
            started(),
            GroupAdmitted(time=2, number=0, epoch=0, row=0, attempt=0, version=0, admitted=1, discarded=0, limit=1),
            ReplicaJoined(time=6, replica="late", version=1, slots=4),
            active([(3, 4)], time=9),
            ReplicaLost(time=9, replica="rollout-0", reason="out of memory"),
            active([(7, 11)], time=12, replica="late"),
            OptimizerStepped(time=12, step=0, fetch=0, version=0, skipped=False, tokens=1, trajectories=1, lags=[0]),
        ]
    )
    idle = [found for found in idle_reasons(timeline) if found.who == REPLICAS]
    assert sum(found.share for found in idle) == pytest.approx(timeline.summary["rollouter/idle_ratio"])
    assert timeline.summary["rollouter/idle_ratio"] == pytest.approx((6 + 2) / (7 + 6))
    assert sum(found.seconds for found in idle) == pytest.approx(10 * (6 + 2) / (7 + 6))
    assert busy_share(lane(timeline, "rollout-0", REPLICAS), timeline) == pytest.approx(1 / 7)
    assert busy_share(lane(timeline, "late"), timeline) == pytest.approx(4 / 6)


# ------------------------------------------------------------------------------------------ counters


def finished(begin: float, end: float) -> TrajectoryFinished:
    return TrajectoryFinished(
        time=end,
        number=0,
        k=0,
        replica="rollout-0",
        prompt_tokens=1,
        tokens=1,
        finish_reason="stop",
        version_spans=[[0, 0]],
        started=begin,
        finished=end,
    )


def test_the_answers_being_generated_are_counted_at_every_change() -> None:
    timeline = build_timeline([started(), finished(0, 4), finished(2, 4), finished(4, 5)])
    generating = counter(timeline, "answers being generated")
    assert values(generating) == [(0, 1), (2, 2), (4, 1), (5, 0)]
    assert generating.limit == 8


def test_the_queue_holds_groups_from_their_reward_until_they_are_taken_or_discarded() -> None:
    events: list[Event] = [
        started(),
        *(GroupRewarded(time=number, number=number, rewards=[1.0]) for number in (1, 2)),
        GroupSettled(time=2, number=2, fate="filtered", reason="no variance"),
        GroupSettled(time=3, number=9, fate="failed", reason="never rewarded"),
    ]
    timeline = build_timeline(events)
    assert values(counter(timeline, "groups in the queue")) == [(1, 1), (2, 1)]
    assert [mark.label for mark in timeline.marks] == [
        "group 2 filtered: no variance",
        "group 9 failed: never rewarded",
    ]


@in_modes
def test_no_counter_falls_below_zero_or_rises_above_its_limit(mode: str) -> None:
    for found in simulated(mode).counters:
        assert min(found.values) >= 0
        assert found.limit is None or max(found.values) <= found.limit
        assert all(before < after for before, after in pairwise(found.times))


def test_a_counter_on_a_page_has_few_points_and_keeps_its_extremes_and_its_end() -> None:
    count = 3 * MAX_POINTS
    whole = Counter("c", tuple(i / 100 for i in range(count)), tuple(float((i * 37) % 101) for i in range(count)))
    timeline = replace(simulated("async_partial"), counters=(whole,))
    (drawn,) = page_data(timeline, (), 0.0)["counters"]
    assert len(drawn["times"]) == len(drawn["values"]) <= MAX_POINTS
    assert (min(drawn["values"]), max(drawn["values"])) == (min(whole.values), max(whole.values))
    assert drawn["values"][-1] == whole.values[-1]


# ------------------------------------------------------------------------------------------ runs that ended badly


def test_a_run_that_was_killed_has_a_timeline_up_to_its_last_event() -> None:
    events = cut_short()
    timeline = build_timeline(events)
    assert timeline.window == (events[0].time, max(event.time for event in events))
    assert timeline.summary["status"] == "running"
    assert lane(timeline, "trainer").spans[-1].end == timeline.window[1]


def test_a_run_that_failed_before_training_has_no_shares_but_a_mark_that_says_why() -> None:
    timeline = build_timeline(failed("WorkerDied: rollout-0 ended"))
    assert idle_reasons(timeline) == []
    assert timeline.measured is None
    assert timeline.marks[-1].label == "the run failed: WorkerDied: rollout-0 ended"


def test_a_run_of_one_event_and_a_run_of_none_have_timelines() -> None:
    assert build_timeline([started(time=5.0)]).window == (5.0, 5.0)
    assert build_timeline([]).lanes == ()


@pytest.mark.parametrize(
    ("files", "versions", "label"),
    [
        (["actor-0.json.gz"], 1, "a profile of 2.5 s begins with v3: actor-0.json.gz in profiles/version-3"),
        (["actor-0.json.gz", "rollout-0.json.gz"], 2, "a profile of 2.5 s begins with v3, to v4: 2 traces in profiles"),
    ],
)
def test_a_profile_is_marked_where_its_window_opened(files: list[str], versions: int, label: str) -> None:
    taken = ProfileTaken(
        time=105.0, version=3, versions=versions, span=(102.0, 104.5), folder="profiles/version-3", files=files
    )
    events = ScriptedRun().build()
    timeline = build_timeline([*events, taken])
    (mark,) = (mark for mark in timeline.marks if "profile" in mark.label)
    assert (mark.time, mark.kind) == (102.0, MarkKind.NOTE)
    assert mark.label.startswith(label)
