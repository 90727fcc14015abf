from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from headway.cluster.backend import start_backend
from headway.cluster.worker_engines import FLOOR
from headway.errors import ModelError
from tests.cluster.one_version import one_version, tiny_config
from tests.tiers import mostly_slow

WAYS: list[dict[str, Any]] = [
    {},
    {"param_update": {"transport": "shared_memory"}},
    {"param_update": {"transport": "shared_memory", "encoding": "delta"}},
    {"param_update": {"transport": "disk"}},
    {"rollout": {"enable_dual_buffer": False}},
    {"cluster": {"placement": "shared"}},
]


@mostly_slow("sections", WAYS, quick=[WAYS[2], WAYS[4]], ids=str)
async def test_a_version_goes_round_in_one_process(tiny_model: str, tmp_path: Path, sections: dict[str, Any]) -> None:
    config = tiny_config("inline", **sections)
    workers = await start_backend(config, model_path=tiny_model, run_dir=tmp_path, total_optimizer_steps=4)
    try:
        assert "ref" in workers.on_trainer_ranks
        outcome = await one_version(workers)
        assert outcome.sent.checksum == outcome.received.checksum
        assert outcome.sent.nbytes == outcome.received.nbytes > 0
        assert outcome.versions_after == {1}
        assert outcome.probe_difference < 1e-5
        await workers.trainer.save(tmp_path / "checkpoint", {"cursor": 3})
        assert await workers.trainer.load(tmp_path / "checkpoint") == {"cursor": 3}
        await workers.trainer.export(tmp_path / "model")
        assert (tmp_path / "model" / "config.json").exists()
    finally:
        await workers.close()
    assert not dist.is_initialized()
    await workers.close()


@pytest.mark.slow
async def test_two_replicas_and_a_reference_of_its_own_in_one_process(tiny_model: str, tmp_path: Path) -> None:
    config = tiny_config("inline", rollout={"n_gpus_per_node": 2}, ref={"nnodes": 1})
    workers = await start_backend(config, model_path=tiny_model, run_dir=tmp_path, total_optimizer_steps=4)
    try:
        assert "ref" not in workers.on_trainer_ranks
        assert workers.reference is not None
        assert [replica.name for replica in workers.rollouts] == ["rollout-0", "rollout-1"]
    finally:
        await workers.close()


async def test_where_a_replica_was_replaced_everybody_is_closed_at_the_end(tiny_model: str, tmp_path: Path) -> None:
    config = tiny_config("inline", rollout={"n_gpus_per_node": 2})
    before = set(threading.enumerate())
    workers = await start_backend(config, model_path=tiny_model, run_dir=tmp_path, total_optimizer_steps=4)
    try:
        assert workers.replace_replica is not None
        replica = await workers.replace_replica("rollout-1")
        assert replica.name == "rollout-1+1"
        measured = {receiver.name: workers.probe_tolerance(receiver.name) for receiver in workers.rollouts}
        assert measured == dict.fromkeys(["rollout-0", "rollout-1+1"], FLOOR["float32"])
    finally:
        await workers.close()
    theirs = [t for t in set(threading.enumerate()) - before if "rollout" in t.name or "actor" in t.name]
    for thread in theirs:
        thread.join(30)  # they were told to end
    assert not [thread.name for thread in theirs if thread.is_alive()]


async def test_a_start_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        await start_backend(
            tiny_config("inline"),
            model_path=str(tmp_path / "missing" / "model"),
            run_dir=tmp_path,
            total_optimizer_steps=4,
        )
    assert not dist.is_initialized()
