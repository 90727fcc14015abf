"""Completion order with a largest lag: groups that would become too old are waited for, or dropped."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import product
from math import floor
from typing import Any

import pytest

from headway.data.types import TrajectoryId
from headway.errors import NothingToTrain
from headway.events import BatchTaken, GroupSettled, OptimizerStepped, RunStarted, TrajectoryFinished
from headway.reports.metrics.run_metrics import RunMetrics
from tests.pipeline.cases import SCHEDULES, Case, cases, for_each
from tests.pipeline.fakes import FakeReward
from tests.pipeline.invariants import check_everything, run_and_check
from tests.pipeline.scenario import Run, Scenario
from tests.tiers import mostly_slow

B = 4


def ready(on_overdue: str, max_lag: int | None, eta: float = 1, **more: Any) -> Scenario:
    """One batch of four groups a version, in completion order."""
    values = {
        "trigger_parameter_sync_step": 1,
        "staleness_threshold": eta,
        "order": "ready",
        "window": None,
        "max_lag": max_lag,
        "on_overdue": on_overdue,
    }
    return Scenario("async_partial", async_training=values, slots=64, **more)


def lags(run: Run) -> list[int]:
    return [event.lag for event in run.of(GroupSettled) if event.lag is not None]


def rare_and_long(trajectory: TrajectoryId) -> int:
    """Every sixth answer takes fifteen times as long as the others."""
    return 120 if trajectory.row % 6 == 3 else 8


def test_without_a_largest_lag_a_slow_group_is_overtaken_again_and_again():
    run = check_everything(ready("wait", None, lengths=rare_and_long, total=48).run().assert_completed())
    assert run.of(RunStarted)[0].lag_bound is None
    assert max(lags(run)) > 3


# ---------------------------------------------------------------------------------------------- wait


@mostly_slow(("eta", "more"), product([0.5, 1, 2], [0, 1]), quick=[(0.5, 0), (1, 1), (2, 0)])
def test_wait_keeps_the_largest_lag_and_drops_nothing(eta: float, more: int):
    max_lag = floor(1 + Fraction(str(eta)) - Fraction(1, B)) + more
    run = check_everything(ready("wait", max_lag, eta, lengths=rare_and_long, total=48).run().assert_completed())
    assert run.of(RunStarted)[0].lag_bound == max_lag
    assert max(lags(run)) == max_lag, "and makes use of it"
    assert run.fates() == {"trained": 48}


def test_the_batch_waits_for_a_group_that_would_become_overdue_although_others_are_ready():
    """Group 3 takes 15 s. With η = 1 and max_lag 1 it may be trained at version 1, not later: that batch waits."""
    run = ready("wait", 1, lengths=lambda t: 120 if t.row == 3 else 8, trainer={"step_s": lambda _: 0.5}).run()
    run.assert_completed()
    taken = {fetch.version: fetch for fetch in run.of(BatchTaken)}
    assert 3 in taken[1].numbers
    finished = max(t.finished for t in run.of(TrajectoryFinished) if t.number == 3)
    assert taken[1].time == finished + 0.25, "as soon as it is rewarded"
    assert taken[1].waited[1] - taken[1].waited[0] > 10
    assert taken[0].time == 8 * 0.125 + 0.25, "nothing waits before it must"


def test_nothing_waits_while_whatever_is_due_still_fits():
    """Unless a group is due, order and times are those of a run without a largest lag."""

    def fetches(max_lag: int | None) -> list[list[int]]:
        run = ready("wait", max_lag, lengths=lambda t: 8 + t.row % 5).run().assert_completed()
        return [fetch.numbers for fetch in run.of(BatchTaken)]

    assert fetches(3) == fetches(None)


def test_a_group_with_newer_tokens_than_its_admission_is_due_later():
    """It waited in the engine while the version changed: its oldest token, not its admission, says how old it is."""
    run = check_everything(ready("wait", 1, lengths=lambda _: 24, total=32).run().assert_completed())
    scenario = ready("wait", 1, lengths=lambda _: 24, total=32)
    scenario.slots = 2
    narrow = check_everything(scenario.run().assert_completed())
    assert max(lags(narrow)) <= max(lags(run)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("share", [1], ids=["all"])
def test_waiting_never_deadlocks_and_never_exceeds_its_bound_in_any_case(share: float):
    """A hundred whole runs and more."""
    waited: Counter[bool] = Counter()

    def check(case: Case) -> None:
        run = run_and_check(case)
        waited[case.max_lag is not None] += 1
        if case.max_lag is not None and not isinstance(run.error, NothingToTrain):
            assert all(event.reason != "overdue" for event in run.of(GroupSettled))

    for_each(cases(order="ready", on_overdue="wait", longest=120), share * SCHEDULES["max_lag"], check)
    assert waited[True] > waited[False] / 2


# ---------------------------------------------------------------------------------------------- drop


@mostly_slow(
    ("max_lag", "on_update"),
    product([0, 1, 2], ["drain", "interrupt", "keep"]),
    quick=[(0, "interrupt"), (1, "keep"), (2, "drain")],
)
def test_drop_keeps_the_largest_lag_and_refills_what_it_drops(max_lag: int, on_update: str):
    scenario = ready("drop", max_lag, lengths=rare_and_long, total=48)
    scenario.async_training["on_update"] = on_update
    run = check_everything(scenario.run().assert_completed())
    assert max(lags(run)) <= max_lag
    assert run.groups["trained"] == 48
    assert run.groups["admitted"] == 48 + run.groups["dropped"]
    assert {event.reason for event in run.of(GroupSettled) if event.fate == "dropped"} <= {"overdue"}
    if max_lag < 2 and on_update != "drain":
        assert run.groups["dropped"] > 0


def test_what_still_decodes_when_its_version_is_over_is_aborted_at_once():
    run = ready("drop", 1, lengths=lambda t: 4000 if t.row == 3 else 8).run().assert_completed()
    (dropped,) = [event for event in run.of(GroupSettled) if event.fate == "dropped"]
    assert (dropped.number, dropped.reason) == (3, "overdue")
    begins = next(fetch.time for fetch in run.of(BatchTaken) if fetch.version == 2)
    steps = [step.time for step in run.of(OptimizerStepped) if step.version == 1]
    assert steps[-1] == dropped.time <= begins, "as soon as version 2 began"
    aborted = [t for t in run.of(TrajectoryFinished) if t.number == 3]
    assert {t.finish_reason for t in aborted} == {"aborted"}
    assert all(0 < t.tokens < 4000 for t in aborted)


def test_what_is_queued_and_overdue_is_dropped_when_it_would_be_taken():
    """Finished and rewarded in time, but the trainer takes what was ready before it."""
    reward = FakeReward(seconds=lambda prompt: 3.0 if prompt.row == 3 else 0.25)
    run = ready("drop", 0, reward=reward, lengths=lambda _: 8, trainer={"step_s": lambda _: 6.0}).run()
    check_everything(run.assert_completed())
    dropped = {event.number: event.time for event in run.of(GroupSettled) if event.reason == "overdue"}
    assert 3 in dropped
    assert dropped[3] in {fetch.waited[0] for fetch in run.of(BatchTaken)}
    assert {t.finish_reason for t in run.of(TrajectoryFinished) if t.number == 3} == {"stop"}


def test_a_group_of_which_one_answer_is_overdue_ends_once():
    """The short one is done long before: the one that still decodes brings the end of both."""
    scenario = ready("drop", 1, lengths=lambda t: 4000 if (t.row, t.k) == (3, 1) else 8, replicas=2)
    run = check_everything(scenario.run().assert_completed())
    (dropped,) = [event for event in run.of(GroupSettled) if event.fate == "dropped"]
    assert (dropped.number, dropped.reason) == (3, "overdue")
    assert sorted((t.k, t.finish_reason) for t in run.of(TrajectoryFinished) if t.number == 3) == [
        (0, "stop"),
        (1, "aborted"),
    ]


def test_dropping_favours_short_answers_and_the_bias_shows_it():
    """What is trained on is shorter than what was asked for; waiting trains on all of it."""

    def ratio(on_overdue: str) -> float:
        run = ready(on_overdue, 1, lengths=rare_and_long, total=48).run().assert_completed()
        metrics = RunMetrics()
        for event in run.events:
            metrics.on_event(event)
        told = metrics.bias()["length_ratio"]
        assert told is not None
        return told

    assert ratio("wait") == 1
    assert ratio("drop") < 0.7
