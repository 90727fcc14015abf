"""The demo's workload: Headway's pipeline against a plain synchronous loop over ``transformers.generate``.

Same model, prompts, number of samples and optimizer steps, same micro-batch tokens, the same two cores. Each round runs
every contender once, so that a busy neighbour slows all of them; the figures are medians over rounds. Start-up is not
counted: both are timed from the first prompt to the last optimizer step. Dynamic sampling is off, so that every sample
that is generated is trained on and samples per second mean the same for all.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.table import report

RECIPE = Path("recipes/demo.yaml")
ROUNDS = 3
GROUPS = 256
COMMON = (
    "algorithm.filter_groups.enable=false",
    "rollout.test_freq=-1",
    "data.task.val_size=16",
)
LENGTH = f"rollout.total_rollout_steps={GROUPS}"
HEADWAY = ("rollout.max_concurrent=null",)
"""The recipe's own is small, to have generation as the slower half; here memory is no limit for either side."""
PLAIN = "plain loop"
MODES = ("on_policy", "async_partial")


def run() -> None:
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as scratch:
        model = _warmed_up_model(Path(scratch))
        results: dict[str, list[dict[str, float]]] = {name: [] for name in (PLAIN, *MODES)}
        for round_ in range(ROUNDS):
            results[PLAIN].append(_plain(model))
            for mode in MODES:
                results[mode].append(_headway(model, mode, Path(scratch) / f"{mode}-{round_}"))
    medians = {
        name: {key: statistics.median(r[key] for r in rounds) for key in rounds[0]} for name, rounds in results.items()
    }
    baseline = medians[PLAIN]["samples/s"]
    rows = [{"contender": name, **values, "ratio": values["samples/s"] / baseline} for name, values in medians.items()]
    report(
        "main_job",
        f"The demo's workload: {GROUPS} groups, medians of {ROUNDS} interleaved rounds",
        rows,
        ["idle: share of the time in which that side did nothing; for the plain loop, in which the other side worked."],
    )


def _warmed_up_model(scratch: Path) -> Path:
    """The recipe's model after warm-up, made once for all contenders."""
    run_dir = scratch / "model-run"
    _call("-m", "headway", "train", str(RECIPE), *COMMON, "rollout.total_rollout_steps=64", f"run.dir={run_dir}")
    return Path(shutil.copytree(run_dir / "initial_model", scratch / "model"))


def _plain(model: Path) -> dict[str, float]:
    out = _call("-m", "benchmarks.plain_job", str(RECIPE), f"model.path={model}", *COMMON, LENGTH)
    figures: dict[str, float] = json.loads(out.splitlines()[-1])
    return figures


def _headway(model: Path, mode: str, run_dir: Path) -> dict[str, float]:
    settings = (f"mode={mode}", f"model.path={model}", *COMMON, LENGTH, *HEADWAY, f"run.dir={run_dir}")
    _call("-m", "headway", "train", str(RECIPE), *settings)
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    trained, wall = summary["tokens"]["trained"], summary["wall_s"]
    return {
        "samples/s": summary["trajectories"] / wall,
        "tokens/s": trained / wall,
        "wall s": wall,
        "train idle": summary["trainer/idle_ratio"],
        "rollout idle": summary["rollouter/idle_ratio"],
    }


def _call(*arguments: str) -> str:
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}  # as Headway's own processes have it
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout
