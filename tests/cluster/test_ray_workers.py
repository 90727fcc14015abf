"""Workers on Ray, with roles that need no model. One Ray for the whole file."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import ray
from ray.exceptions import (
    ActorPlacementGroupRemoved,
    LocalRayletDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util import placement_group_table

from headway.cluster.backend import start_backend
from headway.cluster.machine.token_files import SMALL, TokenFiles, TokenPart, TokenPlace
from headway.cluster.on_ray import ray_worker, resource_pool
from headway.cluster.on_ray.ray_cluster import RayCluster
from headway.cluster.on_ray.ray_node import ChildProcesses
from headway.cluster.on_ray.ray_worker import RayPeer, RayWorker
from headway.cluster.on_ray.resource_pool import Node, ResourcePool
from headway.cluster.on_ray.worker_connections import ConnectionEnded
from headway.cluster.worker_group import WorkerGroup
from headway.config.schema import Config
from headway.config.sizing.placement import node_shares
from headway.data.journal import CompletionJournal, JournalWriter
from headway.data.types import TrainSample
from headway.errors import ConfigError, ModelError, RunError, StallError, TokensLost, UpdateFailed, WorkerDied
from tests.cluster.fakes import EchoRole, echo_plan, echo_specs, group_tokens, sample
from tests.cluster.one_version import tiny_config

WAIT_S = 60.0
"""For a worker to answer, or to be seen to have ended, on a machine with other work."""


@pytest_asyncio.fixture
async def workers(ray_here: None, tmp_path: Path) -> AsyncIterator[list[RayWorker]]:
    config = Config(cluster={"device": "cpu"})  # type: ignore[arg-type]
    cluster = RayCluster(config, tmp_path)
    await cluster.connect()
    specs = echo_specs(2, config)
    await cluster.reserve(echo_plan(specs))
    started = [cluster.launch(spec) for spec in specs]
    await asyncio.gather(*(worker.up() for worker in started))
    yield started
    await asyncio.gather(*(worker.kill() for worker in started))
    await cluster.stop()
    assert ray.is_initialized(), "a cluster that found Ray running leaves it running"


def ranks(workers: list[RayWorker]) -> Any:
    return WorkerGroup(EchoRole, workers)


def shown_by_ps(worker: RayWorker) -> str:
    return Path(f"/proc/{worker.pid}/cmdline").read_text()


def put_samples(*lengths: int) -> list[TrainSample]:
    return [sample(ray.put(group_tokens(n, float(n))), n, k) for k, n in enumerate(lengths)]


async def test_a_worker_has_its_name_its_threads_its_log_and_one_thread_for_its_role(
    workers: list[RayWorker], tmp_path: Path
) -> None:
    answers = [await worker.call("describe") for worker in workers]
    assert [a["rank"] for a in answers] == [0, 1]
    assert [a["pid"] for a in answers] == [w.pid for w in workers]
    assert {a["omp"] for a in answers} == {"1"}
    assert [a["thread"] for a in answers] == ["echo-0_0", "echo-1_0"]
    await ranks(workers).write("hello")
    for worker in workers:
        started, *lines = worker.log_file.read_text().splitlines()
        assert f"worker={worker.name} " in started
        assert sorted(lines) == ["hello", "hello from a child"]
        assert shown_by_ps(worker).startswith(f"ray::{worker.name} {tmp_path.name}")


async def test_an_interrupt_does_not_end_a_worker(workers: list[RayWorker]) -> None:
    for worker in workers:
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGINT)
    assert await ranks(workers).only_rank_zero() == 0
    assert (await workers[1].call("describe"))["interrupt_blocked"]


async def test_a_worker_says_what_it_does_while_its_thread_is_busy(workers: list[RayWorker]) -> None:
    leaving = asyncio.create_task(workers[0].call("was_left"))
    async with asyncio.timeout(WAIT_S):
        while not (beat := await workers[0].heartbeat()).doing:  # noqa: ASYNC110 - another process begins
            await asyncio.sleep(0.01)
        async with aclosing(workers[0].peer().each("endless")) as items:
            await anext(items)
            both = (await workers[0].heartbeat()).doing
        assert await leaving
        assert (await workers[1].heartbeat()).doing == ""
    assert re.match(r"was_left for \d+ s, no progress for \d+ s$", beat.doing)
    assert re.search(r"; 1 × endless for \d+ s$", both)


async def test_columns_stay_behind_references_and_are_read_by_the_rank_that_needs_them(
    workers: list[RayWorker],
) -> None:
    samples = put_samples(3, 9, 5, 1)
    columns = await ranks(workers).logprobs_plus(samples, 100.0)
    assert all(isinstance(column.handle, ray.ObjectRef) for column in columns)
    values = [ray.get(column.handle)[column.index] for column in columns]
    assert [len(v) for v in values] == [3, 9, 5, 1]
    assert [float(v[0]) for v in values] == [103.0, 109.0, 105.0, 101.0]
    with_columns = [replace(s, columns={"ref_logprobs": column}) for s, column in zip(samples, columns, strict=True)]
    # Rank zero answers for its share, the longest sample: the three others, which share a prompt, are as much.
    assert await ranks(workers).columns_seen(with_columns) == [109.0]


async def test_what_a_peer_iterates_over_ends_where_it_runs_when_it_is_left_early(workers: list[RayWorker]) -> None:
    peer = workers[0].peer()
    assert [item async for item in peer.each("numbers", 3)] == [0, 1, 2]
    async with aclosing(peer.each("endless")) as items:
        assert await anext(items) == 0
        waiting = asyncio.create_task(anext(items))
        await peer.call("describe")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert await peer.call("was_left")


async def test_a_peer_tells_of_failures_and_deaths_as_a_call_through_ray_does(workers: list[RayWorker]) -> None:
    peer, other = (worker.peer() for worker in workers)
    with pytest.raises(UpdateFailed, match=r"^rank 0 was told to fail$"):
        await peer.call("fail_on", 0)
    with pytest.raises(RunError, match=r"worker echo-0 failed in 'raise_foreign': KeyError: 'lost'.*echo-0\.log"):
        await peer.call("raise_foreign")
    async with aclosing(peer.each("endless")) as items:
        await anext(items)
        waiting = asyncio.create_task(peer.call("die"))
        with pytest.raises(WorkerDied, match=r"worker echo-0 died: its process \(pid \d+\) ended during 'endless'"):
            await anext(items)
        with pytest.raises(WorkerDied, match=r"ended during 'die'"):
            await waiting
    with pytest.raises(WorkerDied, match="echo-0 died"):
        await peer.call("describe")
    await workers[1].kill()
    with pytest.raises(WorkerDied, match="echo-1 died"):
        await other.call("describe")


async def test_tokens_in_files_are_read_by_the_rank_that_needs_them_wherever_they_are(
    workers: list[RayWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray starts a process for the task that reads."""
    here = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    files = TokenFiles("episode-worker-0", TokenPlace(here, tmp_path), here)
    samples = [sample(files.write(group_tokens(n, float(n))), n, n) for n in (3, 9)]
    columns = await ranks(workers).logprobs_plus(samples, 100.0)
    assert [float(ray.get(column.handle)[column.index][0]) for column in columns] == [103.0, 109.0]
    reading = ray_worker._read.options(scheduling_strategy=ray_worker._on(ray_worker._alive()[here]["NodeID"]))
    elsewhere = ray.get(reading.remote([TokenPart(s.tokens, (0,)) for s in samples]))
    assert [len(tokens[0].ids) for tokens in elsewhere] == [3, 9]
    files.remove([samples[0].tokens])
    with pytest.raises(TokensLost, match=r"the tokens of 1 groups were on .*--resume RUN` makes groups again"):
        await ranks(workers).lengths_fetched([samples[0]])


@pytest.mark.parametrize("where", ["on a machine that Ray has no more", "removed from a machine that Ray has"])
async def test_large_groups_of_a_lost_machine_are_read_in_the_journal(
    workers: list[RayWorker], tmp_path: Path, where: str
) -> None:
    """Ray starts a process for the task that reads."""
    here = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    host = here if where.startswith("removed") else "10.0.0.2"
    files = TokenFiles("episode-worker-1", TokenPlace("10.0.0.1", tmp_path / "headway-run-1"), host)
    journal = CompletionJournal(JournalWriter(tmp_path, "episode-worker-1", groups_per_block=4, sync_s=None))
    samples = [sample(files.write(group_tokens(n, 0.0), partial(journal.keep, n)), n, n) for n in (SMALL, SMALL + 1)]
    files.remove([one.tokens for one in samples])
    assert await workers[0].call("lengths_fetched", samples) == [SMALL, SMALL + 1]
    ((path, _), _) = (one.tokens.copy for one in samples)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TokensLost, match=f"the tokens of 1 groups were on {host}.*the journal lacks them"):
        await workers[0].call("lengths_fetched", samples)


async def test_a_roles_own_error_arrives_as_it_was_raised_though_the_other_rank_hangs(workers: list[RayWorker]) -> None:
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(UpdateFailed, match=r"^rank 1 was told to fail$"):
            await ranks(workers).fail_on(1)


async def test_a_foreign_error_names_the_worker_the_method_and_the_log(workers: list[RayWorker]) -> None:
    with pytest.raises(RunError, match=r"worker echo-\d failed in 'raise_foreign': KeyError: 'lost'.*echo-\d\.log"):
        await ranks(workers).raise_foreign()


async def test_a_killed_worker_is_named_by_the_call_that_was_waiting_for_it(workers: list[RayWorker]) -> None:
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(WorkerDied, match=r"worker echo-0 died.*'die'.*echo-0\.log.*memory had run out"):
            await workers[0].call("die")
    assert (await workers[1].call("describe"))["rank"] == 1


def test_a_worker_that_ray_ended_for_lack_of_memory_died_and_the_message_is_one_line() -> None:
    worker = RayWorker.__new__(RayWorker)  # not started
    worker.name, worker.pid, worker.log_file = "rollout-0", 7, Path("rollout-0.log")
    worker._killed, worker._ray, worker._elsewhere = False, None, None
    with (
        pytest.raises(WorkerDied, match=r"^worker rollout-0 died: .*pid 7.*memory had almost run out: 2 were") as died,
        RayWorker._failures(worker, "supervision"),
    ):
        raise OutOfMemoryError("2 were killed (0.97)\nThe top ten users are\n…")
    assert "top ten" not in str(died.value)
    assert "RAY_memory_usage_threshold" in str(died.value)


class AnsweringWith:
    """Handle of an actor whose methods all fail with an error of Ray's."""

    def __init__(self, error: RayError) -> None:
        self.address = self.process = self
        self._error = error

    async def remote(self) -> None:
        raise self._error


@pytest.mark.parametrize(
    "error",
    [
        NodeDiedError("lost"),
        WorkerCrashedError(),
        LocalRayletDiedError(),
        ActorPlacementGroupRemoved(),
        RayActorError(),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_whatever_ray_says_of_a_worker_that_a_peer_calls_means_that_it_died(error: RayError) -> None:
    peer = RayPeer("rollout-0", 7, "rollout-0.log", AnsweringWith(error))
    with pytest.raises(WorkerDied, match=r"^worker rollout-0 died: its process \(pid 7\) ended during 'generate'"):
        await peer.call("generate")
    assert isinstance(await peer._translated("generate", ConnectionEnded("cut")), WorkerDied)


async def test_a_peer_tells_what_a_workers_method_raises_from_a_death_unless_its_connection_has_ended() -> None:
    raised = RayTaskError("address", "", ValueError("no port"))
    peer = RayPeer("rollout-0", 7, "rollout-0.log", AnsweringWith(raised))
    with pytest.raises(RunError, match=r"^worker rollout-0 failed in 'generate': ValueError: no port"):
        await peer.call("generate")
    assert isinstance(await peer._translated("generate", ConnectionEnded("cut")), WorkerDied)


async def test_a_killed_worker_is_noticed_while_nobody_calls_it(workers: list[RayWorker]) -> None:
    watching = [asyncio.create_task(worker.died()) for worker in workers]
    await workers[1].call("describe")
    assert workers[1].pid is not None
    os.kill(workers[1].pid, signal.SIGKILL)
    done, pending = await asyncio.wait(watching, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
    assert done == {watching[1]}
    assert isinstance(watching[1].exception(), WorkerDied)
    for task in pending:
        task.cancel()


async def test_a_stopped_worker_is_given_up_while_one_that_computes_is_not(workers: list[RayWorker]) -> None:
    """A stopped process is looked at for two seconds, and was asked for its heartbeat up to three seconds before."""
    watching = [asyncio.create_task(worker.lost()) for worker in workers]
    assert workers[1].pid is not None
    os.kill(workers[1].pid, signal.SIGSTOP)
    computing = asyncio.create_task(workers[0].call("holds_the_interpreter", 4.0))
    done, _ = await asyncio.wait(watching, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
    assert done == {watching[1]}
    assert re.match(r"worker echo-1 \(pid \d+\) has been stopped for 2 s \(SIGSTOP\)\.", str(watching[1].exception()))
    await computing
    assert not watching[0].done()
    watching[0].cancel()


async def test_devices_that_are_not_there_are_told_with_what_there_is(ray_here: None) -> None:
    with pytest.raises(ConfigError, match=r"^echo asks for 1 node.* 3 GPU.* has 1 node.s. with 0 GPU.s.\. .*ray start"):
        await ResourcePool.reserve(node_shares("echo", range(3), 3), on_gpus=True, timeout_s=60)


async def test_more_nodes_than_there_are_are_told_though_one_has_room_for_all(ray_here: None) -> None:
    asked = r"^echo asks for 2 node.* 1 process.es. \(echo\.nnodes=2\), and Ray has 1 node.s. with 200 process.es."
    with pytest.raises(ConfigError, match=asked + r".*More devices of one machine are n_gpus_per_node"):
        await ResourcePool.reserve(node_shares("echo", range(2), 1), on_gpus=False, timeout_s=60)


async def test_a_start_without_free_devices_says_what_is_lacking_before_its_time_is_over(
    ray_here: None, tmp_path: Path
) -> None:
    """Waits for devices that another run has, as long as a start may wait."""
    others = await ResourcePool.reserve(node_shares("other", range(199), 199), on_gpus=False, timeout_s=60)
    config = tiny_config("ray", cluster={"start_timeout_s": 4})
    try:
        with pytest.raises(StallError, match=r"has 1 node.s. with 200 process.es., 1 free; .*room within 3\.\d+ s"):
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
