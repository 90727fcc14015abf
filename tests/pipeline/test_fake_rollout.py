"""The fake replica keeps the contract of `RolloutEngine`: otherwise every test that uses it would prove nothing."""

from __future__ import annotations

import asyncio

import pytest

from headway.data.types import FinishReason
from headway.interfaces import FinishedGroup, GenerateRequest, OnUpdate, Priority, SamplingParams
from tests.pipeline.fakes import FakeRollout, Wire, prompt
from tests.pipeline.virtual_clock import run_virtual


def engine(length: int = 16, slots: int = 2, prefill_s: float = 0.5) -> FakeRollout:
    """16 tokens take two seconds."""
    return FakeRollout(wire=Wire(0), lengths=lambda _: length, slots=slots, prefill_s=prefill_s)


def request(number: int, n: int = 1, priority: Priority = Priority.TRAINING) -> GenerateRequest:
    return GenerateRequest(number, prompt(0, number), n, SamplingParams(max_tokens=99), priority)


async def generate(replica: FakeRollout, *requests: GenerateRequest) -> list[FinishedGroup]:
    return [finished async for finished in replica.generate(requests)]


async def load(replica: FakeRollout, version: int) -> None:
    await replica.stage_weights(version)
    await replica.activate(version)


def test_slots_bound_what_decodes_at_once():
    async def main() -> list[tuple[int, float, float]]:
        done = await generate(engine(), *(request(i) for i in range(3)))
        return [(g.number, t.started, t.finished) for g in done for t in g.trajectories]

    assert run_virtual(main()) == [(0, 0.625, 2.5), (1, 0.625, 2.5), (2, 3.125, 5.0)]


def test_validation_starts_before_waiting_training_requests():
    async def main() -> list[float]:
        replica = engine(slots=1)
        training = asyncio.ensure_future(generate(replica, request(0), request(1)))
        await asyncio.sleep(1)
        (held_out,) = await generate(replica, request(0, priority=Priority.VALIDATION))
        return [t.finished for g in [*await training, held_out] for t in g.trajectories]

    assert run_virtual(main()) == [2.5, 7.5, 5.0]


def test_drain_finishes_what_was_submitted_and_starts_nothing_that_came_later():
    async def main() -> tuple[float, float, list[int]]:
        replica = engine(slots=1)
        before = asyncio.ensure_future(generate(replica, request(0), request(1)))
        await asyncio.sleep(1)
        pausing = asyncio.ensure_future(replica.pause(OnUpdate.DRAIN))
        await asyncio.sleep(0)
        after = asyncio.ensure_future(generate(replica, request(2)))
        await pausing
        drained = asyncio.get_running_loop().time()
        assert [g.number for g in await before] == [0, 1]
        flying = await replica.in_flight()
        await replica.resume()
        (late,) = await after
        return drained, late.trajectories[0].finished, flying

    assert run_virtual(main()) == (5.0, 7.5, [2])


@pytest.mark.parametrize(("policy", "finished"), [(OnUpdate.INTERRUPT, 3.425), (OnUpdate.KEEP, 2.925)])
def test_an_interrupted_answer_keeps_its_tokens_and_goes_on_under_the_new_version(policy: OnUpdate, finished: float):
    async def main() -> tuple[list[list[int]], float, int, int]:
        replica = engine()
        generating = asyncio.ensure_future(generate(replica, request(0)))
        await asyncio.sleep(1.3)  # half a second of prefill, six whole steps, and a bit
        paused = await replica.pause(policy)
        await load(replica, 1)
        await replica.resume()
        ((done,),) = [g.trajectories for g in await generating]
        return done.version_spans, done.finished, done.length, paused.interrupted

    spans, at, length, interrupted = run_virtual(main())
    assert spans == [[0, 0], [6, 1]]
    assert (length, interrupted) == (16, 1)
    assert at == pytest.approx(finished), "what it had is kept; an interrupted answer is prefilled again"


def test_a_version_counts_only_once_a_token_was_sampled_under_it():
    async def main() -> list[list[int]]:
        replica = engine()
        generating = asyncio.ensure_future(generate(replica, request(0)))
        await asyncio.sleep(0.25)  # still in prefill: nothing was sampled
        assert (await replica.pause(OnUpdate.INTERRUPT)).interrupted == 0
        await load(replica, 1)
        await replica.resume()
        ((done,),) = [g.trajectories for g in await generating]
        return done.version_spans

    assert run_virtual(main()) == [[0, 1]]


def test_aborted_groups_are_yielded_too():
    async def main() -> list[tuple[int, FinishReason]]:
        replica = engine(slots=1)
        generating = asyncio.ensure_future(generate(replica, request(0), request(1), request(2)))
        await asyncio.sleep(1)
        await replica.abort([0, 2])
        return [(g.number, g.trajectories[0].finish_reason) for g in await generating]

    assert run_virtual(main()) == [(0, "aborted"), (2, "aborted"), (1, "stop")]


def test_loading_while_something_decodes_is_refused():
    async def main() -> None:
        replica = engine()
        generating = asyncio.ensure_future(generate(replica, request(0)))
        await asyncio.sleep(1)
        try:
            await load(replica, 1)
        finally:
            generating.cancel()

    with pytest.raises(AssertionError, match="loads while it decodes"):
        run_virtual(main())


def test_a_dead_replica_raises_from_every_call_those_under_way_included():
    async def main() -> None:
        replica = engine()
        generating = asyncio.ensure_future(generate(replica, request(0)))
        await asyncio.sleep(1)
        replica.die(ConnectionError("gone"))
        for call in (generating, replica.pause(OnUpdate.DRAIN), replica.stats()):
            with pytest.raises(ConnectionError):
                await call

    run_virtual(main())
