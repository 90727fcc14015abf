"""Whole plans: with a stand-in for the simulation on a fake clock, and of small jobs that are really simulated."""

import inspect
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.presets import PRESETS
from headway.errors import ConfigError
from headway.planner.grid import PlanSetting, splits
from headway.planner.measure import Measurement
from headway.planner.planner import PlanResult, plan, to_json
from headway.planner.profiles.job_profile import Profile
from tests.planner.planning import MEASURED, profile_of, setting


@dataclass
class Stand:
    """A clock, and a simulation that takes ``wall_s`` of it; the more devices train, the quicker the step."""

    wall_s: float = 5.0
    now: float = 100.0
    asked: list[PlanSetting] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def measure(
        self, profile: Profile, setting: PlanSetting, *, out_of_time: Callable[[int], bool]
    ) -> Measurement | None:
        self.asked.append(setting)
        self.now += self.wall_s
        step_s = (40.0 if setting.split.shared else 20.0) - setting.split.train_devices
        return replace(MEASURED, step_s=step_s, trajectories=16 * 7)

    def plan(self, profile: Profile, budget_s: float = 1e6, **options: object) -> PlanResult:
        return plan(profile, budget_s=budget_s, clock=self.clock, measure=self.measure, **options)


def small_plan(**changes: object) -> PlanResult:
    """Really simulated."""
    settings = [setting("colocate_sync", 8, 8)]
    settings += [setting(preset, train, 8 - train) for preset in ("on_policy", "async_partial") for train in (2, 4)]
    return plan(profile_of(**changes), settings=settings, budget_s=600)


def test_the_default_grid_has_each_preset_and_says_what_it_left_out():
    stand = Stand()
    found = stand.plan(profile_of())
    assert found.open == ()
    assert len(found.rows) == len(stand.asked) == len(set(stand.asked))
    assert {row.setting.preset for row in found.rows} == set(PRESETS)
    assert not {*found.skipped} & {*stand.asked}
    # The more devices train, the quicker: every setting's best split is the last one, and is found.
    assert found.rows[0].setting.split.train_devices == 7
    assert {float(row.setting.eta) for row in found.rows if row.setting.preset == "async_partial"} > {0.5}


@given(
    devices=st.integers(2, 4096),
    per_replica=st.integers(1, 8),
    mini_batches=st.sampled_from([1, 2, 4, 6, 16]),
    best=st.floats(0, 1),
    steep=st.floats(0, 3),
)
@settings(deadline=None, max_examples=30)
def test_the_default_grid_is_small_for_any_number_of_devices_and_ends_near_the_best_split(
    devices, per_replica, mini_batches, best, steep
):
    profile = profile_of(
        devices=devices + per_replica,
        batch={"groups_per_version": 2 * mini_batches, "ppo_mini_batch_size": 2},
        rollout={"devices": per_replica},
    )

    def simulate(profile: Profile, setting: PlanSetting, **_: object) -> Measurement:
        share = setting.split.train_devices / profile.devices
        step_s = 10 * (1 + (1 if setting.split.shared else steep * abs(share - best)))
        return replace(MEASURED, step_s=step_s, half_width=0.0)

    found = plan(profile, budget_s=600, measure=simulate)
    assert found.open == ()
    assert len(found.rows) <= 40
    possible = min(abs(split.train_devices / profile.devices - best) for split in splits(profile))
    assert found.rows[0].step_s <= 10 * (1 + steep * possible) + 1e-9


def test_the_sweep_has_every_combination():
    stand = Stand()
    found = stand.plan(profile_of(), sweep=True)
    assert sum(row.setting.preset == "async_partial" for row in found.rows) == 7 * 3 * 3
    assert len(found.rows) > len(Stand().plan(profile_of()).rows)


def test_rows_are_sorted_and_compared_with_colocated_synchronous_training():
    found = Stand().plan(profile_of())
    steps = [row.step_s for row in found.rows]
    assert steps == sorted(steps)
    assert found.baseline is not None
    assert found.baseline.setting.preset == "colocate_sync"
    assert found.baseline.speedup == 1
    assert found.rows[0].speedup == pytest.approx(32 / 13)
    assert found.rows[0].samples_per_s == pytest.approx(8 / 13)


def test_without_shared_devices_the_quickest_synchronous_row_is_the_baseline():
    found = Stand().plan(profile_of(), settings=[setting("on_policy", t, 8 - t) for t in (2, 5)])
    assert found.baseline is not None
    assert found.baseline.setting.split.train_devices == 5


def test_without_a_synchronous_row_there_is_no_speedup():
    found = Stand().plan(profile_of(), settings=[setting("async_partial")])
    assert found.baseline is None
    assert found.rows[0].speedup is None


def test_no_row_begins_that_would_end_after_the_budget():
    stand = Stand(wall_s=5.0)
    found = stand.plan(profile_of(), budget_s=22.0)
    assert len(found.rows) == 4
    assert found.cpu_s == 20.0
    assert stand.asked[0].preset == "colocate_sync"
    assert set(found.open).isdisjoint(stand.asked)
    # Whatever was not begun is open, and nothing of it was found to be slow.
    begun = {setting.preset for setting in stand.asked}
    assert {setting.preset for setting in found.open} >= set(PRESETS) - begun
    assert found.skipped == ()
    missing = found.advice.sentence.partition("Not compared, for want of time (--budget): ")[2].rstrip(".")
    assert set(missing.split(", ")) == set(PRESETS) - begun


def test_work_of_other_processes_takes_no_rows_away_and_a_verdict_without_shared_devices_says_so():
    assert inspect.signature(plan).parameters["clock"].default is time.process_time
    profile = profile_of()
    several = profile.model_copy(update={"rollout": profile.rollout.model_copy(update={"devices": 2})})
    assert "Modes of shared devices are not compared: a replica has 2 devices" in Stand().plan(several).advice.sentence
    assert "not compared" not in Stand().plan(profile).advice.sentence


def test_a_row_has_its_share_of_the_time_and_no_less_than_it_takes_to_be_known_roughly():
    stand, versions = Stand(wall_s=0.0), []

    def simulate(profile: Profile, setting: PlanSetting, *, out_of_time: Callable[[int], bool]) -> Measurement:
        count = 0
        while count < 30 and not out_of_time(count):
            stand.now, count = stand.now + 1.0, count + 1
        versions.append(count)
        return replace(MEASURED, trajectories=16 * count)

    rows = [setting("on_policy", train, 8 - train) for train in range(1, 6)]
    for budget_s, expected in ((1000.0, 30), (50.0, 10), (33.0, 6)):
        versions.clear()
        plan(profile_of(), settings=rows, budget_s=budget_s, clock=stand.clock, measure=simulate)
        # The first one cannot know what a version takes.
        assert set(versions[1:]) <= {expected, expected + 1, expected - 1}
        assert len(versions) == 5


def test_the_first_row_is_simulated_however_small_the_budget():
    found = Stand().plan(profile_of(), budget_s=0.001)
    assert len(found.rows) == 1


def test_a_row_that_ran_out_of_time_stays_open():
    found = plan(profile_of(), settings=[setting("async_partial")], measure=lambda *_, **__: None)
    assert found.rows == ()
    assert found.open == (setting("async_partial"),)
    assert found.advice.recommended is None


def test_time_that_runs_out_within_a_row_ends_it_at_the_next_version():
    ticks = iter(range(10**6))
    profile = profile_of(response={"kind": "lognormal", "mean": 50, "sigma": 1, "max": 500})
    found = plan(profile, settings=[setting("on_policy")], budget_s=6, clock=lambda: float(next(ticks)))
    (row,) = found.rows
    assert row.measured.versions < 10


def test_the_simulators_throughput_counts_all_trajectories_and_all_time():
    found = Stand().plan(profile_of(), settings=[setting("async_partial"), setting("on_policy")])
    assert (found.trajectories, found.cpu_s, found.trajectories_per_s) == (224, 10.0, 22.4)


def test_another_number_of_devices_replaces_the_profiles():
    found = Stand().plan(profile_of(), devices=16)
    assert found.profile.devices == 16
    assert {row.setting.split.train_devices for row in found.rows if row.setting.split.shared} == {16}
    with pytest.raises(ConfigError, match="got 0"):
        Stand().plan(profile_of(), devices=0)


def test_devices_that_no_split_fits_are_an_error_before_anything_is_simulated():
    stand = Stand()
    with pytest.raises(ConfigError, match="give more devices"):
        stand.plan(profile_of(train={"min_devices": 8}))
    assert stand.asked == []


def test_progress_is_told_of_each_row_and_what_is_left():
    seen = []
    settings = [setting("async_partial"), setting("on_policy")]
    Stand().plan(profile_of(), settings=settings, progress=lambda row, left: seen.append((row.setting.preset, left)))
    assert [left for _, left in seen] == [1, 0]


def test_json_has_every_row_and_is_json():
    found = Stand().plan(profile_of(), budget_s=22.0)
    told = json.loads(json.dumps(to_json(found), allow_nan=False))
    assert len(told["rows"]) == 4
    assert len(told["not_simulated"]) == len(found.open)
    assert len(told["expected_slower"]) == len(found.skipped)
    wanted = {"preset", "split", "eta", "trigger", "require_batches", "step_s", "samples_per_s", "lag_mean", "lag_max"}
    assert wanted | {"trainer_idle_ratio", "rollouter_idle_ratio"} <= set(told["rows"][0])
    baseline = next(row for row in told["rows"] if row["preset"] == "colocate_sync")
    assert (baseline["split"], baseline["placement"], baseline["speedup"]) == ("8:8", "shared", 1.0)
    assert told["simulator"]["trajectories"] == 4 * 112


def test_even_answers_and_cheap_generation_are_told_that_asynchrony_does_not_help():
    found = small_plan(train={"points": [{"devices": 8, "token_s": 0.01}]}, rollout={"decode": [[1, 0.01]]})
    assert found.advice.helps is False
    assert "does not help here" in found.advice.sentence
    assert "which trains " in found.advice.sentence
    assert found.advice.recommended is not None
    assert found.advice.recommended.setting.preset == "colocate_sync"


@pytest.mark.slow
def test_a_long_tail_is_told_that_asynchrony_helps():
    """Simulates a dozen runs."""
    found = small_plan(
        response={"kind": "lognormal", "mean": 100, "sigma": 1.2, "max": 2000},
        train={"points": [{"devices": 8, "token_s": 0.002}]},
    )
    assert found.advice.helps is True
    assert "slots are empty behind the longest answers" in found.advice.sentence
    assert found.advice.recommended is not None
    assert found.advice.recommended.setting.eta > 0
    assert (found.advice.recommended.speedup or 0) > 1.3


@pytest.mark.slow
def test_the_same_profile_gives_the_same_rows(monkeypatch):
    monkeypatch.setattr("headway.planner.measure.MOST_VERSIONS", 5)
    job = {"response": {"kind": "lognormal", "mean": 30, "sigma": 1, "max": 200}}
    assert small_plan(**job).rows == small_plan(**job).rows
