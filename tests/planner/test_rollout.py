"""What a simulated replica generates when: schedules that can be computed by hand."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace

import pytest

from headway.data.interfaces.rollout import OnUpdate, Priority
from headway.data.types import FinishReason, TrajectoryId
from headway.planner.simulation.processor_sharing import SharedContext, SimulatedCall
from headway.planner.simulation.simulated_rollout import SimulatedRollout
from headway.planner.simulation.virtual_clock import run_virtual
from tests.planner.replica import calls, generate, in_order, load, now, paused, replica, submit

# ---------------------------------------------------------------------------------------------- decoding


def test_two_answers_share_the_step_until_the_shorter_one_ends():
    async def main() -> list[tuple[int, float, float]]:
        engine = replica(lambda row, k: (4, 10)[k], decode=[(1, 1.0), (2, 3.0)])
        done = in_order(await generate(engine, calls(0, n=2)))
        return [(t.length, t.started, t.finished) for t in done]

    assert run_virtual(main()) == [(4, 3.0, 12.0), (10, 3.0, 18.0)], "4 steps of 3 s, then 6 of 1 s"


def test_whoever_joins_between_two_steps_slows_the_others_from_then_on():
    async def main() -> list[tuple[float, float]]:
        engine = replica(lambda row, k: (4, 2)[row], decode=[(1, 1.0), (2, 2.0)])
        first = submit(engine, calls(0))
        await asyncio.sleep(1.5)
        second = submit(engine, calls(1))
        return [(t.started, t.finished) for t in in_order([*await first, *await second])]

    # 1.5 tokens alone, then two tokens of both in 4 s, then the last half token alone.
    assert run_virtual(main()) == [(1.0, 6.0), (3.5, 5.5)]


def test_every_cached_token_makes_the_step_longer():
    async def main() -> tuple[float, float]:
        engine = replica(3, slots=1, step_s=1.0, kv_token_s=0.25)
        (done,) = in_order(await generate(engine, calls(0, prompt_tokens=4)))
        return done.started, done.finished

    assert run_virtual(main()) == (2.0, 3 * 1.0 + 0.25 * (4 + 5 + 6))


def test_slots_bound_what_decodes_at_once():
    async def main() -> list[tuple[int, float, float]]:
        done = await generate(replica(prefill_s=0.5), *(calls(i) for i in range(3)))
        return [(t.number, t.started, t.finished) for t in done]

    assert run_virtual(main()) == [(0, 0.625, 2.5), (100, 0.625, 2.5), (200, 3.125, 5.0)]


def test_an_answer_is_cut_at_the_most_tokens_that_were_asked_for():
    async def main() -> list[tuple[int, FinishReason]]:
        engine = replica(lambda row, k: (5, 6, 7)[k], slots=3)
        return [(t.length, t.finish_reason) for t in in_order(await generate(engine, calls(0, 3, max_tokens=6)))]

    assert run_virtual(main()) == [(5, "stop"), (6, "length"), (6, "length")]


def test_a_finished_call_says_what_was_sampled():
    async def main() -> None:
        for done in await generate(replica(slots=4), calls(7, n=2, prompt_tokens=5)):
            assert (done.length, done.version_spans, done.tokens) == (16, [[0, 0]], None)

    run_virtual(main())


def test_calls_that_end_at_one_moment_come_in_one_batch_and_others_do_not_wait_for_them():
    async def main() -> list[tuple[float, list[int]]]:
        engine = replica(lambda row, k: 9 - row, slots=8)
        await engine.submit("me", [call for row in range(3) for call in calls(row, n=2)])
        batches = []
        async for batch in engine.finished("me"):
            batches.append((now(), [call.number for call in batch]))
            assert {call.started for call in batch} == {0.125}, "a wave starts together"
            if len(batches) == 3:
                break
        return batches

    assert run_virtual(main()) == [(0.875, [200, 201]), (1.0, [100, 101]), (1.125, [0, 1])]


def test_what_was_finished_before_anybody_listened_is_there():
    async def main() -> list[list[int]]:
        engine = replica(lambda row, k: 8 + 8 * k)
        await engine.submit("me", calls(0, n=2))
        await asyncio.sleep(5)
        batches = aiter(engine.finished("me"))
        return [[call.number for call in await anext(batches)] for _ in range(2)]

    assert run_virtual(main()) == [[0], [1]]


def test_clients_get_their_own_calls_whatever_numbers_others_use():
    async def main() -> list[list[tuple[int, int]]]:
        engine = replica(lambda row, k: 4 + row, slots=4)
        tasks = [submit(engine, [replace(calls(row)[0], number=5)], client=f"client {row}") for row in range(3)]
        return [[(done.number, done.length) for done in await task] for task in tasks]

    assert run_virtual(main()) == [[(5, 4)], [(5, 5)], [(5, 6)]]


# ---------------------------------------------------------------------------------------------- prefill


def test_a_prompt_is_prefilled_once_for_all_answers_also_for_those_that_start_later():
    async def main() -> tuple[list[float], int]:
        engine = replica(8, slots=2, prefill_s=1.0, prefill_token_s=0.25)
        done = in_order(await generate(engine, calls(0, n=3, prompt_tokens=4)))
        return [t.started - 0.125 for t in done], (await engine.stats()).prefilled_tokens

    # 1 s and 4 tokens for two of them, one second of decoding, and then the third, at once.
    assert run_virtual(main()) == ([2.0, 2.0, 3.0], 4)


def test_decoding_waits_while_the_replica_prefills():
    async def main() -> list[float]:
        engine = replica(8, prefill_s=1.0)
        first = submit(engine, calls(0))
        await asyncio.sleep(1.5)
        second = submit(engine, calls(1))
        return [t.finished for t in in_order([*await first, *await second])]

    assert run_virtual(main()) == [3.0, 3.5]


def test_what_comes_during_a_prefill_is_prefilled_after_it():
    async def main() -> list[float]:
        engine = replica(8, slots=3, prefill_s=1.0)
        first = submit(engine, calls(0))
        await asyncio.sleep(0.25)
        later = [submit(engine, calls(number)) for number in (1, 2)]
        await asyncio.gather(first, *later)
        return [t.finished for task in (first, *later) for t in in_order(await task)]

    assert run_virtual(main()) == [3.0, 3.0, 3.0], "two prefills, then a second of decoding for all"


def test_a_prefill_for_nobody_is_broken_off():
    async def main() -> float:
        engine = replica(8, slots=1, prefill_s=1.0)
        aborted, other = submit(engine, calls(0), client="me"), submit(engine, calls(1))
        await asyncio.sleep(0.5)
        await engine.abort("me", [0])
        await aborted
        (done,) = in_order(await other)
        return done.finished

    assert run_virtual(main()) == 2.5


def test_a_call_that_comes_while_another_of_its_prompt_is_open_finds_the_context_in_the_cache():
    async def main() -> tuple[list[int], list[int], tuple[int, int]]:
        engine = replica(lambda row, k: 8 + 8 * k, slots=4, prefill_s=1.0)
        first = submit(engine, calls(0, n=2)[:1])
        await asyncio.sleep(1.5)
        second = submit(engine, calls(0, n=2)[1:], calls(1))
        found = [done.cached for done in in_order([*await first, *await second])]
        # Nobody has the first prompt open any more.
        again = [done.cached for done in await generate(engine, calls(0))]
        stats = await engine.stats()
        return found, again, (stats.prefilled_tokens, stats.cached_tokens)

    assert run_virtual(main()) == ([0, 4, 0], [0], (4 + 4 + 4, 4))


def test_a_prefill_that_an_abort_broke_off_leaves_nothing_in_the_cache():
    async def main() -> tuple[list[float], int]:
        engine = replica(8, slots=1, prefill_s=1.0)
        generating = submit(engine, calls(0, n=2), client="me")
        await asyncio.sleep(0.5)
        await engine.abort("me", [0])
        return [done.finished for done in in_order(await generating)], (await engine.stats()).prefilled_tokens

    assert run_virtual(main()) == ([0.5, 2.5], 4)


# ---------------------------------------------------------------------------------------------- further calls


async def second_call(engine: SimulatedRollout, *, tokens: int, later: float = 1.0) -> int:
    """What the second call of an episode, with a context of ``tokens``, finds of the first one's."""
    await engine.submit("me", calls(0, goes_on=True))
    batches = aiter(engine.finished("me"))
    await anext(batches)
    await asyncio.sleep(later)
    await engine.submit("me", calls(0, prompt_tokens=tokens, key=1))
    ((done,),) = [await anext(batches)]
    return done.cached


def test_a_further_call_of_an_episode_finds_context_and_continuation_of_the_one_before():
    async def main() -> tuple[int, float, tuple[int, int]]:
        engine = replica(slots=1, prefill_token_s=0.25)
        found = await second_call(engine, tokens=4 + 16 + 2)
        stats = await engine.stats()
        return found, now(), (stats.prefilled_tokens, stats.cached_tokens)

    assert run_virtual(main()) == (20, 1.0 + 2.0 + 1.0 + 0.5 + 2.0, (4 + 2, 20))


def test_of_a_call_that_does_not_go_on_nothing_is_kept_nor_of_an_episode_that_is_released():
    async def main() -> list[int]:
        engine = replica(slots=1)
        await engine.submit("me", [*calls(0), *calls(1, goes_on=True)])
        batches = aiter(engine.finished("me"))
        await anext(batches)
        await anext(batches)
        await engine.release([TrajectoryId(0, 1, 0, 0), TrajectoryId(7, 7, 7, 7)])
        await engine.submit("me", [*calls(0, prompt_tokens=22, key=1), *calls(1, prompt_tokens=22, key=1)])
        return [done.cached for _ in range(2) for done in await anext(batches)]

    assert run_virtual(main()) == [0, 0]


@pytest.mark.parametrize(
    ("policies", "found"),
    [
        ([OnUpdate.DRAIN], 0),
        ([OnUpdate.INTERRUPT], 0),
        ([OnUpdate.KEEP], 20),
        ([OnUpdate.DRAIN, OnUpdate.KEEP], 20),
        ([OnUpdate.KEEP, OnUpdate.INTERRUPT], 0),
        ([OnUpdate.INTERRUPT, OnUpdate.KEEP], 0),
    ],
)
@pytest.mark.parametrize("during", ["the call", "the time between calls"])
def test_what_one_version_has_computed_is_for_the_next_only_what_it_goes_on_from_in_place(
    policies: list[OnUpdate], found: int, during: str
):
    async def main() -> int:
        engine = replica(slots=1)
        second = asyncio.ensure_future(second_call(engine, tokens=22))
        await asyncio.sleep(1 if during == "the call" else 2.5)
        pauses = [asyncio.ensure_future(engine.pause(policy)) for policy in policies]
        await asyncio.gather(*pauses)
        await load(engine, 1)
        await engine.resume()
        return await second

    # An interrupted call is prefilled again under the version that it ends with.
    again = 20 if during == "the call" and OnUpdate.INTERRUPT in policies else found
    assert run_virtual(main()) == again


def test_what_is_kept_gives_way_to_what_decodes():
    async def main() -> list[int]:
        found = []
        for tokens in (36, 37):
            engine = replica(slots=2, kv_tokens=4 + 16 + tokens)
            second = asyncio.ensure_future(second_call(engine, tokens=22, later=10.0))
            await asyncio.sleep(3)
            await generate(engine, calls(1, prompt_tokens=21))  # 37 tokens at its end
            found.append(await second)
        return found

    assert run_virtual(main()) == [0, 20]


# ---------------------------------------------------------------------------------------------- the cache's limit


def test_the_youngest_gives_way_when_the_cache_is_full_and_keeps_its_tokens():
    async def main() -> tuple[list[tuple[int, float, list[list[int]]]], int]:
        engine = replica(10, slots=3, step_s=1.0, kv_tokens=20, prefill_token_s=0.5)
        done = in_order(await generate(engine, calls(0), calls(1)))
        return [(t.length, t.finished, t.version_spans) for t in done], (await engine.stats()).prefilled_tokens

    # 4 s of prefill; six steps fill the cache (2·(4 + 6) = 20); the older one decodes its last four alone, and then the
    # other's 4 + 6 tokens are prefilled for 5 s, before its last four.
    assert run_virtual(main()) == ([(10, 14.0, [[0, 0]]), (10, 23.0, [[0, 0]])], 8 + 10)


def test_a_preempted_answer_is_the_next_to_start():
    async def main() -> list[float]:
        engine = replica(10, slots=2, step_s=1.0, kv_tokens=20)
        return [t.finished for t in in_order(await generate(engine, *(calls(i) for i in range(3))))]

    # 0 and 1 fill the cache at 6; 1 waits until 0 ends at 10; then 1 (10 tokens) and 2 (4) fill it again after 3 steps,
    # and 2 waits for 1 to end at 14.
    assert run_virtual(main()) == [10.0, 14.0, 21.0]


def test_one_answer_alone_may_be_larger_than_the_cache():
    async def main() -> list[float]:
        engine = replica(10, slots=2, step_s=1.0, kv_tokens=6)
        return [t.finished for t in in_order(await generate(engine, calls(0), calls(1)))]

    assert run_virtual(main()) == [10.0, 20.0]


def test_validation_makes_training_give_way_and_not_itself():
    async def main() -> tuple[float, float]:
        engine = replica(10, slots=2, step_s=1.0, kv_tokens=20)
        training = submit(engine, calls(0))
        await asyncio.sleep(2)
        validation = submit(engine, calls(0, priority=Priority.VALIDATION))
        return in_order(await validation)[0].finished, in_order(await training)[0].finished

    # At 2 they have 6 and 4 tokens; at 7, 11 and 9, and no step fits; training goes on at 12.
    assert run_virtual(main()) == (12.0, 15.0)


def test_validation_starts_before_waiting_training_requests():
    async def main() -> list[float]:
        engine = replica(slots=1, prefill_s=0.5)
        training = submit(engine, calls(0), calls(1))
        await asyncio.sleep(1)
        (held_out,) = await generate(engine, calls(2, priority=Priority.VALIDATION))
        return [t.finished for t in in_order([*await training, held_out])]

    assert run_virtual(main()) == [2.5, 7.5, 5.0]


def test_validation_that_does_not_fit_is_not_overtaken_by_training_that_would():
    async def main() -> tuple[float, float]:
        engine = replica(10, slots=3, step_s=1.0, kv_tokens=40)
        running = submit(engine, calls(0, prompt_tokens=4))
        await asyncio.sleep(1)
        validation = submit(engine, calls(0, priority=Priority.VALIDATION, prompt_tokens=36))
        training = submit(engine, calls(1, prompt_tokens=4))
        await running
        return in_order(await validation)[0].started, in_order(await training)[0].started

    assert run_virtual(main()) == (11.0, 21.0)


# ---------------------------------------------------------------------------------------------- accounting


def test_busy_spans_and_slot_time_are_those_since_the_last_report():
    async def main() -> None:
        engine = replica(lambda row, k: (4, 8)[k], step_s=0.25, prefill_s=0.5)
        await asyncio.sleep(1)
        generating = submit(engine, calls(0, n=2))
        await asyncio.sleep(1)
        first = await engine.stats()
        assert (first.busy, first.slot_seconds, first.running, first.waiting) == ([(1.0, 2.0)], 2.0, 2, 0)
        assert (first.generated_tokens, first.prefilled_tokens) == (4, 4)
        await generating
        await asyncio.sleep(1)
        await generate(engine, calls(1))
        second = await engine.stats()
        assert second.busy == [(2.0, 3.5), (4.5, 6.0)]
        assert second.slot_seconds == 2 * 0.5 + 1.0 + 1.5
        assert (second.generated_tokens, second.prefilled_tokens) == (2 + 2 + 4 + 4, 4)
        assert (second.running, second.waiting, second.version) == (0, 0, 0)

    run_virtual(main())


def test_a_report_in_the_middle_of_a_step_counts_no_token_twice():
    async def main() -> list[int]:
        engine = replica(6, slots=3, step_s=1.0)
        generating = submit(engine, calls(0, n=3))
        counts = []
        for _ in range(5):
            await asyncio.sleep(0.6)
            counts.append((await engine.stats()).generated_tokens)
        async with paused(engine, OnUpdate.KEEP):  # at 3.0, with three tokens each
            await asyncio.sleep(1)
        await asyncio.sleep(0.9)
        counts.append((await engine.stats()).generated_tokens)
        async with paused(engine, OnUpdate.KEEP):  # nine tenths of a step are lost
            counts.append((await engine.stats()).generated_tokens)
        await generating
        return [*counts, (await engine.stats()).generated_tokens]

    counts = run_virtual(main())
    assert sum(counts) == 18
    assert min(counts) >= 0


def test_work_that_follows_at_once_makes_one_busy_span():
    async def main() -> list[tuple[float, float]]:
        engine = replica()
        for number in range(3):
            await generate(engine, calls(number))
        return (await engine.stats()).busy

    assert run_virtual(main()) == [(0.0, 6.0)]


def test_a_pause_is_not_busy_time():
    async def main() -> list[tuple[float, float]]:
        engine = replica()
        generating = submit(engine, calls(0))
        await asyncio.sleep(1)
        async with paused(engine, OnUpdate.KEEP):
            await asyncio.sleep(1)
        await generating
        return (await engine.stats()).busy

    assert run_virtual(main()) == [(0.0, 1.0), (2.0, 3.0)]


@pytest.mark.slow
def test_the_memory_of_finished_calls_is_freed_without_the_garbage_collector():
    """Looks at all objects of the process, several times."""

    def held() -> int:
        return sum(isinstance(thing, SimulatedCall | SharedContext) for thing in gc.get_objects())

    async def main() -> int:
        engine = replica(slots=4)
        gc.disable()
        try:
            await generate(engine, *(calls(i, n=4) for i in range(8)))
            return held()
        finally:
            gc.enable()

    gc.collect()
    before = held()  # what an earlier test of this process may still hold
    assert run_virtual(main()) <= before


def test_it_runs_on_the_walls_clock_too():
    async def main() -> tuple[float, float]:
        began = asyncio.get_running_loop().time()
        (done,) = in_order(await generate(replica(10, step_s=1e-3, prefill_s=1e-3), calls(0)))
        return done.started - began, done.finished - done.started

    first, rest = asyncio.run(main())
    assert first >= 2e-3
    assert rest >= 9e-3 - 1e-6
