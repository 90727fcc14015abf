"""``headway plan``: simulates settings until all are measured or time is out, and recommends one.

profile ─▶ settings ─▶ `promising` ─▶ simulate one ─▶ row ─┐
                            ▲                              ├─▶ Plan: rows, quickest first; advice
                            └──── its seconds ─────────────┘

A row is simulated until it is precise or has used its share of the remaining time. Answers have the same lengths in all
settings, so that differences come only from the settings.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from headway.errors import ConfigError
from headway.planner import grid
from headway.planner.grid import DeviceSplit, PlanSetting
from headway.planner.measure import FEWEST_VERSIONS, Measurement, fill_versions, measure
from headway.planner.plan_rows import Advice, PlanRow, advise, baseline_of, row_of
from headway.planner.plan_rows import to_json as row_to_json
from headway.planner.profiles.job_profile import Profile

VARIED = 3
"""Number of presets whose η and trigger are varied."""
USUAL_ROWS = 30
"""Number of rows, roughly, of a plan without ``--sweep``."""
ROUGHLY_KNOWN = 6
"""Smallest number of versions simulated for a row, even if its share of the time is smaller."""

Progress = Callable[[PlanRow, int], None]
"""Callback after each row, with that row and the number of settings that are still to come, roughly."""


Measure = Callable[..., Measurement | None]
"""Function that measures one setting: `headway.planner.measure.measure`, or a stand-in for it."""


@dataclass(frozen=True, slots=True)
class PlanResult:
    profile: Profile
    """The job's profile, with the number of devices that was planned for."""
    rows: tuple[PlanRow, ...]
    """Simulated rows, the quickest first."""
    open: tuple[PlanSetting, ...]
    """Settings that were not simulated because the time was used up; the most promising first."""
    skipped: tuple[PlanSetting, ...]
    """Settings that were not simulated because they are expected to be slower than others."""
    baseline: PlanRow | None
    """The row that ``speedup`` compares with: colocated synchronous training, or the quickest synchronous row."""
    advice: Advice
    trajectories: int
    """Number of simulated trajectories, over all rows."""
    cpu_s: float
    """Seconds of processor time that the planning took."""
    wall_s: float
    """Seconds that the planning took, which are more where the machine does something else, too."""

    @property
    def trajectories_per_s(self) -> float:
        """Number of trajectories simulated per second of processor time: the simulator's own throughput."""
        return self.trajectories / self.cpu_s if self.cpu_s > 0 else 0.0


def plan(
    profile: Profile,
    *,
    devices: int | None = None,
    budget_s: float = 60.0,
    sweep: bool = False,
    settings: Sequence[PlanSetting] | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.process_time,
    measure: Measure = measure,
) -> PlanResult:
    """Simulate and compare settings of ``profile``'s job.

    Args:
        devices: replaces the profile's number.
        budget_s: seconds of ``clock``; no new row is begun that would probably end after it. The first one always is.
            By default they are of this process's own work: what else the machine does takes no rows away.
        sweep: all combinations of preset, split, η and trigger, instead of those that may be the quickest.
        settings: these and no others.

    Raises:
        ConfigError: no split of the devices fits, or a setting is impossible.
    """
    if devices is not None:
        if devices < 1:
            raise ConfigError(f"devices: got {devices}, expected at least 1")
        profile = profile.model_copy(update={"devices": devices})
    # Beside `clock`: the budget is of processor time, so that other work on the machine takes none of it.
    began = time.monotonic()
    possible, step_s = grid.full(profile) if sweep else grid.own(profile), dict[PlanSetting, float]()
    if settings is not None:
        possible = list(settings)
    everything = sweep or settings is not None
    following = iter(possible) if everything else promising(profile, possible, step_s)
    rows: list[PlanRow] = []
    started, trajectories, late = clock(), 0, False
    of_version = profile.batch.groups_per_version * profile.batch.n

    def ends_late(versions: int, limit: float) -> bool:
        """Return True if ``versions`` more would probably end too late. The simulator's cost is per trajectory."""
        elapsed = clock() - started
        return elapsed + versions * of_version * (elapsed / trajectories if trajectories else 0.0) > limit

    for setting in following:
        to_come = (len(possible) if everything else max(USUAL_ROWS, len(rows) + 2)) - len(rows)
        if late := ends_late(fill_versions(setting.eta) + FEWEST_VERSIONS, budget_s):
            break
        elapsed = clock() - started
        share_ends = elapsed + (budget_s - elapsed) / to_come

        # A default argument, so that it stays the share of this row.
        def out_of_time(versions: int, share_ends: float = share_ends) -> bool:
            return ends_late(1, share_ends if versions >= ROUGHLY_KNOWN else budget_s)

        measured = measure(profile, setting, out_of_time=out_of_time)
        if late := measured is None:
            break
        trajectories += measured.trajectories
        rows.append(row_of(profile, setting, measured))
        step_s[setting] = measured.step_s
        if progress is not None:
            progress(rows[-1], to_come - 1)
    left = tuple(setting for setting in possible if setting not in step_s)
    not_compared = _not_compared(profile, rows, left if late else ())
    rows.sort(key=lambda row: row.step_s)
    if (baseline := baseline_of(rows)) is not None:
        rows = [replace(row, speedup=baseline.step_s / row.step_s) for row in rows]
    return PlanResult(
        profile=profile,
        rows=tuple(rows),
        open=left if late else (),
        skipped=() if late else left,
        baseline=baseline_of(rows),
        advice=advise(rows, not_compared),
        trajectories=trajectories,
        cpu_s=clock() - started,
        wall_s=time.monotonic() - began,
    )


def promising(
    profile: Profile, settings: Sequence[PlanSetting], step_s: Mapping[PlanSetting, float]
) -> Iterator[PlanSetting]:
    """Yield those of ``settings`` that may be the quickest, and others with η and trigger varied.

    ``settings`` are presets on their splits, in order. The best split is looked for with one synchronous preset and one
    other; the others begin there. ``step_s`` has the seconds of a setting when the next one is asked for.
    """
    presets = [list(alike) for _, alike in groupby(settings, key=lambda each: each.preset)]
    best: dict[bool, DeviceSplit] = {}

    def quickest(splits: Sequence[PlanSetting]) -> PlanSetting:
        return min(splits, key=lambda each: step_s.get(each, math.inf))

    for splits in presets:
        kind = splits[0].synchronous
        begin = next((at for at, each in enumerate(splits) if each.split == best.get(kind)), len(splits) // 2)
        if kind in best or splits[0].split.shared:
            yield splits[begin]
        else:
            yield from _climb(splits, begin, step_s)
            best[kind] = quickest(splits).split
    for splits in presets:
        yield from _climb(splits, splits.index(quickest(splits)), step_s)
    ahead = (top for top in map(quickest, presets) if top.eta > 0)
    for top in sorted(ahead, key=step_s.__getitem__)[:VARIED]:
        yield from grid.around(profile, top)


def _climb(splits: Sequence[PlanSetting], place: int, step_s: Mapping[PlanSetting, float]) -> Iterator[PlanSetting]:
    """Yield the split at ``place`` with its neighbours, then those of the quickest, until no neighbour is quicker."""
    while True:
        near = range(max(0, place - 1), min(place + 2, len(splits)))
        # The place itself first: time may be out before its neighbours.
        for at in sorted(near, key=lambda at: at != place):
            if splits[at] not in step_s:
                yield splits[at]
        # Of equals keep the current one: otherwise two equal splits would alternate for ever.
        before, place = place, min(near, key=lambda at: (step_s[splits[at]], at != place))
        if place == before:
            return


def to_json(plan: PlanResult) -> dict[str, Any]:
    """The whole plan as one JSON object; ``rows`` has each row, quickest first."""
    advice = plan.advice
    return {
        "profile": plan.profile.name,
        "devices": plan.profile.devices,
        "parallel": plan.profile.train.parallel.model_dump(),
        "groups_per_version": plan.profile.batch.groups_per_version,
        "rows": [row_to_json(row) for row in plan.rows],
        "not_simulated": [str(setting) for setting in plan.open],
        "expected_slower": [str(setting) for setting in plan.skipped],
        "baseline": None if plan.baseline is None else str(plan.baseline.setting),
        "recommended": None if advice.recommended is None else row_to_json(advice.recommended),
        "asynchrony_helps": advice.helps,
        "sentence": advice.sentence,
        "assumptions": plan.profile.assumptions,
        "simulator": {
            "trajectories": plan.trajectories,
            "cpu_s": plan.cpu_s,
            "trajectories_per_s": plan.trajectories_per_s,
        },
    }


def _not_compared(profile: Profile, rows: Sequence[PlanRow], missing: Sequence[PlanSetting]) -> str | None:
    """Return a sentence on the modes without rows and the reason; None if all modes have rows."""
    if (devices := profile.rollout.devices) > 1:
        return (
            f"Modes of shared devices are not compared: a replica has {devices} devices here, and one there. If the "
            "model fits on one, a profile with rollout.tensor_model_parallel_size=1 compares them."
        )
    measured = {row.setting.preset for row in rows}
    late = list(dict.fromkeys(setting.preset for setting in missing if setting.preset not in measured))
    return f"Not compared, for want of time (--budget): {', '.join(late)}." if late and measured else None
