"""The engine on several ranks: what must agree, and what must not hang."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.cluster.roles.weight_roles import Send, WeightSendRole
from headway.config.schema import Config
from headway.config.sections.learning import ActorConfig, OptimConfig, ParallelConfig
from headway.data.interfaces.training import StepContext
from headway.data.packing import CollatedRow
from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.engines.weights.protocols import EndContext, OutgoingWeights
from headway.errors import ModelError, UpdateFailed
from tests.engines.train.rows import random_rows, with_columns
from tests.tiers import mostly_slow

RunRanks = Callable[..., list[Any]]
ModelPath = Callable[..., str]


def engine(path: str) -> FsdpEngine:
    config = Config(actor=ActorConfig(ppo_max_token_len_per_gpu=64, optim=OptimConfig(lr=1e-2)))
    return FsdpEngine(
        model_path=path,
        config=config,
        total_optimizer_steps=10,
        mesh=TrainMesh.make(ParallelConfig(), torch.device("cpu")),
    )


def share(rows: list[CollatedRow]) -> list[CollatedRow]:
    """Rank 0 has one row, the last rank the rest: as uneven as it gets."""
    return {0: rows[:1], dist.get_world_size() - 1: rows[1:]}.get(dist.get_rank(), [])


def buckets(of: FsdpEngine, bucket_bytes: int = 4096, dtype: torch.dtype = torch.float32) -> bytes:
    """All of them on every rank."""
    gathered = of.gather(of.manifest(dtype), bucket_bytes, everywhere=True)
    return b"".join(bytes(bucket.numpy()) for _, bucket in gathered)


def train_and_save(path: str, checkpoint: Path, exported: Path, rows: list[CollatedRow]) -> dict[str, Any]:
    trainer = engine(path)
    start = buckets(trainer)
    trainer.train_step(share(rows), StepContext())
    broken = [with_columns(row, advantages=row.columns["advantages"] * np.nan) for row in share(rows)]
    skipped = trainer.train_step(broken if dist.get_rank() == 0 else share(rows), StepContext())
    trainer.learner.save(checkpoint, {"version": 1})
    trainer.export(exported)
    saved = buckets(trainer)
    logprobs = trainer.forward_logprobs(share(rows))
    return {
        "start": start,
        "skipped": skipped.skipped,
        "saved": saved,
        "logprobs": logprobs,
        "next": trainer.train_step(share(rows), StepContext()).metrics,
    }


def load_and_train(path: str, checkpoint: Path, rows: list[CollatedRow]) -> dict[str, Any]:
    trainer = engine(path)
    extra = trainer.learner.load(checkpoint)
    saved = buckets(trainer)
    return {
        "extra": extra,
        "saved": saved,
        "logprobs": trainer.forward_logprobs(rows),
        "next": trainer.train_step(rows, StepContext()).metrics,
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


def step_of_kept_layers(path: str, rows: list[CollatedRow], reshards: bool) -> tuple[float, bytes]:
    fsdp = {"reshard_after_forward": reshards}
    config = Config(actor=ActorConfig.model_validate({"fsdp_config": fsdp, "optim": {"lr": 1e-2}}))
    mesh = TrainMesh.make(ParallelConfig(), torch.device("cpu"))
    trainer = FsdpEngine(model_path=path, config=config, total_optimizer_steps=10, mesh=mesh)
    trainer.forward_logprobs(share(rows))
    metrics = trainer.train_step(share(rows), StepContext()).metrics
    trainer.forward_logprobs(share(rows))
    return metrics["grad_norm"], buckets(trainer)


def test_layers_that_stay_gathered_are_trained_like_others(run_ranks: RunRanks, model_path: ModelPath) -> None:
    path, rows = model_path(), random_rows(5)
    first, second = (run_ranks(2, step_of_kept_layers, (path, rows, reshards)) for reshards in (True, False))
    assert first == second


@pytest.mark.slow
def test_a_step_on_two_ranks_ends_where_one_rank_does(
    one_rank: None, run_ranks: RunRanks, model_path: ModelPath
) -> None:
    path, rows = model_path("llama", False), random_rows(5)
    alone = engine(path)
    alone.train_step(rows, StepContext())
    expected = np.frombuffer(buckets(alone), dtype=np.float32)
    for result in run_ranks(2, step, (path, rows)):
        # AdamW's first step moves each weight by about ±lr, so what is compared is the sign of the gradient
        assert np.isclose(np.frombuffer(result, dtype=np.float32), expected, atol=1e-4).mean() > 0.999


def step(path: str, rows: list[CollatedRow]) -> bytes:
    trainer = engine(path)
    trainer.train_step(share(rows), StepContext())
    return buckets(trainer)


@mostly_slow(
    ("bucket_bytes", "dtype"),
    product([256, 1024, 2**20], [torch.bfloat16, torch.float32]),
    quick=[(256, torch.bfloat16)],
)
def test_what_ranks_gather_does_not_depend_on_their_number_or_on_the_size_of_buckets(
    one_rank: None, run_ranks: RunRanks, model_path: ModelPath, bucket_bytes: int, dtype: torch.dtype
) -> None:
    """Most tensors lie across several buckets of the smallest size, and over all ranks."""
    path = model_path("qwen2", False)
    expected = buckets(engine(path), 4096, dtype)
    for ranks in (2, 3):
        assert run_ranks(ranks, gathered, (path, bucket_bytes, dtype)) == [expected] * ranks


def gathered(path: str, bucket_bytes: int, dtype: torch.dtype) -> bytes:
    return buckets(engine(path), bucket_bytes, dtype)


@mostly_slow("encoding", ["full", "delta"], quick=["full"])
def test_after_a_send_that_failed_half_way_the_next_one_sends_what_the_weights_are(
    one_rank: None, run_ranks: RunRanks, model_path: ModelPath, encoding: str
) -> None:
    """Gathering is collective: the other ranks go on to its end, and so must the one whose sending failed."""
    path = model_path("qwen2", False)
    expected = buckets(engine(path))
    senders = 2 if encoding == "delta" else 1
    assert b"".join(run_ranks(2, fail_and_send_again, (path, encoding, senders))) == expected


def fail_and_send_again(path: str, encoding: str, senders: int) -> bytes:
    trainer = engine(path)
    config = Config.model_validate(
        {"param_update": {"encoding": encoding}, "rollout": {"param_update_preduce_bucket_size_mb": 0.004}}
    )
    outbox = WeightSendRole(config, dist.get_rank(), EndContext())
    outbox.open_route("float32", trainer.manifest(torch.float32, most_senders=senders), pinned=False)
    sender = Interrupted(fails=dist.get_rank() == 0)
    if dist.get_rank() < senders:
        outbox._senders["all"] = sender
    for version in (1, 1, 2):
        try:
            outbox.send(version, Send("float32", "all", None), trainer.gather)
        except UpdateFailed:
            assert version == 1
    return sender.sent


class Interrupted:
    """A sender whose first version ``fails`` after its third bucket."""

    def __init__(self, *, fails: bool) -> None:
        self.sent = b""
        self._failed = not fails

    def send(self, version: int, weights: OutgoingWeights) -> None:
        self.sent = b""
        for chunk in weights:
            if not self._failed and chunk.header.index == 3:
                self._failed = True
                raise UpdateFailed("the receiver died")
            self.sent += bytes(chunk.payload.numpy())

    def close(self) -> None: ...


@mostly_slow("senders", [1, 2], quick=[2])
def test_gathering_holds_a_bucket_of_its_own_and_one_of_other_shares_and_nothing_else(
    run_ranks: RunRanks, model_path: ModelPath, senders: int
) -> None:
    """The largest tensor of the model is far larger than a bucket."""
    assert run_ranks(2, large_allocations, (model_path("qwen2", False), 1024, senders)) == [[1024] * senders] * 2


def large_allocations(path: str, bucket_bytes: int, senders: int) -> list[int]:
    """Sizes of those of half a bucket and more."""
    trainer = engine(path)
    manifest = trainer.manifest(torch.bfloat16, most_senders=senders)
    assert max(slot.nbytes for slot in manifest.slots) > 2 * bucket_bytes
    with Allocations() as allocations:
        deque(trainer.gather(manifest, bucket_bytes), maxlen=0)
    return [nbytes for nbytes in allocations.nbytes if nbytes >= bucket_bytes // 2]


class Allocations(TorchDispatchMode):
    """The bytes of each storage that any operation returned and that was not there before."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            if (storage := tensor.untyped_storage()).data_ptr() not in known:
                self.nbytes.append(storage.nbytes())
        return result


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def test_every_rank_learns_that_the_model_cannot_be_opened(run_ranks: RunRanks, tmp_path: Path) -> None:
    messages = run_ranks(2, opening_fails, (str(tmp_path),))
    assert all("no config.json" in message for message in messages)


def opening_fails(path: str) -> str:
    with pytest.raises(ModelError) as failure:
        engine(path)
    return str(failure.value)
