"""The demo's workload: Headway's pipeline against a plain loop over ``transformers.generate`` and TRL's trainer.

Same model, prompts, number of samples and optimizer steps, the same two cores, and the same micro-batch tokens where
the contender counts them. Each round runs every contender once, so that a busy neighbour slows all of them; the figures
are medians over rounds. Start-up is not counted: all are timed from the first prompt to the last optimizer step.
Dynamic sampling is off, so that every sample that is generated is trained on and samples per second mean the same for
all; a contender that made another number of samples or steps ends the benchmark.

TRL has an environment of its own (``make trl-env``). Without it the others are measured, and the table says so.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.table import report

RECIPE = Path("recipes/demo.yaml")
ROUNDS = 5
GROUPS = 256
SAMPLES = GROUPS * 8
"""Samples of each contender: the recipe's ``rollout.n`` is 8."""
STEPS = GROUPS // 16
"""Optimizer steps of each contender: the recipe's ``actor.ppo_mini_batch_size`` is 16."""
COMMON = (
    "algorithm.filter_groups.enable=false",
    "rollout.test_freq=-1",
    "data.task.val_size=16",
)
LENGTH = f"rollout.total_rollout_steps={GROUPS}"
HEADWAY = ("rollout.max_concurrent=null",)
"""The recipe's own is small, to have generation as the slower half; here memory is no limit for either side."""
PLAIN = "plain loop"
TRL = "TRL"
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


def run() -> None:
    """Measure all contenders and write ``build/bench/main_job.json``."""
    runs, notes = contenders()
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as scratch:
        model = _warmed_up_model(Path(scratch))
        results: dict[str, list[Figures]] = {name: [] for name in runs}
        for round_ in range(ROUNDS):
            for name, once in runs.items():
                figures = once(model, Path(scratch) / f"{name}-{round_}")
                check(name, figures)
                results[name].append(figures)
                told = f"[round {round_ + 1} of {ROUNDS}] {name}: {figures['samples/s']:.0f} samples/s"
                print(told, file=sys.stderr, flush=True)
    title = f"The demo's workload: {GROUPS} groups, medians of {ROUNDS} interleaved rounds"
    report("main_job", title, table(results), [*NOTES, *notes])


def contenders() -> tuple[dict[str, Run], list[str]]:
    """Every contender that can be run here, in the order of a round, and what there is to say about the rest."""
    runs: dict[str, Run] = {PLAIN: _plain}
    notes = []
    if TRL_STAMP.exists():
        runs[TRL] = _trl
    else:
        notes.append("TRL: skipped, there is no environment for it (make bench-trl builds one)")
    for mode in MODES:
        runs[mode] = _headway(mode)
    return runs, notes


def check(name: str, figures: Mapping[str, float]) -> None:
    """End the benchmark where a contender did not do the same job."""
    done = tuple(figures[key] for key in COUNTED)
    if done != (SAMPLES, STEPS):
        sys.exit(f"{name} made {done[0]} samples in {done[1]} optimizer steps, not {SAMPLES} in {STEPS}: no comparison")


def table(results: Mapping[str, Sequence[Figures]]) -> list[dict[str, Any]]:
    """Medians of each contender's rounds, and its samples per second over those of the plain loop and of TRL."""
    medians = {
        name: {key: statistics.median(r[key] for r in rounds) for key in rounds[0]} for name, rounds in results.items()
    }
    rates = {name: values["samples/s"] for name, values in medians.items()}
    shown = {
        name: {key: value for key, value in values.items() if key not in COUNTED} for name, values in medians.items()
    }
    return [
        {"contender": name, **values, "tokens/sample": values["tokens/s"] / values["samples/s"]}
        | {f"÷ {other}": rates[name] / rates[other] if other in rates else "—" for other in (PLAIN, TRL)}
        for name, values in shown.items()
    ]


def _warmed_up_model(scratch: Path) -> Path:
    """The recipe's model after warm-up, made once for all contenders."""
    run_dir = scratch / "model-run"
    settings = (*COMMON, "rollout.total_rollout_steps=64", f"run.dir={run_dir}")
    _call(sys.executable, "-m", "headway", "train", str(RECIPE), *settings)
    return Path(shutil.copytree(run_dir / "initial_model", scratch / "model"))


def _plain(model: Path, _: Path) -> Figures:
    return _job(sys.executable, "benchmarks.plain_job", model)


def _trl(model: Path, _: Path) -> Figures:
    return _job(str(TRL_PYTHON), "benchmarks.trl_job", model)


def _job(python: str, module: str, model: Path) -> Figures:
    out = _call(python, "-m", module, str(RECIPE), f"model.path={model}", *COMMON, LENGTH)
    figures: Figures = json.loads(out.splitlines()[-1])
    return figures


def _headway(mode: str) -> Run:
    def once(model: Path, run_dir: Path) -> Figures:
        settings = (f"mode={mode}", f"model.path={model}", *COMMON, LENGTH, *HEADWAY, f"run.dir={run_dir}")
        _call(sys.executable, "-m", "headway", "train", str(RECIPE), *settings)
        summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
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


def _call(*command: str) -> str:
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}  # as Headway's own processes have it
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout
