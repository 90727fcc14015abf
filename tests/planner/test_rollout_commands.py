"""The commands of `RolloutEngine`: what a simulated replica does when it is paused, updated, aborted, put to sleep."""

from __future__ import annotations

import asyncio

import pytest

from headway.data.interfaces.rollout import OnUpdate, Priority
from headway.data.interfaces.weights import ReceiveReport
from headway.data.types import FinishReason
from headway.errors import RunError, UpdateFailed
from headway.planner.simulation.simulated_rollout import SimulatedRollout
from headway.planner.simulation.virtual_clock import run_virtual
from tests.planner.replica import calls, generate, in_order, load, now, paused, replica, submit

CUTTING = [OnUpdate.INTERRUPT, OnUpdate.KEEP]

# ---------------------------------------------------------------------------------------------- pause and update


def test_drain_finishes_what_was_submitted_and_starts_nothing_that_came_later():
    async def main() -> tuple[float, float, int]:
        engine = replica(slots=1, prefill_s=0.5)
        before = submit(engine, calls(0), calls(1))
        await asyncio.sleep(1)
        pausing = asyncio.ensure_future(engine.pause(OnUpdate.DRAIN))
        await asyncio.sleep(0)
        after = submit(engine, calls(2))
        await pausing
        drained = now()
        assert [done.number for done in await before] == [0, 100]
        waiting = (await engine.stats()).waiting
        await engine.resume()
        (late,) = in_order(await after)
        return drained, late.finished, waiting

    assert run_virtual(main()) == (5.0, 7.5, 1)


def test_a_drain_of_an_idle_replica_ends_at_once():
    async def main() -> float:
        engine = replica()
        await engine.pause(OnUpdate.DRAIN)
        return now()

    assert run_virtual(main()) == 0.0


def test_a_drain_that_is_called_off_does_not_pretend_to_be_over():
    async def main() -> float:
        engine = replica()
        generating = submit(engine, calls(0))
        await asyncio.sleep(1)
        draining = asyncio.ensure_future(engine.pause(OnUpdate.DRAIN))
        await asyncio.sleep(0)
        await engine.resume()
        with pytest.raises(RunError, match="resumed before it had drained"):
            await draining
        return in_order(await generating)[0].finished

    assert run_virtual(main()) == 2.0


def test_a_drain_that_is_interrupted_ends_at_once():
    async def main() -> tuple[float, int]:
        engine = replica(prefill_s=0.5)
        generating = submit(engine, calls(0))
        await asyncio.sleep(1)
        draining = asyncio.ensure_future(engine.pause(OnUpdate.DRAIN))
        await asyncio.sleep(0)
        interrupted = (await engine.pause(OnUpdate.INTERRUPT)).interrupted
        await draining
        stopped = now()
        await engine.resume()
        await generating
        return stopped, interrupted

    assert run_virtual(main()) == (1.0, 1)


@pytest.mark.parametrize(("policy", "finished"), [(OnUpdate.INTERRUPT, 3.05), (OnUpdate.KEEP, 2.55)])
def test_an_interrupted_answer_keeps_its_tokens_and_goes_on_under_the_new_version(policy: OnUpdate, finished: float):
    async def main() -> tuple[list[list[int]], float, int, int]:
        engine = replica(prefill_s=0.5)
        generating = submit(engine, calls(0))
        await asyncio.sleep(1.3)  # half a second of prefill, six whole steps, and a bit
        async with paused(engine, policy) as interrupted:
            await load(engine, 1)
        (done,) = in_order(await generating)
        return done.version_spans, done.finished, done.length, interrupted

    spans, at, length, interrupted = run_virtual(main())
    assert spans == [[0, 0], [6, 1]]
    assert (length, interrupted) == (16, 1)
    assert at == pytest.approx(finished), "what it had is kept; an interrupted answer is prefilled again"


def test_after_an_interruption_each_answer_is_prefilled_with_its_own_tokens():
    async def main() -> int:
        engine = replica(slots=2, prefill_token_s=0.0)
        generating = submit(engine, calls(0, n=2, prompt_tokens=4))
        await asyncio.sleep(1)
        async with paused(engine, OnUpdate.INTERRUPT):
            pass
        await generating
        return (await engine.stats()).prefilled_tokens

    assert run_virtual(main()) == 4 + 2 * (4 + 8), "the shared prompt, then two prompts with eight tokens each"


@pytest.mark.parametrize("policy", CUTTING)
def test_a_prefill_that_a_pause_broke_off_starts_over(policy: OnUpdate):
    async def main() -> tuple[float, list[list[int]]]:
        engine = replica(prefill_s=0.5)
        generating = submit(engine, calls(0))
        await asyncio.sleep(0.25)
        async with paused(engine, policy) as interrupted:
            assert interrupted == 0, "nothing was sampled"
            await load(engine, 1)
            await asyncio.sleep(1)
        (done,) = in_order(await generating)
        return done.finished, done.version_spans

    assert run_virtual(main()) == (3.75, [[0, 1]]), "and a version counts only if a token was sampled under it"


def test_what_came_during_a_pause_starts_after_what_was_cut():
    async def main() -> list[float]:
        engine = replica(slots=1)
        cut = submit(engine, calls(0))
        await asyncio.sleep(1)
        async with paused(engine, OnUpdate.KEEP):
            late = submit(engine, calls(1, priority=Priority.VALIDATION))
            await asyncio.sleep(1)
        return [in_order(await task)[0].finished for task in (cut, late)]

    assert run_virtual(main()) == [3.0, 5.0]


def test_an_answer_that_ends_in_the_instant_of_the_pause_is_finished():
    async def main() -> tuple[int, FinishReason, float]:
        engine = replica()
        pausing = asyncio.get_running_loop().create_future()
        # Set before the engine's own timer, for the same instant.
        asyncio.get_running_loop().call_at(
            2.0, lambda: pausing.set_result(asyncio.ensure_future(engine.pause(OnUpdate.INTERRUPT)))
        )
        generating = submit(engine, calls(0))
        interrupted = (await (await pausing)).interrupted
        (done,) = in_order(await generating)
        return interrupted, done.finish_reason, done.finished

    assert run_virtual(main()) == (0, "stop", 2.0)


@pytest.mark.parametrize("policy", CUTTING)
def test_after_sleep_everything_that_was_cut_is_prefilled_again(policy: OnUpdate):
    async def main() -> int:
        engine = replica()
        generating = submit(engine, calls(0))
        await asyncio.sleep(1)
        async with paused(engine, policy):
            await engine.sleep()
            await load(engine, 1)
            with pytest.raises(RunError, match="asleep; call wake"):
                await engine.resume()
            await engine.wake()
        await generating
        return (await engine.stats()).prefilled_tokens

    assert run_virtual(main()) == 4 + 12


def test_a_replica_that_gave_its_weights_up_cannot_go_on_before_it_has_new_ones():
    async def main() -> list[int]:
        engine = replica()
        generating = submit(engine, calls(0))
        await asyncio.sleep(1)
        await engine.pause(OnUpdate.INTERRUPT)
        await engine.sleep(keep_weights=False)
        await engine.wake()
        with pytest.raises(RunError, match="resume without weights"):
            await engine.resume()
        await load(engine, 1)
        await engine.resume()
        (done,) = in_order(await generating)
        return [version for _, version in done.version_spans]

    assert run_virtual(main()) == [0, 1]


def test_a_replica_that_kept_its_weights_goes_on_with_them():
    async def main() -> list[list[int]]:
        engine = replica()
        generating = submit(engine, calls(0))
        await asyncio.sleep(1)
        async with paused(engine, OnUpdate.INTERRUPT):
            await engine.sleep(keep_weights=True)
            await engine.wake()
        (done,) = in_order(await generating)
        return done.version_spans

    assert run_virtual(main()) == [[0, 0]]


def test_there_is_nothing_to_probe():
    assert run_virtual(replica_probe()) is None


async def replica_probe() -> None:
    return await replica().probe()


def test_sleeping_and_waking_take_their_time_and_twice_is_once():
    async def main() -> list[float]:
        engine = replica(sleep_s=0.5, wake_s=0.25)
        await engine.pause(OnUpdate.DRAIN)
        times = []
        for command in (engine.wake, engine.sleep, engine.sleep, engine.wake, engine.wake):
            await command()
            times.append(now())
        return times

    assert run_virtual(main()) == [0.0, 0.5, 0.5, 0.75, 0.75]


def test_a_version_that_arrives_while_another_is_loaded_stays_staged():
    async def main() -> int:
        engine = replica(load_s=0.5)
        await engine.pause(OnUpdate.KEEP)
        await engine.stage_weights(1)
        loading = asyncio.ensure_future(engine.activate(1))
        await asyncio.sleep(0.25)
        await engine.stage_weights(2)
        await loading
        await engine.activate(2)
        return engine.version

    assert run_virtual(main()) == 2


def test_kept_answers_are_not_prefilled_again():
    async def main() -> int:
        engine = replica(prefill_s=0.5)
        generating = submit(engine, calls(0))
        await asyncio.sleep(1)
        async with paused(engine, OnUpdate.KEEP):
            pass
        await generating
        return (await engine.stats()).prefilled_tokens

    assert run_virtual(main()) == 4


def test_loading_takes_its_time_and_the_version_counts_from_its_end():
    async def main() -> tuple[float, int, int]:
        engine = replica(load_s=0.5)
        await engine.pause(OnUpdate.DRAIN)
        await engine.stage_weights(3)
        loading = asyncio.ensure_future(engine.activate(3))
        await asyncio.sleep(0.25)
        before = engine.version
        with pytest.raises(RunError, match="busy with load"):
            await engine.resume()
        return await loading, before, engine.version

    assert run_virtual(main()) == (0.5, 0, 3)


async def _refused(engine: SimulatedRollout, what: str) -> None:
    generating = submit(engine, calls(0))
    await asyncio.sleep(0.5)
    await engine.stage_weights(1)
    try:
        match what:
            case "activate while it decodes":
                await engine.activate(1)
            case "activate while it drains":
                draining = asyncio.ensure_future(engine.pause(OnUpdate.DRAIN))
                await asyncio.sleep(0)
                try:
                    await engine.activate(1)
                finally:
                    draining.cancel()
            case "activate what is not staged":
                await engine.pause(OnUpdate.KEEP)
                await engine.activate(2)
            case "sleep while it decodes":
                await engine.sleep()
            case "resume without a pause":
                await engine.resume()
    finally:
        generating.cancel()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("activate while it decodes", "told to load, .*not paused"),
        ("activate while it drains", "told to load, .*not paused, or still decodes"),
        ("activate what is not staged", "staged is version 1"),
        ("sleep while it decodes", "told to sleep, .*not paused"),
        ("resume without a pause", "not paused"),
    ],
)
def test_what_would_mix_two_versions_or_compute_asleep_is_refused(what: str, message: str):
    with pytest.raises(RunError, match=message):
        run_virtual(_refused(replica(), what))


def test_weights_that_did_not_arrive_are_not_staged():
    async def fails(name: str, version: int) -> ReceiveReport:
        raise UpdateFailed(f"{name} lost version {version}")

    async def main() -> None:
        engine = replica(receive=fails)
        await engine.pause(OnUpdate.KEEP)
        with pytest.raises(UpdateFailed, match="rollout-0 lost version 1"):
            await engine.stage_weights(1)
        with pytest.raises(UpdateFailed, match="nothing"):
            await engine.activate(1)

    run_virtual(main())


# ---------------------------------------------------------------------------------------------- abort


def test_aborted_calls_are_yielded_with_the_tokens_that_they_have():
    async def main() -> list[tuple[int, FinishReason, int, float]]:
        engine = replica(slots=1, step_s=0.3)
        generating = submit(engine, calls(0), calls(1), calls(2), client="me")
        await asyncio.sleep(1)
        await engine.abort("me", [0, 200, 200])
        return [(t.number, t.finish_reason, t.length, round(t.finished, 9)) for t in await generating]

    assert run_virtual(main()) == [(0, "aborted", 3, 1.0), (200, "aborted", 0, 1.0), (100, "stop", 16, 5.8)]


def test_what_was_aborted_at_one_moment_comes_in_one_batch():
    async def main() -> list[int]:
        engine = replica()
        await engine.submit("me", [*calls(0, n=2), *calls(1, n=2)])
        await asyncio.sleep(1)
        await engine.abort("me", [101, 0, 100])
        return [call.number for call in await anext(aiter(engine.finished("me")))]

    assert run_virtual(main()) == [101, 0, 100]


def test_what_had_finished_before_it_was_aborted_stays_finished():
    async def main() -> list[tuple[FinishReason, int]]:
        engine = replica(lambda row, k: (2, 99)[k])
        generating = submit(engine, calls(0, n=2), client="me")
        await asyncio.sleep(1)
        await engine.abort("me", [0, 1])
        return [(t.finish_reason, t.length) for t in in_order(await generating)]

    assert run_virtual(main()) == [("stop", 2), ("aborted", 8)]


def test_numbers_that_are_unknown_or_anothers_are_ignored():
    async def main() -> list[FinishReason]:
        engine = replica()
        generating = submit(engine, calls(0), client="me")
        await asyncio.sleep(1)
        await engine.abort("me", [17])
        await engine.abort("another", [0])
        return [t.finish_reason for t in in_order(await generating)]

    assert run_virtual(main()) == ["stop"]


def test_only_training_calls_with_a_token_of_an_older_version_are_overdue():
    async def main() -> list[tuple[int, FinishReason]]:
        engine = replica(lambda row, k: 2 if (row, k) == (2, 0) else 80, slots=3)
        # Of 2 one answer finishes under version 0, the other one and 1 decode under it; 3 waits for a slot.
        generating = submit(engine, calls(2, n=2), calls(1), calls(3), calls(0, priority=Priority.VALIDATION))
        await asyncio.sleep(1)
        await engine.abort_older_than(0)
        async with paused(engine, OnUpdate.INTERRUPT):
            await load(engine, 1)
        later = submit(engine, calls(4))
        await asyncio.sleep(1)
        await engine.abort_older_than(1)
        await asyncio.sleep(1)
        await engine.abort_older_than(1)
        return [(t.number, t.finish_reason) for t in in_order([*await generating, *await later])]

    assert run_virtual(main()) == [
        (0, "stop"),
        (100, "aborted"),
        (200, "stop"),
        (201, "aborted"),
        (300, "stop"),
        (400, "stop"),
    ]


def test_the_tokens_that_are_being_sampled_count_when_the_oldest_version_is_asked_for():
    async def main() -> list[FinishReason]:
        engine = replica(slots=3, step_s=1.0)
        generating = [submit(engine, calls(0))]
        await asyncio.sleep(1.5)
        generating.append(submit(engine, calls(1)))
        await asyncio.sleep(0.9)  # not yet a whole token
        await engine.abort_older_than(1)
        return [done.finish_reason for task in generating for done in await task]

    assert run_virtual(main()) == ["aborted", "stop"]


def test_leaving_drops_what_was_not_yielded_and_frees_its_slot():
    async def main() -> tuple[float, list[int]]:
        engine = replica(slots=1)
        left = submit(engine, calls(0), calls(1), client="me")
        other = submit(engine, calls(2))
        await asyncio.sleep(1)
        left.cancel()
        await asyncio.sleep(0)
        stats = await engine.stats()
        (done,) = await other
        return done.finished, [stats.running, stats.waiting]

    assert run_virtual(main()) == (3.0, [1, 0])


def test_leaving_gives_up_what_was_kept_for_the_clients_episodes():
    async def main() -> list[int]:
        engine = replica(slots=1)
        await generate(engine, calls(0, goes_on=True), client="me")
        return [done.cached for done in await generate(engine, calls(0, prompt_tokens=22, key=1), client="me")]

    assert run_virtual(main()) == [0]


# ---------------------------------------------------------------------------------------------- the end


def test_a_dead_replica_raises_from_every_call_those_under_way_included():
    async def never(name: str, version: int) -> ReceiveReport:
        await asyncio.Event().wait()
        raise AssertionError

    async def main() -> None:
        engine = replica(slots=1, receive=never)
        under_way = [
            submit(engine, calls(0)),
            submit(engine, calls(1)),
            asyncio.ensure_future(engine.stage_weights(1)),
        ]
        await asyncio.sleep(1)
        under_way.append(asyncio.ensure_future(engine.pause(OnUpdate.DRAIN)))
        await asyncio.sleep(0)
        engine.die(ConnectionError("gone"))
        later = [
            generate(engine, calls(2)),
            engine.pause(OnUpdate.DRAIN),
            engine.resume(),
            engine.stage_weights(1),
            engine.activate(1),
            engine.abort("me", [0]),
            engine.abort_older_than(1),
            engine.release([]),
            engine.sleep(),
            engine.wake(),
            engine.stats(),
        ]
        for call in (*under_way, *later):
            with pytest.raises(ConnectionError, match="gone"):
                await call

    run_virtual(main())


def test_a_receiving_call_can_be_cancelled():
    async def never(name: str, version: int) -> ReceiveReport:
        await asyncio.Event().wait()
        raise AssertionError

    async def main() -> None:
        engine = replica(receive=never)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.stage_weights(1), 5)
        await generate(engine, calls(0))

    run_virtual(main())


def test_a_closed_replica_says_so_to_whoever_still_waits():
    async def main() -> None:
        engine = replica()
        generating = submit(engine, calls(0))
        await asyncio.sleep(1)
        await engine.close()
        await engine.close()
        for call in (generating, engine.stats()):
            with pytest.raises(RunError, match="rollout-0 is closed"):
                await call

    run_virtual(main())
