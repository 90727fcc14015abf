"""What Ray has for a run's workers: devices that are not there, that others have, or that are given up on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import placement_group_table

from headway.cluster.backend import start_backend
from headway.cluster.on_ray import resource_pool
from headway.cluster.on_ray.ray_cluster import RayCluster
from headway.cluster.on_ray.ray_node import ChildProcesses
from headway.cluster.on_ray.resource_pool import Node, ResourcePool
from headway.config.schema import Config
from headway.config.sizing.placement import node_shares
from headway.errors import ConfigError, ModelError, StallError
from tests.cluster.fakes import echo_plan, echo_specs
from tests.cluster.one_version import tiny_config

WAIT_S = 240.0
"""For Ray to answer, on a machine with other work."""


async def test_devices_that_are_not_there_are_told_with_what_there_is(ray_here: None) -> None:
    with pytest.raises(ConfigError, match=r"^echo asks for 1 node.* 3 GPU.* has 1 node.s. with 0 GPU.s.\. .*ray start"):
        await ResourcePool.reserve(node_shares("echo", range(3), 3), on_gpus=True, timeout_s=60)


async def test_more_nodes_than_there_are_are_told_though_one_has_room_for_all(ray_here: None) -> None:
    asked = r"^echo asks for 2 node.* 1 process.es. \(echo\.nnodes=2\), and Ray has 1 node.s. with 200 process.es."
    with pytest.raises(ConfigError, match=asked + r".*n_gpus_per_node"):
        await ResourcePool.reserve(node_shares("echo", range(2), 1), on_gpus=False, timeout_s=60)


async def test_a_start_without_free_devices_says_what_is_lacking_before_its_time_is_over(
    ray_here: None, tmp_path: Path
) -> None:
    """Waits for devices that another run has, as long as a start may wait."""
    others = await ResourcePool.reserve(node_shares("other", range(199), 199), on_gpus=False, timeout_s=60)
    config = tiny_config("ray", cluster={"start_timeout_s": 2})
    try:
        with pytest.raises(StallError, match=r"has 1 node.s. with 200 process.es., 1 free; .*room within 1\.\d+ s"):
            await start_backend(config, model_path="m", run_dir=tmp_path, total_optimizer_steps=1)
    finally:
        others.release()


async def test_a_machine_with_too_few_gpus_is_told_at_once(
    ray_here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0, "GPU": 1.0, "memory": 2.0**33})
    config = Config()
    cluster = RayCluster(config, tmp_path)
    assert await cluster.connect() == "cuda"
    plan = echo_plan(echo_specs(2, config))
    with pytest.raises(ConfigError, match=r"asks for 1 node.s. with 2 GPU.* has 1 node.s. with 0 GPU.*lower nnodes"):
        await cluster.reserve(plan)


async def test_a_machine_with_too_little_memory_for_so_many_processes_is_told_at_once(
    ray_here: None, tmp_path: Path
) -> None:
    config = Config(cluster={"device": "cpu"})  # type: ignore[arg-type]
    cluster = RayCluster(config, tmp_path)
    await cluster.connect()
    plan = echo_plan(echo_specs(5000, config))
    with pytest.raises(ConfigError, match=r"needs 5000 processes, each with 128 MiB or more, and Ray has [\d.]+ GiB"):
        await cluster.reserve(plan)


async def test_devices_that_are_given_up_on_are_not_taken_later(
    ray_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource_pool, "CPU_SHARE", 4)  # more than there is, and found free by a look that is late
    there = ray.get_runtime_context().get_node_id()
    monkeypatch.setattr(resource_pool, "_nodes", lambda on_gpus: [Node(there, 1, 1)])
    reserving = asyncio.create_task(ResourcePool.reserve(node_shares("echo", range(1), 1), on_gpus=False, timeout_s=60))
    async with asyncio.timeout(WAIT_S):
        while "PENDING" not in group_states():  # noqa: ASYNC110 - Ray tells nobody
            await asyncio.sleep(0.01)
    reserving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reserving
    assert group_states() <= {"REMOVED"}


def group_states() -> set[str]:
    groups: dict[str, dict[str, Any]] = placement_group_table()
    return {group["state"] for group in groups.values()}


@pytest.mark.slow
async def test_a_start_that_fails_leaves_no_worker_behind(ray_here: None, tmp_path: Path) -> None:
    """Starts workers of its own on Ray, each of which imports torch."""
    missing = str(tmp_path / "missing" / "model")
    with pytest.raises(ModelError, match="no such folder"):
        await start_backend(tiny_config("ray"), model_path=missing, run_dir=tmp_path, total_optimizer_steps=4)
    assert ChildProcesses("WorkerActor").left_after(10) == []
