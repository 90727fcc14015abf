"""Whole runs over random small configurations, durations, rewards and seeds: what must hold in every one of them."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from headway.data.types import Prompt
from headway.errors import NothingToTrain
from headway.events import OptimizerStepped, RunStarted, TrajectoryFinished, UpdateFinished
from headway.pipeline.run import Status
from headway.pipeline.staleness import admission_limit, lag_bound
from tests.pipeline.fakes import FakeReference, FakeReward, fails, seeded_lengths, without_variance
from tests.pipeline.scenario import Run, Scenario

MANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@dataclass(frozen=True, slots=True)
class Case:
    """One small run. Everything random in it is drawn from ``seed``, keyed by what it belongs to."""

    seed: int
    eta: Fraction
    fetches_per_version: int
    require_batches: int
    mini_batch: int
    versions: int
    by_epochs: bool
    short_by: int
    """Rows that the data lacks to a whole number of versions."""
    admission: str
    order: str
    window: int
    on_update: str
    replicas: int
    slots: int
    n: int
    problems: int
    test_freq: int
    failing: float
    flat: float
    """Shares of prompts whose reward fails, or has no variance."""
    nonfinite: float
    step_s: float
    reward_s: float
    longest: int
    reference: str
    stop_after: float | None
    """Virtual seconds until a stop is asked for."""

    @property
    def per_version(self) -> int:
        return self.fetches_per_version * self.require_batches * self.mini_batch

    def scenario(self) -> Scenario:
        groups = self.versions * self.per_version
        length: dict[str, Any] = {"total": groups}
        if self.by_epochs:
            length = {"rows": max(1, groups - self.short_by), "epochs": 1}
        return Scenario(
            "async_partial",
            async_training={
                "trigger_parameter_sync_step": self.fetches_per_version,
                "require_batches": self.require_batches,
                "staleness_threshold": str(self.eta),
                "admission": self.admission,
                "order": self.order,
                "window": self.window if self.order == "window" else None,
                "on_update": self.on_update,
            },
            mini_batch=self.mini_batch,
            n=self.n,
            replicas=self.replicas,
            slots=self.slots,
            seed=self.seed,
            lengths=seeded_lengths(self.seed, 1, self.longest),
            problems=self.problems,
            test_freq=self.test_freq,
            reward=FakeReward(self._rewards, lambda prompt: self.reward_s * self._draw("reward_s", prompt.row)),
            group_filter=without_variance,
            trainer={
                "step_s": lambda step: self.step_s * 2 * self._draw("step", step),
                "skips": lambda step: self._draw("nonfinite", step) < self.nonfinite,
            },
            reference=FakeReference() if self.reference == "own ranks" else None,
            reference_inside_fetch=self.reference == "inside the fetch",
            beside=self._stop if self.stop_after is not None else None,
            **length,
        )

    async def _stop(self, run: Run) -> None:
        assert self.stop_after is not None
        await asyncio.sleep(self.stop_after)
        run.pipeline.request_stop()

    def _rewards(self, prompt: Prompt) -> list[float]:
        luck = self._draw("luck", prompt.epoch, prompt.row)
        if luck < self.failing:
            return list(fails("unlucky"))
        return [1.0] if luck < self.failing + self.flat else [float(k) for k in range(self.n)]

    def _draw(self, *key: object) -> float:
        return random.Random(f"{self.seed} {key}").random()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    fetches, batches, mini_batch = draw(
        st.sampled_from([(1, 1, 1), (1, 1, 3), (2, 1, 2), (1, 2, 2), (4, 1, 1), (3, 1, 2), (2, 2, 2), (1, 1, 8)])
    )
    per_version = fetches * batches * mini_batch
    discards = draw(st.sampled_from([(0.0, 0.0), (0.2, 0.0), (0.1, 0.3)]))
    return Case(
        seed=draw(st.integers(0, 10_000)),
        eta=draw(
            st.sampled_from([Fraction(p, q) for p, q in [(0, 1), (0, 1), (1, 4), (1, 3), (1, 2), (1, 1), (2, 1)]])
        ),
        fetches_per_version=fetches,
        require_batches=batches,
        mini_batch=mini_batch,
        versions=draw(st.integers(1, max(1, min(6, 30 // per_version)))),
        by_epochs=draw(st.booleans()),
        short_by=draw(st.integers(0, per_version)),
        admission=draw(st.sampled_from(["group", "batch"])),
        order=draw(st.sampled_from(["fifo", "window", "ready"])),
        window=draw(st.integers(1, 2 * per_version)),
        on_update=draw(st.sampled_from(["drain", "interrupt", "keep"])),
        replicas=draw(st.integers(1, 3)),
        slots=draw(st.integers(1, 8)),
        n=draw(st.integers(2, 3)),
        problems=draw(st.sampled_from([0, 0, 1, 4])),
        test_freq=draw(st.sampled_from([1, 2, 3, -1])),
        failing=discards[0],
        flat=discards[1],
        nonfinite=draw(st.sampled_from([0.0, 0.0, 0.2])),
        step_s=draw(st.sampled_from([0.0, 0.5, 4.0])),
        reward_s=draw(st.sampled_from([0.0, 1.0, 10.0])),
        longest=draw(st.sampled_from([1, 20, 120])),
        reference=draw(st.sampled_from(["none", "none", "own ranks", "inside the fetch"])),
        stop_after=draw(st.sampled_from([None, None, None, None, 0.0, 0.1, 1.0, 3.3, 10.0, 31.0])),
    )


def run_to_its_end(case: Case) -> Run:
    run = case.scenario().run()
    if isinstance(run.error, NothingToTrain):
        event("nothing to train")
    elif run.error is not None:
        raise run.error
    return run.assert_clean()


@MANY
@given(cases())
def test_what_holds_for_every_run(case: Case):
    run = run_to_its_end(case)
    started, groups = run.of(RunStarted)[0], run.groups
    lags = [lag for step in run.of(OptimizerStepped) for lag in step.lags]
    event(f"ended: {run.status or 'failed'}, largest lag {max(lags, default=0)}")

    assert started.lag_bound is not None or (case.order == "ready" and case.eta > 0)
    assert all(lag >= 0 for lag in lags)
    if started.lag_bound is not None:
        assert all(lag <= started.lag_bound for lag in lags)
    if case.eta == 0:
        assert set(lags) <= {0}
    if case.on_update == "drain":
        assert all(len(t.version_spans) == 1 for t in run.of(TrajectoryFinished))

    consumed = sum(len(step.lags) for step in run.of(OptimizerStepped))
    if run.status is Status.COMPLETED:
        assert groups["in_flight"] == 0
        if case.by_epochs:
            assert groups["admitted"] == case.scenario().rows
            assert run.version == -(-consumed // case.per_version)
        else:
            assert consumed == started.total_groups
            assert run.version == case.versions
    if run.status is Status.INTERRUPTED and not case.by_epochs:
        assert consumed % case.per_version == 0
    if run.status is not None:
        assert [update.version for update in run.of(UpdateFinished)] == list(range(1, run.version + 1))
        assert run.trainer.saved[-1][1]["version"] == run.version
        assert_validated(case, run)


def assert_validated(case: Case, run: Run) -> None:
    if not case.problems:
        assert run.validated() == []
        return
    between = [v for v in range(1, run.version) if case.test_freq > 0 and v % case.test_freq == 0]
    assert run.validated() == [0, *between, *([run.version] if run.version else [])]


@settings(MANY, max_examples=40)
@given(cases())
def test_the_same_seed_gives_the_same_events(case: Case):
    first, second = run_to_its_end(case), run_to_its_end(case)
    assert [event.to_json() for event in first.events] == [event.to_json() for event in second.events]


@settings(MANY, max_examples=40)
@given(cases(), st.integers(0, 100))
def test_on_policy_batches_do_not_depend_on_timing(case: Case, other: int):
    """η = 0, waves, in order: durations may change, what is trained on in which step may not."""
    strict = replace(case, eta=Fraction(0), admission="batch", order="fifo", stop_after=None, nonfinite=0.0)
    slower = replace(strict, step_s=7.0, reward_s=3.0, longest=120 - other, replicas=1 + other % 3)

    def batches(case: Case) -> list[list[int]]:
        return [list(fetch.numbers) for fetch in run_to_its_end(case).events if fetch.kind == "fetch.taken"]

    assert batches(strict) == batches(slower)


@pytest.mark.parametrize("eta", [Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(3, 2), Fraction(2)])
@pytest.mark.parametrize("window", [1, 4, 8])
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
