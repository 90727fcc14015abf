"""``python -m benchmarks.calibrate``: one workload fitted to a published record, and what it predicts.

    published parts of three steps ─▶ fit (mean and sigma of lengths) ─▶ recipes/plan/qwen2.5-math-7b-dapo.yaml
                                                                              │
                     build/bench/predictions.json ◀── --predict ──────────────┤
                     build/bench/sensitivity.json ◀── --sensitivity (refits) ─┘

Only the three rows of `PUBLISHED` are fitted to. Training follows from them directly; generation is fitted by
simulating ``colocate_sync`` on as many devices. What is predicted are asynchronous rows against colocated synchronous
training, and how much each assumption moves them.

    decode step of a replica of t devices, with a active sequences and c tokens in its cache
        = overhead + (weight bytes + c · cache bytes) / (t · bandwidth) + a · token compute / t
    token compute of an engine = a share of the device-seconds that the published forward pass takes per token
    training on a published number of devices = the published seconds over the workload's tokens
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
import yaml

from benchmarks.runner import parser
from benchmarks.table import Share, report
from headway.events import Event, LeaseChanged, TrainerBusy
from headway.planner import planner
from headway.planner.grid import DeviceSplit, PlanSetting, setting_of
from headway.planner.plan_rows import PlanRow
from headway.planner.profiles.job_profile import (
    BatchProfile,
    ConstantLengths,
    LognormalLengths,
    PhaseProfile,
    Profile,
    RolloutProfile,
    SharedProfile,
    TrainPoint,
    TrainProfile,
    UpdateProfile,
)
from headway.planner.profiles.profile_files import dump_profile, load_profile
from headway.planner.simulation.simulated_run import Simulation, config_for

RECIPE = Path("recipes/plan/qwen2.5-math-7b-dapo.yaml")
STEP, FINEST = 0.2, 0.05
"""Of the search, in logarithms. The published steps are far from being known as well as the finest."""
VERSIONS = 4
"""Simulated per number of devices and guess."""
ETAS = (0.1, 0.3, 0.5)
RUNS_AHEAD, STREAMS, BASELINE = ("async_stale", "async_partial"), "stream_off_policy", "colocate_sync"
HEADER = """\
# Published: seconds of a colocated synchronous step (generation, old log-probs, update), 28K-token answers.
#   32 GPUs 790.10 (357.41, 107.71, 313.81)    64 GPUs 365.28 (150.72, 70.26, 133.41)
#   128 GPUs 356.30 (177.85, 53.92, 113.81)
# Fitted to these rows alone by `python -m benchmarks.calibrate`, which writes this file; docs/simulator.md explains it.
#
#   headway plan recipes/plan/qwen2.5-math-7b-dapo.yaml --gpus 64
"""
ASSUMPTIONS = [
    "hardware is unknown: a device reads 2 TB/s while it decodes (plausible: 1.2 to 3), a step costs 2 ms besides "
    "(1 to 4), and an engine computes a token in half the time of the trainer's forward pass (a quarter to all of it)",
    "a replica has 4 devices (1 to 8) and 256 slots (128 to 512), and a cache that never runs full",
    "answers are lognormal, cut at 28,672 tokens; their mean and spread are fitted to generation times, which cannot "
    "tell a longer mean from slower devices (mean: roughly 1,500 to 6,000 tokens); answers of one prompt share half of "
    "the variance (0.2 to 0.8); prompts have 150 tokens (75 to 600)",
    "the three published runs had answers of the same lengths; that 64 GPUs generate faster than 128, and train 2.35 "
    "times as fast as 32, says that they did not quite, or that something else differed (10% either way)",
    "fewer than 32 training devices take inversely longer: 628 s on 16, an extrapolation (520 to 740)",
    "on devices of their own an update takes 5.5 s (0 to 11); on shared ones handing over takes the 10.9 s that the "
    "published parts leave out",
    "asynchronous rows take the engine's own log-probs; rewards cost nothing, and nothing is filtered",
]


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of a colocated synchronous step."""

    total: float
    generation: float
    old_log_prob: float
    update: float

    @property
    def rest(self) -> float:
        """What the three parts do not add up to."""
        return self.total - self.generation - self.old_log_prob - self.update


PUBLISHED: Mapping[int, Parts] = {
    32: Parts(790.10, 357.41, 107.71, 313.81),
    64: Parts(365.28, 150.72, 70.26, 133.41),
    128: Parts(356.30, 177.85, 53.92, 113.81),
}
"""By number of GPUs: Qwen2.5-Math-7B, DAPO, 512 prompts × 16 answers a step, mini-batches of 32 prompts."""
BATCH = BatchProfile(groups_per_version=512, ppo_mini_batch_size=32, n=16)
LONGEST = 28_672
WEIGHT_BYTES = 15_200_000_000
"""7.6 billion parameters in bf16."""
CACHE_BYTES = 28 * 2 * 4 * 128 * 2
"""Of one token: layers × (key and value) × key-value heads × their size × bytes of bf16."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of answers: what is fitted."""

    mean: float
    """Before the cut, in tokens."""
    sigma: float


START = Lengths(mean=4000, sigma=0.6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What the record does not say."""

    prompt_tokens: int = 150
    within_group: float = 0.5
    tensor_parallel: int = 4
    slots: int = 256
    bandwidth: float = 2.0e12
    """Bytes that a device reads from its memory per second while it decodes."""
    overhead_s: float = 2e-3
    """Of a decode step, whatever its size."""
    compute_share: float = 0.5
    """An engine's compute per token, decoded or prefilled, over that of the trainer's forward pass."""
    update_s: float = 5.5
    """To bring new weights to replicas on devices of their own."""
    longer: Mapping[int, float] = field(default_factory=dict)
    """How much longer the answers of the run on so many devices were than the workload's; default: 1."""
    train: Mapping[int, Parts] = field(default_factory=lambda: PUBLISHED)
    """What old log-probs and updates take, by number of devices."""
    recompute_old_log_probs: str = "shared"

    def lengths_on(self, devices: int, lengths: Lengths) -> LognormalLengths:
        """Those of the published run on so many devices."""
        return LognormalLengths(
            kind="lognormal",
            mean=lengths.mean * self.longer.get(devices, 1.0),
            sigma=lengths.sigma,
            max=LONGEST,
            within_group=self.within_group,
        )


def profile_of(assumptions: Assumptions, lengths: Lengths, response: LognormalLengths | None = None) -> Profile:
    """The workload's profile; ``response`` are other answers than its own, at the same costs."""
    points = [_train_point(assumptions, lengths, devices) for devices in sorted(assumptions.train)]
    tensor_parallel, slots = assumptions.tensor_parallel, assumptions.slots
    # Few devices forward most efficiently: with more, what does not scale counts.
    compute_s = assumptions.compute_share * points[0].forward_token_s * points[0].devices / tensor_parallel
    bytes_per_s = tensor_parallel * assumptions.bandwidth
    fixed_s = assumptions.overhead_s + WEIGHT_BYTES / bytes_per_s
    # Shared devices: all that the published parts leave out. Devices of their own: a guess, half of it sending.
    local = assumptions.update_s / 2
    handing_over = _rounded((fmean(parts.rest for parts in PUBLISHED.values()) - local) / 2)
    quarter, half = PhaseProfile(latency_s=_rounded(local / 2)), PhaseProfile(latency_s=_rounded(local))
    return Profile(
        name="Qwen2.5-Math-7B, DAPO",
        devices=max(PUBLISHED),
        batch=BATCH,
        prompt=ConstantLengths(kind="constant", tokens=assumptions.prompt_tokens),
        response=response or assumptions.lengths_on(0, lengths),
        rollout=RolloutProfile(
            devices=tensor_parallel,
            slots=slots,
            decode=[(1, _rounded(fixed_s + compute_s)), (slots, _rounded(fixed_s + slots * compute_s))],
            kv_token_s=_rounded(CACHE_BYTES / bytes_per_s),
            prefill_token_s=_rounded(compute_s),
        ),
        train=TrainProfile.model_validate(
            {"points": points, "min_devices": 8, "recompute_old_log_probs": assumptions.recompute_old_log_probs}
        ),
        update=UpdateProfile(nbytes=WEIGHT_BYTES, gather=quarter, send=half, load=quarter),
        shared=SharedProfile(to_train_s=handing_over, to_generate_s=handing_over),
    )


def _train_point(assumptions: Assumptions, lengths: Lengths, devices: int) -> TrainPoint:
    """The published seconds over the tokens that took them; what an optimizer step costs by itself is not known."""
    response = assumptions.lengths_on(devices, lengths)
    tokens = BATCH.groups_per_version * BATCH.n * (assumptions.prompt_tokens + mean_length(response))
    parts = assumptions.train[devices]
    update_s, forward_s = _rounded(parts.update / tokens), _rounded(parts.old_log_prob / tokens)
    return TrainPoint(devices=devices, token_s=update_s, forward_token_s=forward_s)


def mean_length(lengths: LognormalLengths) -> float:
    """Mean tokens of answers: E[min(X, max)] of a log-normal X."""
    normal, mu = NormalDist(), math.log(lengths.mean) - lengths.sigma**2 / 2
    cut = (math.log(lengths.max) - mu) / lengths.sigma
    return lengths.mean * normal.cdf(cut - lengths.sigma) + lengths.max * (1 - normal.cdf(cut))


def _rounded(value: float) -> float:
    """To four significant digits."""
    return float(f"{value:.4g}")


REFITTED: Mapping[str, dict[str, Any]] = {
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
}
"""Other assumptions that change the fit."""
PRICED: Mapping[str, dict[str, Any]] = {
    "an update takes nothing": {"update_s": 0.0},
    "an update takes 11 s": {"update_s": 11.0},
    "old log-probs in all rows": {"recompute_old_log_probs": "always"},
}
"""Other assumptions that change predictions alone."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("calibrate", "Fit, unless told otherwise.")
    choice = options.add_mutually_exclusive_group()
    choice.add_argument("--predict", action="store_true", help="predict asynchronous rows with the fitted profile")
    choice.add_argument("--sensitivity", action="store_true", help="refit under other assumptions, and predict again")
    chosen = options.parse_args(arguments)
    if chosen.predict:
        predict(load_profile(RECIPE))
    elif chosen.sensitivity:
        sensitivity()
    else:
        lengths = calibrate(Assumptions())
        RECIPE.write_text(recipe(lengths))
        show(Assumptions(), lengths)
        print(f"fitted mean={lengths.mean:.0f} sigma={lengths.sigma:.2f}; written to {RECIPE}")


# ------------------------------------------------------------------------------------------ the fit


def recipe(lengths: Lengths) -> str:
    """The fitted profile as a file."""
    assumptions = yaml.safe_dump({"assumptions": ASSUMPTIONS}, width=118, allow_unicode=True)
    return HEADER + dump_profile(profile_of(Assumptions(), lengths)) + assumptions


def shipped() -> Lengths:
    """The fit in the recipe."""
    response = load_profile(RECIPE).response
    assert isinstance(response, LognormalLengths)
    return Lengths(response.mean, response.sigma)


def calibrate(assumptions: Assumptions, *, sigma: float | None = None, versions: int = VERSIONS) -> Lengths:
    """The lengths whose simulated steps are closest to the published ones; ``sigma`` fixes their spread."""

    def lengths_at(point: Sequence[float]) -> Lengths:
        mean, *spread = map(math.exp, point)
        return Lengths(round(mean), round(spread[0], 3) if sigma is None else sigma)

    start = [math.log(START.mean), math.log(START.sigma)][: 2 if sigma is None else 1]
    found = pattern_search(lambda point: misfit(simulated(assumptions, lengths_at(point), versions)), start)
    return lengths_at(found)


def misfit(steps: Mapping[int, Parts]) -> float:
    """Sum of squared logarithms of simulated over published, of all parts and totals: half counts like twice."""
    return sum(
        math.log(getattr(steps[devices], part) / getattr(published, part)) ** 2
        for devices, published in PUBLISHED.items()
        for part in Parts.__dataclass_fields__
    )


def simulated(assumptions: Assumptions, lengths: Lengths, versions: int) -> dict[int, Parts]:
    """The published rows, as `colocate_sync` simulates them: mean parts of so many versions."""
    found = {}
    for devices in PUBLISHED:
        profile = profile_of(assumptions, lengths, assumptions.lengths_on(devices, lengths))
        replicas = devices // assumptions.tensor_parallel
        config = config_for(profile, BASELINE, train_devices=devices, replicas=replicas, versions=versions)
        meter = PartsMeter()
        Simulation(profile, config, observers=(meter,)).run()
        found[devices] = meter.parts()
    return found


class PartsMeter:
    """An observer: the parts of a step on shared devices, averaged over versions."""

    def __init__(self) -> None:
        self._began = [0.0]
        """When generation got the devices."""
        self._generated: list[tuple[float, float]] = []
        """From when on it had them, until every answer was there."""
        self._computed: list[tuple[str, float, float]] = []

    def on_event(self, event: Event) -> None:
        match event:
            case LeaseChanged(holder="generate", time=time):
                self._began.append(time)
            case LeaseChanged(holder="train", asked=asked):
                self._generated.append((self._began[-1], asked))
            case TrainerBusy(what=what, span=(start, end)):
                self._computed.append((what, start, end))

    def close(self) -> None: ...

    def parts(self) -> Parts:
        steps = len(self._generated)

        def computed(wanted: str) -> float:
            return sum(end - start for what, start, end in self._computed if what == wanted) / steps

        return Parts(
            total=self._began[steps] / steps,
            generation=fmean(end - start for start, end in self._generated),
            old_log_prob=computed("forward"),
            update=computed("step"),
        )


def pattern_search(cost: Callable[[list[float]], float], start: Sequence[float]) -> list[float]:
    """A local minimum of ``cost``: one coordinate at a time, by steps that halve where none improves."""
    point, step = tuple(start), STEP
    known = {point: cost(list(point))}
    while step >= FINEST:
        for index, move in product(range(len(point)), (step, -step)):
            tried = tuple(round(value + move * (at == index), 6) for at, value in enumerate(point))
            if tried not in known:
                known[tried] = cost(list(tried))
            if known[tried] < known[point]:
                point = tried
                break
        else:
            step /= 2
    return list(point)


def show(assumptions: Assumptions, lengths: Lengths) -> None:
    """Fitted against published, in seconds."""
    rows = []
    for devices, fitted in simulated(assumptions, lengths, versions=4 * VERSIONS).items():
        for part in ("total", "generation", "old_log_prob", "update", "rest"):
            was, is_ = getattr(PUBLISHED[devices], part), getattr(fitted, part)
            error = Share(is_ / was - 1)
            rows.append({"GPUs": str(devices), "part": part, "published": was, "fitted": is_, "error": error})
    report("calibration", {"Colocated synchronous steps, in seconds": rows})


# ------------------------------------------------------------------------------------------ predictions


def predict(profile: Profile) -> None:
    """Predict the baseline on all devices, and each asynchronous row on two equal halves."""
    rows = []
    for devices, published in PUBLISHED.items():
        job = profile.model_copy(update={"devices": devices})
        baseline = setting_of(job, BASELINE, _split(job, devices, shared=True))
        ahead = [_halved(job, mode, eta) for mode in RUNS_AHEAD for eta in ETAS]
        for row in _planned(job, [baseline, _halved(job, STREAMS), *ahead]):
            figures = (
                "trainer_idle_ratio",
                "rollouter_idle_ratio",
                "slot_utilization",
                "trainer_waited_s",
                "lag_mean",
                "lag_max",
            )
            rows.append(
                {
                    "preset": row.setting.preset,
                    "split": str(row.setting.split),
                    "eta": float(row.setting.eta),
                    "step_s": row.step_s,
                    "over published": published.total / row.step_s,
                    **{name: getattr(row.measured, name) for name in figures},
                }
            )
    report("predictions", {"Predicted seconds per B = 512 groups (require_batches 4, trigger 4)": rows})


def _planned(job: Profile, settings: list[PlanSetting]) -> Sequence[PlanRow]:
    return planner.plan(job, settings=settings, budget_s=math.inf).rows


def _halved(job: Profile, mode: str, eta: float | None = None) -> PlanSetting:
    return setting_of(job, mode, _split(job, job.devices // 2, shared=False), eta=eta)


def _split(job: Profile, each: int, *, shared: bool) -> DeviceSplit:
    return DeviceSplit(each, each, each // job.rollout.devices, shared=shared)


def sensitivity() -> None:
    """Refit under each variation that matters to the fit, and predict."""
    varied = {
        "as shipped": (Assumptions(), shipped()),
        "sigma 1": (Assumptions(), calibrate(Assumptions(), sigma=1.0, versions=2)),
    }
    for name, changes in REFITTED.items():
        varied[name] = (assumed := Assumptions(**changes)), calibrate(assumed, versions=2)
    smooth = Assumptions(train=_smooth())
    varied["training takes a/devices + b"] = smooth, calibrate(smooth, versions=2)
    varied |= {name: (Assumptions(**changes), shipped()) for name, changes in PRICED.items()}
    profiles = {name: (profile_of(*both), both[1]) for name, both in varied.items()}
    plain = profile_of(Assumptions(), shipped())
    for times in (1.66, 2.35):
        few = plain.train.points[0].model_copy(update={"devices": plain.train.points[0].devices // 2})
        few = few.model_copy(update={name: times * getattr(few, name) for name in ("token_s", "forward_token_s")})
        train = plain.train.model_copy(update={"points": [few, *plain.train.points]})
        profiles[f"16 train in {times} × the time of 32"] = plain.model_copy(update={"train": train}), shipped()
    rows = []
    for name, (profile, lengths) in profiles.items():
        found: dict[str, Any] = {"assumed": name, "mean": lengths.mean, "sigma": lengths.sigma}
        for (mode, eta), (devices, published) in product(
            ((RUNS_AHEAD[-1], max(ETAS)), (STREAMS, None)), PUBLISHED.items()
        ):
            job = profile.model_copy(update={"devices": devices})
            (row,) = _planned(job, [_halved(job, mode, eta)])
            found[f"{mode} {row.setting.split}"] = published.total / row.step_s
        rows.append(found)
    report("sensitivity", {"Speed-up over the published step": rows})


def _smooth() -> dict[int, Parts]:
    """Published training seconds, smoothed: a/devices + b, least squares of relative errors."""
    smoothed = dict(PUBLISHED)
    for part in ("update", "old_log_prob"):
        known = np.array([getattr(parts, part) for parts in PUBLISHED.values()])
        terms = np.array([[1 / devices, 1.0] for devices in PUBLISHED]) / known[:, None]
        a, b = np.linalg.lstsq(terms, np.ones(len(known)), rcond=None)[0]
        smoothed = {devices: replace(was, **{part: float(a / devices + b)}) for devices, was in smoothed.items()}
    return smoothed


if __name__ == "__main__":
    main()
