"""``python -m benchmarks.calibrate``: one workload fitted to a published record, and what it predicts.

    published parts of three steps ─▶ fit (mean and sigma of lengths) ─▶ recipes/plan/qwen2.5-math-7b-dapo.yaml
                                                                              │
                     build/bench/predictions.json ◀── --predict ──────────────┤
                     build/bench/sensitivity.json ◀── --sensitivity (refits) ─┘

Only the three published rows of `benchmarks.workload` are fitted to. Training follows from them directly; generation is
fitted by simulating ``colocate_sync`` on as many devices.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean

import yaml

from benchmarks import predictions
from benchmarks.table import report
from benchmarks.workload import PUBLISHED, Assumptions, Lengths, Parts, profile_of
from headway.events import Event, LeaseChanged, TrainerBusy
from headway.planner.profiles.job_profile import LognormalLengths
from headway.planner.profiles.profile_files import dump_profile, load_profile
from headway.planner.simulation.simulated_run import Simulation, config_for

RECIPE = Path("recipes/plan/qwen2.5-math-7b-dapo.yaml")
START = Lengths(mean=4000, sigma=0.6)
STEP, FINEST = 0.2, 0.05
"""Of the search, in logarithms. The published steps are far from being known as well as the finest."""
VERSIONS = 4
"""Simulated per number of devices and guess."""
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calibrate", description="Fit, unless told otherwise.")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--predict", action="store_true", help="predict asynchronous rows with the fitted profile")
    choice.add_argument("--sensitivity", action="store_true", help="refit under other assumptions, and predict again")
    chosen = parser.parse_args(arguments)
    if chosen.predict:
        predictions.predict(load_profile(RECIPE))
    elif chosen.sensitivity:
        predictions.sensitivity(calibrate, shipped())
    else:
        lengths = calibrate(Assumptions())
        RECIPE.write_text(recipe(lengths))
        show(Assumptions(), lengths)
        print(f"fitted mean={lengths.mean:.0f} sigma={lengths.sigma:.2f}; written to {RECIPE}")


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
    return {devices: _simulated_on(devices, assumptions, lengths, versions) for devices in PUBLISHED}


def _simulated_on(devices: int, assumptions: Assumptions, lengths: Lengths, versions: int) -> Parts:
    profile = profile_of(assumptions, lengths, assumptions.lengths_on(devices, lengths))
    replicas = devices // assumptions.tensor_parallel
    config = config_for(profile, "colocate_sync", train_devices=devices, replicas=replicas, versions=versions)
    meter = PartsMeter()
    Simulation(profile, config, observers=(meter,)).run()
    return meter.parts()


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
        published = PUBLISHED[devices]
        for part in ("total", "generation", "old_log_prob", "update", "rest"):
            was, is_ = getattr(published, part), getattr(fitted, part)
            rows.append({"GPUs": str(devices), "part": part, "published": was, "fitted": is_, "error": is_ / was - 1})
    report("calibration", {"Colocated synchronous steps, in seconds": rows})


if __name__ == "__main__":
    main()
