"""What is vLLM's own beside the contract (``tests/engines/contract``): steps as it tells them, the probe, limits."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from headway.data.interfaces.rollout import OnUpdate
from headway.errors import RunError
from tests.engines.contract.harness import endless, make_calls, numbers_of, tokens_of
from tests.environments.vllm.serving import TOLERANCE, Served


async def test_steps_are_told_with_what_each_computed(served: Served) -> None:
    prompt, tokens = 9, 10
    await served.collect(make_calls(1, n=1, max_tokens=tokens, length=prompt))
    stats = await served.engine.stats()
    ((steps, active, prefilled, seconds, cached),) = stats.prefill_steps.values()
    assert (steps, active, prefilled, cached) == (1, 1, prompt, prompt)
    assert seconds > 0
    ((active, (steps, seconds, cached)),) = stats.decode_steps.items()
    # Each has the keys and values of the prompt and of all tokens before the one that it samples.
    assert (active, steps, cached) == (1, tokens - 1, sum(prompt + before for before in range(1, tokens)))
    assert seconds > 0


async def test_steps_add_up_to_what_was_generated_over_interrupts_and_aborts(served: Served) -> None:
    task = await served.submit(*(endless(row, n=3) for row in range(5)), client="me")
    parts = []
    for _ in range(3):
        await asyncio.sleep(0.1)
        await served.engine.pause(OnUpdate.INTERRUPT)
        parts.append(await served.engine.stats())
        await served.engine.resume()
    await served.engine.abort("me", numbers_of([*endless(1, n=3), *endless(4, n=3)]))
    answers = await task
    parts.append(await served.engine.stats())
    assert sum(part.generated_tokens for part in parts) == sum(answer.length for answer in answers)
    for part in parts:
        decoded = sum(active * steps for active, (steps, _, _) in part.decode_steps.items())
        assert decoded + sum(active for _, active, _, _, _ in part.prefill_steps.values()) == part.generated_tokens
        assert sum(tokens for _, _, tokens, _, _ in part.prefill_steps.values()) == part.prefilled_tokens
        # What an interrupt cut is prefilled again.
        assert part.prefilled_tokens > 0
    await served.collect(make_calls(1, n=1, max_tokens=1, length=5))
    ((_, _, _, _, cached),) = (await served.engine.stats()).prefill_steps.values()
    assert cached == 5  # nothing is left of the others


async def test_the_probe_is_at_the_temperature_of_the_run(served: Served) -> None:
    probe = await served.engine.probe()
    np.testing.assert_allclose(probe, served.probe_reference(), atol=TOLERANCE, rtol=0)
    core = served.engine._core
    assert core is not None
    core.temperature = 0.5
    try:
        np.testing.assert_allclose(await served.engine.probe(), served.probe_reference(0.5), atol=TOLERANCE, rtol=0)
    finally:
        core.temperature = 1.0


async def test_a_probe_between_steps_changes_nothing(served: Served) -> None:
    parts = [endless(row, n=2) for row in range(2)]
    undisturbed = tokens_of(await served.collect(*parts))
    task = await served.submit(*parts)
    for _ in range(3):
        await served.sampled(20)
        np.testing.assert_allclose(await served.engine.probe(), served.probe_reference(), atol=TOLERANCE, rtol=0)
    assert tokens_of(await task) == undisturbed


async def test_an_engine_without_weights_of_its_own_to_come_cannot_update(served: Served) -> None:
    updates, served.engine._updates = served.engine._updates, None
    try:
        with pytest.raises(RunError, match="without a weight transport"):
            await served.engine.stage_weights(5)
        with pytest.raises(RunError, match="without a weight transport"):
            await served.engine.activate(5)
    finally:
        served.engine._updates = updates


def test_it_says_what_it_can_do(served: Served) -> None:
    capabilities = served.engine.capabilities
    assert capabilities.on_update == frozenset(OnUpdate)
    assert capabilities.double_buffered
    assert capabilities.reproducible  # there is memory for a whole context in each slot
    assert not capabilities.sleep
