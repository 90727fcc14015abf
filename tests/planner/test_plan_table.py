"""What a plan looks like on a terminal."""

import math
from dataclasses import replace

import pytest
from rich.console import Console

from headway.config.presets import PRESETS
from headway.planner.plan_rows import PlanRow, advise
from headway.planner.plan_table import ROWS_SHOWN, print_plan
from headway.planner.planner import PlanResult
from headway.planner.profiles.job_profile import RolloutProfile
from tests.planner.planning import profile_of, row, setting

ASSUMPTIONS = [
    "answers are lognormal",
    "a replica is one device of 16 slots, which nobody has ever tried on this machine",
]


def plan_of(rows: list[PlanRow], *, open: int = 0, skipped: int = 0, assumptions: tuple[str, ...] = ()) -> PlanResult:
    ordered = tuple(sorted(rows, key=lambda each: each.step_s))
    return PlanResult(
        profile=profile_of(assumptions=list(assumptions)),
        rows=ordered,
        open=tuple(setting("async_partial", train, 8 - train) for train in range(1, open + 1)),
        skipped=tuple(setting("overlapped", train, 8 - train) for train in range(1, skipped + 1)),
        baseline=next((each for each in ordered if each.setting.preset == "colocate_sync"), None),
        advice=advise(ordered),
        trajectories=123_456,
        cpu_s=12.0,
        wall_s=40.0,
    )


def shown(plan: PlanResult, width: int) -> list[str]:
    console = Console(width=width, force_terminal=False, color_system=None)
    with console.capture() as capture:
        print_plan(plan, console)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_replicas_of_several_devices_are_named_with_what_is_recommended() -> None:
    plan = plan_of([row("async_partial", 10.0)])
    assert not any("tensor_model_parallel_size" in line for line in shown(plan, 100))
    several = replace(plan, profile=plan.profile.model_copy(update={"rollout": several_devices(plan, 2)}))
    text = " ".join(shown(several, 100))
    assert "rollout.tensor_model_parallel_size=2" in text


def several_devices(plan: PlanResult, count: int) -> RolloutProfile:
    return plan.profile.rollout.model_copy(update={"devices": count})


def every_preset() -> list[PlanRow]:
    return [replace(row(preset, 1000.0 + place), speedup=1.25) for place, preset in enumerate(PRESETS)]


@pytest.mark.parametrize(("width", "widest"), [(80, 80), (100, 100), (200, 100)])
def test_a_plan_fits_the_terminal_and_a_hundred_columns(width, widest):
    lines = shown(plan_of(every_preset(), open=5, assumptions=tuple(ASSUMPTIONS)), width)
    assert max(map(len, lines)) <= widest
    for preset in PRESETS:
        assert any(f" {preset} " in line for line in lines), preset
    assert not any("…" in line for line in lines[:14])


def test_narrow_terminals_are_spared_the_less_important_columns():
    narrow, wide = (" ".join(shown(plan_of(every_preset()), width)) for width in (80, 100))
    assert "±" in wide
    assert "±" not in narrow


def test_the_recommended_row_is_marked_and_said():
    lines = shown(plan_of([row("colocate_sync", 10.0), row("async_partial", 5.0, train=3, rollout=5)]), 100)
    (marked,) = [line for line in lines if "→" in line]
    assert marked.split()[:3][:2] == ["→1", "async_partial"]
    text = " ".join(lines)
    assert "Recommended: async_partial, 3 devices train, 5 generate (5 replicas): mode=async_partial" in text
    assert "async_training.staleness_threshold=0.5" in text
    assert "Asynchrony helps here" in text


def test_an_arrow_below_a_quicker_row_is_explained_and_so_is_a_replay():
    precise = plan_of([row("async_partial", 10.0, lag_mean=0.5), row("colocate_sync", 10.1)])
    text = " ".join(" ".join(shown(precise, 100)).split())
    assert "Row 2, not 1: of rows within 2% of the quickest" in text and "known within" not in text
    rough = plan_of([row("async_partial", 5.0, error=0.9, versions=3), row("colocate_sync", 6.0)])
    assert "Row 1 is known within 90% only." in " ".join(" ".join(shown(rough, 100)).split())
    unknown = plan_of([row("async_partial", 5.0, error=math.inf, versions=1), row("colocate_sync", 6.0)])
    text = " ".join(" ".join(shown(unknown, 100)).split())
    assert "Row 1 is known from too few versions for any error only." in text
    quickest = plan_of([row("async_partial", 5.0), row("colocate_sync", 6.0)])
    assert "not 1:" not in " ".join(shown(quickest, 100))
    lengths = {"kind": "empirical", "groups": [[1]], "replay": True}
    assert "PROFILE's" in " ".join(shown(replace(quickest, profile=profile_of(response=lengths)), 100))
    assert "PROFILE's" not in " ".join(shown(quickest, 100))


def test_the_mesh_that_training_was_measured_with_is_said_and_is_among_the_settings_to_give():
    plain = plan_of([row("colocate_sync", 10.0), row("async_partial", 5.0)])
    train = {"parallel": {"tp": 2, "cp": 2}, "points": [{"devices": 4, "token_s": 0.0}]}
    meshed = replace(plain, profile=profile_of(train=train))
    text = " ".join(shown(meshed, 100))
    assert "Training was measured with tp=2 cp=2; other meshes need a profile of their own." in text
    assert "actor.parallel.tp=2 actor.parallel.cp=2" in " ".join(text.split())
    text = " ".join(shown(plain, 100))
    assert "Training was measured with replicate, tp, cp and ep of 1; other meshes need" in text
    assert "actor.parallel" not in text


def test_of_many_rows_the_quickest_are_shown_and_each_presets_best_and_the_rest_counted():
    many = [row("async_partial", 5.0 + i / 10) for i in range(ROWS_SHOWN + 10)]
    lines = shown(plan_of([*many, row("on_policy", 50.0), row("colocate_sync", 60.0)]), 100)
    assert sum("async_partial" in line and ":4" in line and "on 4:4" not in line for line in lines) == ROWS_SHOWN
    assert any("on_policy" in line for line in lines)
    assert any("colocate_sync" in line for line in lines)
    assert "10 more rows are not shown; --json writes them all." in lines


def test_a_rows_number_counts_rows_that_are_not_shown_too():
    many = [row("async_partial", 5.0 + i / 10) for i in range(ROWS_SHOWN + 10)]
    (last, *_) = [line for line in shown(plan_of([*many, row("on_policy", 50.0)]), 100) if "on_policy" in line]
    assert last.split()[0] == str(ROWS_SHOWN + 11)


def test_what_was_not_simulated_or_not_precisely_is_said():
    rows = [row("colocate_sync", 10.0, error=0.1), row("on_policy", 11.0, error=0.1, versions=30)]
    text = " ".join(shown(plan_of(rows, open=4, skipped=1), 100))
    assert "Not known within 2%: 2 rows, 1 of them for want of time (--budget)." in text
    assert "Not simulated, as time was out (--budget): async_partial 1:7 η=0.5 trigger=4; async_partial" in text
    assert "and 2 more." in text
    assert "as others are expected to be quicker (--sweep): overlapped 1:7 η=1 trigger=1." in " ".join(text.split())


def test_assumptions_and_the_simulators_throughput_are_shown():
    text = " ".join(" ".join(shown(plan_of(every_preset(), assumptions=tuple(ASSUMPTIONS)), 80)).split())
    assert "assumptions, which nobody measured (2):" in text
    assert all(f"- {assumption}" in text for assumption in ASSUMPTIONS)
    assert "Simulated 8 rows with 123,456 trajectories in 40s, 10,288 in a second of processor time." in text


def test_a_plan_without_rows_says_what_to_do():
    text = " ".join(shown(plan_of([], open=1), 80))
    assert "Nothing was simulated to the end" in text
