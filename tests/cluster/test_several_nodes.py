"""Several Ray nodes on this machine: devices land where the placement says, and move when a node is lost.

Slow: each Ray node takes seconds to start, and each worker imports torch.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.experimental import get_object_locations

from headway.cluster.machine.worker_setup import available_cores
from headway.cluster.on_ray import resource_pool
from headway.cluster.on_ray.ray_cluster import RayCluster
from headway.cluster.on_ray.ray_node import sigterm_kept
from headway.cluster.on_ray.ray_worker import RayWorker
from headway.cluster.on_ray.resource_pool import Node, ResourcePool
from headway.cluster.worker_group import WorkerGroup
from headway.cluster.worker_plan import ClusterPlan, plan_cluster
from headway.config.schema import Config
from headway.config.sizing.placement import NodeShare, Placement, node_shares, resolve_placement
from headway.errors import ConfigError, StallError
from tests.cluster.fakes import EchoRole, echo_plan, echo_specs, group_tokens, sample

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STORE = 80 * 2**20
WAIT_S = 240.0
"""For workers to start, or a node to be missed, on a machine with other work."""


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A head that has no device at all; each test adds nodes."""
    root = request.config.rootpath
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root / "src"), str(root)]))
    monkeypatch.setenv("RAY_worker_niceness", "0")
    head = {"num_cpus": 0, "num_gpus": 0, "include_dashboard": False, "object_store_memory": STORE}
    with sigterm_kept():
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def add(cluster: Cluster, count: int, *, gpus: int = 0) -> list[Any]:
    return [cluster.add_node(num_cpus=1, num_gpus=gpus, object_store_memory=STORE) for _ in range(count)]


def by_node(on: dict[int, str]) -> list[tuple[int, ...]]:
    """Devices that are together on a node, for each node."""
    together: dict[str, list[int]] = {}
    for device, node in sorted(on.items()):
        together.setdefault(node, []).append(device)
    return sorted(tuple(devices) for devices in together.values())


def echoing(plan: ClusterPlan, config: Config) -> ClusterPlan:
    """The plan with workers that need no model."""
    arguments = {"config": config, "model_path": "nowhere", "rank": 0}
    return replace(plan, workers=tuple(replace(spec, role=EchoRole, arguments=arguments) for spec in plan.workers))


async def test_workers_land_on_the_nodes_that_the_placement_gives_them_and_come_back_on_another(
    nodes: Cluster, tmp_path: Path
) -> None:
    """Starts Ray nodes, and nine workers that import torch."""
    added = add(nodes, 3)
    config = Config.model_validate(
        {
            "cluster": {"device": "cpu", "address": nodes.address},
            "trainer": {"nnodes": 2, "n_gpus_per_node": 2},
            "rollout": {"nnodes": 3, "n_gpus_per_node": 1},
        }
    )
    placement = resolve_placement(config)
    cluster = RayCluster(config, tmp_path)
    workers: dict[str, RayWorker] = {}
    try:
        assert await cluster.connect() == "cpu"
        plan = plan_cluster(config, placement, model_path="nowhere", total_optimizer_steps=1)
        plan = echoing(plan, config)
        await cluster.reserve(plan)
        workers = {spec.name: cluster.launch(spec) for spec in plan.workers}
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(worker.up() for worker in workers.values()))
            on = {name: await node_of(worker) for name, worker in workers.items()}
            threads = {name: int((await worker.call("describe"))["omp"]) for name, worker in workers.items()}
        computing = {spec.device: on[spec.name] for spec in plan.workers if not spec.beside}
        assert by_node(computing) == [(0, 1, 4), (2, 3, 5), (6,)]
        for spec in plan.workers:
            together = 1 if spec.device == 6 else 3
            assert threads[spec.name] == (1 if spec.beside else max(1, available_cores() // together))
            assert on[spec.name] == computing[spec.device], "an episode worker is beside its replica"

        lost = next(node for node in added if node.node_id == on["rollout-2"])
        nodes.remove_node(lost, allow_graceful=False)
        of_rollout = next(spec for spec in plan.workers if spec.name == "rollout-2")
        async with asyncio.timeout(WAIT_S):
            device = await cluster.find_place(of_rollout)
            again = cluster.launch(replace(of_rollout, name="rollout-2+1", device=device))
            workers["rollout-2+1"] = again
            await again.up()
            assert await node_of(again) in {on["actor-0"], on["actor-2"]}
            episode_worker = next(spec for spec in plan.workers if spec.name == "episode-worker-2")
            assert await cluster.find_place(episode_worker, [4, 5, 6]) == 6
            assert await workers["actor-0"].call("only_rank_zero") == 0, "nobody else has moved"
    finally:
        await asyncio.gather(*(worker.kill() for name, worker in workers.items() if "-2" not in name or "+" in name))
        await cluster.stop()


async def node_of(worker: RayWorker) -> str:
    _, node = await worker._actor.process.remote()
    return str(node)


async def test_columns_that_another_machine_computed_are_here_when_it_is_lost(nodes: Cluster, tmp_path: Path) -> None:
    """Starts a Ray node, and a worker that imports torch."""
    (other,) = add(nodes, 1)
    config = Config.model_validate({"cluster": {"device": "cpu", "address": nodes.address}})
    cluster, length = RayCluster(config, tmp_path), 100_000  # a small column would be in the answer itself
    try:
        await cluster.connect()
        here = ray.get_runtime_context().get_node_id()
        plan = echo_plan(echo_specs(1, config))
        await cluster.reserve(plan)
        worker = cluster.launch(plan.workers[0])
        async with asyncio.timeout(WAIT_S):
            await worker.up()
            samples = [sample(ray.put(group_tokens(length, 1.0)), length)]
            (column,) = await WorkerGroup(EchoRole, [worker]).logprobs_plus(samples, 100.0)
        async with asyncio.timeout(WAIT_S / 4):
            while here not in get_object_locations([column.handle])[column.handle]["node_ids"]:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        nodes.remove_node(other, allow_graceful=False)
        assert (ray.get(column.handle, timeout=WAIT_S)[column.index] == 101.0).sum() == length
    finally:
        await cluster.stop()


@ray.remote
class OnGpu:
    """Says where it is. Ray hides from it the GPUs that it does not have."""

    def where(self) -> tuple[str, list[int]]:
        return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()


async def gpus_of(pool: ResourcePool, placement: Placement, order: list[int]) -> dict[int, tuple[str, int]]:
    """Node and GPU of each device, whose workers start in this ``order``."""
    actors = {device: OnGpu.options(**pool.options(device)).remote() for device in order}
    found = {}
    for device, actor in actors.items():
        node, (gpu,) = await asyncio.wait_for(actor.where.remote(), WAIT_S)
        found[device] = (node, int(gpu))
        assert node == pool.node(device)
    assert sorted(found) == list(range(placement.total))
    return found


async def test_ranks_of_a_node_have_its_gpus_in_order_whoever_starts_first(nodes: Cluster) -> None:
    """Starts Ray nodes with GPUs that only Ray believes in."""
    add(nodes, 3, gpus=4)
    ray.init(address=nodes.address, log_to_driver=False)
    placement = resolve_placement(
        Config.model_validate(
            {
                "actor": {"use_kl_loss": True, "parallel": {"tp": 2}},
                "trainer": {"nnodes": 2, "n_gpus_per_node": 2},
                "rollout": {"nnodes": 1, "n_gpus_per_node": 4},
                "ref": {"nnodes": 2, "n_gpus_per_node": 2},
            }
        )
    )
    pool = await ResourcePool.reserve(placement.shares, on_gpus=True, timeout_s=WAIT_S)
    found = await gpus_of(pool, placement, [9, 3, 0, 11, 7, 5, 1, 10, 2, 4, 8, 6])
    assert by_node({device: node for device, (node, _) in found.items()}) == [
        (0, 1, 8, 9),
        (2, 3, 10, 11),
        (4, 5, 6, 7),
    ]
    assert [found[device][1] for device in (0, 1, 8, 9)] == [0, 1, 2, 3]
    assert [found[device][1] for device in (2, 3, 10, 11)] == [0, 1, 2, 3]
    assert [found[device][1] for device in (4, 5, 6, 7)] == [0, 1, 2, 3]

    more: tuple[NodeShare, ...] = node_shares("rollout", range(2), 2)
    with pytest.raises(StallError, match=r"^rollout asks for 1 node.s. with 2 GPU.* 3 node.s. with 4 GPU.s., 0 free"):
        await ResourcePool.reserve(more, on_gpus=True, timeout_s=1)
    pool.release()
    await ResourcePool.reserve(more, on_gpus=True, timeout_s=WAIT_S)


async def test_a_replica_of_several_devices_has_neighbours_of_one_node(nodes: Cluster) -> None:
    """Starts Ray nodes with GPUs that only Ray believes in."""
    add(nodes, 2, gpus=4)
    ray.init(address=nodes.address, log_to_driver=False)
    config = Config.model_validate(
        {
            "trainer": {"n_gpus_per_node": 2},
            "rollout": {"name": "vllm", "nnodes": 2, "n_gpus_per_node": 2, "tensor_model_parallel_size": 2},
        }
    )
    plan = plan_cluster(config, resolve_placement(config), model_path="nowhere", total_optimizer_steps=1)
    groups = [spec.devices for spec in plan.workers if spec.further]
    pool = await ResourcePool.reserve(plan.shares, groups, on_gpus=True, timeout_s=WAIT_S)
    actors = {device: OnGpu.options(**pool.options(device)).remote() for device in (4, 1, 2, 0)}
    found = {device: await asyncio.wait_for(actor.where.remote(), WAIT_S) for device, actor in actors.items()}
    assert {device: list(map(int, gpus)) for device, (_, gpus) in found.items()} == {
        0: [0],
        1: [1],
        2: [2, 3],
        4: [0, 1],
    }
    assert by_node({device: node for device, (node, _) in found.items()}) == [(0, 1, 2), (4,)]


@pytest.mark.parametrize(
    ("sections", "asked"),
    [
        ({"trainer": {"nnodes": 3, "n_gpus_per_node": 1}}, "trainer asks for 3 node(s) with 1 GPU(s)"),
        ({"trainer": {"n_gpus_per_node": 3}}, "trainer asks for 1 node(s) with 3 GPU(s)"),
        ({"trainer": {"nnodes": 2, "n_gpus_per_node": 2}}, "rollout asks for 1 node(s) with 1 GPU(s)"),
    ],
)
async def test_a_cluster_that_cannot_hold_the_run_is_told_what_is_asked_and_what_there_is(
    nodes: Cluster, sections: dict[str, Any], asked: str
) -> None:
    """Starts Ray nodes with GPUs that only Ray believes in."""
    add(nodes, 2, gpus=2)
    ray.init(address=nodes.address, log_to_driver=False)
    shares = resolve_placement(Config.model_validate(sections)).shares
    with pytest.raises(ConfigError) as refused:
        await ResourcePool.reserve(shares, on_gpus=True, timeout_s=WAIT_S)
    assert asked in str(refused.value)
    assert "and Ray has 2 node(s) with 2 GPU(s) and 1 node(s) with 0 GPU(s). " in str(refused.value)


async def test_a_node_that_joins_in_time_is_waited_for(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts Ray nodes one after the other."""
    add(nodes, 1)
    ray.init(address=nodes.address, log_to_driver=False)
    shares = node_shares("trainer", range(2), 1)
    looked, found = threading.Event(), resource_pool._nodes

    def look(on_gpus: bool) -> list[Node]:
        try:
            return found(on_gpus)
        finally:
            looked.set()

    monkeypatch.setattr(resource_pool, "_nodes", look)
    monkeypatch.setattr(resource_pool, "NODES_JOIN_S", WAIT_S)
    reserving = asyncio.create_task(ResourcePool.reserve(shares, on_gpus=False, timeout_s=WAIT_S, may_grow=True))
    assert await asyncio.to_thread(looked.wait, WAIT_S) and not reserving.done()
    add(nodes, 1)  # on this thread, as Ray wants it
    pool = await reserving
    assert pool.node(0) != pool.node(1)
