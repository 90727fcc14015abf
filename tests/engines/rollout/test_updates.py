"""Updates that arrive at any time, meet each other, or break: what is served stays one whole version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
import torch

from headway.data.interfaces.rollout import OnUpdate
from headway.engines.rollout.native.engine import NativeEngine
from headway.engines.weights.incoming_version import BackBuffer
from headway.engines.weights.protocols import Chunk, HostCopy, IncomingWeights, WeightSink
from headway.errors import RunError, UpdateFailed
from tests.engines.rollout.serving import MODEL, WAIT_S, Source, collect, endless, outgoing, serving
from tests.engines.rollout.support import assert_logprobs, make_model, make_request
from tests.tiers import mostly_slow

NEW = make_model(seed=3)
either_buffer = pytest.mark.parametrize("dual_buffer", [True, False], ids=["dual", "in place"])


async def wait_until_running(engine: NativeEngine) -> None:
    async with asyncio.timeout(WAIT_S):
        while not (await engine.stats()).running:
            pass


@asynccontextmanager
async def staging(source: Source, engine: NativeEngine, version: int) -> AsyncIterator[asyncio.Task[Any]]:
    """While the engine receives ``version``, and the sender has nothing to send yet."""
    source.go.clear()
    source.entered.clear()
    task = asyncio.create_task(engine.stage_weights(version))
    assert await asyncio.to_thread(source.entered.wait, WAIT_S)
    try:
        yield task
    finally:
        source.go.set()
        await asyncio.gather(task, return_exceptions=True)


# ------------------------------------------------------------------------------------------ when it arrives


async def running(engine: NativeEngine) -> None:
    """Nothing is asked of the engine."""


async def draining(engine: NativeEngine) -> None:
    drain = asyncio.create_task(engine.pause(OnUpdate.DRAIN))
    await asyncio.sleep(0)
    drain.cancel()
    assert await engine._ask(lambda core: core.draining)


async def paused(engine: NativeEngine) -> None:
    await engine.pause(OnUpdate.INTERRUPT)


async def asleep(engine: NativeEngine) -> None:
    await engine.pause(OnUpdate.INTERRUPT)
    await engine.sleep()


async def asleep_without_weights(engine: NativeEngine) -> None:
    await engine.pause(OnUpdate.INTERRUPT)
    await engine.sleep(keep_weights=False)


States = Callable[[NativeEngine], Awaitable[None]]


@mostly_slow(
    "enter", [running, draining, paused, asleep, asleep_without_weights], quick=[running, asleep_without_weights]
)
async def test_with_a_back_buffer_an_update_may_arrive_at_any_time(enter: States) -> None:
    async with serving(Source(NEW), slots=4) as engine:
        assert engine.capabilities.double_buffered
        waiting = asyncio.create_task(collect(engine, [endless(0), endless(1), endless(2)]))
        await wait_until_running(engine)
        await enter(engine)
        await engine.stage_weights(1)
        await engine.pause(OnUpdate.INTERRUPT)
        await engine.activate(1)
        await engine.wake()
        await engine.resume()
        assert_logprobs(await waiting, {0: MODEL, 1: NEW})
        assert_logprobs(await collect(engine, [make_request(3)]), {1: NEW})


@pytest.mark.parametrize("enter", [running, draining])
async def test_in_place_an_update_is_refused_while_anything_decodes(enter: States) -> None:
    async with serving(Source(NEW), slots=4, dual_buffer=False) as engine:
        assert not engine.capabilities.double_buffered
        waiting = asyncio.create_task(collect(engine, [endless(0), endless(1), endless(2)]))
        await wait_until_running(engine)
        await enter(engine)
        with pytest.raises(UpdateFailed, match=r"not paused; call pause\(\)"):
            await engine.stage_weights(1)
        await engine.resume()
        assert_logprobs(await waiting, {0: MODEL})


@mostly_slow("enter", [paused, asleep, asleep_without_weights], quick=[paused, asleep_without_weights])
async def test_in_place_an_update_arrives_while_nothing_decodes(enter: States) -> None:
    async with serving(Source(NEW), slots=4, dual_buffer=False) as engine:
        waiting = asyncio.create_task(collect(engine, [endless(0), endless(1)]))
        await wait_until_running(engine)
        await enter(engine)
        report = await engine.stage_weights(1)
        assert report.nbytes == sum(p.nbytes for p in NEW.parameters())
        await engine.activate(1)
        await engine.wake()
        await engine.resume()
        assert_logprobs(await waiting, {0: MODEL, 1: NEW})
        assert_logprobs(await collect(engine, [make_request(3)]), {1: NEW})


async def test_with_a_back_buffer_decoding_may_resume_between_staging_and_activating() -> None:
    async with serving(Source(NEW)) as engine:
        await engine.pause(OnUpdate.KEEP)
        await engine.stage_weights(1)
        await engine.resume()
        assert_logprobs(await collect(engine, [make_request(0)]), {0: MODEL})
        await engine.activate(1)
        assert_logprobs(await collect(engine, [make_request(0)]), {1: NEW})


async def test_in_place_what_has_come_is_not_sampled_from_before_it_is_stamped() -> None:
    async with serving(Source(NEW), dual_buffer=False) as engine:
        await engine.pause(OnUpdate.KEEP)
        await engine.stage_weights(1)
        waiting = asyncio.create_task(collect(engine, [make_request(0)]))
        with pytest.raises(RunError, match=r"cannot resume: .*version 1's, .*activate\(1\)"):
            await engine.resume()
        with pytest.raises(UpdateFailed, match="version 1 is staged"):
            await engine.activate(2)
        await engine.activate(1)
        with pytest.raises(UpdateFailed, match="nothing is staged"):
            await engine.activate(1)
        await engine.resume()
        assert_logprobs(await waiting, {1: NEW})


@either_buffer
async def test_a_version_that_was_staged_and_not_activated_is_replaced_by_the_next(dual_buffer: bool) -> None:
    async with serving(Source(NEW), dual_buffer=dual_buffer) as engine:
        await engine.pause(OnUpdate.KEEP)
        await engine.stage_weights(1)
        await engine.stage_weights(2)
        with pytest.raises(UpdateFailed, match="version 2 is staged"):
            await engine.activate(1)
        await engine.activate(2)
        with pytest.raises(UpdateFailed, match="nothing is staged"):
            await engine.activate(2)
        await engine.resume()
        assert_logprobs(await collect(engine, [make_request(0)]), {2: NEW})


# ------------------------------------------------------------------------------------------ two at once


@either_buffer
async def test_an_update_that_meets_another_is_told_what_to_wait_for(dual_buffer: bool) -> None:
    source = Source(NEW)
    async with serving(source, dual_buffer=dual_buffer) as engine:
        await engine.pause(OnUpdate.KEEP)
        async with staging(source, engine, 1) as first:
            with pytest.raises(UpdateFailed, match="still receiving version 1; receiving version 2"):
                await engine.stage_weights(2)
            with pytest.raises(UpdateFailed, match="still receiving version 1; loading version 1"):
                await engine.activate(1)
        await first
        await engine.activate(1)


async def test_in_place_nothing_resumes_sleeps_or_probes_while_weights_are_written() -> None:
    source = Source(NEW)
    async with serving(source, dual_buffer=False) as engine:
        await engine.pause(OnUpdate.KEEP)
        async with staging(source, engine, 1) as first:
            waiting = asyncio.create_task(collect(engine, [make_request(0)]))
            for call, doing in ((engine.resume(), "resume"), (engine.sleep(), "sleep"), (engine.probe(), "probe")):
                with pytest.raises(RunError, match=f"cannot {doing}: version 1 is being written"):
                    await call
            await engine.pause(OnUpdate.INTERRUPT)
            await engine.wake()
        await first
        await engine.activate(1)
        await engine.resume()
        assert_logprobs(await waiting, {1: NEW})


async def test_a_cancelled_update_in_place_goes_on_and_is_there_when_it_ends() -> None:
    source = Source(NEW)
    async with serving(source, dual_buffer=False) as engine:
        await engine.pause(OnUpdate.KEEP)
        async with staging(source, engine, 1) as first:
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            with pytest.raises(UpdateFailed, match="still receiving version 1"):
                await engine.stage_weights(2)
        assert engine._updates is not None
        await asyncio.to_thread(engine._updates._thread.submit(lambda: None).result, WAIT_S)  # behind the first
        await engine.activate(1)
        await engine.resume()
        assert_logprobs(await collect(engine, [make_request(0)]), {1: NEW})


async def test_an_engine_that_is_closed_receives_nothing_more() -> None:
    async with serving(Source(NEW), dual_buffer=False) as engine:
        await engine.pause(OnUpdate.KEEP)
        await engine.close()
        with pytest.raises(RunError, match="is closed"):
            await engine.stage_weights(1)


# ------------------------------------------------------------------------------------------ what goes wrong


class Faulty(Source):
    """Sends every bucket, but one of them not as it should."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.faulty = True

    def receive(self, version: int, incoming: IncomingWeights) -> None:
        (sink,) = incoming.expect([incoming.manifest])
        weights = outgoing(self.model, self.manifest)
        for chunk in weights:
            if self.faulty and chunk.header.index == 2:
                self.fault(chunk, sink)
            else:
                self.put(chunk, sink)
        sink.ended(weights.digests)

    def put(self, chunk: Chunk, sink: WeightSink) -> None:
        sink.room(chunk.header).copy_(chunk.payload)
        sink.filled(chunk.header)

    def fault(self, chunk: Chunk, sink: WeightSink) -> None:
        raise NotImplementedError


class Corrupting(Faulty):
    """Flips a bit, which only the digests can tell."""

    def fault(self, chunk: Chunk, sink: WeightSink) -> None:
        chunk.payload[5] ^= 1
        # The digests were taken when the chunk was drawn.
        self.put(chunk, sink)


class Losing(Faulty):
    def fault(self, chunk: Chunk, sink: WeightSink) -> None:
        pass


class Repeating(Faulty):
    def fault(self, chunk: Chunk, sink: WeightSink) -> None:
        self.put(chunk, sink)
        self.put(chunk, sink)


class Ending(Faulty):
    """Says that this was all."""

    def fault(self, chunk: Chunk, sink: WeightSink) -> None:
        sink.ended([])
        raise Cut

    def receive(self, version: int, incoming: IncomingWeights) -> None:
        with suppress(Cut):
            super().receive(version, incoming)


class Cut(Exception):
    pass


every_fault = pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Corrupting, "not those that the trainer sent"),
        pytest.param(Losing, "bucket 2, .* is due", marks=pytest.mark.slow),
        pytest.param(Repeating, "bucket 3, .* is due", marks=pytest.mark.slow),
        (Ending, r"ended after \d+ of \d+ bytes"),
    ],
)


@every_fault
async def test_with_a_back_buffer_the_old_version_is_served_on_after_a_fault(fault: type[Faulty], message: str) -> None:
    source = fault(NEW)
    async with serving(source) as engine:
        with pytest.raises(UpdateFailed, match=message):
            await engine.stage_weights(1)
        with pytest.raises(UpdateFailed, match="nothing is staged"):
            await engine.activate(1)
        assert_logprobs(await collect(engine, [make_request(0)]), {0: MODEL})
        source.faulty = False
        await engine.stage_weights(2)
        await engine.activate(2)
        assert_logprobs(await collect(engine, [make_request(0)]), {2: NEW})


@every_fault
async def test_in_place_torn_weights_serve_nobody_until_a_whole_version_has_come(
    fault: type[Faulty], message: str
) -> None:
    source = fault(NEW)
    async with serving(source, dual_buffer=False) as engine:
        await engine.pause(OnUpdate.KEEP)
        with pytest.raises(UpdateFailed, match=message):
            await engine.stage_weights(1)
        waiting = asyncio.create_task(collect(engine, [make_request(0)]))
        for version in (0, 1):
            with pytest.raises(UpdateFailed, match=r"cannot activate .* torn: .*version 1\b"):
                await engine.activate(version)
        for call in (engine.resume, engine.probe):
            with pytest.raises(RunError, match=r"torn: .*stage and activate"):
                await call()
        # Asleep and awake again they are no less torn.
        await engine.sleep()
        await engine.wake()
        with pytest.raises(RunError, match="torn"):
            await engine.resume()
        source.faulty = False
        await engine.stage_weights(2)
        await engine.activate(2)
        await engine.resume()
        assert_logprobs(await waiting, {2: NEW})


async def test_in_place_a_sender_that_never_begins_tears_nothing() -> None:
    source = Source(NEW)
    source.break_after = 0
    async with serving(source, dual_buffer=False) as engine:
        await engine.pause(OnUpdate.KEEP)
        with pytest.raises(UpdateFailed, match="the sender is gone"):
            await engine.stage_weights(1)
        with pytest.raises(UpdateFailed, match="nothing is staged"):
            await engine.activate(1)
        await engine.resume()
        assert_logprobs(await collect(engine, [make_request(0)]), {0: MODEL})


async def test_torn_weights_that_another_sender_does_not_begin_to_mend_stay_torn() -> None:
    source = Source(NEW)
    async with serving(source, dual_buffer=False) as engine:
        await engine.pause(OnUpdate.KEEP)
        for source.break_after in (2, 0):
            with pytest.raises(UpdateFailed, match="the sender is gone"):
                await engine.stage_weights(1)
        with pytest.raises(RunError, match=r"cannot resume: .*torn: .*version 1\b"):
            await engine.resume()


async def test_torn_weights_are_refused_by_the_decoding_step_itself() -> None:
    source = Source(NEW)
    source.break_after = 2
    async with serving(source, dual_buffer=False) as engine:
        await engine.pause(OnUpdate.KEEP)
        with pytest.raises(UpdateFailed):
            await engine.stage_weights(1)
        with pytest.raises(RunError, match=r"cannot decode: .*torn"):
            await engine._ask(lambda core: core.step())


# ------------------------------------------------------------------------------------------ from another's copy


class Elsewhere:
    """A receiver's end that is told where another process of the machine has each version."""

    def __init__(self) -> None:
        self.source = Source(NEW)
        self.manifest = self.source.manifest
        self.owner = BackBuffer(self.manifest)
        self.copy: HostCopy

    def has(self, version: int) -> None:
        report = self.owner.fill(version, partial(self.source.receive, version))
        assert report.path is not None
        self.copy = HostCopy(version, report.path, report.checksum)

    def receive(self, version: int, incoming: IncomingWeights) -> None:
        incoming.found(self.copy)


def from_elsewhere(elsewhere: Elsewhere) -> AbstractAsyncContextManager[NativeEngine]:
    return serving(receive=elsewhere.receive, manifest=elsewhere.manifest)


async def test_a_version_that_was_written_over_before_it_is_loaded_is_not_and_the_old_one_is_served_on() -> None:
    elsewhere = Elsewhere()
    async with from_elsewhere(elsewhere) as engine:
        elsewhere.has(1)
        assert (await engine.stage_weights(1)).nbytes == 0
        elsewhere.has(2)
        with pytest.raises(UpdateFailed, match=r"activate version 1: nothing is staged"):
            await engine.activate(1)
        assert_logprobs(await collect(engine, [make_request(0)]), {0: MODEL})
        await engine.stage_weights(2)
        await engine.activate(2)
        assert_logprobs(await collect(engine, [make_request(0)]), {2: NEW})


async def test_a_version_that_is_written_over_while_it_is_loaded_serves_nobody_until_a_whole_one_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere = Elsewhere()
    async with from_elsewhere(elsewhere) as engine:
        elsewhere.has(1)
        await engine.stage_weights(1)
        await engine.pause(OnUpdate.KEEP)
        assert engine._updates is not None
        write = engine._updates.write
        assert write is not None

        def meanwhile(buffer: BackBuffer) -> None:
            elsewhere.has(2)
            write(buffer)

        with monkeypatch.context() as patch:
            patch.setattr(engine._updates, "write", meanwhile)
            with pytest.raises(UpdateFailed, match="version 1 was written over"):
                await engine.activate(1)
        for call in (engine.resume, engine.probe):
            with pytest.raises(RunError, match=r"torn: .*stage and activate"):
                await call()
        await engine.stage_weights(2)
        await engine.activate(2)
        await engine.resume()
        assert_logprobs(await collect(engine, [make_request(0)]), {2: NEW})
