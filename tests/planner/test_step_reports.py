"""A simulated replica tells of its steps, like a real one."""

from __future__ import annotations

import asyncio

import pytest

from headway.data.interfaces.rollout import EngineStats, OnUpdate
from headway.planner.simulation.virtual_clock import run_virtual

from .replica import calls, generate, replica

CURVE = [(1, 0.1), (2, 0.15), (4, 0.35)]


def seconds_in_steps(stats: EngineStats) -> float:
    return sum(s for _, s, _ in stats.decode_steps.values()) + sum(s for _, _, _, s, _ in stats.prefill_steps.values())


def test_steps_are_counted_by_the_sequences_that_were_active() -> None:
    async def main() -> EngineStats:
        engine = replica(lambda row, k: (3, 8)[k], slots=4, decode=CURVE, kv_token_s=0.001)
        await generate(engine, calls(0, n=2, prompt_tokens=5))
        return await engine.stats()

    stats = run_virtual(main())
    ((size, (steps, active, tokens, first_s, cached)),) = stats.prefill_steps.items()
    assert (size, steps, active, tokens, cached) == (4, 1, 2, 5, 10)
    assert first_s == pytest.approx(0.15 + 0.010)
    assert {active: steps for active, (steps, _, _) in stats.decode_steps.items()} == {2: 2, 1: 5}
    # Two more tokens in the cache before each of the two steps; then one sequence of 5 + 3 tokens goes on alone.
    assert stats.decode_steps[2][2] == 12 + 14
    assert stats.decode_steps[1][2] == 8 + 9 + 10 + 11 + 12
    assert stats.decode_steps[1][1] == pytest.approx(5 * 0.1 + 0.001 * 50)


def test_steps_and_prefills_add_up_to_the_busy_time() -> None:
    async def main() -> EngineStats:
        engine = replica(lambda row, k: 5 + 3 * row + k, slots=3, decode=CURVE, prefill_s=0.3, prefill_token_s=0.01)
        await generate(engine, *(calls(number, n=2, prompt_tokens=5 + number) for number in range(4)))
        return await engine.stats()

    stats = run_virtual(main())
    assert seconds_in_steps(stats) == pytest.approx(sum(end - start for start, end in stats.busy))
    assert sum(tokens for _, _, tokens, _, _ in stats.prefill_steps.values()) == stats.prefilled_tokens == 5 + 6 + 7 + 8


def test_parts_of_steps_are_kept_for_the_next_report() -> None:
    async def main() -> list[dict[int, int]]:
        engine = replica(10, slots=1, step_s=1.0)
        answers = asyncio.create_task(generate(engine, calls(0)))
        reports = []
        for pause_s in (2.5, 3.0, 10.0):
            await asyncio.sleep(pause_s)
            reports.append({active: steps for active, (steps, _, _) in (await engine.stats()).decode_steps.items()})
        await answers
        return reports

    # The first step belongs to the prefill.
    assert run_virtual(main()) == [{1: 1}, {1: 3}, {1: 5}]


def test_a_prompt_is_prefilled_again_for_new_weights_and_after_its_cache_was_freed() -> None:
    async def main() -> dict[int, tuple[int, int]]:
        engine = replica(4, slots=1, step_s=1.0)
        answers = asyncio.create_task(generate(engine, calls(0, n=4, prompt_tokens=5)))
        await asyncio.sleep(4)  # the second answer begins, from the prompt that is kept
        await engine.pause(OnUpdate.KEEP)
        await engine.stage_weights(1)
        await engine.activate(1)
        await engine.resume()
        await asyncio.sleep(5.5)  # the third: the prompt under new weights, and a token
        await engine.pause(OnUpdate.INTERRUPT)
        await engine.resume()  # the third with its token, and later the prompt for the fourth
        await answers
        merged = (await engine.stats()).prefill_steps
        return {size: (steps, tokens) for size, (steps, _, tokens, _, _) in merged.items()}

    assert run_virtual(main()) == {4: (4, 5 + 5 + 6 + 5)}
