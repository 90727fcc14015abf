"""Whole runs over random small configurations, durations, rewards and seeds: what must hold in every one of them.

What that is stands in books.py, machines.py and figures.py. With test_random_faults.py and test_cancellation.py more
than 2,000 schedules run in the slow tests, a twentieth of them in the quick ones; each test counts its own, and fails
if there were fewer.
"""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product

import pytest

from headway.events import BatchTaken, GroupAdmitted, OptimizerStepped, TrajectoryFinished
from headway.pipeline.admission.staleness import admission_limit, lag_bound
from headway.pipeline.run import Status
from tests.pipeline.books import Rules
from tests.pipeline.cases import SCHEDULES, Case, cases, faulty, for_each
from tests.pipeline.invariants import check_everything, run_and_check
from tests.pipeline.scenario import MODES, Run, Scenario
from tests.tiers import a_twentieth_and_all, crossed, enough, mostly_slow

pytestmark = pytest.mark.timeout(600)
"""Quick as they are: a case that fails is run many times more, until it is as small as can be."""


@a_twentieth_and_all
def test_everything_holds_in_every_run(share: float):
    """Hundreds of whole runs: rare coincidences of moments are found by their number alone."""
    ends: set[Status | None] = set()
    lags: set[int] = set()

    def check(case: Case) -> None:
        run = run_and_check(case)
        ends.add(run.status)
        lags.update(lag for step in run.of(OptimizerStepped) for lag in step.lags)

    for_each(cases(), share * SCHEDULES["undisturbed"], check)
    assert Status.COMPLETED in ends
    assert lags >= ({0, 1, 2, 3} if share == 1 else {0, 1, 2}), "cases that reach no lag prove nothing about its bound"


def test_at_least_two_thousand_schedules_run():
    assert sum(SCHEDULES.values()) >= 2_000


@crossed(("mode", "replicas"), MODES, [1, 3])
def test_everything_holds_in_every_mode(mode: str, replicas: int):
    check_everything(Scenario(mode, problems=3, replicas=replicas, test_freq=2).run().assert_completed())


def log(run: Run) -> str:
    return "\n".join(json.dumps(event.to_json()) for event in run.events)


@a_twentieth_and_all
def test_the_same_seed_gives_the_same_event_log_byte_for_byte(share: float):

    def check(case: Case) -> None:
        assert log(case.scenario().run()) == log(case.scenario().run())

    for_each(faulty("joins", "stop", discards=(0.0, 0.0)), share * 60, check)


@pytest.mark.slow
@pytest.mark.parametrize("share", [1], ids=["all"])
def test_the_same_seed_gives_the_same_event_log_although_the_run_fails(share: float):
    """Dozens of tasks are cancelled then, and each of them has something to say."""
    failed = 0

    def check(case: Case) -> None:
        nonlocal failed
        run = case.scenario().run()
        failed += run.error is not None
        assert log(run) == log(case.scenario().run())

    for_each(faulty("dies", "hangs", "hangs_on_drain", "never_receives"), share * 60, check)
    assert failed >= enough(20, share)


@a_twentieth_and_all
def test_on_policy_batches_do_not_depend_on_timing(share: float):
    """η = 0, waves, in order: durations may change, what is trained on in which step may not."""
    in_order = {"eta": Fraction(0), "admission": "batch", "order": "fifo", "nonfinite": 0.0}

    def batches(case: Case) -> list[list[int]]:
        return [fetch.numbers for fetch in run_and_check(case).of(BatchTaken)]

    def check(case: Case) -> None:
        slower = replace(case, step_s=8.0, reward_s=3.0, longest=61, replicas=5 - case.replicas, slots=1)
        assert batches(case) == batches(slower)

    for_each(cases(**in_order), share * SCHEDULES["on-policy"], check)


@a_twentieth_and_all
def test_how_much_is_admitted_under_a_version_depends_on_nothing_but_the_version(share: float):
    """Without discards: not on lengths, speeds, order of completion, slots, replicas or the schedule of updates."""

    def check(case: Case) -> None:
        run = run_and_check(case)
        rules, admitted = Rules.of(run.scenario), run.of(GroupAdmitted)
        assert rules.total is not None
        for event, following in pairwise(admitted):
            if event.version < following.version:
                assert event.admitted == min(rules.total, rules.limit(event.version))
        assert len(admitted) == rules.total

    undiscarded = {"discards": (0.0, 0.0), "by_epochs": False, "on_overdue": "wait", "admission": "group"}
    for_each(cases(**undiscarded), share * SCHEDULES["admission"], check)


@pytest.mark.slow
@pytest.mark.parametrize("share", [1], ids=["all"])
def test_waves_are_as_large_whatever_the_order_in_which_groups_finish(share: float):
    """Takes seconds: many random schedules."""

    def waves(case: Case) -> list[int]:
        return [event.limit for event in run_and_check(case).of(GroupAdmitted)]

    def check(case: Case) -> None:
        assert waves(case) == waves(replace(case, seed=case.seed + 1, slots=8, replicas=1))

    steady = {"discards": (0.0, 0.0), "by_epochs": False, "admission": "batch", "eta": Fraction(0), "order": "ready"}
    for_each(cases(**steady), share * 40, check)


@a_twentieth_and_all
def test_a_drained_answer_has_one_version_and_no_answer_is_cut_short(share: float):
    """Takes seconds: many random schedules."""

    def check(case: Case) -> None:
        assert all(len(t.version_spans) == 1 for t in run_and_check(case).of(TrajectoryFinished))

    for_each(cases(on_update="drain", overlapped=False, on_overdue="wait", longest=120), share * 40, check)


@mostly_slow(
    ("eta", "window"),
    product([Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(3, 2), Fraction(2)], [1, 4, 8]),
    quick=[(Fraction(1, 4), 8), (Fraction(1), 4), (Fraction(3, 2), 1)],
)
def test_the_bound_on_lag_is_reached(eta: Fraction, window: int):
    """By the last group that a version admits, when its answer is so long that W − 1 others overtake it."""
    largest = 0
    for version in (0, 1, 2):
        last = admission_limit(version, eta, 8) - 1
        run = Scenario(
            "async_partial",
            async_training={"trigger_parameter_sync_step": 8, "staleness_threshold": str(eta), "window": window},
            mini_batch=1,
            total=48,
            n=1,
            slots=64,
            lengths=lambda trajectory, last=last: 400 if trajectory.row == last else 8,
        ).run()
        run.assert_completed()
        largest = max(largest, *(lag for step in run.of(OptimizerStepped) for lag in step.lags))
    assert largest == lag_bound(eta, 8, window)


@mostly_slow(
    ("eta", "b"),
    [("0.3", 10), ("4/3", 9), ("2/3", 9), ("4/3", 3), ("0.1", 10), ("1/3", 3)],
    quick=[("0.3", 10), ("4/3", 3)],
)
def test_eta_is_exact_at_the_boundary(eta: str, b: int):
    """Where η·B is a whole number, one bit too few under ⌊·⌋ would cost a group."""
    scenario = Scenario("async_partial", async_training={"staleness_threshold": eta, "trigger_parameter_sync_step": b})
    scenario.mini_batch, scenario.total = 1, 5 * b
    run = check_everything(scenario.run().assert_completed())
    ahead = Fraction(eta) * b
    assert ahead.denominator == 1
    limits = {event.version: event.limit for event in run.of(GroupAdmitted)}
    assert all(limit == (version + 1) * b + ahead for version, limit in limits.items())
    assert sum(event.time == 0 for event in run.of(GroupAdmitted)) == b + ahead
