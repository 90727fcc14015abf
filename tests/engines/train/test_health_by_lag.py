"""What a step reports of each lag, against numpy over the tokens of that lag."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headway.config.schema import AsyncTrainingConfig, Config, RolloutConfig
from headway.config.sections.learning import ActorConfig, AlgorithmConfig, CorrectionConfig, ParallelConfig
from headway.data.interfaces.training import StepContext, StepReport
from headway.data.packing import CollatedRow
from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.models.pretrained import load_model
from tests.engines.train.rows import random_rows, response_logprobs, with_columns
from tests.tiers import mostly_slow

ModelPath = Callable[..., str]
RunRanks = Callable[..., list[Any]]
VERSION = 6
CONTEXT = StepContext(version=VERSION)
LAGS = ("lag_0", "lag_1", "lag_2", "lag_3", "lag_4_up")
ONE_MICRO_BATCH, MANY_MICRO_BATCHES = 100_000, 48
TEMPERATURE, LOW, HIGH = 0.8, 0.1, 0.3
OF_EACH_LAG = {"tokens", "ess", "kl", "ratio_max", "ratio_p01", "ratio_p50", "ratio_p99", "clip_fraction", "entropy"}


def build(path: str, budget: int, correction: CorrectionConfig | None = None) -> FsdpEngine:
    config = Config(
        actor=ActorConfig(ppo_max_token_len_per_gpu=budget, clip_ratio_low=LOW, clip_ratio_high=HIGH),
        rollout=RolloutConfig(temperature=TEMPERATURE),
        async_training=AsyncTrainingConfig(use_rollout_log_probs=correction is None),
        algorithm=AlgorithmConfig(rollout_correction=correction or CorrectionConfig()),
    )
    return FsdpEngine(
        model_path=path,
        config=config,
        total_optimizer_steps=5,
        mesh=TrainMesh.make(ParallelConfig(), torch.device("cpu")),
    )


def of_versions(rows: Sequence[CollatedRow], versions: Sequence[int], seed: int = 0) -> list[CollatedRow]:
    """Each token of one of ``versions``, ascending in an answer, the older the further off; garbage where masked."""
    rng, result = np.random.default_rng(seed), []
    for row in rows:
        by = np.sort(rng.choice(versions, len(row.versions))).astype(np.int32)
        off = 0.1 * (1 + VERSION - by) * rng.standard_normal(len(by))
        result.append(
            replace(
                row,
                versions=np.where(row.loss_mask, by, VERSION + 5).astype(np.int32),
                logprobs=np.where(row.loss_mask, row.logprobs + off, -np.inf).astype(np.float32),
            )
        )
    return result


def joined(rows: Sequence[CollatedRow], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Of the tokens that count, as float64."""
    pairs = zip(rows, arrays, strict=True)
    return np.concatenate([np.asarray(array, np.float64)[row.loss_mask] for row, array in pairs])


def entropies(path: str, rows: Sequence[CollatedRow]) -> list[np.ndarray]:
    model = load_model(path, dtype=torch.float64)
    return [response_logprobs(model, row, TEMPERATURE)[1].detach().numpy() for row in rows]


def in_numpy(
    rows: Sequence[CollatedRow], logprobs: Sequence[np.ndarray], entropy: Sequence[np.ndarray]
) -> dict[str, float]:
    """Everything but the quantiles."""
    now, sampled = joined(rows, logprobs), joined(rows, [row.logprobs for row in rows])
    lags = np.minimum(VERSION - joined(rows, [row.versions for row in rows]), 4)
    x, of_entropy = np.clip(now - sampled, -20, 20), joined(rows, entropy)
    w, expected = np.exp(x), {}
    outside = (w < 1 - LOW) | (w > 1 + HIGH)
    for lag, name in enumerate(LAGS):
        own = lags == lag
        if own.any():
            expected |= {
                f"offpolicy/tokens/{name}": float(own.sum()),
                f"offpolicy/ess/{name}": float(w[own].sum() ** 2 / (own.sum() * np.square(w[own]).sum())),
                f"offpolicy/kl/{name}": float((w[own] - 1 - x[own]).mean()),
                f"offpolicy/ratio_max/{name}": float(w[own].max()),
                f"offpolicy/clip_fraction/{name}": float(outside[own].mean()),
                f"offpolicy/entropy/{name}": float(of_entropy[own].mean()),
            }
    return expected


def quantile(rows: Sequence[CollatedRow], logprobs: Sequence[np.ndarray], lag: int, percent: int) -> float:
    """Of log w: the smallest that so many per cent of the tokens do not exceed."""
    x = joined(rows, logprobs) - joined(rows, [row.logprobs for row in rows])
    lags = np.minimum(VERSION - joined(rows, [row.versions for row in rows]), 4)
    ordered = np.sort(np.clip(x[lags == lag], -20, 20))
    return float(ordered[max(math.ceil(percent / 100 * len(ordered)), 1) - 1])


def by_lag(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if "/lag_" in name}


def assert_reported(
    report: StepReport, rows: Sequence[CollatedRow], logprobs: Sequence[np.ndarray], entropy: Sequence[np.ndarray]
) -> None:
    got, expected = by_lag(report.metrics), in_numpy(rows, logprobs, entropy)
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-7), name
    there = {name.rpartition("/")[2] for name in expected}
    for name in there:
        for percent in (1, 50, 99):
            exact = quantile(rows, logprobs, LAGS.index(name), percent)
            reported = math.log(got[f"offpolicy/ratio_p{percent:02d}/{name}"])
            assert reported == pytest.approx(exact, rel=0.0167, abs=0.0002)
    assert {f"offpolicy/{what}/{name}" for what in OF_EACH_LAG for name in there} == got.keys()


def step(path: str, budget: int, rows: list[CollatedRow], cut: int) -> tuple[list[np.ndarray], StepReport]:
    """On two ranks each has its side of ``cut``."""
    mine = rows if dist.get_world_size() == 1 else (rows[:cut] if dist.get_rank() == 0 else rows[cut:])
    trainer = build(path, budget)
    return trainer.forward_logprobs(mine), trainer.train_step(mine, CONTEXT)


@mostly_slow("budget", [ONE_MICRO_BATCH, MANY_MICRO_BATCHES], quick=[MANY_MICRO_BATCHES])
def test_each_lag_has_the_metrics_of_its_own_tokens(one_rank: None, model_path: ModelPath, budget: int) -> None:
    path, rows = model_path(), of_versions(random_rows(24), range(VERSION + 1))
    logprobs, report = step(path, budget, rows, 0)
    assert_reported(report, rows, logprobs, entropies(path, rows))
    fractions = [report.metrics[f"offpolicy/clip_fraction/{lag}"] for lag in LAGS]
    assert all(0 < fraction < 1 for fraction in fractions)


@mostly_slow(
    ("budget", "cut"),
    [(ONE_MICRO_BATCH, 6), (MANY_MICRO_BATCHES, 9), (MANY_MICRO_BATCHES, 1)],
    quick=[(MANY_MICRO_BATCHES, 1)],
)
def test_ranks_and_micro_batches_add_up_to_the_same(
    run_ranks: RunRanks, model_path: ModelPath, budget: int, cut: int
) -> None:
    """In the last split one rank has no more than one answer, so that it lacks most lags."""
    path, rows = model_path(), of_versions(random_rows(13), range(VERSION + 1))
    (first, report), (second, other) = run_ranks(2, step, (path, budget, rows, cut))
    assert report == other
    assert_reported(report, rows, first + second, entropies(path, rows))


def test_a_lag_without_tokens_has_no_metrics(one_rank: None, model_path: ModelPath) -> None:
    path = model_path()
    rows = of_versions(random_rows(8), [VERSION, VERSION - 2])
    logprobs, report = step(path, MANY_MICRO_BATCHES, rows, 0)
    assert {name.rpartition("/")[2] for name in by_lag(report.metrics)} == {"lag_0", "lag_2"}
    assert_reported(report, rows, logprobs, entropies(path, rows))


def test_everything_older_than_three_versions_is_one_lag(one_rank: None, model_path: ModelPath) -> None:
    rows = of_versions(random_rows(8), [0, 1, 2])
    _, report = step(model_path(), ONE_MICRO_BATCH, rows, 0)
    assert {name.rpartition("/")[2] for name in by_lag(report.metrics)} == {"lag_4_up"}
    for what in ("ess", "kl", "ratio_max", "clip_fraction"):
        assert report.metrics[f"offpolicy/{what}/lag_4_up"] == pytest.approx(report.metrics[f"offpolicy/{what}"])


def test_without_a_token_that_counts_there_is_no_lag_at_all(one_rank: None, model_path: ModelPath) -> None:
    rows = [replace(row, loss_mask=np.zeros_like(row.loss_mask)) for row in random_rows(4)]
    _, report = step(model_path(), ONE_MICRO_BATCH, rows, 0)
    assert not report.skipped
    assert by_lag(report.metrics) == {}


def test_the_tokens_of_all_lags_add_up_to_the_whole(one_rank: None, model_path: ModelPath) -> None:
    rows = of_versions(random_rows(24), range(VERSION + 1))
    metrics = step(model_path(), MANY_MICRO_BATCHES, rows, 0)[1].metrics
    tokens = np.array([metrics[f"offpolicy/tokens/{lag}"] for lag in LAGS])
    assert tokens.sum() == sum(int(row.loss_mask.sum()) for row in rows)
    for what in ("kl", "clip_fraction"):
        parts = np.array([metrics[f"offpolicy/{what}/{lag}"] for lag in LAGS])
        assert parts @ tokens / tokens.sum() == pytest.approx(metrics[f"offpolicy/{what}"], rel=1e-6)
    entropy = np.array([metrics[f"offpolicy/entropy/{lag}"] for lag in LAGS])
    assert entropy @ tokens / tokens.sum() == pytest.approx(metrics["entropy"], rel=1e-6)
    assert max(metrics[f"offpolicy/ratio_max/{lag}"] for lag in LAGS) == metrics["offpolicy/ratio_max"]


def test_what_a_correction_does_is_reported_by_lag_too(one_rank: None, model_path: ModelPath) -> None:
    rows = of_versions(random_rows(24, with_prox=True), range(VERSION + 1))
    rows = [with_columns(row, prox_logprobs=np.where(row.loss_mask, row.columns["prox_logprobs"], 0)) for row in rows]
    correction = CorrectionConfig(name="mask", bound=1.3, lower=0.8)
    metrics = build(model_path(), MANY_MICRO_BATCHES, correction).train_step(rows, CONTEXT).metrics
    w = np.exp(joined(rows, [r.columns["prox_logprobs"] for r in rows]) - joined(rows, [r.logprobs for r in rows]))
    lags = np.minimum(VERSION - joined(rows, [row.versions for row in rows]), 4)
    rejected = (w < 0.8) | (w > 1.3)
    for lag, name in enumerate(LAGS):
        own = lags == lag
        assert 0 < rejected[own].mean() < 1
        assert metrics[f"offpolicy/correction/rejected/{name}"] == pytest.approx(rejected[own].mean())
        weight = np.where(rejected, 0, w)[own].mean()
        assert metrics[f"offpolicy/correction/weight/{name}"] == pytest.approx(weight, rel=1e-5)


def test_a_token_from_a_version_that_does_not_exist_yet_is_an_error(one_rank: None, model_path: ModelPath) -> None:
    rows = of_versions(random_rows(2), [VERSION + 1])
    with pytest.raises(ValueError, match="lag is -1"):
        build(model_path(), ONE_MICRO_BATCH).train_step(rows, CONTEXT)
