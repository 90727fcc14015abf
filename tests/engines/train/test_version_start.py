"""Log-probs of a version's start, asked for in its middle: bit for bit, and as if nobody had asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from headway.config.schema import AsyncTrainingConfig, Config
from headway.config.sections.learning import ActorConfig, OptimConfig, ParallelConfig
from headway.config.sections.model_section import ModelConfig
from headway.data.interfaces.training import StepContext
from headway.data.packing import CollatedRow
from headway.engines.train.fsdp.column_engines import ProximalWeights
from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.errors import RunError
from tests.engines.train.rows import random_rows as any_rows
from tests.tiers import mostly_slow

ModelPath = Callable[..., str]
RunRanks = Callable[..., list[Any]]
Logprobs = list[np.ndarray]
random_rows = partial(any_rows, with_prox=True)


def engine(path: str, fetches: int = 3, **model: object) -> FsdpEngine:
    config = Config(
        actor=ActorConfig(ppo_max_token_len_per_gpu=64, optim=OptimConfig(lr=1e-2, weight_decay=0.1)),
        async_training=AsyncTrainingConfig(trigger_parameter_sync_step=fetches, use_rollout_log_probs=False),
        model=ModelConfig.model_validate(model),
    )
    return FsdpEngine(
        model_path=path,
        config=config,
        total_optimizer_steps=20,
        mesh=TrainMesh.make(ParallelConfig(), torch.device("cpu")),
    )


def share(rows: list[CollatedRow]) -> list[CollatedRow]:
    """Of this rank: uneven, so that one rank's last micro-batches are fillers."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    return rows if ranks == 1 else (rows[:1] if rank == 0 else rows[1:])


def sampled_by(rows: Sequence[CollatedRow], version: int) -> list[CollatedRow]:
    return [replace(row, versions=np.full_like(row.versions, version)) for row in rows]


def same(left: Logprobs, right: Logprobs) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def two_versions(path: str, asks: bool, dtype: str = "float32") -> dict[str, Any]:
    """Two versions of three fetches with two steps each. What was answered, what it should be, and every report.

    With ``asks`` each batch's log-probs are asked for twice; without, nothing is ever asked for.
    """
    trainer = engine(path, dtype=dtype)
    answers: list[bool] = []
    moved: list[bool] = []
    reports = []
    for version in (0, 1):
        fetches = [share(sampled_by(random_rows(4, seed=10 * version + f), version)) for f in range(3)]
        start = [trainer.forward_logprobs(rows) for rows in fetches] if asks else []
        for fetch, rows in enumerate(fetches):
            if asks:
                answers += [same(trainer.proximal_logprobs(rows, version), start[fetch]) for _ in range(2)]
                moved.append(not same(trainer.forward_logprobs(rows), start[fetch]))
            reports += [trainer.train_step(rows, StepContext(version=version)) for _ in range(2)]
    manifest = trainer.manifest(torch.float32)
    flat = b"".join(bytes(b.numpy()) for _, b in trainer.gather(manifest, 4096, everywhere=True))
    return {"answers": answers, "moved": moved, "reports": reports, "weights": flat}


@mostly_slow("dtype", ["float32", "bfloat16"], quick=["bfloat16"])
def test_every_batch_of_a_version_gets_the_log_probs_of_its_start_and_training_does_not_notice(
    one_rank: None, model_path: ModelPath, dtype: str
) -> None:
    asked, unasked = two_versions(model_path(), True, dtype), two_versions(model_path(), False, dtype)
    assert all(asked["answers"]) and len(asked["answers"]) == 12
    assert asked["moved"] == [False, True, True] * 2, "the policy is not where it was, but at the start of a version"
    assert not any(report.skipped for report in asked["reports"])
    assert asked["reports"] == unasked["reports"]
    assert asked["weights"] == unasked["weights"]


@pytest.mark.slow
def test_so_it_is_on_two_ranks_which_hold_half_of_every_tensor(run_ranks: RunRanks, model_path: ModelPath) -> None:
    """Trains on two ranks, whose start takes seconds."""
    asked = run_ranks(2, two_versions, (model_path("llama", False), True))
    unasked = run_ranks(2, two_versions, (model_path("llama", False), False))
    for mine, twin in zip(asked, unasked, strict=True):
        assert all(mine["answers"])
        assert mine["moved"] == [False, True, True] * 2
        assert mine["reports"] == twin["reports"]
        assert mine["weights"] == twin["weights"]
    assert asked[0]["weights"] == asked[1]["weights"]


def test_a_skipped_step_is_a_step_as_far_as_asking_late_goes(one_rank: None, model_path: ModelPath) -> None:
    trainer, rows = engine(model_path()), random_rows(4)
    start = trainer.proximal_logprobs(rows, 0)
    bad = [replace(row, columns={**row.columns, "advantages": row.columns["advantages"] * np.nan}) for row in rows]
    assert trainer.train_step(bad, StepContext()).skipped
    assert same(trainer.proximal_logprobs(rows, 0), start)
    trainer.train_step(rows, StepContext())
    assert same(trainer.proximal_logprobs(rows, 0), start)


@pytest.mark.parametrize("fetches", [1, 3])
def test_asking_for_the_first_time_after_a_step_is_an_error(
    one_rank: None, model_path: ModelPath, fetches: int
) -> None:
    trainer, rows = engine(model_path(), fetches), random_rows(3)
    trainer.train_step(rows, StepContext(version=0))
    with pytest.raises(RunError, match=r"start of version 0 .*after its first optimizer step"):
        trainer.proximal_logprobs(rows, 0)
    trainer.proximal_logprobs(rows, 1)  # the next one is there
    trainer.train_step(rows, StepContext(version=1))
    trainer.train_step(rows, StepContext(version=2))
    with pytest.raises(RunError, match="start of version 2"):
        trainer.proximal_logprobs(rows, 2)


def test_with_one_batch_per_version_no_copy_is_kept(one_rank: None, model_path: ModelPath) -> None:
    trainer, rows = engine(model_path(), fetches=1), random_rows(3)
    for version in range(3):
        assert same(trainer.proximal_logprobs(rows, version), trainer.forward_logprobs(rows))
        assert trainer._at_version._start.views() == []
        trainer.train_step(sampled_by(rows, version), StepContext(version=version))
        with pytest.raises(RunError, match=f"start of version {version}"):
            trainer.proximal_logprobs(rows, version)


def test_with_several_the_copy_is_one_of_this_ranks_own_shards(run_ranks: RunRanks, model_path: ModelPath) -> None:
    held, whole = zip(*run_ranks(2, copied_elements, (model_path(),)), strict=True)
    assert sum(held) == whole[0] == whole[1]
    assert all(0 < elements < whole[0] for elements in held)


def copied_elements(path: str) -> tuple[int, int]:
    trainer, rows = engine(path), share(random_rows(3))
    trainer.proximal_logprobs(rows, 0)
    trainer.train_step(rows, StepContext())
    trainer.proximal_logprobs(rows, 0)
    copied = sum(len(view) for view in trainer._at_version._start.views()) // 4
    return copied, sum(p.numel() for p in trainer._policy.parameters())


def test_a_forward_pass_that_fails_leaves_the_policy_where_it_was(one_rank: None, model_path: ModelPath) -> None:
    trainer, rows = engine(model_path()), random_rows(3)
    start = trainer.proximal_logprobs(rows, 0)
    trainer.train_step(rows, StepContext())
    now = trainer.forward_logprobs(rows)
    with pytest.raises(ValueError, match="empty prompt"):
        trainer.proximal_logprobs([replace(rows[0], prompt_length=0)], 0)
    assert same(trainer.forward_logprobs(rows), now)
    assert same(trainer.proximal_logprobs(rows, 0), start)


def test_the_copy_is_no_view_of_what_is_trained() -> None:
    module = nn.Linear(2, 2)
    first = module.weight.detach().clone()
    at = ProximalWeights(module, keeps_copy=True)
    with at.restored(7):
        assert torch.equal(module.weight, first)
    at.stepping(7)
    with torch.no_grad():
        module.weight += 1
    with at.restored(7):
        assert torch.equal(module.weight, first)
    assert torch.equal(module.weight, first + 1)


@pytest.mark.parametrize("keeps_copy", [True, False])
def test_a_version_that_has_passed_is_not_mistaken_for_one_that_begins(keeps_copy: bool) -> None:
    at = ProximalWeights(nn.Linear(2, 2), keeps_copy=keeps_copy)
    for version in (7, 8):
        with at.restored(version):
            pass
        at.stepping(version)
    with pytest.raises(RunError, match="start of version 7"), at.restored(7):
        raise AssertionError("the policy of version 8 would answer for that of version 7")
