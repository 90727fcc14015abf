"""Groups out of calls: who is asked what, and what becomes of groups whose replica leaves, refuses or aborts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headway.agents.episodes.episode_worker import EpisodeWorker
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import Completion, GenerateRequest, Priority, SamplingParams
from headway.data.journal import CompletionJournal, JournalWriter
from headway.data.types import FinishReason, Prompt, SampledTokens, TrajectoryId
from headway.errors import DataError, RunError, WorkerDied
from headway.planner.simulation.virtual_clock import run_virtual

SAMPLING = SamplingParams(16)


class ScriptedEngine:
    """Takes calls and finishes those that a test names."""

    def __init__(self, name: str, slots: int = 4) -> None:
        self.name = name
        self.slots = slots
        self.calls: dict[int, GenerateRequest] = {}
        self.messages: list[list[int]] = []
        """Numbers of the calls of each `submit`."""
        self.aborted: list[int] = []
        self.refuses: DataError | None = None
        self._batches: asyncio.Queue[list[Completion] | WorkerDied] = asyncio.Queue()

    async def submit(self, client: str, calls: Sequence[GenerateRequest]) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.messages.append([call.number for call in calls])
        self.calls.update((call.number, call) for call in calls)

    async def finished(self, client: str) -> AsyncIterator[Sequence[Completion]]:
        while True:
            batch = await self._batches.get()
            if isinstance(batch, WorkerDied):
                raise batch
            yield batch

    async def abort(self, client: str, numbers: Sequence[int]) -> None:
        self.aborted += numbers
        self.finish([number for number in numbers if number in self.calls], FinishReason.ABORTED)

    async def release(self, trajectories: Sequence[TrajectoryId]) -> None: ...

    def finish(self, numbers: Sequence[int], reason: FinishReason = FinishReason.STOP, version: int = 0) -> None:
        """Finish these calls in one step, each with two tokens: its row and its k."""
        batch = []
        for number in numbers:
            id = self.calls.pop(number).trajectory
            ids = np.array([id.row, id.k], np.int32)
            tokens = SampledTokens(ids, np.zeros(2, np.float32), np.full(2, version, np.int32))
            batch.append(Completion(number, 2, [[0, version]], reason, 0.0, 1.0, tokens))
        self._batches.put_nowait(batch)

    def finish_all(self, version: int = 0) -> None:
        self.finish(list(self.calls), version=version)

    def die(self) -> None:
        self._batches.put_nowait(WorkerDied(f"{self.name} was killed"))


def request(number: int, n: int = 2, priority: Priority = Priority.TRAINING) -> Group:
    ids = np.arange(3, dtype=np.int32)
    return Group(number, Prompt(0, number, 0, "test", "", ids), n, SAMPLING, priority)


@asynccontextmanager
async def worker_of(
    *engines: ScriptedEngine, gather_s: float = 0.0, journal: CompletionJournal | None = None
) -> AsyncGenerator[EpisodeWorker, None]:
    worker = EpisodeWorker("episode-worker", lambda ids: " ".join(map(str, ids)), gather_s=gather_s, journal=journal)
    for engine in engines:
        await worker.join(engine)
    await worker.route([engine.name for engine in engines])
    yield worker
    await worker.close()


class Asked:
    """A `generate` call under way, and the groups that it has given."""

    def __init__(self, worker: EpisodeWorker, requests: Sequence[Group], on: str | None = None) -> None:
        self.groups: list[Group] = []
        self.task = asyncio.ensure_future(self._read(worker.generate(requests, on=on)))

    async def _read(self, groups: AsyncIterator[Group]) -> None:
        async for group in groups:
            self.groups.append(group)

    @property
    def numbers(self) -> list[int]:
        return [group.number for group in self.groups]


async def settle() -> None:
    """Let everything happen that waits for no time."""
    await asyncio.sleep(1)


def test_a_wave_is_one_message_and_each_group_comes_when_its_last_answer_does():
    async def main() -> None:
        engine = ScriptedEngine("a", slots=64)
        async with worker_of(engine) as worker:
            asked = Asked(worker, [request(0), request(1, n=3)])
            await settle()
            assert engine.messages == [[1, 2, 3, 4, 5]]
            engine.finish([1, 4, 5])
            await settle()
            assert asked.numbers == []
            engine.finish([2])
            engine.finish([3])
            await asked.task
            assert asked.numbers == [0, 1]
            trajectories = asked.groups[1].trajectories
            assert [t.id.k for t in trajectories] == [0, 1, 2]
            assert [t.text for t in trajectories] == ["1 0", "1 1", "1 2"]
            assert [r.ids.tolist() for r in asked.groups[1].tokens] == [[1, 0], [1, 1], [1, 2]]
            assert asked.groups[1].tokens[0].prompt_ids.tolist() == [0, 1, 2]

    run_virtual(main())


def test_a_baseline_is_one_more_answer_with_a_sampling_of_its_own():
    async def main() -> None:
        engine, greedy = ScriptedEngine("a"), SamplingParams(16, temperature=0.0)
        async with worker_of(engine) as worker:
            asked = Asked(worker, [Group(0, request(0).prompt, 2, SAMPLING, baseline_sampling=greedy)])
            await settle()
            assert [call.sampling for call in engine.calls.values()] == [SAMPLING, SAMPLING, greedy]
            engine.finish_all()
            await asked.task
            assert len(asked.groups[0].trajectories) == 3

    run_virtual(main())


def test_the_text_of_an_answer_is_without_the_stop_token_that_ended_it():
    async def main() -> None:
        engine, sampling = ScriptedEngine("a"), SamplingParams(16, stop_token_ids=(1,))
        async with worker_of(engine) as worker:
            asked = Asked(worker, [Group(3, request(3).prompt, 2, sampling)])
            await settle()
            engine.finish_all()  # each with its row and its k
            await asked.task
            assert [one.text for one in asked.groups[0].trajectories] == ["3 0", "3"]

    run_virtual(main())


def test_the_calls_of_a_replica_that_leaves_are_asked_of_another_and_finished_ones_stay():
    async def main() -> None:
        a, b = ScriptedEngine("a"), ScriptedEngine("b")
        async with worker_of(a, b) as worker:
            asked = Asked(worker, [request(0, n=3), request(1)])
            await settle()
            assert (len(a.calls), len(b.calls)) == (3, 2)
            a.finish([1])
            await settle()
            await worker.leave("a")
            await settle()
            assert sorted(call.trajectory[1:] for call in b.calls.values()) == [
                (0, 0, 1),
                (0, 0, 2),
                (1, 0, 0),
                (1, 0, 1),
            ]
            b.finish_all()
            await asked.task
            assert [t.replica for t in next(g for g in asked.groups if g.number == 0).trajectories] == ["a", "b", "b"]

    run_virtual(main())


def test_without_a_replica_that_takes_calls_they_wait_for_one():
    async def main() -> None:
        a, b = ScriptedEngine("a"), ScriptedEngine("b")
        async with worker_of(a) as worker:
            asked = Asked(worker, [request(0)])
            await settle()
            await worker.leave("a")
            await worker.join(b)
            await settle()
            assert not b.calls, "it is not routed to yet"
            await worker.route(["b"])
            await settle()
            b.finish_all()
            await asked.task
            assert asked.numbers == [0]

    run_virtual(main())


def test_groups_that_belong_to_one_replica_end_with_it():
    async def main() -> None:
        a, b = ScriptedEngine("a"), ScriptedEngine("b")
        async with worker_of(a, b) as worker:
            asked = Asked(worker, [request(0), request(1)], on="a")
            await settle()
            assert len(a.calls) == 4
            await worker.leave("a")
            with pytest.raises(WorkerDied, match="a is gone"):
                await asked.task
            with pytest.raises(WorkerDied, match="a is gone"):
                await Asked(worker, [request(0)], on="a").task
            await settle()
            assert not b.calls

    run_virtual(main())


def test_a_call_that_an_engine_ends_ends_its_group_and_no_other():
    async def main() -> None:
        engine = ScriptedEngine("a", slots=64)
        async with worker_of(engine) as worker:
            asked = Asked(worker, [request(0, n=3), request(1)])
            await settle()
            engine.finish([1])
            engine.finish([2], FinishReason.ABORTED)
            await settle()
            assert engine.aborted == [3]
            reasons = [t.finish_reason for t in asked.groups[0].trajectories]
            assert reasons == [FinishReason.STOP, FinishReason.ABORTED, FinishReason.ABORTED]
            engine.finish_all()
            await asked.task
            assert asked.numbers == [0, 1]

    run_virtual(main())


def test_training_groups_are_aborted_whether_their_calls_run_or_wait():
    async def main() -> None:
        first, second = ScriptedEngine("a", slots=64), ScriptedEngine("b", slots=64)
        async with worker_of(first, second) as worker:
            await worker.route(["a"])
            running = Asked(worker, [request(0), request(1)])
            validating = Asked(worker, [request(0, priority=Priority.VALIDATION)])
            await settle()
            await worker.route(["b"])
            waiting = Asked(worker, [request(2)])
            await settle()
            first.finish([1, 5])
            second.finish([7])
            await settle()
            await worker.route([])
            await worker.leave("b")
            await worker.abort_older_than(1)
            await settle()
            assert (running.numbers, waiting.numbers, validating.numbers) == ([0], [2], [])
            reasons = [t.finish_reason for t in waiting.groups[0].trajectories]
            assert reasons == [FinishReason.STOP, FinishReason.ABORTED]
            first.finish_all()
            await asyncio.gather(running.task, validating.task)

    run_virtual(main())


def test_a_group_with_an_old_token_in_a_finished_call_is_aborted():
    async def main() -> None:
        engine = ScriptedEngine("a", slots=64)
        async with worker_of(engine) as worker:
            asked = Asked(worker, [request(0), request(1)])
            await settle()
            engine.finish([1], version=3)
            engine.finish([3], version=4)
            await settle()
            await worker.abort_older_than(4)
            await settle()
            assert asked.numbers == [0]
            engine.finish_all(version=5)
            await asked.task

    run_virtual(main())


def test_whoever_leaves_early_has_the_rest_aborted_and_others_go_on():
    async def main() -> None:
        engine = ScriptedEngine("a", slots=64)
        async with worker_of(engine) as worker:
            asked, other = Asked(worker, [request(0), request(1)]), Asked(worker, [request(2)])
            await settle()
            asked.task.cancel()
            await settle()
            assert sorted(engine.aborted) == [1, 2, 3, 4]
            engine.finish_all()
            await other.task
            assert other.numbers == [2]

    run_virtual(main())


def test_what_an_engine_refuses_is_raised_where_it_was_asked_for():
    async def main() -> None:
        engine = ScriptedEngine("a")
        async with worker_of(engine) as worker:
            engine.refuses = DataError("row 0: too long")
            with pytest.raises(DataError, match="row 0: too long"):
                await Asked(worker, [request(0)]).task
            engine.refuses = None
            asked = Asked(worker, [request(1)])
            await settle()
            engine.finish_all()
            await asked.task

    run_virtual(main())


def test_a_replica_that_fails_is_reported_once():
    async def main() -> None:
        engine = ScriptedEngine("a")
        async with worker_of(engine) as worker:
            asked = Asked(worker, [request(0)])
            await settle()
            engine.die()
            replica, error = await anext(worker.failures())
            assert (replica, str(error)) == ("a", "a was killed")
            worker.end(error)
            with pytest.raises(WorkerDied, match="a was killed"):
                await asked.task

    run_virtual(main())


# ---------------------------------------------------------------------------------------------- gathering


def test_whole_groups_are_gathered_for_a_while_unless_none_is_being_made_any_more():
    async def main() -> None:
        engine = ScriptedEngine("a", slots=64)
        async with worker_of(engine, gather_s=10.0) as worker:
            asked = Asked(worker, [request(number) for number in range(4)])
            await settle()
            engine.finish([1, 2])
            await settle()
            assert asked.numbers == [0]  # nothing was handed on in the last ten seconds
            engine.finish([3, 4])
            await settle()
            engine.finish([5, 6])
            await asyncio.sleep(7)
            assert asked.numbers == [0]
            await asyncio.sleep(2)
            assert asked.numbers == [0, 1, 2]
            engine.finish([7, 8])
            await settle()
            assert asked.numbers == [0, 1, 2, 3]  # the last one

    run_virtual(main())


def test_a_gathered_group_is_handed_on_before_the_episode_workers_end_and_dropped_with_whoever_asked_for_it():
    async def main() -> None:
        engine = ScriptedEngine("a", slots=64)
        async with worker_of(engine, gather_s=10.0) as worker:
            left, ended = Asked(worker, [request(0), request(1)]), Asked(worker, [request(2), request(3)])
            await settle()
            engine.finish([1, 2])
            await settle()
            engine.finish([3, 4])
            engine.finish([5, 6])
            await settle()
            left.task.cancel()
            await settle()
            worker.end(DataError("enough"))
            with pytest.raises(DataError, match="enough"):
                await ended.task
            assert left.numbers == [0]
            assert ended.numbers == [2]

    run_virtual(main())


def test_a_group_that_cannot_be_put_together_fails_for_whoever_waits_for_it():
    async def main() -> None:
        engine = ScriptedEngine("a", slots=64)
        async with worker_of(engine, gather_s=10.0) as worker:
            worker.decode = lambda ids: str(1 // 0)
            asked = Asked(worker, [request(0)])
            await settle()
            engine.finish_all()
            with pytest.raises(RunError, match="episode-worker, group 0: ZeroDivisionError"):
                await asked.task

    run_virtual(main())


def test_finished_calls_of_a_lost_worker_are_not_asked_for_again(tmp_path: Path):
    """Of the lost worker's two calls one was finished: the other one alone is asked for."""

    def journal(name: str) -> CompletionJournal:
        return CompletionJournal(JournalWriter(tmp_path, name, groups_per_block=4, sync_s=None))

    async def main() -> None:
        first, second = ScriptedEngine("a"), ScriptedEngine("b")
        async with worker_of(first, journal=journal("lost")) as worker:
            Asked(worker, [request(5)])
            await settle()
            first.finish([1], version=3)
            await settle()
        async with worker_of(second, journal=journal("other")) as worker:
            asked = Asked(worker, [replace(request(5), again=True)])
            await settle()
            assert [call.trajectory.k for call in second.calls.values()] == [1]
            second.finish_all(version=4)
            await asked.task
        of_first, of_second = asked.groups[0].trajectories
        assert (of_first.text, of_first.replica, of_first.version_spans) == ("5 0", "a", [[0, 3]])
        assert (of_second.text, of_second.replica, of_second.version_spans) == ("5 1", "b", [[0, 4]])

    run_virtual(main())


def test_groups_of_a_lost_worker_are_looked_for_in_one_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A block's files may be large, and its groups many."""
    read, reads = CompletionJournal._read, []
    monkeypatch.setattr(CompletionJournal, "_read", lambda self, block: reads.append(block) or read(self, block))
    journal = CompletionJournal(JournalWriter(tmp_path, "other", groups_per_block=4, sync_s=None))

    async def main() -> None:
        engine = ScriptedEngine("a", slots=64)
        async with worker_of(engine, journal=journal) as worker:
            asked = Asked(worker, [replace(request(number), again=True) for number in (4, 5, 6, 8)])
            await settle()
            engine.finish_all()
            await asked.task

    run_virtual(main())
    assert reads == [1, 2]
