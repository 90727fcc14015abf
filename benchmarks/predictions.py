"""What the calibrated workload predicts: asynchronous rows against colocated synchronous training, and how much each
assumption moves them. `benchmarks.calibrate` is the command.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from benchmarks.table import report
from benchmarks.workload import PUBLISHED, Assumptions, Lengths, Parts, profile_of
from headway.planner import planner
from headway.planner.grid import PlanSetting, setting_of, split_of
from headway.planner.plan_rows import PlanRow
from headway.planner.profiles.job_profile import Profile, TrainPoint

ETAS = (0.1, 0.3, 0.5)
RUNS_AHEAD = ("async_stale", "async_partial")
STREAMS = "stream_off_policy"
BASELINE = "colocate_sync"


class Calibrate(Protocol):
    def __call__(self, assumptions: Assumptions, *, sigma: float | None = None, versions: int = ...) -> Lengths: ...


def predict(profile: Profile) -> None:
    """Print the predictions of ``profile`` and write them to ``build/bench/predictions.json``."""
    predicted = [_figures(devices, row) for devices in PUBLISHED for row in _rows(profile, devices, _settings)]
    report("predictions", {"Predicted seconds per B = 512 groups (require_batches 4, trigger 4)": predicted})


def _figures(devices: int, row: PlanRow) -> dict[str, Any]:
    measured = row.measured
    return {
        "preset": row.setting.preset,
        "split": str(row.setting.split),
        "eta": float(row.setting.eta),
        "step_s": row.step_s,
        "samples/s": row.samples_per_s,
        "speedup": row.speedup,
        "over published": PUBLISHED[devices].total / row.step_s,
        "trainer idle": measured.trainer_idle,
        "rollouter idle": measured.rollouter_idle,
        "slots used": measured.slot_utilization,
        "waited_s": measured.trainer_waited_s,
        "lag mean": measured.lag_mean,
        "lag max": measured.lag_max,
    }


Settings = Callable[[Profile], list[PlanSetting]]


def _rows(profile: Profile, devices: int, settings: Settings) -> tuple[PlanRow, ...]:
    job = profile.model_copy(update={"devices": devices})
    return planner.plan(job, settings=settings(job), budget_s=math.inf).rows


def _settings(profile: Profile) -> list[PlanSetting]:
    """The baseline on all devices, and each asynchronous row on two equal halves."""
    everything = split_of(profile, BASELINE, profile.devices, profile.devices)
    return [
        setting_of(profile, BASELINE, everything),
        _halved(profile, STREAMS),
        *(_halved(profile, mode, eta) for mode in RUNS_AHEAD for eta in ETAS),
    ]


def _halves(profile: Profile, mode: str, eta: float | None) -> list[PlanSetting]:
    return [_halved(profile, mode, eta)]


def _halved(profile: Profile, mode: str, eta: float | None = None) -> PlanSetting:
    half = profile.devices // 2
    return setting_of(profile, mode, split_of(profile, mode, half, half), eta=eta)


# ---------------------------------------------------------------------------------------------- sensitivity


@dataclass(frozen=True, slots=True)
class Variation:
    """Something else assumed."""

    name: str
    assumptions: Assumptions
    sigma: float | None = None
    """Fixed instead of fitted."""
    refit: bool = True
    """It changes what is fitted."""
    train_exponent: float | None = None
    """Training on 16 devices takes 2^this times as long as on 32."""


def sensitivity(calibrate: Calibrate, shipped: Lengths) -> None:
    """Refit under each variation that matters to the fit; print what it predicts, and write
    ``build/bench/sensitivity.json``."""
    found = []
    for variation in _variations():
        refitted = partial(calibrate, variation.assumptions, sigma=variation.sigma, versions=2)
        lengths = refitted() if variation.refit else shipped
        found.append(_varied(variation, lengths))
        print(found[-1], flush=True)
    report("sensitivity", {"Speed-up over the published step": found})


def _varied(variation: Variation, lengths: Lengths) -> dict[str, Any]:
    profile = profile_of(variation.assumptions, lengths)
    if variation.train_exponent is not None:
        profile = _with_fewer_devices(profile, variation.train_exponent)
    found: dict[str, Any] = {"assumed": variation.name, "mean": lengths.mean, "sigma": lengths.sigma}
    for mode, eta in ((RUNS_AHEAD[-1], max(ETAS)), (STREAMS, None)):
        for devices, published in PUBLISHED.items():
            (row,) = _rows(profile, devices, partial(_halves, mode=mode, eta=eta))
            found[f"{mode} {row.setting.split}"] = published.total / row.step_s
    return found


def _with_fewer_devices(profile: Profile, exponent: float) -> Profile:
    least = profile.train.points[0]
    half = TrainPoint(
        devices=least.devices // 2,
        token_s=least.token_s * 2**exponent,
        forward_token_s=least.forward_token_s * 2**exponent,
    )
    train = profile.train.model_copy(update={"points": [half, *profile.train.points]})
    return profile.model_copy(update={"train": train})


def _variations() -> list[Variation]:
    base = Assumptions()
    refitted: Mapping[str, dict[str, Any]] = {
        "2 devices a replica": {"tensor_parallel": 2},
        "8 devices a replica": {"tensor_parallel": 8},
        "128 slots": {"slots": 128},
        "512 slots": {"slots": 512},
        "1.2 TB/s": {"bandwidth": 1.2e12},
        "3 TB/s": {"bandwidth": 3e12},
        "a decode step's overhead 4 ms": {"overhead_s": 4e-3},
        "an engine computes like the trainer": {"compute_share": 1.0},
        "a prompt's answers share 0.2": {"within_group": 0.2},
        "a prompt's answers share 0.8": {"within_group": 0.8},
        "prompts of 600 tokens": {"prompt_tokens": 600},
        "the answers on 64 10% shorter": {"longer": {64: 0.9}},
        "the answers on 64 10% longer": {"longer": {64: 1.1}},
        "training takes a/devices + b": {"train": _smooth()},
    }
    priced: Mapping[str, dict[str, Any]] = {
        "an update takes nothing": {"update_s": 0.0},
        "an update takes 11 s": {"update_s": 11.0},
        "old log-probs in all rows": {"recompute_old_log_probs": "always"},
    }
    return [
        Variation("as shipped", base, refit=False),
        Variation("sigma 1", base, sigma=1.0),
        *(Variation(name, replace(base, **changes)) for name, changes in refitted.items()),
        *(Variation(name, replace(base, **changes), refit=False) for name, changes in priced.items()),
        Variation("16 train in 1.66 × the time of 32", base, train_exponent=0.73, refit=False),
        Variation("16 train in 2.35 × the time of 32", base, train_exponent=1.23, refit=False),
    ]


def _smooth() -> dict[int, Parts]:
    """Published training seconds, smoothed: a/devices + b, least squares of relative errors."""
    update, old = (
        _law({devices: getattr(parts, part) for devices, parts in PUBLISHED.items()})
        for part in ("update", "old_log_prob")
    )
    return {
        devices: replace(parts, update=update(devices), old_log_prob=old(devices))
        for devices, parts in PUBLISHED.items()
    }


def _law(seconds: Mapping[int, float]) -> Callable[[int], float]:
    known = np.array(list(seconds.values()))
    terms = np.array([[1 / devices, 1.0] for devices in seconds]) / known[:, None]
    a, b = np.linalg.lstsq(terms, np.ones(len(known)), rcond=None)[0]
    return lambda devices: float(a / devices + b)
