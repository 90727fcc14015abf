"""Metrics of scripted runs, against figures worked out from the script by other means."""

from __future__ import annotations

import random
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.events import (
    BatchTaken,
    Event,
    GroupAdmitted,
    GroupRewarded,
    GroupSettled,
    OptimizerStepped,
    ReplicaActivity,
    ReplicaJoined,
    ReplicaLost,
    RunStarted,
    Span,
    StageChanged,
    TrainerBusy,
    TrajectoryFinished,
    UpdateFinished,
    UpdatePhase,
    ValidationFinished,
)
from headway.reports.metrics.run_metrics import RunMetrics
from headway.reports.metrics.summary import NOTHING_TRAINED, summary
from headway.reports.record.events_file import EventsFile, read_events
from tests.reports.scripted_run import REPLICA, ScriptedRun


class Rows(list[dict[str, Any]]):
    """A sink that keeps the rows."""

    def on_row(self, row: dict[str, Any]) -> None:
        self.append(row)

    def close(self) -> None: ...


def observe(run: list[Event]) -> tuple[RunMetrics, Rows]:
    rows = Rows()
    metrics = RunMetrics([rows])
    for event in run:
        metrics.on_event(event)
    metrics.close()
    return metrics, rows


def of_type(run: list[Event], cls: type[Any]) -> list[Any]:
    return [event for event in run if isinstance(event, cls)]


def test_the_summary_of_a_scripted_run_follows_from_the_script() -> None:
    script = ScriptedRun(versions=4, per_version=8, n=4, wait_s=1.0, forward_s=0.5, step_s=2.0, update_s=0.5)
    run = script.build()
    result = summary(observe(run)[0])

    filtered = len([e for e in of_type(run, GroupSettled) if e.fate == "filtered"])
    assert result["groups"] == {
        "admitted": 32 + filtered,
        "trained": 32,
        "filtered": filtered,
        "dropped": 0,
        "failed": 0,
        "in_flight": 0,
    }
    assert result["balanced"] is True
    assert result["status"] == "completed"
    assert (result["mode"], result["seed"], result["version"]) == ("async_partial", 0, 4)
    assert (result["fetches"], result["optimizer_steps"], result["skipped_steps"]) == (4, 4, 0)
    # Each version waits 1, computes 2.5 and updates 0.5; the last update is after the last step.
    assert result["wall_s"] == pytest.approx(4 * 4.0 - 0.5)
    assert result["trainer/idle_ratio"] == pytest.approx(1 - 4 * 2.5 / 15.5)
    assert result["rollouter/idle_ratio"] == pytest.approx(1 - 4 * 0.8 * 3.5 / 15.5)
    assert result["rollouter/slot_utilization"] == pytest.approx(4 * 0.8 * 3.5 * 12 / (16 * 15.5))
    assert result["param_update"]["count"] == 4
    assert result["param_update"]["trainer_stall_s"] == pytest.approx(4 * 0.5)
    assert result["param_update"]["rollout_stall_s"] == pytest.approx(4 * 0.25)
    assert result["param_update"]["recv_s"] == pytest.approx(4 * 0.25 * 0.5)
    assert [e["version"] for e in result["eval"]] == [0, 1, 2, 3, 4]
    assert result["eval"][0]["accuracy"] == pytest.approx(0.52)
    assert result["throughput"]["samples_per_s"] == pytest.approx(32 / 15.5)


def test_lags_come_from_trained_groups_and_partial_rollouts_from_every_trajectory() -> None:
    run = ScriptedRun(versions=5).build()
    result = summary(observe(run)[0])

    lags = [e.lag for e in of_type(run, GroupSettled) if e.fate == "trained"]
    assert result["lag"]["mean"] == pytest.approx(fmean(lags))
    assert result["lag"]["max"] == max(lags)
    assert result["lag"]["bound"] == 2
    assert result["lag"]["order"] == "window"
    assert result["lag"]["histogram"] == {str(lag): lags.count(lag) for lag in sorted(set(lags))}
    assert result["stale"]["samples_processed"] == sum(lag >= 1 for lag in lags)

    finished = of_type(run, TrajectoryFinished)
    partial = [e for e in finished if len({version for _, version in e.version_spans}) > 1]
    assert partial, "the script must contain some"
    assert result["trajectories"] == len(finished)
    assert result["preempted"] == 3 * len(of_type(run, ReplicaActivity)) > 0
    assert result["partial"] == {
        "total_partial_num": len(partial),
        "partial_ratio": len(partial) / len(finished),
        "max_partial_span": 1,
    }
    assert result["tokens"]["generated"] == sum(e.tokens for e in finished)


def test_a_version_row_has_the_groups_trained_at_it_and_the_update_that_ended_it() -> None:
    run = ScriptedRun(versions=3).build()
    _, rows = observe(run)
    assert [row["version"] for row in rows] == [0, 1, 2, 3]

    numbers = of_type(run, BatchTaken)[1].numbers
    rewards = [r for e in of_type(run, GroupRewarded) if e.number in numbers for r in e.rewards]
    lengths = [e.tokens for e in of_type(run, TrajectoryFinished) if e.number in numbers]
    row = rows[1]
    assert row["reward/mean"] == pytest.approx(fmean(rewards))
    assert row["response_length/mean"] == pytest.approx(fmean(lengths))
    assert row["response_length/max"] == max(lengths)
    assert row["actor/optimizer_steps"] == 1
    assert row["actor/lr"] == 1e-4
    assert row["param_update/recv_s"] == pytest.approx(0.125)
    assert row["param_update/trainer_stall_s"] == pytest.approx(0.5)
    assert row["validation/accuracy"] == pytest.approx(0.52 + 0.45 * 0.2)
    assert row["time/seconds"] == pytest.approx(4.0)
    assert row["trainer/idle_ratio"] == pytest.approx(1.5 / 4)
    assert row["throughput/samples_per_s"] == pytest.approx(8 / 4)


def test_the_last_row_has_the_validation_of_the_last_version_and_no_training() -> None:
    _, rows = observe(ScriptedRun(versions=2).build())
    assert "validation/accuracy" in rows[-1]
    assert "reward/mean" not in rows[-1]
    assert "trainer/idle_ratio" not in rows[-1]


def test_rows_add_up_to_the_summary() -> None:
    metrics, rows = observe(ScriptedRun(versions=6).build())
    result = summary(metrics)
    trained = [row for row in rows if "reward/mean" in row]
    assert sum(row["actor/optimizer_steps"] for row in trained) == result["optimizer_steps"]
    assert (
        sum(row["fully_async/partial/total_partial_num"] for row in trained) == result["partial"]["total_partial_num"]
    )
    assert sum(sum(row["lag/histogram"].values()) for row in trained) == result["groups"]["trained"]
    assert rows[-1]["fully_async/count/stale_samples_processed"] == result["stale"]["samples_processed"]
    assert rows[-1]["fully_async/count/stale_trajectory_processed"] == result["stale"]["trajectory_processed"]


def test_a_replayed_file_gives_the_same_summary_and_rows(tmp_path: Path) -> None:
    run = ScriptedRun(versions=3).build()
    file = EventsFile(tmp_path / "events.jsonl", pytest.fail)
    for event in run:
        file.on_event(event)
    file.close()
    metrics, rows = observe(run)
    again, rows_again = observe(list(read_events(tmp_path / "events.jsonl")))
    assert summary(again) == summary(metrics)
    assert rows_again == rows


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.sampled_from([0, 2, 5]))
def test_events_of_one_instant_may_come_in_any_order_that_keeps_each_groups_own(
    seed: int, versions: int, discard_every: int
) -> None:
    """Groups are independent: only a group's own events are ordered, and rows end where an update finishes."""
    run = ScriptedRun(versions=versions, discard_every=discard_every).build()
    expected = summary(observe(run)[0])
    rng = random.Random(seed)
    shuffled: list[Event] = []
    for _, instant in groupby(run, key=lambda event: event.time):
        shuffled += interleaved(list(instant), rng)
    assert summary(observe(shuffled)[0]) == close_to(expected)


def interleaved(instant: list[Event], rng: random.Random) -> list[Event]:
    """A random order of simultaneous events in which those of one group, and those of one stage, keep theirs."""
    lanes: dict[str, list[Event]] = {}
    for index, event in enumerate(instant):
        if isinstance(event, BatchTaken):  # concerns many groups: everything before it stays before it
            return interleaved_around(instant, event, rng)
        lane = getattr(event, "number", getattr(event, "stage", f"alone {index}"))
        lanes.setdefault(str(lane), []).append(event)
    result = []
    while lanes:
        lane = rng.choice(sorted(lanes))
        result.append(lanes[lane].pop(0))
        if not lanes[lane]:
            del lanes[lane]
    return result


def interleaved_around(instant: list[Event], pivot: Event, rng: random.Random) -> list[Event]:
    at = instant.index(pivot)
    return [*interleaved(instant[:at], rng), pivot, *interleaved(instant[at + 1 :], rng)]


def close_to(value: Any) -> Any:
    """Sums of the same floats in another order differ in the last digit."""
    if isinstance(value, dict):
        return {key: close_to(item) for key, item in value.items()}
    if isinstance(value, list):
        return [close_to(item) for item in value]
    return pytest.approx(value) if isinstance(value, float) else value


def test_before_anything_happened_there_is_a_summary_without_ratios() -> None:
    result = summary(RunMetrics())
    assert result["status"] == "running"
    assert result["trainer/idle_ratio"] is None
    assert result["lag"]["max"] is None
    assert result["wall_s"] == 0
    assert result["bottleneck"] == NOTHING_TRAINED


def started(slots: dict[str, int] | None = None) -> RunStarted:
    return RunStarted(
        time=0.0,
        mode="m",
        seed=0,
        groups_per_version=1,
        total_groups=None,
        lag_bound=None,
        order="ready",
        slots=slots or {REPLICA: 4},
    )


def admitted(number: int, time: float) -> GroupAdmitted:
    return GroupAdmitted(
        time=time, number=number, epoch=0, row=0, attempt=0, version=0, admitted=number + 1, discarded=0, limit=9
    )


def finished(number: int, spans: list[list[int]], tokens: int = 10, k: int = 0) -> TrajectoryFinished:
    return TrajectoryFinished(
        time=1.0,
        number=number,
        k=k,
        replica=REPLICA,
        prompt_tokens=3,
        tokens=tokens,
        finish_reason="stop",
        version_spans=spans,
        started=0.5,
        finished=1.0,
    )


def stepped(time: float, version: int, skipped: bool = False, **metrics: float) -> OptimizerStepped:
    return OptimizerStepped(
        time=time,
        step=0,
        fetch=0,
        version=version,
        skipped=skipped,
        tokens=10,
        trajectories=1,
        lags=[],
        metrics=metrics,
    )


def updated(time: float, version: int) -> UpdateFinished:
    return UpdateFinished(time=time, version=version, trainer_stall_s=1.0, rollout_stall_s=0.5, interrupted=0)


def test_lag_is_split_into_what_passed_in_flight_and_what_passed_in_the_queue() -> None:
    _, rows = observe(
        [
            started(),
            admitted(0, 1.0),
            finished(0, [[0, 1], [4, 2]]),
            finished(0, [[0, 2], [4, 3]], k=1),
            GroupRewarded(time=1.0, number=0, rewards=[1.0, 0.0]),
            BatchTaken(time=2.0, fetch=0, version=7, numbers=[0], waited=(0.0, 2.0)),
            stepped(3.0, 7),
            GroupSettled(time=3.0, number=0, fate="trained", lag=6),
        ]
    )
    row = next(row for row in rows if row["version"] == 7)
    assert row["lag/in_flight_mean"] == 2
    assert row["lag/in_queue_mean"] == 4
    assert row["lag/max"] == 6


def test_a_group_trained_in_several_epochs_is_counted_once() -> None:
    metrics, rows = observe(
        [
            started(),
            admitted(0, 1.0),
            finished(0, [[0, 0]]),
            BatchTaken(time=2.0, fetch=0, version=0, numbers=[0], waited=(0.0, 2.0)),
            stepped(3.0, 0, loss=1.0, ratio_max=1.0, lr=0.5),
            stepped(4.0, 0, loss=3.0, ratio_max=5.0, lr=0.25),
            stepped(4.5, 0, skipped=True, loss=1e9),
            GroupSettled(time=5.0, number=0, fate="trained", lag=0),
        ]
    )
    result = summary(metrics)
    assert result["groups"]["trained"] == sum(result["lag"]["histogram"].values()) == 1
    assert result["tokens"]["trained"] == 10
    assert (result["optimizer_steps"], result["skipped_steps"]) == (2, 1)
    assert rows[0]["actor/loss"] == 2.0
    assert rows[0]["actor/ratio_max"] == 5.0
    assert rows[0]["actor/lr"] == 0.25


def test_the_slowest_receiver_counts_for_a_phase() -> None:
    def phase(name: str, where: str, seconds: float) -> UpdatePhase:
        return UpdatePhase(time=4.0, version=1, phase=name, where=where, seconds=seconds)

    metrics, rows = observe(
        [
            started({"a": 1, "b": 1}),
            admitted(0, 1.0),
            stepped(3.0, 0),
            phase("send", "actor", 1.0),
            phase("recv", "a", 1.5),
            phase("recv", "b", 2.0),
            phase("load", "a", 0.25),
            phase("load", "b", 0.5),
            updated(5.0, 1),
        ]
    )
    assert rows[0]["param_update/recv_s"] == 2.0
    assert rows[0]["param_update/load_s"] == 0.5
    assert summary(metrics)["param_update"]["send_s"] == 1.0
    assert metrics.served == {"a": 1, "b": 1}


def test_what_was_published_before_the_first_admission_is_no_cost_of_the_run() -> None:
    metrics, _ = observe([started(), updated(0.5, 0), admitted(0, 1.0), stepped(3.0, 0)])
    assert summary(metrics)["param_update"]["count"] == 0


def active(time: float, *busy: Span, replica: str = REPLICA) -> ReplicaActivity:
    return ReplicaActivity(
        time=time, replica=replica, busy=list(busy), slot_seconds=0.0, generated_tokens=0, prefilled_tokens=0
    )


def test_a_late_report_of_a_replica_is_counted_in_a_later_row() -> None:
    _, rows = observe(
        [
            started(),
            admitted(0, 0.0),
            active(3.0, (0.0, 3.0)),
            stepped(3.5, 0),
            updated(4.0, 1),  # what happened between 3 and 4 is not known yet
            active(7.0, (3.0, 5.0)),
            stepped(7.5, 1),
            updated(8.0, 2),
        ]
    )
    assert rows[0]["rollouter/idle_ratio"] == pytest.approx(0.0)
    assert rows[1]["rollouter/idle_ratio"] == pytest.approx(0.5)


def test_rows_count_a_replica_from_its_join_to_its_loss() -> None:
    metrics, rows = observe(
        [
            started({"a": 1}),
            admitted(0, 0.0),
            active(4.0, (0.0, 4.0), replica="a"),
            stepped(4.0, 0),
            updated(4.0, 1),
            ReplicaJoined(time=6.0, replica="late", version=1, slots=1),
            ReplicaLost(time=7.0, replica="a", reason="died"),  # 3 s of which it told nothing
            ReplicaLost(time=7.5, replica="never joined", reason="died"),
            active(8.0, (7.0, 8.0), replica="late"),
            stepped(8.0, 1),
            updated(8.0, 2),
        ]
    )
    assert rows[0]["rollouter/idle_ratio"] == 0
    assert rows[1]["rollouter/idle_ratio"] == pytest.approx((3 + 1) / (3 + 2))
    assert summary(metrics)["rollouter/idle_ratio"] == pytest.approx((3 + 1) / (7 + 2))
    assert metrics.served == {"late": 1}


def trainer_stage(time: float, state: str) -> StageChanged:
    return StageChanged(time=time, stage="ActorTrain", state=state)


def worked(what: str, *span: float) -> TrainerBusy:
    start, end = span
    return TrainerBusy(time=end, what=what, version=0, span=(start, end))


def test_a_row_that_is_complete_in_the_middle_of_a_step_is_told_at_the_steps_end() -> None:
    """With the part of the step until then; the rest is the next row's."""
    rows = Rows()
    metrics = RunMetrics([rows])

    def see(*events: Event) -> list[int]:
        for event in events:
            metrics.on_event(event)
        return [row["version"] for row in rows]

    see(started(), admitted(0, 0.0), trainer_stage(0.0, "processing"), worked("step", 0.0, 2.0), stepped(2.0, 0))
    see(trainer_stage(2.0, "waiting_output"), worked("gather", 3.0, 4.0), trainer_stage(4.0, "processing"))
    assert see(updated(6.0, 1)) == []
    early = ValidationFinished(time=7.0, version=0, accuracy=1, problems=1, mean_tokens=1, failed=0, span=(6.0, 7.0))
    assert see(early) == [], "it stays behind the row of its version"
    assert see(worked("step", 5.0, 8.0)) == [0, 0]
    assert rows[0]["trainer/idle_ratio"] == pytest.approx(1 - (2 + 1 + 1) / 6)
    see(stepped(8.0, 1), trainer_stage(8.0, "waiting_output"), worked("gather", 8.0, 9.0))
    assert see(updated(10.0, 2)) == [0, 0, 1], "the trainer stands after its gather"
    assert rows[2]["trainer/idle_ratio"] == pytest.approx(1 - (2 + 1) / 4)


def test_a_row_is_told_at_once_while_the_trainer_waits_for_groups_and_later_while_it_may_gather() -> None:
    rows = Rows()
    metrics = RunMetrics([rows])
    for event in [started(), admitted(0, 0.0), stepped(1.0, 0), trainer_stage(1.0, "waiting_input"), updated(2.0, 1)]:
        metrics.on_event(event)
    assert len(rows) == 1
    for event in [stepped(3.0, 1), trainer_stage(3.0, "waiting_output"), updated(4.0, 2)]:
        metrics.on_event(event)
    assert len(rows) == 1
    metrics.on_event(worked("gather", 3.5, 5.0))
    assert len(rows) == 2
    assert rows[1]["trainer/idle_ratio"] == pytest.approx(1 - 0.5 / 2)


def test_what_was_under_way_when_the_record_ends_delays_no_row() -> None:
    _, rows = observe([started(), admitted(0, 0.0), stepped(1.0, 0), trainer_stage(1.0, "processing"), updated(2.0, 1)])
    assert len(rows) == 1


def test_lengths_lost_on_the_way_to_training_show_as_a_bias() -> None:
    metrics, _ = observe(
        [
            started(),
            *[admitted(number, 1.0) for number in range(4)],
            finished(0, [[0, 0]], tokens=10),
            finished(1, [[0, 0]], tokens=50),
            finished(2, [[0, 0]], tokens=999),  # still under way: neither trained nor lost
            finished(3, [[0, 0]], tokens=999),  # filtered: not trained on purpose
            GroupSettled(time=2.0, number=0, fate="trained", lag=0),
            GroupSettled(time=2.0, number=1, fate="dropped", reason="overdue"),
            GroupSettled(time=2.0, number=3, fate="filtered", reason="all rewards are 0"),
        ]
    )
    assert summary(metrics)["bias"] == {
        "trained_length_mean": 10,
        "dispatched_length_mean": 30,
        "length_ratio": pytest.approx(1 / 3),
    }
    assert summary(metrics)["reasons"] == {"dropped": {"overdue": 1}, "filtered": {"all rewards are 0": 1}}
    assert summary(metrics)["groups"]["in_flight"] == 1


def test_a_validation_that_ends_after_its_versions_row_gets_a_row_of_its_own() -> None:
    validation = ValidationFinished(
        time=6.0, version=0, accuracy=0.5, problems=2, mean_tokens=1.0, failed=0, span=(5.0, 6.0)
    )
    _, rows = observe([started(), admitted(0, 0.0), stepped(3.0, 0), updated(4.0, 1), validation])
    assert [row["version"] for row in rows] == [0, 0]
    told = {"accuracy": 0.5, "mean_tokens": 1.0, "failed": 0, "failed_episodes": 0}
    assert rows[1] == {"version": 0, **{f"validation/{name}": value for name, value in told.items()}}


@settings(max_examples=30, deadline=None)
@given(
    st.floats(0, 3), st.floats(0.1, 3), st.floats(0.1, 3), st.floats(0, 2), st.integers(1, 4), st.sampled_from([0, 3])
)
def test_ratios_of_any_script_are_shares_and_groups_balance(
    wait: float, forward: float, step: float, update: float, versions: int, discard_every: int
) -> None:
    script = ScriptedRun(
        versions=versions,
        wait_s=wait,
        forward_s=forward,
        step_s=step,
        update_s=update,
        discard_every=discard_every,
    )
    run = script.build()
    metrics, rows = observe(run)
    result = summary(metrics)
    for table in [result, *rows]:
        for name in ("trainer/idle_ratio", "rollouter/idle_ratio", "rollouter/slot_utilization"):
            if table.get(name) is not None:
                assert 0 <= table[name] <= 1
    groups = result["groups"]
    assert groups["admitted"] == sum(count for fate, count in groups.items() if fate != "admitted")
    assert result["balanced"]


def test_a_checkpoint_is_not_work_of_the_trainer() -> None:
    run: list[Event] = [
        started(),
        admitted(0, 0.0),
        TrainerBusy(time=2.0, what="step", version=0, span=(0.0, 2.0)),
        TrainerBusy(time=3.0, what="save", version=0, span=(2.0, 3.0)),
        stepped(4.0, 0),
    ]
    assert summary(observe(run)[0])["trainer/idle_ratio"] == pytest.approx(0.5)
