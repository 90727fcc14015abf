"""The demo: ``headway train recipes/demo.yaml cluster.backend=inline``, a process as a user starts it.

The whole recipe where the time is enough. After `RUN_S` it is told to end, as by Ctrl-C, and what it has done counts.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.gpu_checks.lanes import ROOT
from benchmarks.gpu_checks.setting import CheckFailed, Finding, Findings, Setting, require
from benchmarks.runner import Failed, TimedOut, call, metrics_of, summary_of

RECIPE = str(ROOT / "recipes" / "demo.yaml")
GROUPS = 768
"""Trained by the recipe."""
RUN_S = 130.0
ON_DEVICE = ("data.task.val_size=128", "rollout.max_concurrent=64")
SMALL_GROUPS = 16
SMALL = (
    f"rollout.total_rollout_steps={SMALL_GROUPS}",
    "actor.ppo_mini_batch_size=2",
    "model.warmup=null",
    "algorithm.filter_groups.enable=false",
    "data.task.val_size=8",
    "rollout.test_freq=-1",
    "actor.entropy_coeff=0.01",
)
"""Two versions of a model that knows nothing: the machinery alone. All rewards are 0: entropy is what moves weights."""


def demo(setting: Setting) -> Findings:
    """A run: warm-up, generation, rewards, training, verified updates, the exported model."""
    directory = setting.scratch / "demo"
    shutil.rmtree(directory, ignore_errors=True)
    settings = ["cluster.backend=inline", f"cluster.device={setting.device}", f"run.dir={directory}"]
    started = time.perf_counter()
    whole = train([*settings, *(SMALL if setting.small else ON_DEVICE)], RUN_S * setting.patience)
    seconds = time.perf_counter() - started
    groups = SMALL_GROUPS if setting.small else GROUPS
    yield from verdict(directory, groups if whole else None, seconds, learns=not setting.small)


def train(settings: Sequence[str], seconds: float = RUN_S) -> bool:
    """Return whether a run ended by itself. Raises `CheckFailed` with the last that it printed, if it fails."""
    try:
        print(call(sys.executable, "-m", "headway", "train", RECIPE, *settings, seconds=seconds), flush=True)
    except TimedOut:
        return False
    except Failed as failure:
        raise CheckFailed(" | ".join(str(failure).splitlines())) from None
    return True


def verdict(directory: Path, groups: int | None, seconds: float, *, learns: bool) -> Findings:
    """What the run's files say. ``groups``: those that a whole run trains; None for one that was told to end.

    Raises `CheckFailed`, also where a model that ``learns`` did not: on a CPU 192 groups take validation from 0.43 or
    0.50 to 0.92. One that was told to end before its second validation is not asked.
    """
    try:
        summary = summary_of(directory)
    except (OSError, ValueError) as cause:
        raise CheckFailed(f"{directory} has no summary of the run: {cause}") from cause
    trained, updates = summary["groups"]["trained"], summary["param_update"]["count"]
    ended = "interrupted" if groups is None else "completed"
    require(summary["status"] == ended, f"the run ended as {summary['status']!r}: {summary['reason']}")
    require(bool(summary["balanced"]), f"the ledger does not balance: {summary['groups']}")
    require(trained == (groups or trained) > 0, f"{trained} groups were trained; {groups or 'some'} were asked for")
    require(summary["skipped_steps"] == 0, f"{summary['skipped_steps']} optimizer steps were not finite")
    require(updates == summary["version"] > 0, f"{updates} updates of the weights for version {summary['version']}")
    before, after = (directory / folder / "model.safetensors" for folder in ("initial_model", "model"))
    require(after.exists(), f"there is no exported model in {directory}")
    old, new = load_file(before), load_file(after)
    require(any(not torch.equal(old[name], new[name]) for name in new), "training left all weights as they were")
    throughput = summary["throughput"]
    text = f"{trained} groups in {summary['optimizer_steps']} steps, {updates} verified updates, "
    text += f"{throughput['generated_tokens_per_s']:.0f} tokens/s generated; {seconds:.0f} s from start to end"
    text += " (told to end)" * (groups is None)
    yield Finding("run", text)
    rewards = [row["reward/generated_mean"] for row in metrics_of(directory) if "reward/generated_mean" in row]
    require(bool(rewards) and all(map(math.isfinite, rewards)), f"there are no rewards, or none that count: {rewards}")
    yield Finding("reward", " → ".join(f"{reward:.2f}" for reward in rewards))
    accuracy = [evaluation["accuracy"] for evaluation in summary["eval"]]
    said = " → ".join(f"{one:.2f}" for one in accuracy)
    if learns and (groups or len(accuracy) > 1):
        require(accuracy[-1] > accuracy[0], f"validation did not rise: {said}")
    yield Finding("validation", said)
