"""What the contract (``tests/engines/contract``) says nothing of: pauses and updates as vLLM alone has them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from headway.data.interfaces.rollout import OnUpdate
from headway.errors import RunError
from tests.engines.contract.harness import endless, make_calls, tokens_of
from tests.engines.contract.reference import across
from tests.environments.vllm.serving import TOLERANCE, Served, drains


async def test_a_drain_that_keeping_ended_leaves_keys_and_values_where_they_are(served: Served) -> None:
    old = served.version
    task = await served.submit(*(endless(row, n=2) for row in range(2)))
    await served.sampled(40)
    draining = asyncio.create_task(served.engine.pause(OnUpdate.DRAIN))
    await served.until(lambda: drains(served))
    await served.engine.pause(OnUpdate.KEEP)
    await draining
    await served.update(OnUpdate.KEEP)
    for answer in await task:
        assert answer.versions == [old, old + 1]
        expected = across([served.models[old], served.models[old + 1]], answer)
        np.testing.assert_allclose(answer.tokens.logprobs, expected, atol=TOLERANCE, rtol=0)


async def test_an_interrupt_changes_no_token_when_the_weights_stay(served: Served) -> None:
    """What vLLM prefills again goes on with the generator that it had."""
    parts = [endless(row, n=4) for row in range(3)]
    undisturbed = tokens_of(await served.collect(*parts))
    task = await served.submit(*parts)
    for _ in range(3):
        await served.sampled(50)
        await served.engine.pause(OnUpdate.INTERRUPT)
        await served.engine.pause(OnUpdate.INTERRUPT)  # twice is once
        await served.engine.resume()
    assert tokens_of(await task) == undisturbed


async def test_activating_without_a_pause_swaps_between_two_steps(served: Served) -> None:
    """vLLM itself would not survive an update while it decodes."""
    task = await served.submit(endless(0))
    await served.sampled(20)
    version = await served.stage()
    await served.engine.activate(version)
    served.version = version
    np.testing.assert_allclose(await served.engine.probe(), served.probe_reference(), atol=TOLERANCE, rtol=0)
    assert [len(answer.versions) for answer in await task] == [2] * 4


async def test_an_untied_head_is_updated_too(untied_engine: Served) -> None:
    await untied_engine.update(OnUpdate.INTERRUPT)
    await untied_engine.update(OnUpdate.DRAIN)
    untied_engine.assert_logprobs(await untied_engine.collect(make_calls(1, max_tokens=8)))


async def test_sleeping_is_refused_where_it_would_free_nothing(served: Served) -> None:
    await served.engine.pause(OnUpdate.INTERRUPT)
    with pytest.raises(RunError, match="cannot sleep"):
        await served.engine.sleep()
    await served.engine.resume()
    assert len(await served.collect(make_calls(1, max_tokens=3))) == 4
