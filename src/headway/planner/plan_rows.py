"""The rows of a plan: a setting, what was measured of it, and how it compares with colocated synchronous training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headway.config.presets import PRESETS
from headway.config.sections.section import shortest_spelling
from headway.planner.grid import PlanSetting
from headway.planner.measure import MOST_VERSIONS, PRECISION, Measurement
from headway.planner.profiles.job_profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One row of a plan: a simulated setting, what was measured of it, and how it compares."""

    setting: PlanSetting
    measured: Measurement
    samples_per_s: float
    """Number of trained groups per second."""
    tail: float | None = None
    """Share of the slots that a batch could fill which is empty while training waits, in a synchronous row."""
    speedup: float | None = None
    """The baseline's step time over this one's; None without a baseline."""

    @property
    def step_s(self) -> float:
        return self.measured.step_s

    @property
    def relative_error(self) -> float:
        """Half-width of the 95% confidence interval of ``step_s``, over ``step_s``."""
        return self.measured.half_width / self.measured.step_s

    @property
    def complete(self) -> bool:
        """Tell whether the row was simulated as far as any is: until it is precise, or for the most versions."""
        return self.relative_error <= PRECISION or self.measured.versions >= MOST_VERSIONS

    @property
    def complexity(self) -> int:
        """Number of values in which the preset differs from colocated synchronous training."""
        values = self.setting.values
        return sum(value != values[key] for key, value in PRESETS[baseline_preset()].items())


def row_of(profile: Profile, setting: PlanSetting, measured: Measurement) -> PlanRow:
    """Make the row of a measured ``setting``, still without a baseline to compare with."""
    return PlanRow(
        setting=setting,
        measured=measured,
        samples_per_s=profile.batch.groups_per_version / measured.step_s,
        tail=_tail(profile, setting, measured) if setting.synchronous else None,
    )


def _tail(profile: Profile, setting: PlanSetting, measured: Measurement) -> float:
    slots = setting.split.replicas * profile.rollout.slots
    fillable = min(slots, profile.batch.groups_per_version * profile.batch.n) * measured.trainer_waited_s
    used = measured.slot_utilization * slots * measured.step_s
    return max(0.0, 1 - used / fillable) if fillable > 0 else 0.0


def baseline_preset() -> str:
    """The preset that trains synchronously on shared devices."""
    return next(
        mode
        for mode, values in PRESETS.items()
        if (values["placement.kind"], values["async_training.staleness_threshold"], values["async_training.admission"])
        == ("shared", 0, "batch")
    )


def baseline_of(rows: Iterable[PlanRow]) -> PlanRow | None:
    """Colocated synchronous training where it was simulated, else the quickest synchronous row."""
    synchronous = [row for row in rows if row.setting.synchronous]
    return min(synchronous, key=lambda row: (not row.setting.split.shared, row.step_s), default=None)


def quickest(rows: Iterable[PlanRow]) -> PlanRow | None:
    return min(rows, key=lambda row: row.step_s, default=None)


def to_json(row: PlanRow) -> dict[str, Any]:
    """Turn ``row`` into a flat JSON object. ``step_s`` is for B groups; null stands for no lag bound or half-width."""
    setting, measured = row.setting, row.measured
    return {
        "preset": setting.preset,
        "split": f"{setting.split.train_devices}:{setting.split.rollout_devices}",
        "placement": setting.values["placement.kind"],
        "train_devices": setting.split.train_devices,
        "rollout_devices": setting.split.rollout_devices,
        "replicas": setting.split.replicas,
        "eta": shortest_spelling(setting.eta),
        "trigger": setting.trigger,
        "require_batches": setting.require_batches,
        "step_s": measured.step_s,
        "half_width_s": measured.half_width if math.isfinite(measured.half_width) else None,
        "versions": measured.versions,
        "samples_per_s": row.samples_per_s,
        "speedup": row.speedup,
        "trainer_idle_ratio": measured.trainer_idle,
        "rollouter_idle_ratio": measured.rollouter_idle,
        "slot_utilization": measured.slot_utilization,
        "trainer_waited_s": measured.trainer_waited_s,
        "update_stall_s": measured.update_stall_s,
        "lag_mean": measured.lag_mean,
        "lag_max": measured.lag_max,
        "lag_bound": measured.lag_bound,
        "partial_ratio": measured.partial_ratio,
    }
