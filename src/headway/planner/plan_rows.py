"""Rows of a plan: a setting, its measurements, and its comparison with colocated synchronous training.

The advice recommends a row, and says whether asynchrony helps:

    synchronous   η = 0, a batch at a time      streaming   η = 0, groups as they come      asynchronous   η > 0

A row is better only if the difference exceeds both errors. Asynchrony helps only if it gains at least `WORTH_IT`, since
it costs off-policy data and a run that is harder to follow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headway.config.presets import PRESETS
from headway.config.sections.section import shortest_spelling
from headway.planner.grid import PlanSetting
from headway.planner.measure import MOST_VERSIONS, PRECISION, Measurement
from headway.planner.profiles.job_profile import Profile
from headway.reports.human import number, share


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """Row of a plan: a simulated setting, its measurements and its comparison with the baseline."""

    setting: PlanSetting
    measured: Measurement
    samples_per_s: float
    """Number of trained groups per second."""
    tail: float | None = None
    """Share of fillable slots that are empty while training waits, in a synchronous row; None in other rows."""
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
        """True if the simulation was not cut short: it reached its precision or the largest number of versions."""
        return self.relative_error <= PRECISION or self.measured.versions >= MOST_VERSIONS


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


def baseline_of(rows: Iterable[PlanRow]) -> PlanRow | None:
    """Return the row of colocated synchronous training or, if it is missing, the quickest synchronous row."""
    synchronous = [row for row in rows if row.setting.synchronous]
    return min(synchronous, key=lambda row: (not row.setting.split.shared, row.step_s), default=None)


def quickest(rows: Iterable[PlanRow]) -> PlanRow | None:
    return min(rows, key=lambda row: row.step_s, default=None)


def to_json(row: PlanRow) -> dict[str, Any]:
    """Turn ``row`` into a flat JSON object. ``step_s`` is for B groups; null stands for no lag bound or half-width."""
    setting, measured = row.setting, asdict(row.measured)
    half_width_s = measured.pop("half_width")
    return {
        "preset": setting.preset,
        "split": f"{setting.split.train_devices}:{setting.split.rollout_devices}",
        "placement": setting.values["cluster.placement"],
        "train_devices": setting.split.train_devices,
        "rollout_devices": setting.split.rollout_devices,
        "replicas": setting.split.replicas,
        "eta": shortest_spelling(setting.eta),
        "trigger": setting.trigger,
        "require_batches": setting.require_batches,
        # JSON has no infinity.
        "half_width_s": half_width_s if math.isfinite(half_width_s) else None,
        "samples_per_s": row.samples_per_s,
        "speedup": row.speedup,
        **measured,
    }


AS_GOOD = 0.02
"""Largest relative difference from the quickest step time that counts as equal. Then less lag decides, then
simplicity."""
WORTH_IT = 0.05


@dataclass(frozen=True, slots=True)
class Advice:
    recommended: PlanRow | None
    """The row to choose; None when nothing was simulated."""
    helps: bool | None
    """True if running ahead (η > 0) makes a version quicker; None when there was nothing to compare."""
    sentence: str


def advise(rows: Sequence[PlanRow], not_compared: str | None = None) -> Advice:
    """The recommendation among ``rows``, and whether asynchrony helps here, with the reason in numbers.

    ``not_compared``: a sentence on modes that the rows lack, which the verdict ends with.
    """
    if not rows:
        return Advice(None, None, "Nothing was simulated to the end: give the plan more time (--budget).")
    helps, sentence = _whether(rows)
    said = sentence if not_compared is None else f"{sentence} {not_compared}"
    return Advice(recommend(rows), helps, said)


def recommend(rows: Sequence[PlanRow]) -> PlanRow:
    """Choose the quickest row; of equally quick ones, the one with the least lag, then the simplest. See `_at_most`."""
    best = min(map(_at_most, rows))
    as_good = [row for row in rows if _at_most(row) <= best * (1 + AS_GOOD)]
    simplest = list(PRESETS).index
    return min(
        as_good,
        key=lambda row: (
            # Rounded: otherwise noise in the lag would decide before simplicity.
            round(row.measured.lag_mean, 1),
            row.measured.lag_max,
            simplest(row.setting.preset),
            row.step_s,
        ),
    )


def _at_most(row: PlanRow) -> float:
    """The row's step time or, if the budget cut it short, the upper end of its interval: the most that it may be."""
    return row.step_s if row.complete else row.step_s * (1 + row.relative_error)


def _whether(rows: Sequence[PlanRow]) -> tuple[bool | None, str]:
    synchronous = quickest(row for row in rows if row.setting.synchronous)
    streaming = quickest(row for row in rows if row.setting.eta == 0 and not row.setting.synchronous)
    ahead = [row for row in rows if row.setting.eta > 0]
    if synchronous is None:
        return None, "Whether asynchrony helps cannot be said: no synchronous setting was simulated."
    if not ahead:
        return None, "Whether asynchrony helps cannot be said: no setting with η > 0 was simulated."
    best = recommend(ahead)
    if streaming is not None and _is_worth_it(streaming, synchronous) and not _is_worth_it(best, streaming):
        return False, _streaming_is_enough(streaming, best, synchronous)
    if _is_worth_it(best, synchronous):
        return True, _helps(best, synchronous)
    if _gain(best, synchronous) >= WORTH_IT:
        return None, _uncertain(best, synchronous)
    return False, _does_not_help(best, synchronous)


def _is_worth_it(row: PlanRow, other: PlanRow) -> bool:
    """Tell whether ``row`` is faster than ``other`` by enough, and by more than both are uncertain."""
    return _gain(row, other) >= max(WORTH_IT, _error(row, other))


def _error(row: PlanRow, other: PlanRow) -> float:
    """The relative error of the ratio of two rows' step times: errors of two measurements add up as squares."""
    return math.hypot(row.relative_error, other.relative_error)


def _gain(row: PlanRow, other: PlanRow) -> float:
    return other.step_s / row.step_s - 1


def _helps(ahead: PlanRow, synchronous: PlanRow) -> str:
    return (
        f"Asynchrony helps here: {_named(ahead)} trains a version in {number(ahead.step_s)} s, "
        f"{synchronous.step_s / ahead.step_s:.2f}× as fast as the best synchronous setting "
        f"({_named(synchronous)}: {number(synchronous.step_s)} s), which {_spends(synchronous)}."
    )


def precision(error: float) -> str:
    """Return a text for this relative error; an infinite error means that none is known yet."""
    return f"within {share(error)}" if math.isfinite(error) else "from too few versions for any error"


def _uncertain(ahead: PlanRow, synchronous: PlanRow) -> str:
    known = precision(_error(ahead, synchronous))
    return (
        f"Whether asynchrony helps cannot be said yet: {_named(ahead)} looks {share(_gain(ahead, synchronous))} faster "
        f"than the best synchronous setting ({_named(synchronous)}), but that is known {known} only: give the plan "
        "more time (--budget)."
    )


def _streaming_is_enough(streaming: PlanRow, ahead: PlanRow, synchronous: PlanRow) -> str:
    return (
        f"Stale data does not help here, overlap alone does: with η = 0 {_named(streaming)} trains a version in "
        f"{number(streaming.step_s)} s, {synchronous.step_s / streaming.step_s:.2f}× as fast as the best "
        f"synchronous setting ({_named(synchronous)}: {number(synchronous.step_s)} s), and the best setting with η > 0 "
        f"({_named(ahead)}) takes {number(ahead.step_s)} s, {_compared(ahead, streaming)}."
    )


def _does_not_help(ahead: PlanRow, synchronous: PlanRow) -> str:
    return (
        f"Asynchrony does not help here: its best setting ({_named(ahead)}) takes {number(ahead.step_s)} s a version, "
        f"{_compared(ahead, synchronous)} than the best synchronous one ({_named(synchronous)}: "
        f"{number(synchronous.step_s)} s), which {_spends(synchronous)}. Of its own time the trainer idles "
        f"{share(ahead.measured.trainer_idle_ratio)}, {share(ahead.measured.update_stall_s / ahead.step_s)} for "
        f"updates, and replicas {share(ahead.measured.rollouter_idle_ratio)}."
    )


def _spends(synchronous: PlanRow) -> str:
    measured, step_s = synchronous.measured, synchronous.step_s
    return (
        f"trains {share(1 - measured.trainer_idle_ratio)} of the time and waits for generation "
        f"{share(measured.trainer_waited_s / step_s)}, while {share(synchronous.tail or 0.0)} of the slots are empty "
        "behind the longest answers"
    )


def _compared(row: PlanRow, other: PlanRow) -> str:
    gain = _gain(row, other)
    if abs(gain) < 0.005:
        return "no faster"
    return f"only {share(gain)} faster" if gain > 0 else f"{share(row.step_s / other.step_s - 1)} slower"


def _named(row: PlanRow) -> str:
    eta = f", η = {float(row.setting.eta):g}" if row.setting.eta else ""
    return f"{row.setting.preset} on {row.setting.split}{eta}"
