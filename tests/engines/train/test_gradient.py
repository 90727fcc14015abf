"""The gradient of a mini-batch is that of its definition, however it is split over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headway.config.schema import Config, RolloutConfig
from headway.config.sections.learning import (
    ActorConfig,
    AlgorithmConfig,
    CorrectionConfig,
    FsdpConfig,
    ParallelConfig,
)
from headway.config.sections.model_section import ModelConfig
from headway.data.interfaces.training import StepContext
from headway.data.packing import CollatedRow
from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.models.pretrained import load_model
from tests.engines.train.rows import plain_loss, random_rows
from tests.tiers import mostly_slow

EVERYTHING = {
    "entropy_coeff": 0.01,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "loss_agg_mode": "seq-mean-token-mean",
}
ONE_MICRO_BATCH, MANY_MICRO_BATCHES = 100_000, 48


def configured(budget: int, actor: dict[str, Any], checkpointing: bool = False) -> Config:
    return Config(
        actor=ActorConfig.model_validate({**actor, "ppo_max_token_len_per_gpu": budget}),
        rollout=RolloutConfig(temperature=0.8),
        model=ModelConfig(enable_gradient_checkpointing=checkpointing),
    )


def gradient(
    path: str, config: Config, shares: list[list[CollatedRow]]
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Gradient and metrics of this rank's share, as the engine leaves them."""
    engine = FsdpEngine(
        model_path=path,
        config=config,
        total_optimizer_steps=1,
        mesh=TrainMesh.make(ParallelConfig(), torch.device("cpu")),
    )
    metrics = engine.learner._backward(shares[dist.get_rank()], partial(engine._part, StepContext()))
    grads = {name: p.grad.full_tensor() for name, p in engine._policy.lm.named_parameters()}
    return grads, metrics


def plain_gradient(path: str, config: Config, rows: list[CollatedRow]) -> tuple[dict[str, torch.Tensor], float]:
    """The same in float64 over the Hugging Face model."""
    model = load_model(path, dtype=torch.float64)
    loss = plain_loss(model, rows, config)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, float(loss.detach())


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name].double(), grad.double(), rtol=1e-5, atol=1e-5, msg=name)


@mostly_slow(
    ("model", "actor"),
    product([("qwen3", True), ("qwen3", False), ("llama", True), ("qwen2", False)], [{}, EVERYTHING]),
    quick=[(("llama", True), {}), (("qwen2", False), EVERYTHING)],
)
def test_the_gradient_is_that_of_the_loss_written_out_plainly(
    one_rank: None, model_path: Callable[..., str], model: tuple[str, bool], actor: dict[str, Any]
) -> None:
    path, config = model_path(*model), configured(MANY_MICRO_BATCHES, actor)
    rows = random_rows(9, with_ref=True)
    expected, loss = plain_gradient(path, config, rows)
    actual, metrics = gradient(path, config, [rows])
    assert_close(actual, expected)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
    norm = torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt()
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_log_probs_given_for_the_proximal_policy_anchor_the_ratio(
    one_rank: None, model_path: Callable[..., str]
) -> None:
    path, config = model_path(), configured(ONE_MICRO_BATCH, {})
    rows = random_rows(5, with_prox=True)
    assert_close(gradient(path, config, [rows])[0], plain_gradient(path, config, rows)[0])


def test_a_correction_weighs_the_policy_loss_and_nothing_else(one_rank: None, model_path: Callable[..., str]) -> None:
    correction = AlgorithmConfig(rollout_correction=CorrectionConfig(name="truncate", bound=1.05))
    path, config = model_path(), configured(MANY_MICRO_BATCHES, EVERYTHING).model_copy(update={"algorithm": correction})
    rows = random_rows(7, with_ref=True, with_prox=True)
    actual, metrics = gradient(path, config, [rows])
    assert_close(actual, plain_gradient(path, config, rows)[0])
    assert 0 < metrics["correction/truncated"] < 1


def test_recomputing_activations_changes_nothing(one_rank: None, model_path: Callable[..., str]) -> None:
    rows = random_rows(5)
    kept, _ = gradient(model_path(), configured(MANY_MICRO_BATCHES, {}), [rows])
    recomputed, _ = gradient(model_path(), configured(MANY_MICRO_BATCHES, {}, checkpointing=True), [rows])
    for name, grad in kept.items():
        assert torch.equal(grad, recomputed[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("actor", [{}, EVERYTHING], ids=["ppo", "everything"])
def test_the_gradient_does_not_depend_on_how_the_mini_batch_is_split(
    one_rank: None, run_ranks: Callable[..., list[Any]], model_path: Callable[..., str], actor: dict[str, Any]
) -> None:
    path, rows = model_path(), random_rows(11, with_ref=True)
    expected, metrics = gradient(path, configured(ONE_MICRO_BATCH, actor), [rows])
    splits = {
        (1, MANY_MICRO_BATCHES): [rows],
        (2, ONE_MICRO_BATCH): [rows[:5], rows[5:]],
        (2, MANY_MICRO_BATCHES): [rows[:2], rows[2:]],
    }
    for (world, budget), shares in splits.items():
        config = configured(budget, actor)
        results = [gradient(path, config, shares)] if world == 1 else run_ranks(world, gradient, (path, config, shares))
        for grads, split_metrics in results:
            assert_close(grads, expected)
            assert split_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_a_rank_without_rows_takes_part(
    one_rank: None, run_ranks: Callable[..., list[Any]], model_path: Callable[..., str]
) -> None:
    path, rows = model_path("llama", False), random_rows(2)
    expected, _ = gradient(path, configured(ONE_MICRO_BATCH, {}), [rows])
    shares: list[list[CollatedRow]] = [[rows[0]], [], [rows[1]]]
    for grads, _ in run_ranks(3, gradient, (path, configured(ONE_MICRO_BATCH, {}), shares)):
        assert_close(grads, expected)


@pytest.mark.slow
def test_gathering_once_for_forward_and_backward_gives_the_same_gradient(
    one_rank: None, run_ranks: Callable[..., list[Any]], model_path: Callable[..., str]
) -> None:
    rows = random_rows(6)
    config = configured(ONE_MICRO_BATCH, {"fsdp_config": FsdpConfig(reshard_after_forward=False)})
    expected, _ = gradient(model_path(), configured(ONE_MICRO_BATCH, {}), [rows])
    for grads, _ in run_ranks(2, gradient, (model_path(), config, [rows[:3], rows[3:]])):
        assert_close(grads, expected)
