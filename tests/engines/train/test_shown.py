"""What a step shows of drawn groups: the numbers of its own forward pass, against the model in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headway.config.schema import Config, RolloutConfig
from headway.config.sections.learning import ActorConfig, OptimConfig, ParallelConfig
from headway.config.sections.model_section import ModelConfig
from headway.data.assignment import GroupId
from headway.data.interfaces.training import StepContext, StepReport, TrainedRow
from headway.data.packing import CollatedRow
from headway.data.types import TrajectoryId
from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.models.pretrained import load_model
from tests.engines.train.rows import random_rows, response_logprobs
from tests.tiers import mostly_slow

ModelPath = Callable[..., str]
RunRanks = Callable[..., list[Any]]
TEMPERATURE = 0.7
DRAWN: GroupId = (0, 4, 1)
OTHER: GroupId = (0, 9, 0)


def engine(path: str, packing: str = "shared", budget: int = 64) -> FsdpEngine:
    config = Config(
        actor=ActorConfig(ppo_max_token_len_per_gpu=budget, optim=OptimConfig(lr=1e-2)),
        rollout=RolloutConfig(temperature=TEMPERATURE),
        model=ModelConfig.model_validate({"packing": packing}),
    )
    return FsdpEngine(
        model_path=path,
        config=config,
        total_optimizer_steps=10,
        mesh=TrainMesh.make(ParallelConfig(), torch.device("cpu")),
    )


def of_group(rows: Sequence[CollatedRow], group: GroupId, first: int = 0) -> list[CollatedRow]:
    return [replace(row, episode=TrajectoryId(*group, first + k)) for k, row in enumerate(rows)]


def fetch() -> list[CollatedRow]:
    """Two groups, in turn. The drawn one has two answers that begin alike, one that is masked, and one of two rows with
    holes."""
    prompt = np.array([3, 4, 5, 6], np.int32)
    drawn, other = random_rows(5, seed=1), random_rows(5, seed=2)
    length = len(drawn[0].loss_mask)
    ids = drawn[0].input_ids[-length:]
    drawn[1] = replace(drawn[0], logprobs=drawn[0].logprobs - 0.5, columns=drawn[0].columns)
    last = ids.copy()
    last[-1] = 2 + (last[-1] - 1) % 16
    drawn[0] = replace(drawn[0], input_ids=np.concatenate([prompt, ids]), prompt_length=4)
    drawn[1] = replace(drawn[1], input_ids=np.concatenate([prompt, last]), prompt_length=4)
    drawn[2] = replace(drawn[2], loss_mask=np.zeros_like(drawn[2].loss_mask))
    rows = of_group(drawn[:4], DRAWN)
    fork = replace(drawn[4], episode=TrajectoryId(*DRAWN, 3))
    hole = np.arange(len(fork.versions)) % 3 != 1
    fork = replace(fork, loss_mask=hole, versions=np.where(hole, 2, -1).astype(np.int32))
    others = of_group(other, OTHER)
    return [others[0], rows[0], others[1], others[2], rows[1], rows[2], others[3], rows[3], fork, others[4]]


def assert_as_trained(found: TrainedRow, row: CollatedRow, path: str) -> None:
    """Its numbers are those of the model before the step, in float64, and those that came with the row."""
    logprobs, entropy = response_logprobs(load_model(path, dtype=torch.float64), row, TEMPERATURE)
    np.testing.assert_allclose(found.logprobs, logprobs.detach().numpy(), atol=2e-5)
    np.testing.assert_allclose(found.entropy, entropy.detach().numpy(), atol=2e-5)
    np.testing.assert_array_equal(np.concatenate([found.prompt_ids, found.ids]), row.input_ids)
    for name, expected in {"behaviour": row.logprobs, "mask": row.loss_mask, "versions": row.versions}.items():
        np.testing.assert_array_equal(getattr(found, name), expected)
    np.testing.assert_array_equal(found.columns["advantages"], row.columns["advantages"])
    assert (found.episode, found.cut) == (row.episode, 0)


@mostly_slow("packing", ["shared", "packed", "padded"], quick=["shared", "padded"])
def test_rows_of_drawn_groups_are_shown_as_the_step_saw_them(
    one_rank: None, model_path: ModelPath, packing: str
) -> None:
    """Packed, what two answers have in common is computed once; the rows are in micro-batches of any order."""
    rows, trainer = fetch(), engine(model_path(), packing, budget=96)
    report = trainer.train_step(rows, StepContext(version=2, shown=frozenset({DRAWN})))
    assert (report.metrics["tokens_saved"] > 0) == (packing == "shared")
    drawn = [row for row in rows if row.episode is not None and row.episode[:3] == DRAWN]
    assert [row.episode.k for row in report.shown] == [0, 1, 2, 3, 3]
    for found, row in zip(report.shown, drawn, strict=True):
        assert_as_trained(found, row, model_path())
    # Gaps by hand: the second answer begins as the first, and was sampled half a nat less likely.
    first, second = report.shown[:2]
    gap = [one.logprobs.astype(np.float64) - one.behaviour for one in (first, second)]
    np.testing.assert_allclose(gap[1][:-1] - gap[0][:-1], 0.5, atol=1e-5)


def test_showing_changes_nothing_that_is_trained_and_other_steps_show_nothing(
    one_rank: None, model_path: ModelPath
) -> None:
    reports = []
    for groups in ({DRAWN, OTHER}, set(), {(7, 7, 7)}):
        trainer = engine(model_path())
        context = StepContext(version=2, shown=frozenset(groups))
        reports.append([trainer.train_step(fetch(), context) for _ in range(2)])
    assert [len(step.shown) for step in reports[0]] == [10, 10]
    assert all(step.shown == () for steps in reports[1:] for step in steps)
    for steps in reports[1:]:
        assert [step.metrics for step in steps] == [step.metrics for step in reports[0]]


def test_long_rows_lack_their_middle(one_rank: None, model_path: ModelPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.engines.train.fsdp.engine.LONGEST", 6)
    (row,) = of_group([row for row in random_rows(8, seed=3) if len(row.loss_mask) > 9][:1], DRAWN)
    (whole,) = engine(model_path()).train_step([row], StepContext(shown=frozenset({DRAWN}))).shown
    length = len(row.loss_mask)
    ends = [0, 1, 2, length - 3, length - 2, length - 1]
    assert whole.cut == length - 6 > 0
    np.testing.assert_array_equal(whole.ids, row.input_ids[row.prompt_length :][ends])
    np.testing.assert_array_equal(whole.columns["advantages"], row.columns["advantages"][ends])
    logprobs, _ = response_logprobs(load_model(model_path(), dtype=torch.float64), row, TEMPERATURE)
    np.testing.assert_allclose(whole.logprobs, logprobs.detach().numpy()[ends], atol=2e-5)


def on_a_rank(path: str, shares: list[list[CollatedRow]]) -> StepReport:
    context = StepContext(version=2, shown=frozenset({DRAWN}))
    return engine(path).train_step(shares[dist.get_rank()], context)


@pytest.mark.slow
def test_each_rank_shows_its_own_rows(run_ranks: RunRanks, model_path: ModelPath) -> None:
    """Over 5 s: a second rank is a process that imports torch."""
    rows, path = fetch(), model_path()
    shares = [[row for row in rows if row.episode is not None and row.episode.k % 2 == rank] for rank in range(2)]
    first, second = run_ranks(2, on_a_rank, (path, shares))
    joined = first.joined([second])
    assert joined.metrics == first.metrics == second.metrics
    assert [row.episode.k for row in joined.shown] == [0, 2, 1, 3, 3]
    drawn = [row for share in shares for row in share if row.episode is not None and row.episode[:3] == DRAWN]
    for found, row in zip(joined.shown, drawn, strict=True):
        assert_as_trained(found, row, path)
