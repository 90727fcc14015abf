"""``python -m benchmarks.calibrate``: one workload fitted to a published record, and what it predicts.

    published parts of three steps ─▶ fit (mean and sigma of lengths) ─▶ recipes/plan/qwen2.5-math-7b-dapo.yaml
                                                                              │
                     build/bench/predictions.json ◀── --predict ──────────────┘

Only the three rows of `PUBLISHED` are fitted to. Training follows from them directly; generation is fitted by
simulating ``colocate_sync`` on as many devices. What is predicted are asynchronous rows against colocated synchronous
training.

    decode step of a replica of t devices, with a active sequences and c tokens in its cache
        = overhead + (weight bytes + c · cache bytes) / (t · bandwidth) + a · token compute / t
    token compute of an engine = a share of the device-seconds that the published forward pass takes per token
    training on a published number of devices = the published seconds over the workload's tokens
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import NormalDist, fmean

import yaml

from benchmarks.runner import parser
from benchmarks.table import Share, report
from headway.events import Event, LeaseChanged, TrainerBusy
from headway.planner import planner
from headway.planner.grid import DeviceSplit, PlanSetting, setting_of
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


PROMPT_TOKENS, WITHIN_GROUP = 150, 0.5
DEVICES, SLOTS = 4, 256
"""Of a replica."""
BANDWIDTH = 2.0e12
"""Bytes that a device reads from its memory per second while it decodes."""
OVERHEAD_S = 2e-3
"""Of a decode step, whatever its size."""
COMPUTE_SHARE = 0.5
"""An engine's compute per token, decoded or prefilled, over that of the trainer's forward pass."""
UPDATE_S = 5.5
"""To bring new weights to replicas on devices of their own."""


def profile_of(lengths: Lengths) -> Profile:
    """The workload's profile. Every number here that is not published is one of `ASSUMPTIONS`."""
    response = LognormalLengths(
        kind="lognormal", mean=lengths.mean, sigma=lengths.sigma, max=LONGEST, within_group=WITHIN_GROUP
    )
    tokens = BATCH.groups_per_version * BATCH.n * (PROMPT_TOKENS + mean_length(response))
    # The published seconds over the tokens that took them; what an optimizer step costs by itself is not known.
    points = [
        TrainPoint(
            devices=devices,
            token_s=_rounded(parts.update / tokens),
            forward_token_s=_rounded(parts.old_log_prob / tokens),
        )
        for devices, parts in sorted(PUBLISHED.items())
    ]
    # Few devices forward most efficiently: with more, what does not scale counts.
    compute_s = COMPUTE_SHARE * points[0].forward_token_s * points[0].devices / DEVICES
    bytes_per_s = DEVICES * BANDWIDTH
    fixed_s = OVERHEAD_S + WEIGHT_BYTES / bytes_per_s
    # Shared devices: all that the published parts leave out. Devices of their own: a guess, half of it sending.
    local = UPDATE_S / 2
    handing_over = _rounded((fmean(parts.rest for parts in PUBLISHED.values()) - local) / 2)
    quarter, half = PhaseProfile(latency_s=_rounded(local / 2)), PhaseProfile(latency_s=_rounded(local))
    return Profile(
        name="Qwen2.5-Math-7B, DAPO",
        devices=max(PUBLISHED),
        batch=BATCH,
        prompt=ConstantLengths(kind="constant", tokens=PROMPT_TOKENS),
        response=response,
        rollout=RolloutProfile(
            devices=DEVICES,
            slots=SLOTS,
            decode=[(1, _rounded(fixed_s + compute_s)), (SLOTS, _rounded(fixed_s + SLOTS * compute_s))],
            kv_token_s=_rounded(CACHE_BYTES / bytes_per_s),
            prefill_token_s=_rounded(compute_s),
        ),
        train=TrainProfile(points=points, min_devices=8, recompute_old_log_probs="shared"),
        update=UpdateProfile(nbytes=WEIGHT_BYTES, gather=quarter, send=half, load=quarter),
        shared=SharedProfile(to_train_s=handing_over, to_generate_s=handing_over),
    )


def mean_length(lengths: LognormalLengths) -> float:
    """Mean tokens of answers: E[min(X, max)] of a log-normal X."""
    normal, mu = NormalDist(), math.log(lengths.mean) - lengths.sigma**2 / 2
    cut = (math.log(lengths.max) - mu) / lengths.sigma
    return lengths.mean * normal.cdf(cut - lengths.sigma) + lengths.max * (1 - normal.cdf(cut))


def _rounded(value: float) -> float:
    """To four significant digits."""
    return float(f"{value:.4g}")


def main(arguments: Sequence[str] | None = None) -> None:
    help = "predict asynchronous rows with the fitted profile"
    options = parser("calibrate", "Fit, unless told otherwise.", predict={"action": "store_true", "help": help})
    if options.parse_args(arguments).predict:
        predict(load_profile(RECIPE))
    else:
        lengths = calibrate()
        RECIPE.write_text(recipe(lengths))
        show(lengths)
        print(f"fitted mean={lengths.mean:.0f} sigma={lengths.sigma:.2f}; written to {RECIPE}")


# ------------------------------------------------------------------------------------------ the fit


def recipe(lengths: Lengths) -> str:
    """The fitted profile as a file."""
    assumptions = yaml.safe_dump({"assumptions": ASSUMPTIONS}, width=118, allow_unicode=True)
    return HEADER + dump_profile(profile_of(lengths)) + assumptions


def shipped() -> Lengths:
    """The fit in the recipe."""
    response = load_profile(RECIPE).response
    assert isinstance(response, LognormalLengths)
    return Lengths(response.mean, response.sigma)


def calibrate(versions: int = VERSIONS) -> Lengths:
    """The lengths whose simulated steps are closest to the published ones."""

    def lengths_at(point: Sequence[float]) -> Lengths:
        mean, sigma = map(math.exp, point)
        return Lengths(round(mean), round(sigma, 3))

    start = [math.log(START.mean), math.log(START.sigma)]
    return lengths_at(pattern_search(lambda point: misfit(simulated(lengths_at(point), versions)), start))


def misfit(steps: Mapping[int, Parts]) -> float:
    """Sum of squared logarithms of simulated over published, of all parts and totals: half counts like twice."""
    return sum(
        math.log(getattr(steps[devices], part) / getattr(published, part)) ** 2
        for devices, published in PUBLISHED.items()
        for part in Parts.__dataclass_fields__
    )


def simulated(lengths: Lengths, versions: int) -> dict[int, Parts]:
    """The published rows, as `colocate_sync` simulates them: mean parts of so many versions."""
    found, profile = {}, profile_of(lengths)
    for devices in PUBLISHED:
        config = config_for(profile, BASELINE, train_devices=devices, replicas=devices // DEVICES, versions=versions)
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


def show(lengths: Lengths) -> None:
    """Fitted against published, in seconds."""
    rows = []
    for devices, fitted in simulated(lengths, versions=4 * VERSIONS).items():
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
        for row in planner.plan(job, settings=[baseline, _halved(job, STREAMS), *ahead], budget_s=math.inf).rows:
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


def _halved(job: Profile, mode: str, eta: float | None = None) -> PlanSetting:
    return setting_of(job, mode, _split(job, job.devices // 2, shared=False), eta=eta)


def _split(job: Profile, each: int, *, shared: bool) -> DeviceSplit:
    return DeviceSplit(each, each, each // job.rollout.devices, shared=shared)


if __name__ == "__main__":
    main()
