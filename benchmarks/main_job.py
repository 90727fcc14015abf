"""The demo's workload: Headway's pipeline against a plain loop over ``transformers.generate`` and TRL's trainer.

Same model, prompts, number of samples and optimizer steps, the same two cores, and the same micro-batch tokens where
the contender counts them. Start-up is not counted: all are timed from the first prompt to the last optimizer step.
Dynamic sampling is off, so that every sample that is generated is trained on and samples per second mean the same for
all; a contender that made another number of samples or steps ends the benchmark.

TRL has an environment of its own (``make trl-env``). Without it the others are measured, and the table says so.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.runner import DEMO, call, say, summary_of, train, turns, warmed_up_model
from benchmarks.table import Ratio, Rows, Share, medians, report

ROUNDS = 5
GROUPS = 256
SAMPLES = GROUPS * 8
"""Samples of each contender: the recipe's ``rollout.n`` is 8."""
STEPS = GROUPS // 16
"""Optimizer steps of each contender: the recipe's ``actor.ppo_mini_batch_size`` is 16."""
COMMON = ("algorithm.filter_groups.enable=false", "rollout.test_freq=-1", "data.task.val_size=16")
LENGTH = f"rollout.total_rollout_steps={GROUPS}"
HEADWAY = ("rollout.max_concurrent=null",)
"""The recipe's own is small, to have generation as the slower half; here memory is no limit for either side."""
PLAIN, TRL = "plain loop", "TRL"
MODES = ("on_policy", "async_partial")
TRL_PYTHON = Path(".venv-trl/bin/python")
TRL_STAMP = Path(".venv-trl/.installed")
"""A file that ``make trl-env`` leaves when the environment is whole."""
NOTES = (
    "idle: share of the time in which that side did nothing; for the plain loop and TRL, in which the other one did.",
    "tokens/sample: answers grow while the model learns, so a policy that lags behind generates shorter ones.",
)
COUNTED = ("samples", "optimizer steps")

Figures = dict[str, float]
"""One run's figures by column, and its ``samples`` and ``optimizer steps``."""
Run = Callable[[Path, Path], Figures]
"""Function of the warmed-up model and of a folder that is not there yet: one contender's job from start to end."""


def main() -> None:
    runs, notes = contenders()
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as scratch:
        model = warmed_up_model(Path(scratch), *COMMON)
        results: dict[str, list[Figures]] = {name: [] for name in runs}
        for name, once in turns(runs, ROUNDS):
            figures = once(model, Path(scratch) / f"{name}-{len(results[name])}")
            check(name, figures)
            results[name].append(figures)
            say(f"[round {len(results[name])} of {ROUNDS}] {name}: {figures['samples/s']:.0f} samples/s")
    title = f"The demo's workload: {GROUPS} groups, medians of {ROUNDS} interleaved rounds"
    report("main_job", {title: table(results)}, [*NOTES, *notes])


def contenders() -> tuple[dict[str, Run], list[str]]:
    """Every contender that can be run here, in the order of a round, and what there is to say about the rest."""
    runs: dict[str, Run] = {PLAIN: _job(sys.executable, "benchmarks.plain_loop")}
    notes = ["TRL: skipped, there is no environment for it (make bench-trl builds one)"]
    if TRL_STAMP.exists():
        runs[TRL], notes = _job(str(TRL_PYTHON), "benchmarks.trl_job"), []
    return {**runs, **{mode: _headway(mode) for mode in MODES}}, notes


def check(name: str, figures: Mapping[str, float]) -> None:
    """End the benchmark where a contender did not do the same job."""
    done = tuple(figures[key] for key in COUNTED)
    if done != (SAMPLES, STEPS):
        sys.exit(f"{name} made {done[0]} samples in {done[1]} optimizer steps, not {SAMPLES} in {STEPS}: no comparison")


def table(results: Mapping[str, Sequence[Figures]]) -> Rows:
    """Medians of each contender's rounds, and its samples per second over those of the plain loop and of TRL."""
    middle = {name: medians(same) for name, same in results.items()}
    rates = {name: values["samples/s"] for name, values in middle.items()}
    rows: list[dict[str, Any]] = []
    for name, values in middle.items():
        shown = {key: Share(v) if key.endswith("idle") else v for key, v in values.items() if key not in COUNTED}
        over = {f"÷ {one}": Ratio(rates[name] / rates[one]) if one in rates else None for one in (PLAIN, TRL)}
        rows.append({"contender": name, **shown, "tokens/sample": values["tokens/s"] / values["samples/s"], **over})
    return rows


def _job(python: str, module: str) -> Run:
    def once(model: Path, _: Path) -> Figures:
        out = call(python, "-m", module, str(DEMO), f"model.path={model}", *COMMON, LENGTH)
        figures: Figures = json.loads(next(line for line in reversed(out.splitlines()) if line.startswith("{")))
        return figures

    return once


def _headway(mode: str) -> Run:
    def once(model: Path, run_dir: Path) -> Figures:
        train(run_dir, f"mode={mode}", f"model.path={model}", *COMMON, LENGTH, *HEADWAY)
        summary = summary_of(run_dir)
        wall = summary["wall_s"]
        return {
            "samples/s": summary["trajectories"] / wall,
            "tokens/s": summary["tokens"]["trained"] / wall,
            "wall s": wall,
            "train idle": summary["trainer/idle_ratio"],
            "rollout idle": summary["rollouter/idle_ratio"],
            "samples": summary["trajectories"],
            "optimizer steps": summary["optimizer_steps"],
        }

    return once


if __name__ == "__main__":
    main()
