from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cluster.worker_group import Collect, Dispatch, WorkerGroup, register, registered
from headway.data.types import Column, Handle, TrainSample, TrajectoryId
from headway.errors import RunError, StallError, WorkerDied
from headway.planner.simulation.virtual_clock import run_virtual
from headway.runtime.progress import Heartbeat


class Doubler:
    @register(Dispatch.ONE_TO_ALL)
    def everywhere(self, value: int) -> None: ...

    @register(Dispatch.RANK_ZERO)
    def first(self, value: int) -> None: ...

    @register(Dispatch.SPLIT)
    def total(self, samples: Sequence[TrainSample], factor: int) -> None: ...

    @register(Dispatch.SPLIT, Collect.JOINED)
    def joined(self, samples: Sequence[TrainSample]) -> None: ...

    @register(Dispatch.SPLIT, Collect.COLUMNS)
    def columns(self, samples: Sequence[TrainSample]) -> None: ...

    @register(Dispatch.ONE_TO_ALL, files="exporting the model to")
    def export(self, path: Path) -> None: ...

    def private(self) -> None: ...


class Scripted:
    """A worker that records its calls and answers with its rank, when it is allowed to."""

    def __init__(self, rank: int, failure: Exception | None = None, hangs: bool = False) -> None:
        self.name = f"w{rank}"
        self.rank = rank
        self.calls: list[tuple[Any, ...]] = []
        self._failure = failure
        self._hangs = hangs
        self.death: WorkerDied | None = None

    async def up(self) -> None: ...

    async def call(self, method: str, *args: Any) -> Any:
        self.calls.append((method, *args))
        if self._failure is not None:
            raise self._failure
        if self._hangs:
            await asyncio.Event().wait()
        return self.rank

    async def keep(self, method: str, parts: Sequence[Sequence[int]], *args: Any) -> list[Handle[Any]]:
        """Its handles are the samples of each part."""
        await self.call(method, *args)
        return [(self.rank, [args[0][place] for place in part]) for part in parts]

    async def heartbeat(self) -> Heartbeat:
        return Heartbeat("")

    async def died(self) -> NoReturn:
        if self.death is not None:
            raise self.death
        await asyncio.Event().wait()
        raise AssertionError

    async def kill(self) -> None: ...


def group(*workers: Scripted) -> WorkerGroup:
    return WorkerGroup(Doubler, workers)


def samples(*lengths: int) -> list[TrainSample]:
    return [
        TrainSample(i, index=0, prompt_length=0, length=n, episode=TrajectoryId(0, i, 0, 0))
        for i, n in enumerate(lengths)
    ]


async def test_one_to_all_calls_every_rank_with_the_same_arguments_and_answers_with_rank_zeros_result() -> None:
    workers = [Scripted(0), Scripted(1), Scripted(2)]
    assert await group(*workers).everywhere(5) == 0
    assert [w.calls for w in workers] == [[("everywhere", 5)]] * 3


async def test_rank_zero_calls_nobody_else() -> None:
    workers = [Scripted(0), Scripted(1)]
    assert await group(*workers).first(5) == 0
    assert [w.calls for w in workers] == [[("first", 5)], []]


async def test_split_divides_the_samples_and_repeats_the_other_arguments() -> None:
    workers = [Scripted(0), Scripted(1)]
    given_samples = samples(8, 1, 1, 6)
    await group(*workers).total(given_samples, 3)
    (method, share0, factor), (_, share1, _) = workers[0].calls[0], workers[1].calls[0]
    assert (method, factor) == ("total", 3)
    assert sorted(s.tokens for s in share0 + share1) == [0, 1, 2, 3]
    assert {sum(s.length for s in share) for share in (share0, share1)} == {8}


async def test_a_rank_that_died_is_named_and_not_the_one_that_failed_for_it() -> None:
    failure = RunError("worker w0 failed: connection closed by peer")
    failure.__cause__ = RuntimeError("connection closed by peer")
    workers = [Scripted(0, failure), Scripted(1, hangs=True)]
    workers[1].death = WorkerDied("worker w1 died")
    with pytest.raises(WorkerDied, match="worker w1 died"):
        await group(*workers).everywhere(5)


class Sum(int):
    """A result to which other ranks' results can be added."""

    def joined(self, others: Sequence[int]) -> int:
        return self + sum(others)


async def test_joined_results_are_rank_zeros_with_what_the_others_add() -> None:
    workers = [Scripted(rank) for rank in range(3)]
    for worker in workers:
        worker.rank = Sum(10**worker.rank)
    assert await group(*workers).joined(samples(8, 1, 1, 6)) == 111
    assert await group(*workers[:1]).joined(samples(8)) == 1


@given(lengths=st.lists(st.integers(0, 50), max_size=20), ranks=st.integers(1, 4))
def test_columns_come_back_in_the_samples_order_and_point_into_the_right_ranks_result(
    lengths: list[int], ranks: int
) -> None:
    workers = [Scripted(rank) for rank in range(ranks)]
    given_samples = samples(*lengths)

    async def run() -> list[Column]:
        result: list[Column] = await group(*workers).columns(given_samples)
        return result

    columns = asyncio.run(run())
    assert len(columns) == len(given_samples)
    for sample, column in zip(given_samples, columns, strict=True):
        rank, kept = column.handle
        assert kept[column.index] is sample and sample in workers[rank].calls[0][1]
        assert {one.episode[:3] for one in kept} == {sample.episode[:3]}, "a handle is one group's"


async def test_between_its_begin_and_its_end_all_calls_find_the_episodes_of_a_batch_on_the_same_ranks() -> None:
    workers = [Scripted(0), Scripted(1)]
    ranks = group(*workers)
    fetch = samples(9, 2, 1, 8, 7, 3)
    await ranks.begin_batch([fetch[:3], fetch[3:]])
    await ranks.columns(fetch)
    for mini_batch in (fetch[:3], fetch[3:], fetch[:3]):
        await ranks.total(mini_batch, 1)
    for worker in workers:
        (_, all_of_it), *steps = worker.calls
        assert all(share.batch == 1 for _, share, *_ in worker.calls), "each call tells of which batch it is"
        for (_, share, _), mini_batch in zip(steps, (fetch[:3], fetch[3:], fetch[:3]), strict=True):
            assert share == [sample for sample in all_of_it if sample in mini_batch] != []
    with pytest.raises(KeyError):
        await ranks.total([replace(fetch[0], episode=TrajectoryId(0, 0, 1, 0))], 1)
    await ranks.end_batch()
    await ranks.total(samples(1, 1), 1)
    assert all(type(worker.calls[-1][1]) is list for worker in workers), "of no batch"


class OfAMesh(Scripted):
    """Keeps what it was asked to hand over: results that came back whole, and those of which it gave handles."""

    def __init__(self, rank: int) -> None:
        super().__init__(Sum(10**rank))
        self.came_back: list[str] = []
        self.kept: list[tuple[str, int]] = []

    async def call(self, method: str, *args: Any) -> Any:
        self.came_back.append(method)
        return await super().call(method, *args)

    async def keep(self, method: str, parts: Sequence[Sequence[int]], *args: Any) -> list[Handle[Any]]:
        self.kept.append((method, len(parts)))
        self.calls.append((method, *args))
        return [(self.rank, [args[0][place] for place in part]) for part in parts]


async def test_the_ranks_of_an_inner_mesh_compute_the_same_samples_and_the_first_has_the_results() -> None:
    workers = [OfAMesh(rank) for rank in range(6)]
    ranks = WorkerGroup(Doubler, workers, inner=2)
    fetch = samples(9, 2, 1, 8, 7, 3)
    await ranks.begin_batch([fetch])
    columns = await ranks.columns(fetch)
    assert await ranks.joined(fetch) == 10**0 + 10**2 + 10**4
    assert await ranks.total(fetch, 3) == 1
    shares = []
    for first, beside in zip(workers[::2], workers[1::2], strict=True):
        assert first.calls == beside.calls, "the same work"
        (_, share), (_, again), (_, once_more, factor) = first.calls
        assert share == again == once_more != [] and factor == 3
        shares.append(share)
        assert first.came_back == ["joined", "total"]
        assert beside.came_back == [], "what it computes is not sent to anybody"
        assert beside.kept == [("columns", 0), ("joined", 0), ("total", 0)]
    assert sorted(sample.tokens for share in shares for sample in share) == list(range(6))
    for sample, column in zip(fetch, columns, strict=True):
        rank, kept = column.handle
        assert kept[column.index] is sample and rank in (10**0, 10**2, 10**4)


async def test_a_rank_of_an_inner_mesh_that_fails_fails_the_call() -> None:
    workers = [Scripted(0, hangs=True), Scripted(1, KeyError("lost"))]
    with pytest.raises(KeyError, match="lost"):
        await asyncio.wait_for(WorkerGroup(Doubler, workers, inner=2).total(samples(8, 1), 1), 60)


async def test_the_first_rank_that_fails_fails_the_call_while_others_hang() -> None:
    with pytest.raises(KeyError, match="lost"):
        await asyncio.wait_for(group(Scripted(0, hangs=True), Scripted(1, KeyError("lost"))).everywhere(1), 60)


async def test_a_call_starts_at_once_and_can_be_awaited_later() -> None:
    worker = Scripted(0)
    future = group(worker).first(1)
    await asyncio.sleep(0)
    assert worker.calls == [("first", 1)]
    assert await future == 0


def test_only_registered_methods_are_there() -> None:
    assert set(registered(Doubler)) == {"everywhere", "first", "total", "joined", "columns", "export"}
    with pytest.raises(AttributeError, match="'private' is not a registered"):
        group(Scripted(0)).private()


async def test_a_path_is_sent_absolute_for_workers_run_in_another_directory() -> None:
    worker = Scripted(0)
    await group(worker).export(Path("model"))
    assert worker.calls == [("export", Path.cwd() / "model")]


def test_a_method_that_works_with_files_ends_when_nothing_moves_and_says_which_path() -> None:
    async def main() -> None:
        await group(Scripted(0, hangs=True), Scripted(1)).export(Path("/there/model"))

    with pytest.raises(StallError, match=r"/there/model is stuck: .*\(w0: idle; w1: idle\)"):
        run_virtual(main())
