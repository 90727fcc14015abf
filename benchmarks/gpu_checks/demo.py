"""The demo, shortened: ``headway train recipes/demo.yaml cluster.backend=inline``, a process as a user starts it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_checks.setting import CheckFailed, Passed, Setting, require

RECIPE = "recipes/demo.yaml"
GROUPS = 128
"""Trained: two versions of the recipe."""
SHORTENED = (f"rollout.total_rollout_steps={GROUPS}", "data.task.val_size=128", "rollout.max_concurrent=64")
SMALL_GROUPS = 16
SMALL = (
    f"rollout.total_rollout_steps={SMALL_GROUPS}",
    "actor.ppo_mini_batch_size=2",
    "model.warmup=null",
    "algorithm.filter_groups.enable=false",
    "data.task.val_size=8",
    "rollout.test_freq=-1",
)
"""Two versions of a model that knows nothing: the machinery alone."""


def demo(setting: Setting) -> Passed:
    """A whole run: warm-up, generation, rewards, training, verified updates, the exported model."""
    directory = setting.scratch / "demo"
    shutil.rmtree(directory, ignore_errors=True)
    settings = ["cluster.backend=inline", f"cluster.device={setting.device}", f"run.dir={directory}"]
    started = time.perf_counter()
    train([*settings, *(SMALL if setting.small else SHORTENED)])
    seconds = time.perf_counter() - started
    return verdict(directory, SMALL_GROUPS if setting.small else GROUPS, seconds)


def train(settings: Sequence[str]) -> None:
    """Raise `CheckFailed` with the last that a run printed, if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "headway", "train", RECIPE, *settings], capture_output=True, text=True, check=False
    )
    print(done.stdout, done.stderr, sep="\n", flush=True)
    said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()][-3:]
    require(done.returncode == 0, f"headway train ended with exit code {done.returncode}: {' | '.join(said)}")


def verdict(directory: Path, groups: int, seconds: float) -> Passed:
    """What the run's summary says. Raises `CheckFailed`."""
    try:
        summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise CheckFailed(f"{directory} has no summary of the run: {cause}") from cause
    trained, updates = summary["groups"]["trained"], summary["param_update"]["count"]
    require(summary["status"] == "completed", f"the run ended as {summary['status']!r}: {summary['reason']}")
    require(bool(summary["balanced"]), f"the ledger does not balance: {summary['groups']}")
    require(trained == groups, f"{trained} groups were trained; {groups} were asked for")
    require(summary["skipped_steps"] == 0, f"{summary['skipped_steps']} optimizer steps were not finite")
    require(updates == summary["version"] > 0, f"{updates} updates of the weights for version {summary['version']}")
    require((directory / "model" / "model.safetensors").exists(), f"there is no exported model in {directory}")
    throughput, accuracy = summary["throughput"], [evaluation["accuracy"] for evaluation in summary["eval"]]
    line = (
        f"{trained} groups trained in {summary['optimizer_steps']} steps, {updates} verified updates; "
        f"{throughput['generated_tokens_per_s']:.0f} tokens/s generated; validation {accuracy[0]:.2f} → "
        f"{accuracy[-1]:.2f}; {seconds:.0f} s from the command to its end"
    )
    return Passed([line], {"seconds": seconds, "throughput": throughput, "accuracy": accuracy})
