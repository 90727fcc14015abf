"""The whole backend on Ray, with a tiny model: the same results as in one process, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from headway.cluster.backend import start_backend
from headway.cluster.on_ray.ray_cluster import RayCluster
from headway.cluster.on_ray.ray_node import ChildProcesses, descendants
from headway.cluster.on_ray.ray_worker import RayWorker
from headway.cluster.worker_engines import RolloutReplica
from headway.cluster.workers import Workers, replaceable_dies
from headway.data.interfaces.rollout import OnUpdate
from headway.errors import UpdateFailed, WorkerDied
from tests.cluster.one_version import N, generate, one_version, request, tiny_config, update

pytestmark = pytest.mark.usefixtures("workers_can_import_tests")

WAIT_S = 240.0
"""For processes to start, and to be seen to have ended, on a machine with other work."""


@pytest.mark.slow
async def test_a_version_equals_one_process_bit_for_bit_and_a_killed_replica_ends_in_a_named_error(
    tiny_model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Starts and ends a Ray of its own, and two workers that import torch."""
    inline = await start_backend(
        tiny_config("inline"), model_path=tiny_model, run_dir=tmp_path, total_optimizer_steps=4
    )
    expected = await one_version(inline)
    await inline.close()

    others = set(descendants(os.getpid()))  # of tests that ran here before
    terminated = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
    handler = signal.getsignal(signal.SIGTERM)
    workers = await start_backend(tiny_config("ray"), model_path=tiny_model, run_dir=tmp_path, total_optimizer_steps=4)
    family = ChildProcesses()
    assert len(family) >= len(others) + 4
    try:
        assert signal.getsignal(signal.SIGTERM) is handler
        os.kill(os.getpid(), signal.SIGTERM)
        assert not 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 3, "Ray's own handler will abort this process"
        await terminated.wait()

        outcome = await one_version(workers)
        assert (outcome.before, outcome.after) == (expected.before, expected.after)
        assert outcome.metrics == expected.metrics
        assert outcome.sent.checksum == outcome.received.checksum == expected.sent.checksum
        assert outcome.versions_after == {1}

        await another_episode_worker_makes_the_same_groups(workers, outcome.after)

        death = asyncio.create_task(workers.rollouts[0].died())
        await workers.trainer.reach(["rollout-0"])
        staging = asyncio.create_task(workers.rollouts[0].stage_weights(2))
        await workers.rollouts[0].stats()
        replica = workers.rollouts[0].worker
        assert isinstance(replica, RayWorker)
        assert replica.pid is not None
        assert os.getpriority(os.PRIO_PROCESS, replica.pid) == os.getpriority(os.PRIO_PROCESS, 0)
        os.kill(replica.pid, signal.SIGKILL)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(WorkerDied, match=r"worker rollout-0 died.*rollout-0\.log"):
                await staging
            with pytest.raises(WorkerDied, match="worker rollout-0 died"):
                await death
            with pytest.raises(UpdateFailed, match=r"version 2: .*rollout-0 did not answer"):
                await workers.trainer.send_weights(2, ["rollout-0"])
            while not (tmp_path / "logs" / "ray.log").exists():  # noqa: ASYNC110 - told by a thread of Ray's
                await asyncio.sleep(0.05)
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        await workers.close()
    assert set(family.left_after(0)) <= others
    assert not ray.is_initialized()
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        "actor-0.log",
        "episode-worker-0.log",
        "episode-worker-0+1.log",
        "rollout-0.log",
        "ray.log",
        "ray",
    }
    assert "A worker died or was killed" in (tmp_path / "logs" / "ray.log").read_text()
    out, err = capfd.readouterr()
    assert "raylet" not in out
    assert "SIGTERM received" not in err


async def calls_at(replica: RolloutReplica) -> int:
    """Unfinished calls at a replica."""
    stats = await replica.stats()
    return stats.running + stats.waiting


async def another_episode_worker_makes_the_same_groups(workers: Workers, expected: list[str]) -> None:
    """Kill the episode worker while it makes groups. Their calls are dropped where they run, and a second one makes
    them."""
    (episode_worker,), replica = workers.episode_workers, workers.rollouts[0]
    watching = asyncio.create_task(replaceable_dies(episode_worker))
    await replica.pause(OnUpdate.KEEP)  # so that nothing is finished before the death
    await episode_worker.join(replica)
    await episode_worker.route([replica.name])
    groups = episode_worker.generate([request(row) for row in range(2, 4)])
    making = asyncio.create_task(anext(groups))
    async with asyncio.timeout(WAIT_S):
        while await calls_at(replica) < 2 * N:  # noqa: ASYNC110 - another process begins
            await asyncio.sleep(0.02)
        worker = episode_worker.worker
        assert isinstance(worker, RayWorker) and worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        for noticed in (watching, making):
            with pytest.raises(WorkerDied, match=r"worker episode-worker-0 died.*episode-worker-0\.log"):
                await noticed
        await replica.drop("episode-worker-0")
        while await calls_at(replica):  # noqa: ASYNC110 - another process ends
            await asyncio.sleep(0.02)
        await replica.resume()
        assert workers.replace_episode_worker is not None
        assert (await workers.replace_episode_worker("episode-worker-0")).name == "episode-worker-0+1"
        again = await generate(workers, range(2, 4))
    assert [t.text for group in again for t in group.trajectories] == expected


@pytest.mark.parametrize(
    "sections",
    [
        {"param_update": {"transport": "object_store", "encoding": "delta"}},
        {"param_update": {"encoding": "delta"}},
        {"param_update": {"transport": "disk"}, "trainer": {"n_gpus_per_node": 2}},
        {"cluster": {"placement": "shared"}, "trainer": {"n_gpus_per_node": 2}, "rollout": {"n_gpus_per_node": 2}},
    ],
    ids=str,
)
@pytest.mark.slow
async def test_versions_arrive_whichever_way_they_take(
    ray_here: None, tiny_model: str, tmp_path: Path, sections: dict[str, Any]
) -> None:
    """Small buckets, so that tensors are split; with two ranks each has half of every tensor.

    Starts workers that import torch. What `make test` has of this: a whole run on Ray in
    tests/integration/test_resume.py, and transports without Ray in `test_roles_of_their_own`.
    """
    sections["rollout"] = {"param_update_preduce_bucket_size_mb": 0.01, **sections.get("rollout", {})}
    config = tiny_config("ray", **sections)
    workers = await start_backend(config, model_path=tiny_model, run_dir=tmp_path, total_optimizer_steps=4)
    try:
        outcome = await one_version(workers)
        assert outcome.sent.checksum == outcome.received.checksum
        assert outcome.probe_difference < 1e-5
        again, received, served = await update(workers, 2)
        assert again.checksum == received.checksum == outcome.sent.checksum, "nothing was trained in between"
        assert np.array_equal(served, again.probe) or np.abs(served - again.probe).max() < 1e-5
        if config.param_update.encoding == "delta":
            assert again.changed == 0
            assert again.nbytes < 0.01 * outcome.sent.nbytes
    finally:
        await workers.close()


@pytest.mark.slow
async def test_a_node_that_was_killed_is_named_and_leaves_neither_process_nor_folder_but_its_logs_to_the_run(
    tmp_path: Path,
) -> None:
    """Starts a Ray of its own, which takes its time: one that is shared cannot be killed."""
    others = set(descendants(os.getpid()))
    cluster = RayCluster(tiny_config("ray"), tmp_path)
    await cluster.connect()
    family, session = ChildProcesses(), Path(ray._private.worker._global_node.get_session_dir_path())  # type: ignore[attr-defined]
    for pid in set(descendants(os.getpid())) - others:
        assert os.getsid(pid) != os.getsid(0), "a signal to this process's group ends none of them"
        command = " ".join(psutil.Process(pid).cmdline())
        assert not re.search(r"monitor\.py|dashboard\.py", command), "a second of the processor for nothing"
    pid = raylet()
    dead = asyncio.create_task(cluster.died())
    await asyncio.sleep(0)
    assert not dead.done()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=rf"raylet .*\(pid {pid}\) ended"):
        await asyncio.wait_for(dead, WAIT_S)
    await cluster.stop()
    assert len(family) > len(others) + 1
    assert set(family.left_after(0)) <= others
    assert session not in beside(session)
    assert (tmp_path / "logs" / "ray" / "raylet.out").stat().st_size > 0


def beside(session: Path) -> list[Path]:
    return list(session.parent.iterdir())


def raylet() -> int:
    """The process of Ray that its agents are children of."""
    (pid,) = (pid for pid in descendants(os.getpid()) if Path(f"/proc/{pid}/exe").readlink().name == "raylet")
    return pid
