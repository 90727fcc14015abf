"""Profiles and rows that the tests of the planner are made of."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from headway.planner.grid import DeviceSplit, PlanSetting, setting_of
from headway.planner.measure import Measurement
from headway.planner.plan_rows import PlanRow
from headway.planner.profiles.job_profile import Profile

MEASURED = Measurement(
    step_s=10.0,
    half_width=0.05,
    versions=8,
    trainer_idle_ratio=0.5,
    rollouter_idle_ratio=0.5,
    slot_utilization=0.25,
    trainer_waited_s=5.0,
    update_stall_s=0.1,
    lag_mean=0.0,
    lag_max=0,
    lag_bound=0,
    partial_ratio=0.0,
    trajectories=1000,
)


def profile_of(**changes: Any) -> Profile:
    """8 devices, replicas of one; B = 8 groups of 2 in mini-batches of 2. A step of decoding takes 0.1 s for any number
    of sequences, one of training 1 s on any number of devices. ``changes`` replace whole sections, or join them."""
    values: dict[str, Any] = {
        "name": "job",
        "devices": 8,
        "batch": {"groups_per_version": 8, "ppo_mini_batch_size": 2, "n": 2},
        "prompt": {"kind": "constant", "tokens": 4},
        "response": {"kind": "constant", "tokens": 10},
        "rollout": {"slots": 16, "decode": [[1, 0.1]]},
        "train": {"points": [{"devices": 1, "step_s": 1.0, "token_s": 0.0}]},
    }
    for name, change in changes.items():
        joins = isinstance(change, dict) and "kind" not in change
        values[name] = {**values.get(name, {}), **change} if joins else change
    return Profile.model_validate(values)


def setting(preset: str, train: int = 4, rollout: int = 4, **how: Any) -> PlanSetting:
    """On `profile_of`'s devices."""
    split = DeviceSplit(train, rollout, rollout, shared=preset.startswith("colocate"))
    return setting_of(profile_of(), preset, split, **how)


def row(
    preset: str,
    step_s: float,
    *,
    train: int = 4,
    rollout: int = 4,
    eta: Fraction | float | None = None,
    trigger: int | None = None,
    error: float = 0.005,
    tail: float | None = None,
    **measured: Any,
) -> PlanRow:
    """A row as if it had been simulated; ``error`` is relative."""
    if preset.startswith("colocate"):
        train = rollout = 8
    values = {field: getattr(MEASURED, field) for field in MEASURED.__slots__}
    values |= {"step_s": step_s, "half_width": error * step_s, "trainer_waited_s": step_s / 2, **measured}
    return PlanRow(
        setting=setting(preset, train, rollout, eta=eta, trigger=trigger),
        measured=Measurement(**values),
        samples_per_s=8 / step_s,
        tail=tail,
    )
