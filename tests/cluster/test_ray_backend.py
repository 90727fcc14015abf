"""The whole backend on Ray, with a tiny model: the same results as in one process, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import ray

from headway.cluster.backend import start_backend
from headway.cluster.processes import Family, descendants
from headway.cluster.ray_cluster import RayCluster
from headway.cluster.ray_worker import RayWorker
from headway.errors import UpdateFailed, WorkerDied
from tests.cluster.one_version import one_version, tiny_config

pytestmark = pytest.mark.usefixtures("workers_can_import_tests")


async def test_a_version_equals_one_process_bit_for_bit_and_a_killed_replica_ends_in_a_named_error(
    tiny_model: str, tmp_path: Path
) -> None:
    inline = await start_backend(
        tiny_config("inline"), model_path=tiny_model, run_dir=tmp_path, total_optimizer_steps=4
    )
    expected = await one_version(inline)
    await inline.close()

    others = set(descendants(os.getpid()))  # of tests that ran here before
    workers = await start_backend(tiny_config("ray"), model_path=tiny_model, run_dir=tmp_path, total_optimizer_steps=4)
    family = Family()
    assert len(family) >= len(others) + 4
    try:
        outcome = await one_version(workers)
        assert (outcome.before, outcome.after) == (expected.before, expected.after)
        assert outcome.metrics == expected.metrics
        assert outcome.sent.checksum == outcome.received.checksum == expected.sent.checksum
        assert outcome.versions_after == {1}

        watch = asyncio.create_task(workers.watch())
        staging = asyncio.create_task(workers.rollouts[0].stage_weights(2))
        await workers.rollouts[0].in_flight()
        replica = next(worker for worker in workers.members if worker.name == "rollout-0")
        assert isinstance(replica, RayWorker)
        assert replica.pid is not None
        os.kill(replica.pid, signal.SIGKILL)
        async with asyncio.timeout(15):
            with pytest.raises(WorkerDied, match=r"worker rollout-0 died.*rollout-0\.log"):
                await staging
            with pytest.raises(WorkerDied, match="worker rollout-0 died"):
                await watch
            with pytest.raises(UpdateFailed, match=r"version 2: .*rollout-0 did not answer"):
                await workers.train.send_weights(2, ["rollout-0"])
    finally:
        await workers.close()
    assert set(family.left_after(0)) <= others
    assert not ray.is_initialized()
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"actor-0.log", "rollout-0.log"}


async def test_a_node_that_was_killed_leaves_no_process_though_nobody_stops_the_others(tmp_path: Path) -> None:
    others = set(descendants(os.getpid()))
    cluster = RayCluster(tiny_config("ray"), tmp_path)
    await cluster.connect()
    family = Family()
    os.kill(raylet(), signal.SIGKILL)
    await cluster.stop()
    assert len(family) > len(others) + 1
    assert set(family.left_after(0)) <= others


def raylet() -> int:
    """The process of Ray that its agents are children of."""
    (pid,) = (pid for pid in descendants(os.getpid()) if Path(f"/proc/{pid}/exe").readlink().name == "raylet")
    return pid
