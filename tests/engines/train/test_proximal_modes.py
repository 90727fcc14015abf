"""The three ways to log π_prox: taken from the engine (behaviour), recomputed, interpolated (log-linear).

Where there is one version they are one, to the last bit. With lag the interpolated one is the recomputed one wherever
log-probs move linearly with the version, which a policy made for it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headway.algorithms.corrections import CORRECTIONS, CorrectionParams, log_linear_prox
from headway.algorithms.losses import LossInputs, PolicyLossParams, ppo_clip
from headway.config.schema import AsyncTrainingConfig, Config, RolloutConfig
from headway.config.sections.learning import (
    ActorConfig,
    AlgorithmConfig,
    CorrectionConfig,
    OptimConfig,
    ParallelConfig,
)
from headway.config.sections.losses import PpoClip
from headway.data.interfaces.training import StepContext
from headway.data.packing import CollatedRow
from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.engines.train.fsdp.learner import count
from headway.engines.train.fsdp.micro_batches import collate
from headway.engines.train.fsdp.objective import DEFAULT_BOUND, Objective, _correction
from tests.engines.train.rows import random_rows, with_columns
from tests.tiers import mostly_slow

ModelPath = Callable[..., str]
RunRanks = Callable[..., list[Any]]
CPU = torch.device("cpu")
VERSION = 3
BEHAVIOUR, RECOMPUTE, LOG_LINEAR = "behaviour", "recompute", "loglinear"
MODES = (BEHAVIOUR, RECOMPUTE, LOG_LINEAR)
NO_CORRECTION = CorrectionConfig()
CORRECTIONS_AT_WORK = [
    NO_CORRECTION,
    CorrectionConfig(name="truncate", bound=2.0),
    CorrectionConfig(name="mask", bound=2.0, lower=0.5),
    CorrectionConfig(name="reject", bound=1.01, lower=0.99, level="geometric", veto=1e-4),
]
Report = tuple[dict[str, torch.Tensor], dict[str, float]]


def configured(mode: str, correction: CorrectionConfig = NO_CORRECTION, budget: int = 64) -> Config:
    method = {"prox_logp_method": "loglinear"} if mode == LOG_LINEAR else {}
    return Config(
        actor=ActorConfig.model_validate(
            {"optim": OptimConfig(lr=2e-2), "ppo_max_token_len_per_gpu": budget, "grad_clip": 100.0, **method}
        ),
        rollout=RolloutConfig(temperature=0.8),
        async_training=AsyncTrainingConfig(use_rollout_log_probs=mode == BEHAVIOUR),
        algorithm=AlgorithmConfig(rollout_correction=correction),
    )


def build(path: str, mode: str, correction: CorrectionConfig = NO_CORRECTION, budget: int = 64) -> FsdpEngine:
    config = configured(mode, correction, budget)
    return FsdpEngine(
        model_path=path, config=config, total_optimizer_steps=10, mesh=TrainMesh.make(ParallelConfig(), CPU)
    )


def prepared(trainer: FsdpEngine, mode: str, rows: Sequence[CollatedRow]) -> list[CollatedRow]:
    """What a batch adds to its rows before the first step."""
    if mode != RECOMPUTE:
        return list(rows)
    prox = trainer.proximal_logprobs(rows, VERSION)
    return [with_columns(row, prox_logprobs=logprobs) for row, logprobs in zip(rows, prox, strict=True)]


def gradient(trainer: FsdpEngine, rows: Sequence[CollatedRow], context: StepContext) -> Report:
    """And the metrics, as the engine leaves them before it steps."""
    metrics = trainer.learner._backward(rows, partial(trainer._part, context))
    grads = {name: p.grad.full_tensor().clone() for name, p in trainer._policy.lm.named_parameters()}
    trainer.learner._forget_grads()
    return grads, metrics


def of_this_version(path: str, rows: Sequence[CollatedRow], budget: int = 64) -> list[CollatedRow]:
    """As if the engine's own forward pass had sampled them just now."""
    logprobs = build(path, BEHAVIOUR, budget=budget).forward_logprobs(rows)
    return [
        replace(row, logprobs=own, versions=np.full_like(row.versions, VERSION))
        for row, own in zip(rows, logprobs, strict=True)
    ]


def assert_same(actual: Report, expected: Report) -> None:
    """To the last bit, all metrics included that both have."""
    for name, grad in expected[0].items():
        assert torch.equal(actual[0][name], grad), name
    assert {n: actual[1][n] for n in actual[1].keys() & expected[1].keys()} == {
        n: expected[1][n] for n in actual[1].keys() & expected[1].keys()
    }


def assert_close(actual: Report, expected: Report, rtol: float = 1e-4) -> None:
    for name, grad in expected[0].items():
        torch.testing.assert_close(actual[0][name], grad, rtol=rtol, atol=1e-6, msg=name)
    assert actual[1]["loss"] == pytest.approx(expected[1]["loss"], rel=1e-4, abs=1e-6)


# ---------------------------------------------------------------------------------------------- one version


def test_with_one_version_the_first_step_is_the_same_to_the_last_bit_in_every_mode(
    one_rank: None, model_path: ModelPath
) -> None:
    """And so decoupled PPO is PPO: the expected one has no correction at all."""
    path, context = model_path(), StepContext(version=VERSION)
    rows = of_this_version(path, random_rows(7))
    plain = build(path, BEHAVIOUR)
    expected = gradient(plain, rows, context)
    assert max(float(grad.abs().max()) for grad in expected[0].values()) > 1e-3
    for mode in MODES:
        trainer = build(path, mode)
        for correction in CORRECTIONS_AT_WORK:
            trainer._objective = Objective(configured(mode, correction))
            assert_same(gradient(trainer, prepared(trainer, mode, rows), context), expected)


@pytest.mark.slow
@pytest.mark.parametrize("correction", CORRECTIONS_AT_WORK[:2], ids=lambda c: c.name or "none")
def test_with_one_version_every_later_step_is_the_same_too(
    one_rank: None, model_path: ModelPath, correction: CorrectionConfig
) -> None:
    path = model_path()
    rows = of_this_version(path, random_rows(6))
    histories = []
    for mode in MODES:
        trainer = build(path, mode, correction)
        fetch = prepared(trainer, mode, rows)
        contexts = [StepContext(version=VERSION, progress=step / 4) for step in range(4)]
        histories.append([trainer.train_step(fetch, context).metrics for context in contexts])
    assert histories[0] == histories[1] == histories[2]
    assert histories[0][3]["clip_fraction"] > 0, "the policy has left the trust region's anchor behind"


def test_log_probs_of_another_split_into_micro_batches_agree_to_float32_rounding(
    one_rank: None, model_path: ModelPath
) -> None:
    path, context = model_path(), StepContext(version=VERSION)
    rows = of_this_version(path, random_rows(7), budget=100_000)
    expected = gradient(build(path, BEHAVIOUR), rows, context)
    trainer = build(path, RECOMPUTE)
    assert_close(gradient(trainer, prepared(trainer, RECOMPUTE, rows), context), expected)


def all_modes(path: str, rows: list[CollatedRow]) -> list[Report]:
    mine = rows[:2] if dist.get_rank() == 0 else rows[2:]
    mine = of_this_version(path, mine)
    reports = []
    for mode in MODES:
        trainer = build(path, mode, CORRECTIONS_AT_WORK[1])
        reports.append(gradient(trainer, prepared(trainer, mode, mine), StepContext(version=VERSION)))
    return reports


@pytest.mark.slow
def test_on_two_ranks_the_modes_agree_to_the_last_bit_too(
    one_rank: None, run_ranks: RunRanks, model_path: ModelPath
) -> None:
    path, rows = model_path(), random_rows(7)
    trainer = build(path, BEHAVIOUR)
    alone = gradient(trainer, of_this_version(path, rows), StepContext(version=VERSION))
    for behaviour, recomputed, interpolated in run_ranks(2, all_modes, (path, rows)):
        assert_same(recomputed, behaviour)
        assert_same(interpolated, behaviour)
        assert_close(behaviour, alone)


# ---------------------------------------------------------------------------------------------- lag, first step


def stale(rows: Sequence[CollatedRow], seed: int = 0) -> list[CollatedRow]:
    """Tokens of versions 0 … 3 in one answer, as after interruptions, and far from what the policy says now."""
    rng = np.random.default_rng(seed)
    return [
        replace(
            row,
            versions=np.sort(rng.integers(0, VERSION + 1, len(row.versions))).astype(np.int32),
            logprobs=(row.logprobs + 0.5 * rng.standard_normal(len(row.logprobs))).astype(np.float32),
        )
        for row in rows
    ]


@mostly_slow("correction", CORRECTIONS_AT_WORK[:3], quick=CORRECTIONS_AT_WORK[1:2], ids=lambda c: c.name or "none")
def test_before_the_first_step_the_anchor_of_an_older_token_is_the_policy_itself_recomputed_or_interpolated(
    one_rank: None, model_path: ModelPath, correction: CorrectionConfig
) -> None:
    path, context = model_path(), StepContext(version=VERSION)
    rows = [replace(row, versions=row.versions.clip(max=VERSION - 1)) for row in stale(random_rows(7))]
    reports = {}
    for mode in MODES:
        trainer = build(path, mode, correction)
        reports[mode] = gradient(trainer, prepared(trainer, mode, rows), context)
    assert_same(reports[LOG_LINEAR], reports[RECOMPUTE])
    assert reports[RECOMPUTE][1]["clip_fraction"] == 0
    assert reports[BEHAVIOUR][1]["clip_fraction"] > 0.1
    assert abs(reports[BEHAVIOUR][1]["loss"] - reports[RECOMPUTE][1]["loss"]) > 1e-3


@pytest.mark.slow
def test_in_one_batch_each_token_has_the_anchor_of_its_own_lag(one_rank: None, model_path: ModelPath) -> None:
    """Tokens of the current version keep π_behav where it is interpolated, which recomputing would also give them."""
    path, context = model_path(), StepContext(version=VERSION)
    rows = stale(random_rows(7))
    own = build(path, BEHAVIOUR).forward_logprobs(rows)
    rows = [
        replace(row, logprobs=np.where(row.versions == VERSION, now, row.logprobs))
        for row, now in zip(rows, own, strict=True)
    ]
    reports = []
    for mode in (RECOMPUTE, LOG_LINEAR):
        trainer = build(path, mode, CORRECTIONS_AT_WORK[1])
        reports.append(gradient(trainer, prepared(trainer, mode, rows), context))
    assert_same(reports[1], reports[0])


# ---------------------------------------------------------------------------------------------- a linear policy


@dataclass(frozen=True)
class LinearPolicy:
    """Tokens whose log-probs are a + b·version; one more token has the rest of the probability."""

    intercepts: np.ndarray
    slopes: np.ndarray

    def logprobs(self, tokens: np.ndarray, versions: np.ndarray | float) -> np.ndarray:
        return self.intercepts[tokens] + self.slopes[tokens] * versions

    def is_one(self, version: float) -> bool:
        every = np.arange(len(self.intercepts))
        return float(np.exp(self.logprobs(every, version)).sum()) < 1


def linear_policy() -> LinearPolicy:
    rng = np.random.default_rng(5)
    policy = LinearPolicy(-3.5 + 0.5 * rng.random(12), 0.12 * rng.standard_normal(12))
    assert all(policy.is_one(version) for version in range(6))
    return policy


def linear_rows(policy: LinearPolicy, prox_version: int) -> list[CollatedRow]:
    """Sampled by versions 0 … ``prox_version``, whose log-probs they have; recomputed ones beside them."""
    rng, rows = np.random.default_rng(6), []
    for row in random_rows(8):
        response = rng.integers(0, 12, len(row.logprobs))
        versions = np.sort(rng.integers(0, prox_version + 1, len(response))).astype(np.int32)
        rows.append(
            replace(
                row,
                input_ids=np.concatenate([row.input_ids[: row.prompt_length], response]).astype(np.int32),
                versions=versions,
                logprobs=policy.logprobs(response, versions).astype(np.float32),
                columns={**row.columns, "prox_logprobs": policy.logprobs(response, prox_version).astype(np.float32)},
            )
        )
    return rows


def through_objective(
    mode: str, correction: CorrectionConfig, policy: LinearPolicy, rows: list[CollatedRow], context: StepContext
) -> tuple[float, np.ndarray, dict[str, float]]:
    """Loss, its gradient in each token's log-prob, and sums."""
    given = rows if mode == RECOMPUTE else [replace(r, columns={"advantages": r.columns["advantages"]}) for r in rows]
    objective = Objective(configured(mode, correction))
    batch, columns = collate(given), objective.collate(given)
    now = policy.logprobs(batch.targets.numpy(), context.version + context.progress)
    logprobs = torch.from_numpy(now.astype(np.float32)).requires_grad_()
    loss, sums = objective(columns, count(rows), logprobs, torch.zeros_like(logprobs), context)
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad.numpy(), {name: float(v) for name, v in sums.items() if v.ndim == 0}


@pytest.mark.parametrize("correction", CORRECTIONS_AT_WORK[:3], ids=lambda c: c.name or "none")
@pytest.mark.parametrize("progress", [0.0, 0.25, 0.75])
def test_of_a_policy_that_is_linear_in_the_version_interpolating_is_recomputing(
    correction: CorrectionConfig, progress: float
) -> None:
    """Through the objective, at any step of the version, with tokens of every lag: to float32 rounding."""
    policy = linear_policy()
    context, rows = StepContext(version=VERSION, progress=progress), linear_rows(policy, VERSION)
    results = [through_objective(mode, correction, policy, rows, context) for mode in (RECOMPUTE, LOG_LINEAR)]
    (loss, grad, sums), (other_loss, other_grad, other_sums) = results
    assert other_loss == pytest.approx(loss, rel=1e-5, abs=1e-7)
    np.testing.assert_allclose(other_grad, grad, rtol=1e-4, atol=1e-7)
    assert other_sums == pytest.approx(sums, rel=1e-4, abs=1e-6)
    behaviour = through_objective(BEHAVIOUR, NO_CORRECTION, policy, rows, context)
    assert np.abs(behaviour[1] - grad).max() > 1e-4, "the modes differ, so that it means something that two agree"


def scalar_decoupled(
    now: float, prox: float, behaviour: float, advantage: float, bound: float | None
) -> tuple[float, float]:
    """w · PPO's clipped loss of one token, and its derivative in log π_θ."""
    ratio, clipped = math.exp(now - prox), min(max(math.exp(now - prox), 0.8), 1.2)
    weight = 1.0 if bound is None else min(math.exp(prox - behaviour), bound)
    slope = -ratio * advantage if ratio * advantage <= clipped * advantage else 0.0
    return -weight * min(ratio * advantage, clipped * advantage), weight * slope


@pytest.mark.parametrize("bound", [None, 1.1])
@pytest.mark.parametrize("mode", [RECOMPUTE, LOG_LINEAR])
def test_the_objective_is_decoupled_ppo_written_out_token_by_token(mode: str, bound: float | None) -> None:
    policy = linear_policy()
    context, rows = StepContext(version=VERSION, progress=0.5), linear_rows(policy, VERSION)
    correction = NO_CORRECTION if bound is None else CorrectionConfig(name="truncate", bound=bound)
    loss, grad, _ = through_objective(mode, correction, policy, rows, context)
    total, slopes = 0.0, []
    for row in rows:
        tokens = row.input_ids[row.prompt_length :]
        for token, version, advantage, counts in zip(
            tokens, row.versions, row.columns["advantages"].tolist(), row.loss_mask, strict=True
        ):
            now, prox, sampled = (float(policy.logprobs(token, v)) for v in (VERSION + 0.5, VERSION, version))
            part, slope = scalar_decoupled(now, prox, sampled, advantage, bound)
            total += part if counts else 0.0
            slopes.append(slope if counts else 0.0)
    tokens = count(rows).tokens
    assert loss == pytest.approx(total / tokens, rel=1e-5, abs=1e-7)
    np.testing.assert_allclose(grad, np.array(slopes) / tokens, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("progress", [0.0, 0.5])
def test_as_pure_functions_the_modes_differ_by_rounding_alone(progress: float) -> None:
    policy, rng = linear_policy(), np.random.default_rng(8)
    tokens, versions = rng.integers(0, 12, (6, 20)), rng.integers(0, VERSION + 1, (6, 20))
    now, recomputed, behaviour = (
        torch.from_numpy(policy.logprobs(tokens, v)) for v in (VERSION + progress, VERSION, versions)
    )
    mask = torch.from_numpy(rng.random((6, 20)) < 0.8)
    advantages = torch.from_numpy(rng.standard_normal((6, 20)))
    interpolated = log_linear_prox(
        behaviour, now, torch.from_numpy(versions), mask, prox_version=VERSION, version=VERSION + progress
    )
    torch.testing.assert_close(interpolated[mask], recomputed[mask], rtol=1e-12, atol=1e-12)
    results = []
    for anchor in (recomputed, interpolated):
        current = now.clone().requires_grad_()
        inputs = LossInputs(current, anchor, behaviour, advantages, mask)
        weights, _ = CORRECTIONS.get("truncate")(inputs, CorrectionParams(1.1))
        loss = (weights * ppo_clip(inputs, PolicyLossParams(PpoClip()))[0]).sum()
        results.append((loss.detach(), torch.autograd.grad(loss, current)[0]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("given", "bound"),
    [
        ({"name": "truncate"}, DEFAULT_BOUND),
        ({"name": "truncate", "bound": 5.0}, 5.0),
        ({"name": "mask", "lower": 0.5}, None),
        ({"name": "off_policy_sequence_mask", "delta": 0.1}, None),
    ],
)
def test_a_correction_has_the_usual_bound_only_where_neither_bound_is_given(
    given: dict[str, Any], bound: float | None
) -> None:
    _, params = _correction(CorrectionConfig(**given))
    assert (params.bound, params.lower) == (bound, given.get("lower"))
