"""The engine on several ranks: what must agree, and what must not hang."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headway.config.schema import ActorConfig, Config, OptimConfig
from headway.data.collate import Row
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.errors import ModelError
from tests.engines.train.rows import random_rows

RunRanks = Callable[..., list[Any]]
ModelPath = Callable[..., str]


def engine(path: str) -> FsdpEngine:
    config = Config(actor=ActorConfig(ppo_max_token_len_per_gpu=64, optim=OptimConfig(lr=1e-2)))
    return FsdpEngine(model_path=path, config=config, total_optimizer_steps=10, device=torch.device("cpu"))


def share(rows: list[Row]) -> list[Row]:
    """Rank 0 has one row, the last rank the rest: as uneven as it gets."""
    return {0: rows[:1], dist.get_world_size() - 1: rows[1:]}.get(dist.get_rank(), [])


def buckets(of: FsdpEngine) -> bytes:
    return b"".join(bytes(bucket.numpy()) for bucket in of.gather_buckets(of.manifest(4096)))


def train_and_save(path: str, checkpoint: Path, exported: Path, rows: list[Row]) -> dict[str, Any]:
    trainer = engine(path)
    start = buckets(trainer)
    trainer.train_step(share(rows))
    broken = [dataclasses.replace(row, advantages=row.advantages * np.nan) for row in share(rows)]
    skipped = trainer.train_step(broken if dist.get_rank() == 0 else share(rows))
    trainer.save(checkpoint, {"version": 1})
    trainer.export(exported)
    saved = buckets(trainer)
    logprobs = trainer.forward_logprobs(share(rows))
    return {
        "start": start,
        "skipped": skipped.skipped,
        "saved": saved,
        "logprobs": logprobs,
        "next": trainer.train_step(share(rows)).metrics,
    }


def load_and_train(path: str, checkpoint: Path, rows: list[Row]) -> dict[str, Any]:
    trainer = engine(path)
    extra = trainer.load(checkpoint)
    saved = buckets(trainer)
    return {
        "extra": extra,
        "saved": saved,
        "logprobs": trainer.forward_logprobs(rows),
        "next": trainer.train_step(rows).metrics,
    }


def test_ranks_agree_and_another_number_of_ranks_can_go_on(
    one_rank: None, run_ranks: RunRanks, model_path: ModelPath, tmp_path: Path
) -> None:
    path, rows = model_path(), random_rows(7)
    first, second = run_ranks(2, train_and_save, (path, tmp_path / "checkpoint", tmp_path / "model", rows))
    assert first["start"] == second["start"] == buckets(engine(path))
    assert first["skipped"] and second["skipped"]
    assert first["saved"] == second["saved"] != first["start"]
    assert first["next"] == second["next"]
    assert buckets(engine(str(tmp_path / "model"))) == first["saved"]

    alone = load_and_train(path, tmp_path / "checkpoint", rows)
    assert alone["extra"] == {"version": 1}
    assert alone["saved"] == first["saved"]
    for ours, theirs in zip(alone["logprobs"], first["logprobs"] + second["logprobs"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert alone["next"] == pytest.approx(first["next"], rel=1e-3, abs=1e-5)


def test_a_step_on_two_ranks_ends_where_one_rank_does(
    one_rank: None, run_ranks: RunRanks, model_path: ModelPath
) -> None:
    path, rows = model_path("llama", False), random_rows(5)
    alone = engine(path)
    alone.train_step(rows)
    expected = np.frombuffer(buckets(alone), dtype=np.float32)
    for result in run_ranks(2, step, (path, rows)):
        # AdamW's first step moves each weight by about ±lr, so what is compared is the sign of the gradient
        assert np.isclose(np.frombuffer(result, dtype=np.float32), expected, atol=1e-4).mean() > 0.999


def step(path: str, rows: list[Row]) -> bytes:
    trainer = engine(path)
    trainer.train_step(share(rows))
    return buckets(trainer)


def test_every_rank_learns_that_the_model_cannot_be_opened(run_ranks: RunRanks, tmp_path: Path) -> None:
    messages = run_ranks(2, opening_fails, (str(tmp_path),))
    assert all("no config.json" in message for message in messages)


def opening_fails(path: str) -> str:
    with pytest.raises(ModelError) as failure:
        engine(path)
    return str(failure.value)
