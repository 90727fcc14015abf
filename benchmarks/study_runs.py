"""The runs of the staleness study: settings over the demo, and what is kept of each run.

LOSSES × η × learning rate × seeds ─▶ settings over recipes/demo.yaml ─▶ headway train, a process ─▶ Result (JSON)
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from benchmarks.runner import train

MINI_BATCH = 4
"""Groups of one optimizer step."""
STEPS = 4
"""Optimizer steps of one version: from the second one on π_θ is not π_prox, and the three losses differ."""
GROUPS_PER_VERSION = MINI_BATCH * STEPS
"""B."""
VERSIONS = 32
TEST_FREQ = 4
"""Versions between two validations."""
VAL_SIZE = 256
"""Held-out problems of each."""

BASE = (
    "mode=async_partial",
    "async_training.trigger_parameter_sync_step=1",
    f"async_training.require_batches={STEPS}",
    "async_training.order=fifo",
    "async_training.window=null",
    f"actor.ppo_mini_batch_size={MINI_BATCH}",
    "algorithm.filter_groups.enable=false",
    "rollout.max_concurrent=64",
    "rollout.threads=1",
    "trainer.threads=1",
    "cluster.backend=inline",
    "cluster.device=cpu",
    "reports.live=off",
    "reports.trackers=[]",
)
"""One process, one torch thread for training and one for generation, which is fast enough to stay as far ahead as η
permits. No group is filtered: where a policy has collapsed nearly all would be, the trainer would wait for generation,
and the lag would vanish with the policy that it ruined."""


@dataclass(frozen=True, slots=True)
class Loss:
    title: str
    settings: tuple[str, ...]


LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        "naive": Loss("naive PPO", ("async_training.use_rollout_log_probs=true",)),
        "decoupled": Loss(
            "decoupled PPO",
            (
                "async_training.use_rollout_log_probs=false",
                "algorithm.rollout_correction.name=truncate",
                "algorithm.rollout_correction.bound=2",
            ),
        ),
        "truncated_is": Loss(
            "truncated IS",
            (
                "algorithm.policy_loss.loss_mode=truncated_is",
                "algorithm.policy_loss.rollout_is_threshold=2",
                "actor.clip_ratio_low=null",
                "actor.clip_ratio_high=null",
            ),
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Run:
    loss: str
    """Key of `LOSSES`."""
    eta: int
    lr: float
    seed: int
    versions: int = VERSIONS
    val_size: int = VAL_SIZE

    @property
    def name(self) -> str:
        return f"lr{self.lr:g}-eta{self.eta}-{self.loss}-seed{self.seed}"

    def settings(self) -> tuple[str, ...]:
        # With η = 0 nothing runs ahead, and a queue to fill first would be a setting without effect.
        ahead = ("async_training.fill_queue=true",) if self.eta else ()
        return (
            *BASE,
            *LOSSES[self.loss].settings,
            f"async_training.staleness_threshold={self.eta}",
            *ahead,
            f"actor.optim.lr={self.lr:g}",
            f"rollout.total_rollout_steps={self.versions * GROUPS_PER_VERSION}",
            f"rollout.test_freq={TEST_FREQ}",
            f"data.task.val_size={self.val_size}",
            f"run.seed={self.seed}",
        )


def runs(
    etas: Sequence[int],
    rates: Sequence[float],
    seeds: Sequence[int],
    *,
    versions: int = VERSIONS,
    val_size: int = VAL_SIZE,
) -> Iterator[Run]:
    """Rate by rate and seed by seed, so that a study that was stopped has whole ones."""
    for lr, seed, eta, loss in product(rates, seeds, etas, LOSSES):
        yield Run(loss, eta, lr, seed, versions, val_size)


@dataclass(frozen=True, slots=True)
class Result:
    """What is kept of a run."""

    run: Run
    updates: tuple[int, ...]
    """Optimizer steps before each validation."""
    accuracy: tuple[float, ...]
    """Held-out, greedy; one for each of ``updates``."""
    lag_mean: float
    """Over the trained groups, each with its oldest token's; in versions."""
    lag_max: int
    ess_mean: float
    """Effective sample size of an optimizer step as a share of its tokens, mean over versions …"""
    ess_min: float
    """… and of the version where it was least."""
    kl_mean: float
    """KL(π_behav‖π_θ), nats per token, mean over versions …"""
    kl_max: float
    clip_fraction: float
    """Of the tokens: without gradient for the clip's sake, or truncated; mean over versions."""
    skipped_steps: int
    seconds: float
    """The process from start to end."""

    @property
    def final(self) -> float:
        return self.accuracy[-1]

    @property
    def half(self) -> float:
        """Accuracy at the last validation in the first half of the updates."""
        middle = self.updates[-1] / 2
        return [a for u, a in zip(self.updates, self.accuracy, strict=True) if u <= middle][-1]

    @property
    def area(self) -> float:
        """Mean accuracy over the updates, linear between validations."""
        points = list(zip(self.updates, self.accuracy, strict=True))
        return sum((u1 - u0) * (a0 + a1) / 2 for (u0, a0), (u1, a1) in pairwise(points)) / points[-1][0]


def execute(run: Run, model: Path, directory: Path) -> Result:
    """Train, in a process of its own, to the end. Ends the program with the run's output when it fails."""
    began = time.perf_counter()
    train(directory, *model_settings(model), *run.settings())
    return read(run, directory, time.perf_counter() - began)


def model_settings(model: Path) -> tuple[str, ...]:
    """Start from ``model`` instead of the recipe's own, which is made and warmed up in each run."""
    return f"model.path={model}", "model.make=null", "model.warmup=null"


def read(run: Run, directory: Path, seconds: float) -> Result:
    """From the run's ``summary.json`` and ``metrics.jsonl``."""
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    def series(name: str) -> list[float]:
        return [row[name] for row in rows if name in row]

    ess, kl = series("offpolicy/ess"), series("offpolicy/kl")
    return Result(
        run=run,
        updates=tuple(entry["version"] * STEPS for entry in summary["eval"]),
        accuracy=tuple(entry["accuracy"] for entry in summary["eval"]),
        lag_mean=summary["lag"]["mean"],
        lag_max=summary["lag"]["max"],
        ess_mean=fmean(ess),
        ess_min=min(ess),
        kl_mean=fmean(kl),
        kl_max=max(kl),
        clip_fraction=fmean(series("actor/clip_fraction")),
        skipped_steps=summary["skipped_steps"],
        seconds=seconds,
    )


class Kept:
    """Results in a folder, a JSON file for each run; one of other settings or another model does not count."""

    def __init__(self, folder: Path, model_digest: str) -> None:
        self._folder = folder
        self._digest = model_digest

    def get(self, run: Run) -> Result | None:
        path = self._path(run)
        if not path.is_file():
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
        return _result(run, found["result"]) if found["of"] == self._of(run) else None

    def put(self, result: Result) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(result.run)
        # Renamed when complete: a study that is stopped while it writes leaves no half of a result.
        part = path.with_suffix(".part")
        values = {"of": self._of(result.run), "result": asdict(result)}
        part.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        part.replace(path)

    def _path(self, run: Run) -> Path:
        return self._folder / f"{run.name}.json"

    def _of(self, run: Run) -> dict[str, Any]:
        return {"model": self._digest, "settings": list(run.settings())}


def _result(run: Run, values: Mapping[str, Any]) -> Result:
    lists = {name: tuple(values[name]) for name in ("updates", "accuracy")}
    return Result(**{**values, **lists, "run": run})


def digest(model: Path) -> str:
    """Of the weights of a model folder."""
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()[:16]
