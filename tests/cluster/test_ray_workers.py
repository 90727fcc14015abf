"""Workers on Ray, with roles that need no model. One Ray for the whole file."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
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

from headway.cluster.machine.token_files import SMALL, TokenFiles, TokenPart, TokenPlace
from headway.cluster.on_ray import ray_worker
from headway.cluster.on_ray.ray_cluster import RayCluster
from headway.cluster.on_ray.ray_worker import RayPeer, RayWorker
from headway.cluster.on_ray.worker_connections import ConnectionEnded
from headway.cluster.worker_group import WorkerGroup
from headway.config.schema import Config
from headway.data.journal import CompletionJournal, JournalWriter
from headway.data.types import TrainSample
from headway.errors import RunError, TokensLost, UpdateFailed, WorkerDied
from tests.cluster.fakes import EchoRole, echo_plan, echo_specs, group_tokens, sample

WAIT_S = 240.0
"""For a worker to answer, or to be seen to have ended, on a machine with other work."""


@asynccontextmanager
async def two_workers(folder: Path) -> AsyncIterator[list[RayWorker]]:
    config = Config(cluster={"device": "cpu"})  # type: ignore[arg-type]
    cluster = RayCluster(config, folder)
    await cluster.connect()
    specs = echo_specs(2, config)
    await cluster.reserve(echo_plan(specs))
    started = [cluster.launch(spec) for spec in specs]
    await asyncio.gather(*(worker.up() for worker in started))
    yield started
    await asyncio.gather(*(worker.kill() for worker in started))
    await cluster.stop()
    assert ray.is_initialized(), "a cluster that found Ray running leaves it running"


@pytest_asyncio.fixture
async def workers(ray_here: None, tmp_path: Path) -> AsyncIterator[list[RayWorker]]:
    """Two workers for one test, which may end them."""
    async with two_workers(tmp_path) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lasting(ray_here: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[RayWorker]]:
    """Two workers for all tests that leave them as they are."""
    async with two_workers(tmp_path_factory.mktemp("workers")) as started:
        yield started


on_their_loop = pytest.mark.asyncio(loop_scope="module")


def ranks(workers: list[RayWorker]) -> Any:
    return WorkerGroup(EchoRole, workers)


def shown_by_ps(worker: RayWorker) -> str:
    return Path(f"/proc/{worker.pid}/cmdline").read_text()


def put_samples(*lengths: int) -> list[TrainSample]:
    return [sample(ray.put(group_tokens(n, float(n))), n, k) for k, n in enumerate(lengths)]


@on_their_loop
async def test_a_worker_has_its_name_its_threads_its_log_and_one_thread_for_its_role(
    lasting: list[RayWorker],
) -> None:
    answers = [await worker.call("describe") for worker in lasting]
    assert [a["rank"] for a in answers] == [0, 1]
    assert [a["pid"] for a in answers] == [w.pid for w in lasting]
    assert {a["omp"] for a in answers} == {"1"}
    assert [a["thread"] for a in answers] == ["echo-0_0", "echo-1_0"]
    await ranks(lasting).write("hello")
    for worker in lasting:
        started, *lines = worker.log_file.read_text().splitlines()
        assert f"worker={worker.name} " in started
        assert sorted(lines) == ["hello", "hello from a child"]
        assert shown_by_ps(worker).startswith(f"ray::{worker.name} {worker.log_file.parents[1].name}")


@on_their_loop
async def test_an_interrupt_does_not_end_a_worker(lasting: list[RayWorker]) -> None:
    for worker in lasting:
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGINT)
    assert await ranks(lasting).only_rank_zero() == 0
    assert (await lasting[1].call("describe"))["interrupt_blocked"]


@on_their_loop
async def test_a_worker_says_what_it_does_while_its_thread_is_busy(lasting: list[RayWorker]) -> None:
    leaving = asyncio.create_task(lasting[0].call("was_left"))
    async with asyncio.timeout(WAIT_S):
        while not (beat := await lasting[0].heartbeat()).doing:  # noqa: ASYNC110 - another process begins
            await asyncio.sleep(0.01)
        async with aclosing(lasting[0].peer().each("endless")) as items:
            await anext(items)
            both = (await lasting[0].heartbeat()).doing
        assert await leaving
        assert (await lasting[1].heartbeat()).doing == ""
    assert re.match(r"was_left for \d+ s, no progress for \d+ s$", beat.doing)
    assert re.search(r"; 1 × endless for \d+ s$", both)


@on_their_loop
async def test_columns_stay_behind_references_and_are_read_by_the_rank_that_needs_them(
    lasting: list[RayWorker],
) -> None:
    samples = put_samples(3, 9, 5, 1)
    columns = await ranks(lasting).logprobs_plus(samples, 100.0)
    assert all(isinstance(column.handle, ray.ObjectRef) for column in columns)
    values = [ray.get(column.handle)[column.index] for column in columns]
    assert [len(v) for v in values] == [3, 9, 5, 1]
    assert [float(v[0]) for v in values] == [103.0, 109.0, 105.0, 101.0]
    with_columns = [replace(s, columns={"ref_logprobs": column}) for s, column in zip(samples, columns, strict=True)]
    # Rank zero answers for its share, the longest sample: the three others, which share a prompt, are as much.
    assert await ranks(lasting).columns_seen(with_columns) == [109.0]


@on_their_loop
async def test_what_a_peer_iterates_over_ends_where_it_runs_when_it_is_left_early(lasting: list[RayWorker]) -> None:
    peer = lasting[1].peer()  # another test has left the first one's
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


@on_their_loop
async def test_tokens_in_files_are_read_by_the_rank_that_needs_them_wherever_they_are(
    lasting: list[RayWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray starts a process for the task that reads."""
    here = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    files = TokenFiles("episode-worker-0", TokenPlace(here, tmp_path), here)
    samples = [sample(files.write(group_tokens(n, float(n))), n, n) for n in (3, 9)]
    columns = await ranks(lasting).logprobs_plus(samples, 100.0)
    assert [float(ray.get(column.handle)[column.index][0]) for column in columns] == [103.0, 109.0]
    reading = ray_worker._read.options(scheduling_strategy=ray_worker._on(ray_worker._alive()[here]["NodeID"]))
    elsewhere = ray.get(reading.remote([TokenPart(s.tokens, (0,)) for s in samples]))
    assert [len(tokens[0].ids) for tokens in elsewhere] == [3, 9]
    files.remove([samples[0].tokens])
    with pytest.raises(TokensLost, match=r"tokens of 1 groups .*--resume RUN`"):
        await ranks(lasting).lengths_fetched([samples[0]])


@on_their_loop
@pytest.mark.parametrize("where", ["on a machine that Ray has no more", "removed from a machine that Ray has"])
async def test_large_groups_of_a_lost_machine_are_read_in_the_journal(
    lasting: list[RayWorker], tmp_path: Path, where: str
) -> None:
    """Ray starts a process for the task that reads."""
    here = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    host = here if where.startswith("removed") else "10.0.0.2"
    files = TokenFiles("episode-worker-1", TokenPlace("10.0.0.1", tmp_path / "headway-run-1"), host)
    journal = CompletionJournal(JournalWriter(tmp_path, "episode-worker-1", groups_per_block=4, sync_s=None))
    samples = [sample(files.write(group_tokens(n, 0.0), partial(journal.keep, n)), n, n) for n in (SMALL, SMALL + 1)]
    files.remove([one.tokens for one in samples])
    assert await lasting[0].call("lengths_fetched", samples) == [SMALL, SMALL + 1]
    ((path, _), _) = (one.tokens.copy for one in samples)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TokensLost, match=f"tokens of 1 groups were on {host}.*journal lacks them"):
        await lasting[0].call("lengths_fetched", samples)


@pytest.mark.slow
async def test_a_roles_own_error_arrives_as_it_was_raised_though_the_other_rank_hangs(workers: list[RayWorker]) -> None:
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(UpdateFailed, match=r"^rank 1 was told to fail$"):
            await ranks(workers).fail_on(1)


@on_their_loop
@pytest.mark.slow
async def test_a_foreign_error_names_the_worker_the_method_and_the_log(lasting: list[RayWorker]) -> None:
    with pytest.raises(RunError, match=r"worker echo-\d failed in 'raise_foreign': KeyError: 'lost'.*echo-\d\.log"):
        await ranks(lasting).raise_foreign()


async def test_a_killed_worker_is_named_by_the_call_that_was_waiting_for_it(workers: list[RayWorker]) -> None:
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(WorkerDied, match=r"worker echo-0 died.*'die'.*echo-0\.log.*memory had run out"):
            await workers[0].call("die")
    assert (await workers[1].call("describe"))["rank"] == 1


def test_a_worker_that_ray_ended_for_lack_of_memory_died_and_the_message_is_one_line() -> None:
    worker = RayWorker.__new__(RayWorker)  # not started
    worker.name, worker.pid, worker.log_file = "rollout-0", 7, Path("rollout-0.log")
    worker._killed, worker._ray, worker._node = False, None, None
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


@pytest.mark.slow
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


@pytest.mark.slow
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
