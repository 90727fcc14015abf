"""The asyncio face: commands between steps, results across the thread, and every way in which it can end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import TypeVar

import pytest
import torch

from headway.agents.episodes.episode_worker import local_episode_worker
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import OnUpdate, Priority
from headway.data.types import FinishReason, TrajectoryId
from headway.engines.weights.incoming_version import BackBuffer
from headway.engines.weights.protocols import IncomingWeights
from headway.errors import DataError, ModelError, RunError, UpdateFailed, WorkerDied
from tests.engines.rollout.serving import MODEL, WAIT_S, Source, collect, endless, serving, until_asked
from tests.engines.rollout.support import (
    CONTEXT,
    assert_logprobs,
    decode,
    make_call,
    make_model,
    make_request,
    tokens_of,
)

T = TypeVar("T")


async def first(batches: AsyncIterator[T], count: int = 1) -> AsyncIterator[T]:
    for _ in range(count):
        yield await anext(batches)


async def everything(items: AsyncIterator[T]) -> list[T]:
    return [item async for item in items]


async def test_groups_are_yielded_as_they_finish() -> None:
    async with serving() as engine:
        groups = await collect(engine, [endless(0, n=1), make_request(1, n=1, max_tokens=2)])
        assert [g.number for g in groups] == [1, 0]
        assert {t.replica for g in groups for t in g.trajectories} == {"replica"}
        assert (await engine.stats()).waiting == 0


async def test_concurrent_calls_share_the_batch_and_get_their_own_groups() -> None:
    async with serving() as engine:
        calls = [collect(engine, [make_request(i), make_request(i + 10)]) for i in range(5)]
        results = await asyncio.gather(*calls)
        assert [sorted(g.number for g in groups) for groups in results] == [[i, i + 10] for i in range(5)]


@pytest.mark.slow
async def test_one_wave_gives_the_same_tokens_every_time() -> None:
    wave = [make_request(i) for i in range(6)]
    results = []
    for _ in range(2):
        async with serving() as engine:
            results.append(tokens_of(await collect(engine, wave)))
    assert results[0] == results[1]


async def test_a_request_that_cannot_be_served_fails_its_own_call_only() -> None:
    async with serving() as engine:
        running = asyncio.create_task(collect(engine, [make_request(0)]))
        with pytest.raises(DataError, match="room for a token"):
            await collect(engine, [make_request(1), make_request(2, length=CONTEXT)])
        assert [g.number for g in await running] == [0]


async def test_an_update_is_staged_while_decoding_and_activated_between_two_tokens() -> None:
    new = make_model(seed=3)
    source = Source(new)
    async with serving(source) as engine:
        generating = asyncio.create_task(collect(engine, [endless(0), endless(1)]))
        report = await engine.stage_weights(1)
        assert report.nbytes == source.manifest.nbytes
        assert (await engine.pause(OnUpdate.INTERRUPT)).interrupted in range(9)
        assert await engine.activate(1) >= 0
        await engine.resume()
        (after,) = await collect(engine, [make_request(2)])
        assert_logprobs([*await generating, after], {0: MODEL, 1: new})
        assert all((r.versions == 1).all() for r in after.tokens)
        assert (await engine.stats()).version == 1


async def test_decoding_goes_on_while_weights_are_received() -> None:
    source = Source(make_model(seed=3))
    source.go.clear()
    async with serving(source) as engine:
        staging = asyncio.create_task(engine.stage_weights(1))
        assert await asyncio.to_thread(source.entered.wait, WAIT_S)
        assert len(await collect(engine, [make_request(0)])) == 1
        with pytest.raises(UpdateFailed, match="still receiving"):
            await engine.stage_weights(2)
        with pytest.raises(UpdateFailed, match="still receiving"):
            await engine.activate(1)
        source.go.set()
        await staging
        await engine.activate(1)


async def test_a_cancelled_staging_blocks_the_next_one_only_until_its_thread_is_done() -> None:
    source = Source(make_model(seed=3))
    source.go.clear()
    async with serving(source) as engine:
        staging = asyncio.create_task(engine.stage_weights(1))
        assert await asyncio.to_thread(source.entered.wait, WAIT_S)
        staging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await staging
        with pytest.raises(UpdateFailed, match="still receiving"):
            await engine.stage_weights(2)
        source.go.set()
        await asyncio.to_thread(lambda: engine._updates._thread.submit(lambda: None).result(WAIT_S))  # behind the first
        await engine.stage_weights(2)
        await engine.activate(2)


async def test_nothing_is_received_while_the_back_buffer_is_copied_into_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Source(make_model(seed=3))
    async with serving(source) as engine:
        await engine.stage_weights(1)
        assert engine._updates is not None
        write, loading, go_on = engine._updates.write, threading.Event(), threading.Event()
        assert write is not None

        def slowly(buffer: BackBuffer) -> None:
            loading.set()
            assert go_on.wait(WAIT_S)
            write(buffer)

        monkeypatch.setattr(engine._updates, "write", slowly)
        activating = asyncio.create_task(engine.activate(1))
        assert await asyncio.to_thread(loading.wait, WAIT_S)
        with pytest.raises(UpdateFailed, match="still loading version 1; receiving version 2"):
            await engine.stage_weights(2)
        go_on.set()
        await activating
        await engine.stage_weights(2)


async def test_more_replicas_than_a_thread_pool_has_threads_can_receive_together() -> None:
    together = threading.Barrier(3)

    class Meeting(Source):
        def receive(self, version: int, incoming: IncomingWeights) -> None:
            together.wait(WAIT_S)
            super().receive(version, incoming)

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(serving(Meeting(make_model(seed=3)))) for _ in range(3)]
        await asyncio.gather(*(engine.stage_weights(1) for engine in engines))


async def test_a_broken_transfer_stages_nothing_and_the_old_version_is_served() -> None:
    source = Source(make_model(seed=3))
    source.break_after = 2
    async with serving(source) as engine:
        with pytest.raises(UpdateFailed, match="the sender is gone"):
            await engine.stage_weights(1)
        with pytest.raises(UpdateFailed, match="nothing is staged"):
            await engine.activate(1)
        (group,) = await collect(engine, [make_request(0)])
        assert group.trajectories[0].version_spans == [[0, 0]]
        source.break_after = None
        await engine.stage_weights(2)
        with pytest.raises(UpdateFailed, match="version 2 is staged"):
            await engine.activate(1)
        await engine.activate(2)


async def test_an_engine_without_a_transport_says_so() -> None:
    async with serving() as engine:
        with pytest.raises(RunError, match="without a weight transport"):
            await engine.stage_weights(1)
        with pytest.raises(RunError, match="without a weight transport"):
            await engine.activate(1)


def test_updates_that_do_not_fit_the_model_are_refused_at_the_start() -> None:
    async def make(model: torch.nn.Module) -> None:
        async with serving(Source(model)):
            pass

    with pytest.raises(ModelError, match="receiving model has shape"):
        asyncio.run(make(make_model(intermediate_size=40)))
    with pytest.raises(ModelError, match="no such tensor"):
        asyncio.run(make(make_model(num_hidden_layers=3)))
    with pytest.raises(ModelError, match="no such tensor"):
        asyncio.run(make(make_model(tied=False)))
    short = make_model()
    del short.model.layers[1]
    with pytest.raises(ModelError, match="leave out 11"):
        asyncio.run(make(short))


async def test_a_drain_returns_when_nothing_is_left_and_later_requests_wait_for_resume() -> None:
    async with serving(slots=2) as engine:
        before = asyncio.create_task(collect(engine, [make_request(0), make_request(1)]))
        await until_asked(engine)
        draining = asyncio.create_task(engine.pause(OnUpdate.DRAIN))
        await asyncio.sleep(0)
        later = asyncio.create_task(collect(engine, [make_request(2)]))
        assert (await draining).interrupted == 0
        assert (await engine.stats()).waiting == 4
        assert FinishReason.ABORTED not in {t.finish_reason for g in await before for t in g.trajectories}
        assert not later.done()
        await engine.resume()
        assert len(await later) == 1


async def test_validation_submitted_while_paused_waits_and_comes_first() -> None:
    async with serving(slots=4) as engine:
        await engine.pause(OnUpdate.KEEP)
        order: list[str] = []

        async def note(kind: str, request: Group) -> None:
            await collect(engine, [request])
            order.append(kind)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(note("training", make_request(0, stop_token_ids=())))
            tasks.create_task(note("validation", make_request(0, priority=Priority.VALIDATION, stop_token_ids=())))
            while (await engine.stats()).waiting < 8:
                pass
            assert not order
            await engine.resume()
        assert order == ["validation", "training"]


async def test_an_abort_lets_an_episode_worker_yield_what_there_is() -> None:
    async with serving(slots=2) as engine:
        async with local_episode_worker(engine, decode=decode) as worker:
            generating = asyncio.create_task(everything(worker.generate([endless(0), endless(1)])))
            while not generating.done():
                while (await engine.stats()).running < 2 and not generating.done():
                    pass
                await engine.abort_older_than(1)
            groups = await generating
        assert {t.finish_reason for g in groups for t in g.trajectories} >= {FinishReason.ABORTED}
        assert (await engine.stats()).waiting == 0


async def test_commands_without_effect_are_harmless() -> None:
    async with serving() as engine:
        await engine.resume()
        await engine.abort("nobody", [5])
        await engine.abort_older_than(3)
        await engine.release([TrajectoryId(0, 0, 0, 0)])
        for policy in OnUpdate:
            assert (await engine.pause(policy)).interrupted == 0
        await engine.sleep()
        await engine.wake()
        await engine.resume()
        assert await collect(engine, []) == []
        assert len(await collect(engine, [make_request(0)])) == 1


async def test_a_client_that_leaves_drops_its_calls_and_nothing_else() -> None:
    async with serving(slots=4) as engine:
        other = asyncio.create_task(collect(engine, [endless(7)]))
        await engine.submit("leaving", [make_call(make_request(0, max_tokens=1)), make_call(endless(1), number=1)])
        finished = engine.finished("leaving")
        async for batch in finished:
            assert [call.number for call in batch] == [0]
            break
        await finished.aclose()
        cancelled = asyncio.create_task(collect(engine, [endless(3)]))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert [g.number for g in await other] == [7]
        stats = await engine.stats()
        assert stats.running == stats.waiting == len(engine._inboxes) == 0
        assert len(engine._core._scheduler) == 0


async def test_a_client_that_comes_back_under_its_name_gets_its_new_calls_alone() -> None:
    async with serving(slots=4) as engine:
        await engine.submit("me", [make_call(endless(1))])
        reading = asyncio.create_task(everything(engine.finished("me")))
        await engine.stats()
        reading.cancel()
        await asyncio.wait([reading])
        await engine.submit("me", [make_call(make_request(2, max_tokens=3, stop_token_ids=()))])  # of the same number
        ((call,),) = [batch async for batch in first(engine.finished("me"))]
        assert (call.number, call.length) == (0, 3)
        assert (await engine.stats()).running == 0


async def test_calls_of_one_step_come_in_one_batch_whoever_asked_first() -> None:
    async with serving(slots=8) as engine:
        await engine.submit("early", [make_call(make_request(0, max_tokens=2), k, k) for k in range(4)])
        async with asyncio.timeout(WAIT_S):
            while (await engine.stats()).running:
                pass
            batches = [batch async for batch in first(engine.finished("early"))]
            late = asyncio.create_task(everything(first(engine.finished("late"))))
            await asyncio.sleep(0)
            await engine.submit("late", [make_call(make_request(1, max_tokens=3), k, 10 + k) for k in range(2)])
            batches += await late
        assert [sorted(call.number for call in batch) for batch in batches] == [[0, 1, 2, 3], [10, 11]]
        assert [[call.length for call in batch] for batch in batches] == [[2] * 4, [3] * 2]
        prompts = [len(make_request(number).prompt.token_ids) for number in range(2)]
        assert [sorted(call.cached for call in batch) for batch in batches] == [[0, *[prompts[0]] * 3], [0, prompts[1]]]


async def test_a_client_is_read_by_one_iterator() -> None:
    async with serving() as engine, asyncio.timeout(WAIT_S):
        await engine.submit("me", [make_call(make_request(0, max_tokens=1))])
        reading = engine.finished("me")
        await anext(reading)
        with pytest.raises(RunError, match="iterated over already"):
            await anext(engine.finished("me"))
        await reading.aclose()
        await engine.submit("me", [make_call(make_request(0, max_tokens=1))])
        assert [call.number for call in await anext(engine.finished("me"))] == [0]


async def test_a_number_that_an_open_call_has_is_refused() -> None:
    async with serving() as engine:
        await engine.pause(OnUpdate.KEEP)
        await engine.submit("me", [make_call(make_request(0))])
        for calls in ([make_call(make_request(1))], [make_call(make_request(1), number=2)] * 2):
            with pytest.raises(DataError, match="another of its open calls"):
                await engine.submit("me", calls)
        await engine.submit("you", [make_call(make_request(1))])
        assert (await engine.stats()).waiting == 2


async def test_old_calls_are_aborted_and_those_of_validation_are_not() -> None:
    source = Source(make_model(seed=3))
    async with serving(source, slots=2) as engine:
        calls = [make_call(endless(0), k, k) for k in range(3)]
        calls.append(make_call(endless(1, priority=Priority.VALIDATION), number=3))
        await engine.submit("me", calls)
        async with asyncio.timeout(WAIT_S):
            while (await engine.stats()).generated_tokens == 0:
                pass
            await engine.pause(OnUpdate.KEEP)
            await engine.stage_weights(1)
            await engine.activate(1)
            await engine.abort_older_than(1)
            ended = [call for batch in await everything(first(engine.finished("me"))) for call in batch]
        assert [(call.number, call.finish_reason) for call in ended] == [(0, FinishReason.ABORTED)]


async def test_a_cancelled_drain_leaves_the_engine_usable() -> None:
    async with serving() as engine:
        generating = asyncio.create_task(collect(engine, [endless(0)]))
        await until_asked(engine)
        draining = asyncio.create_task(engine.pause(OnUpdate.DRAIN))
        await asyncio.sleep(0)
        draining.cancel()
        await engine.resume()
        assert len(await generating) == 1
        assert len(await collect(engine, [make_request(1)])) == 1


async def test_the_end_of_the_thread_reaches_everyone_who_waits_and_everyone_who_comes_later() -> None:
    def explode(ids: object) -> str:
        raise OSError("no more text")

    async with serving(decode=explode, slots=1) as engine:
        requests = [make_request(0, n=1, max_tokens=2, stop=("stop",)), endless(1)]
        waiting = [asyncio.create_task(collect(engine, [request])) for request in requests]
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        for error in outcomes:
            assert isinstance(error, WorkerDied) and "OSError: no more text" in str(error)
            assert isinstance(error.__cause__, OSError)
        for call in (engine.resume(), engine.stats(), engine.pause(OnUpdate.DRAIN), collect(engine, [make_request(2)])):
            with pytest.raises(WorkerDied, match="no more text"):
                await call
        with pytest.raises(RunError):
            await engine.stage_weights(1)


async def test_an_update_that_breaks_half_way_ends_the_engine_and_its_own_caller_learns_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(Source(MODEL)) as engine:
        await engine.stage_weights(1)

        def fail(buffer: object) -> None:
            raise MemoryError("no room for the weights")

        assert engine._updates is not None
        monkeypatch.setattr(engine._updates, "write", fail)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(WorkerDied, match="no room for the weights"):
                await engine.activate(1)
            with pytest.raises(WorkerDied, match="no room for the weights"):
                await engine.resume()


async def test_closing_ends_waiting_calls_and_the_thread_and_can_be_repeated() -> None:
    async with serving() as engine:
        generating = asyncio.create_task(collect(engine, [endless(0)]))
        await engine.pause(OnUpdate.KEEP)
        await until_asked(engine)
        await engine.close()
        await engine.close()
        with pytest.raises(RunError, match="is closed"):
            await generating
        with pytest.raises(RunError, match="is closed"):
            await engine.resume()
        assert not any(thread.name.startswith("headway-decode") for thread in threading.enumerate())
