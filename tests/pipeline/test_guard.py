"""The guard: what follows from a step whose data is too far off policy, and what comes back after it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from math import floor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.sections.learning import GuardConfig
from headway.errors import NonFinite, NothingToTrain
from headway.events import (
    CheckpointSaved,
    Event,
    GroupAdmitted,
    GroupSettled,
    GuardActed,
    Note,
    OptimizerStepped,
    RunFinished,
    RunStarted,
)
from headway.pipeline.admission.ledger import Ledger
from headway.pipeline.admission.message_queue import MessageQueue
from headway.pipeline.admission.pipeline_state import RunState
from headway.pipeline.admission.staleness import Staleness
from headway.pipeline.off_policy_guard import MOST_SKIPPED, Guard, StepCounter
from headway.pipeline.run import Status
from headway.planner.simulation.virtual_clock import run_virtual
from tests.pipeline.cases import ETAS, Case, cases, faulty, for_each
from tests.pipeline.figures import check_figures
from tests.pipeline.machines import check_machines
from tests.pipeline.scenario import MODES, Run, Scenario
from tests.tiers import a_share_and_all, enough, mostly_slow

LEAST = 0.5
AHEAD = ["one_step_off", "async_stale", "async_partial", "overlapped", "colocate_async"]
"""Modes with η > 0."""

sizes = st.lists(st.sampled_from([0.1, 0.4999, 0.5, 0.9]), min_size=1, max_size=60)
"""Effective sample sizes of the steps of a run."""


def guarded(action: str, ess: Callable[[int], float | None], mode: str = "async_partial", **more: Any) -> Scenario:
    scenario = Scenario(mode, **more)
    scenario.sections["algorithm"] = {"guard": {"min_ess": LEAST, "action": action}}
    scenario.trainer["ess"] = ess
    return scenario


# ---------------------------------------------------------------------------------------------- alone


class Alone:
    """A guard, and what it did: five steps a version."""

    def __init__(self, action: str, *, least: float | None = LEAST, eta: str = "1", b: int = 8) -> None:
        self.events: list[Event] = []
        self.stopped: list[str] = []
        self.staleness = Staleness(Fraction(eta), b, 1, None, {"rollout-0": 0})
        state = RunState(self.staleness, Ledger(), MessageQueue(self.staleness), self.events.append)
        self.guard = Guard(GuardConfig(min_ess=least, action=action), state, self.stopped.append)

    def sees(self, *sizes: float | None, skipped: bool = False) -> Alone:
        async def main() -> None:
            for step, size in enumerate(sizes):
                metrics = {} if size is None else {"offpolicy/ess": size}
                self.guard.look(None if skipped else metrics.get("offpolicy/ess"), step // 5)

        run_virtual(main())
        return self


actions = pytest.mark.parametrize("action", ["warn", "tighten", "lower_eta", "stop"])


@actions
def test_without_a_least_size_nothing_is_done(action: str):
    alone = Alone(action, least=None).sees(0.0, 0.1)
    assert (alone.events, alone.stopped, alone.guard.clip_scale) == ([], [], 1.0)


@actions
def test_a_step_that_reports_no_size_or_was_skipped_is_not_judged(action: str):
    alone = Alone(action).sees(None, None)
    alone.sees(0.0, 0.0, skipped=True)
    assert (alone.events, alone.stopped, alone.guard.clip_scale) == ([], [], 1.0)


@actions
def test_the_least_size_itself_is_enough(action: str):
    alone = Alone(action).sees(LEAST, LEAST)
    assert (alone.events, alone.stopped) == ([], [])


# ---------------------------------------------------------------------------------------------- warn


@given(sizes)
@settings(max_examples=50, deadline=None)
def test_it_warns_once_for_each_version_with_a_step_below(ess: Sequence[float]):
    notes = [event for event in Alone("warn").sees(*ess).events if isinstance(event, Note)]
    assert len(notes) == len({step // 5 for step, size in enumerate(ess) if size < LEAST})
    assert all(note.level == "warning" and "algorithm.guard.min_ess=0.5" in note.text for note in notes)


def test_a_run_that_is_warned_goes_on_as_before():
    run = guarded("warn", lambda _: 0.25).run().assert_completed()
    before = Scenario("async_partial").run()
    assert len(run.of(Note)) == 6
    assert "0.25" in run.of(Note)[0].text
    assert [event.to_json() for event in run.of(GroupAdmitted)] == [e.to_json() for e in before.of(GroupAdmitted)]


# ---------------------------------------------------------------------------------------------- tighten


def widths(ess: Sequence[float]) -> list[float]:
    """Before each step: as many halvings as there were steps below, less those above, between none and three."""
    halvings, scales = 0, []
    for size in ess:
        scales.append(2.0**-halvings)
        halvings = min(3, halvings + 1) if size < LEAST else max(0, halvings - 1)
    return scales


@given(sizes)
@settings(max_examples=50, deadline=None)
def test_the_clip_range_is_halved_down_to_an_eighth_and_widens_back(ess: Sequence[float]):
    alone = Alone("tighten").sees(*ess)
    after = widths([*ess, 1.0])
    assert alone.guard.clip_scale == after[-1]
    changes = [scale for before, scale in pairwise(after) if before != scale]
    acted = [event for event in alone.events if isinstance(event, GuardActed)]
    assert [event.clip_scale for event in acted] == changes
    assert [event.did for event in acted] == [
        "tightened" if new < old else "widened" for old, new in pairwise([1.0, *changes])
    ]


@mostly_slow("mode", MODES, quick=["on_policy", "overlapped"])
def test_the_width_reaches_every_step(mode: str):
    def ess(step: int) -> float:
        return 0.9 if step % 7 in (2, 6) else 0.1

    run = guarded("tighten", ess, mode).run().assert_completed()
    scales = [context.clip_scale for context in run.trainer.contexts]
    assert scales == widths([ess(step) for step in range(len(scales))])
    assert len(set(scales)) > 2
    assert {event.eta for event in run.of(GuardActed)} == {
        float(run.pipeline.config.async_training.staleness_threshold)
    }


# ---------------------------------------------------------------------------------------------- lower η


@pytest.mark.parametrize("eta", sorted(set(ETAS)))
@pytest.mark.parametrize("b", [1, 3, 8, 100])
def test_eta_falls_by_halves_to_zero_and_comes_back_to_just_what_it_was(eta: Fraction, b: int):
    staleness = Staleness(eta, b, 1, None, {"rollout-0": 0})
    ahead = [eta * b]
    while staleness.lower():
        ahead.append(staleness.eta_now * b)
        assert staleness.limit == floor((1 + staleness.eta_now) * b)
    assert ahead[-1] == 0
    assert all(after == before / 2 for before, after in pairwise(ahead[:-1]))
    assert all(groups >= 1 for groups in ahead[1:-1]), "less than a group is none"
    back = 0
    while staleness.recover():
        back += 1
        assert 0 < staleness.eta_now <= eta
        assert back < 20
    assert staleness.eta_now == eta
    assert not staleness.recover()
    assert staleness.bound == Staleness(eta, b, 1, None, {"rollout-0": 0}).bound


class Ahead:
    """How far a run is admitted ahead, from its steps alone: at most one change per version, each by a factor of 2."""

    def __init__(self, eta: Fraction, b: int) -> None:
        self.eta = self.now = eta
        self.b = b
        self.version: int | None = None
        self.was_low = False
        self.changes: list[Fraction] = []

    def step(self, event: OptimizerStepped) -> None:
        size = event.metrics.get("offpolicy/ess")
        if size is None or event.skipped:
            return
        low = size < LEAST
        if event.version != self.version:
            if self.version is not None and not self.was_low and not low:
                self.change(min(self.eta, self.now * 2 if self.now else Fraction(1, self.b)))
            self.version, self.was_low = event.version, False
        if low and not self.was_low:
            self.was_low = True
            self.change(self.now / 2 if self.now * self.b >= 2 else Fraction(0))

    def change(self, eta: Fraction) -> None:
        if eta != self.now:
            self.now = eta
            self.changes.append(eta)


def check_lowered(run: Run) -> Ahead:
    """Each group came in by the η of its moment, and no lag is beyond the bound of the η that was configured."""
    run.assert_clean()
    check_machines(run)
    check_figures(run)
    config = run.pipeline.config
    ahead = Ahead(config.async_training.staleness_threshold, config.groups_per_version)
    told: list[float] = []
    for event in run.events:
        match event:
            case OptimizerStepped():
                ahead.step(event)
                assert [float(eta) for eta in ahead.changes] == told
            case GuardActed():
                told.append(event.eta)
            case GroupAdmitted():
                assert event.limit == floor((event.version + 1 + ahead.now) * ahead.b)
    bound = run.of(RunStarted)[0].lag_bound
    lags = [event.lag for event in run.of(GroupSettled) if event.lag is not None]
    assert bound is None or max(lags, default=0) <= bound
    return ahead


@mostly_slow("mode", AHEAD, quick=["one_step_off", "async_stale"])
def test_a_run_whose_data_stays_far_off_policy_becomes_on_policy_and_ends(mode: str):
    run = guarded("lower_eta", lambda _: 0.1, mode, replicas=2).run().assert_completed()
    ahead = check_lowered(run)
    b = run.pipeline.config.groups_per_version
    assert ahead.now == 0
    assert {event.did for event in run.of(GuardActed)} == {"lowered η"}
    last = [event for event in run.of(GroupAdmitted) if event.version >= 4]
    assert last and all(event.limit == (event.version + 1) * b for event in last)
    assert set(run.of(OptimizerStepped)[-1].lags) == {0}
    assert run.version == 6


@mostly_slow("mode", AHEAD, quick=["overlapped", "colocate_async"])
def test_when_the_size_comes_back_so_does_eta(mode: str):
    """Low for the first third of the steps; the run is long enough for every halving to be undone."""
    per_version = Scenario(mode).config.groups_per_version // 4
    scenario = guarded("lower_eta", lambda step: 0.1 if step < 4 * per_version else 0.9, mode)
    scenario.total = 16 * 4 * per_version
    run = scenario.run().assert_completed()
    ahead = check_lowered(run)
    assert 0 in ahead.changes
    assert ahead.now == ahead.eta
    assert run.of(GuardActed)[-1].did == "raised η"


def test_room_that_a_raised_eta_makes_is_used_at_once():
    """Low in version 0, and never again; steps are so long that everything else has come to rest at their ends."""
    scenario = guarded("lower_eta", lambda step: 0.1 if step < 4 else 0.9, "async_stale", slots=64)
    scenario.lengths, scenario.trainer["step_s"] = (lambda _: 1), (lambda _: 16.0)
    run = scenario.run().assert_completed()
    (raised,) = [event for event in run.of(GuardActed) if event.did == "raised η"]
    came = [event.limit for event in run.of(GroupAdmitted) if event.time == raised.time]
    assert came == [56] * 4, "⌊(2 + 1 + 0.5)·16⌋, where ⌊(2 + 1 + 0.25)·16⌋ were in: version 1 had no low step"


def random_sizes(case: Case) -> Scenario:
    scenario = case.scenario()
    scenario.sections["algorithm"] = {"guard": {"min_ess": LEAST, "action": "lower_eta"}}
    low = case.seed % 4 / 3
    scenario.trainer["ess"] = lambda step: 0.25 if random.Random(f"{case.seed} {step}").random() < low else 0.75
    return scenario


@a_share_and_all
def test_the_bound_holds_and_the_run_ends_whatever_the_sizes(share: float):
    """Runs hundreds of random jobs."""
    turns = zeros = 0

    def check(case: Case) -> None:
        nonlocal turns, zeros
        run = random_sizes(case).run()
        if isinstance(run.error, NothingToTrain):
            return
        if run.error is not None:
            raise run.error
        changes = check_lowered(run).changes
        turns += len(changes) > 1
        zeros += 0 in changes

    ahead = st.sampled_from([eta for eta in ETAS if eta >= Fraction(1, 2)])
    for_each(ahead.flatmap(lambda eta: cases(eta=eta, versions=6, shape=(2, 1, 2))), share * 40, check)
    for_each(ahead.flatmap(lambda eta: faulty("stop", "joins", eta=eta, versions=5)), share * 20, check)
    assert min(turns, zeros) >= enough(15, share)


# ---------------------------------------------------------------------------------------------- stop


@mostly_slow("mode", MODES, quick=["one_step_off", "async_partial"])
def test_the_run_stops_after_the_version_with_a_checkpoint_and_says_why(mode: str):
    per_version = Scenario(mode).config.groups_per_version // 4
    run = guarded("stop", lambda step: 0.1 if step >= 2 * per_version else 0.9, mode, problems=2).run()
    run.assert_clean()
    check_machines(run)
    check_figures(run)
    assert run.error is None and run.status is Status.INTERRUPTED
    why = "algorithm.guard: the effective sample size of a step of version 2 is 0.1, below algorithm.guard.min_ess=0.5"
    assert run.pipeline.stop_reason == why
    finished = run.of(RunFinished)[0]
    assert (finished.status, finished.reason, finished.version) == ("interrupted", why, 3)
    assert [saved.version for saved in run.of(CheckpointSaved)] == [3]
    assert len(run.trainer.steps) == 3 * per_version
    assert run.groups["trained"] == 3 * run.pipeline.config.groups_per_version
    assert sum(run.fates().values()) == run.groups["admitted"]
    assert [event.did for event in run.of(GuardActed)] == ["stopped"]
    assert run.validated()[-1] == 3, "the version that was reached is validated"


@mostly_slow("mode", ["on_policy", "async_partial"], quick=["on_policy"])
def test_a_low_size_in_the_last_version_does_not_make_a_complete_run_an_interrupted_one(mode: str):
    last = 6 * Scenario(mode).config.groups_per_version // 4 - 1
    run = guarded("stop", lambda step: 0.1 if step == last else 0.9, mode).run()
    assert run.assert_completed().version == 6


def test_it_stops_a_run_whose_length_the_data_decides():
    run = guarded("stop", lambda step: 0.1 if step == 1 else 0.9, rows=1000, epochs=1).run().assert_clean()
    assert run.status is Status.INTERRUPTED
    assert (run.version, run.groups["trained"]) == (1, 16)


def test_it_stops_a_run_in_which_batches_are_taken_ahead_after_all_of_them_were_trained():
    scenario = guarded("stop", lambda step: 0.1 if step == 1 else 0.9, logp_ranks=1, slots=64)
    scenario.lengths = lambda _: 1
    run = scenario.run().assert_clean()
    assert run.status is Status.INTERRUPTED
    assert (run.version, run.groups["trained"]) == (1, 16)


# ---------------------------------------------------------------------------------------------- skipped steps


def test_steps_that_were_skipped_in_a_row_count_on_from_a_checkpoint():
    before, after = StepCounter("actor.optim.lr"), StepCounter("actor.optim.lr")
    for _ in range(MOST_SKIPPED):
        before.count(skipped=True)
    after.restore(before.state())
    assert after.made == MOST_SKIPPED
    with pytest.raises(NonFinite, match=f"^{MOST_SKIPPED + 1} optimizer steps in a row were skipped .*actor.optim.lr"):
        after.count(skipped=True)
