"""The profiles in ``recipes/plan``: they load, and plans say what their names promise; and the calibration of one."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import calibrate
from benchmarks.calibrate import PUBLISHED, PartsMeter, misfit, pattern_search
from benchmarks.modes import DEMO, B, trainable_modes
from headway.config.loading import load
from headway.config.presets import PRESETS
from headway.planner.grid import own
from headway.planner.planner import PlanResult, plan
from headway.planner.profiles.profile_files import load_profile
from headway.planner.simulation.simulated_run import Simulation, config_for

from .jobs import profile

RECIPES = sorted(Path("recipes/plan").glob("*.yaml"))
PAPER, SHORT, LONG_TAIL = (
    Path("recipes/plan") / f"{name}.yaml" for name in ("qwen2.5-math-7b-dapo", "short-answers", "long-tail")
)


def planned(path: Path, train_devices: int) -> PlanResult:
    """The synchronous preset and two that run ahead, each at its own η, on shared devices or that split."""
    job = load_profile(path)
    rows = [row for row in own(job) if row.split.shared or row.split.train_devices == train_devices]
    few = [row for row in rows if row.preset in ("colocate_sync", "colocate_async", "async_partial")]
    return plan(job, settings=few, budget_s=math.inf)


# ---------------------------------------------------------------------------------------------- the profiles


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_profile_loads_and_says_what_it_assumes(path: Path) -> None:
    assert load_profile(path).assumptions


@pytest.mark.parametrize("path", [SHORT, LONG_TAIL], ids=lambda path: path.stem)
def test_an_example_is_short_enough_to_read(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 40


@pytest.mark.slow
def test_short_answers_gain_nothing_from_running_ahead_and_the_plan_says_so() -> None:
    """Simulates the runs of a plan."""
    found = planned(SHORT, train_devices=3)
    assert found.advice.helps is False
    assert found.advice.recommended is not None and found.advice.recommended.setting.synchronous
    assert found.advice.sentence.startswith("Asynchrony does not help here")


@pytest.mark.slow
def test_a_long_tail_gains_from_running_ahead_and_the_plan_says_so() -> None:
    """Plans with a tail of long answers, which takes many simulated runs to tell settings apart."""
    found = planned(LONG_TAIL, train_devices=8)
    assert found.advice.helps is True
    assert found.advice.recommended is not None and found.advice.recommended.setting.eta > 0
    assert "slots are empty behind the longest answers" in found.advice.sentence


# ---------------------------------------------------------------------------------------------- the published record


def test_the_fitted_profile_is_what_the_calibration_writes(tmp_path: Path) -> None:
    (written := tmp_path / "written.yaml").write_text(calibrate.recipe(calibrate.shipped()))
    assert load_profile(PAPER) == load_profile(written)


@pytest.mark.slow
def test_the_fitted_profile_repeats_the_published_training_and_comes_close_to_the_steps() -> None:
    """Simulates a version of a large job."""
    for devices, fitted in calibrate.simulated(calibrate.shipped(), versions=1).items():
        published = PUBLISHED[devices]
        assert fitted.update == pytest.approx(published.update, rel=0.05)
        assert fitted.old_log_prob == pytest.approx(published.old_log_prob, rel=0.05)
        assert fitted.rest == pytest.approx(published.rest, rel=0.05)
        assert fitted.total == pytest.approx(published.total, rel=0.2)


def test_the_parts_of_a_step_on_shared_devices_add_up() -> None:
    # 100 steps of 0.02 s; 4 × 110 tokens of training and forward; handing over takes 0.75 s.
    point = {"devices": 1, "token_s": 1e-3, "forward_token_s": 5e-4}
    job = profile(
        train={"points": [point], "recompute_old_log_probs": "shared"},
        shared={"to_train_s": 0.5, "to_generate_s": 0.25},
    )
    meter = PartsMeter()
    config = config_for(job, "colocate_sync", train_devices=1, replicas=1, versions=4)
    Simulation(job, config, observers=(meter,)).run()
    parts = meter.parts()
    assert (parts.generation, parts.old_log_prob, parts.update, parts.rest) == pytest.approx((2.0, 0.22, 0.44, 0.75))


def test_the_misfit_is_zero_for_the_record_itself_and_counts_half_like_twice() -> None:
    assert misfit(PUBLISHED) == 0
    twice, half = (
        {**PUBLISHED, 64: replace(PUBLISHED[64], generation=factor * PUBLISHED[64].generation)} for factor in (2, 0.5)
    )
    assert misfit(twice) == pytest.approx(misfit(half)) == pytest.approx(math.log(2) ** 2)


def test_the_search_finds_the_bottom_of_a_bowl() -> None:
    found = pattern_search(lambda point: (point[0] - 1.3) ** 2 + 3 * (point[1] + 0.4) ** 2, [0.0, 0.0])
    assert found == pytest.approx([1.3, -0.4], abs=calibrate.FINEST)


# ---------------------------------------------------------------------------------------------- against reality


@pytest.mark.slow
def test_the_modes_that_are_compared_with_reality_train_on_the_same_number_of_groups() -> None:
    modes = trainable_modes(first="on_policy")
    assert modes[0].name == "on_policy"
    assert {"one_step_off", "async_partial"} <= {mode.name for mode in modes} <= set(PRESETS)
    for mode in modes:
        assert load(DEMO, mode.settings).config.groups_per_version == B
