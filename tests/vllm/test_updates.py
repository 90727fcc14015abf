"""New weights in the middle of everything, and what a pause does to what is in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel

from headway.data.types import FinishReason
from headway.errors import RunError, UpdateFailed
from headway.interfaces import FinishedGroup, OnUpdate
from tests.engines.rollout.support import make_request, tokens_of
from tests.vllm.serving import CONTEXT, SLOTS, TOLERANCE, Served, drains, endless, tiny


def switches(groups: Sequence[FinishedGroup]) -> list[list[list[int]]]:
    """Of the trajectories with tokens of two versions or more."""
    spans = [trajectory.version_spans for group in groups for trajectory in group.trajectories]
    return [span for span in spans if len(span) > 1]


async def test_an_interrupt_keeps_tokens_and_samples_on_from_a_new_prefill(served: Served) -> None:
    old = served.version
    task = asyncio.create_task(served.collect([endless(number, n=4) for number in range(3)]))
    await served.sampled(20 * SLOTS)
    paused = await served.update(OnUpdate.INTERRUPT)
    groups = await task
    assert paused.interrupted == SLOTS
    assert len(switches(groups)) == SLOTS
    for (start, first), (switch, second) in switches(groups):
        assert (start, first, second) == (0, old, old + 1)
        assert switch >= 10
    # Every token under its own version's weights over the whole context: nothing of the old cache is left.
    served.assert_logprobs(groups)
    waited = groups[2].trajectories
    assert {t.oldest_version for t in waited} == {old + 1}


async def test_keeping_goes_on_with_the_old_keys_and_values(served: Served) -> None:
    old = served.version
    task = asyncio.create_task(served.collect([endless(number, n=2) for number in range(2)]))
    await served.sampled(20 * 4)
    paused = await served.update(OnUpdate.KEEP)
    groups = await task
    assert paused.interrupted == 0
    assert len(switches(groups)) == 4
    for group in groups:
        for trajectory, response in zip(group.trajectories, group.tokens.responses, strict=True):
            switch = trajectory.version_spans[1][0]
            expected = across(served.models[old], served.model, group.tokens.prompt_ids, response.ids, switch)
            np.testing.assert_allclose(response.logprobs, expected, atol=TOLERANCE, rtol=0)


def across(
    old: PreTrainedModel, new: PreTrainedModel, prompt: NDArray[np.int32], ids: NDArray[np.int32], switch: int
) -> NDArray[np.float32]:
    """[T] log-probs where ``new`` went on from token ``switch`` with the keys and values of ``old``."""
    whole = torch.from_numpy(np.concatenate([prompt, ids]).astype(np.int64))[None]
    first = len(prompt) + switch - 1  # what the new weights compute first: the last token that the old ones sampled
    cache = DynamicCache()
    with torch.no_grad():
        before = old(input_ids=whole[:, :first], past_key_values=cache).logits
        after = new(input_ids=whole[:, first:], past_key_values=cache).logits
    logprobs = torch.log_softmax(torch.cat([before, after], 1)[0].float(), -1)
    return logprobs[len(prompt) - 1 : -1].gather(1, whole[0, len(prompt) :, None]).squeeze(1).numpy()


async def test_after_keeping_a_new_request_shares_nothing_with_the_old_version(served: Served) -> None:
    """Prompts of a whole block and more would be found in the prefix cache."""
    long = {"length": CONTEXT - 20, "n": 2}
    await served.collect([endless(5, **long)])
    held = asyncio.create_task(served.collect([endless(6, n=2)]))
    await served.sampled(4)
    await served.update(OnUpdate.KEEP)
    groups = await served.collect([endless(5, **long)])
    served.assert_logprobs(groups)
    await held


async def test_a_drain_finishes_what_was_submitted_and_starts_nothing_new(served: Served) -> None:
    old = served.version
    first = asyncio.create_task(served.collect([make_request(n, n=4, max_tokens=30) for n in range(4)]))
    await served.sampled(10)
    draining = asyncio.create_task(served.update(OnUpdate.DRAIN))
    await served.until(lambda: drains(served))
    later = asyncio.create_task(served.collect([make_request(n, n=4, max_tokens=5) for n in range(10, 13)]))
    await draining
    assert {v for g in await first for t in g.trajectories for _, v in t.version_spans} == {old}
    assert {v for g in await later for t in g.trajectories for _, v in t.version_spans} == {old + 1}
    served.assert_logprobs([*first.result(), *later.result()])


async def test_a_drain_that_keeping_ended_leaves_keys_and_values_where_they_are(served: Served) -> None:
    old = served.version
    task = asyncio.create_task(served.collect([endless(number, n=2) for number in range(2)]))
    await served.sampled(40)
    draining = asyncio.create_task(served.engine.pause(OnUpdate.DRAIN))
    await served.until(lambda: drains(served))
    await served.engine.pause(OnUpdate.KEEP)
    await draining
    await served.update(OnUpdate.KEEP)
    groups = await task
    assert len(switches(groups)) == 4
    for group in groups:
        for trajectory, response in zip(group.trajectories, group.tokens.responses, strict=True):
            (_, first), (switch, second) = trajectory.version_spans
            assert (first, second) == (old, old + 1)
            expected = across(served.models[old], served.models[old + 1], group.tokens.prompt_ids, response.ids, switch)
            np.testing.assert_allclose(response.logprobs, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("policy", [OnUpdate.INTERRUPT, OnUpdate.KEEP])
async def test_pausing_changes_no_token_when_the_weights_stay(served: Served, policy: OnUpdate) -> None:
    requests = [endless(number, n=4) for number in range(3)]
    undisturbed = tokens_of(await served.collect(requests))
    task = asyncio.create_task(served.collect(requests))
    for _ in range(3):
        await served.sampled(50)
        await served.engine.pause(policy)
        await served.engine.pause(policy)  # twice is once
        await served.engine.resume()
    assert tokens_of(await task) == undisturbed


async def test_a_paused_engine_samples_nothing_and_takes_requests(served: Served) -> None:
    running = asyncio.create_task(served.collect([endless(1)]))
    await served.sampled(8)
    await served.engine.pause(OnUpdate.INTERRUPT)
    await served.engine.stats()
    waiting = asyncio.create_task(served.collect([make_request(2, max_tokens=3)]))
    await served.until_in_flight([1, 2])
    await served.engine.probe()  # time enough for a step, if there were one
    stats = await served.engine.stats()
    assert (stats.generated_tokens, stats.busy, stats.running, stats.waiting) == (0, [], 0, 8)
    await served.engine.resume()
    assert [len(g.trajectories) for g in [*(await running), *(await waiting)]] == [4, 4]


async def test_many_updates_lose_nothing_and_tear_nothing(served: Served) -> None:
    requests = [endless(number, n=3, max_tokens=60 + 10 * (number % 5)) for number in range(12)]
    task = asyncio.create_task(served.collect(requests))
    for _ in range(4):
        await served.sampled(120)
        await served.update(OnUpdate.INTERRUPT)
    groups = await task
    served.assert_logprobs(groups)
    assert [t.length for g in groups for t in g.trajectories] == [
        60 + 10 * (n % 5) for n in range(12) for _ in range(3)
    ]
    assert max(len(spans) for spans in switches(groups)) >= 2


async def test_an_abort_ends_groups_as_they_are(served: Served) -> None:
    task = asyncio.create_task(served.collect([endless(number, n=4) for number in range(4)]))
    await served.sampled(10 * SLOTS)
    assert await served.engine.in_flight() == [0, 1, 2, 3]
    await served.engine.abort([1, 3, 77])
    assert await served.engine.in_flight() == [0, 2]
    groups = await task
    assert [{t.finish_reason for t in g.trajectories} for g in groups] == [
        {FinishReason.LENGTH},
        {FinishReason.ABORTED},
        {FinishReason.LENGTH},
        {FinishReason.ABORTED},
    ]
    assert all(0 < t.length < CONTEXT - t.prompt_length for t in groups[1].trajectories)
    assert [t.length for t in groups[3].trajectories] == [0] * 4
    served.assert_logprobs(groups)


async def test_groups_of_an_older_version_are_aborted_and_no_others(served: Served) -> None:
    old = asyncio.create_task(served.collect([endless(0, n=3), endless(1, n=3)]))
    await served.sampled(6 * 5)
    await served.update(OnUpdate.INTERRUPT)
    new = asyncio.create_task(served.collect([endless(2, n=2), endless(3, n=4)]))
    await served.sampled(SLOTS * 4)
    assert await served.engine.abort_older_than(served.version) == [0, 1]
    assert {t.finish_reason for g in await old for t in g.trajectories} == {FinishReason.ABORTED}
    assert {t.finish_reason for g in await new for t in g.trajectories} == {FinishReason.LENGTH}
    served.assert_logprobs([*old.result(), *new.result()])


async def test_an_abort_while_paused_is_over_before_the_engine_goes_on(served: Served) -> None:
    task = asyncio.create_task(served.collect([endless(0), endless(1)]))
    await served.sampled(SLOTS * 4)
    await served.engine.pause(OnUpdate.KEEP)
    await served.engine.abort([0, 1])
    assert await served.engine.in_flight() == []
    groups = await task
    assert {t.finish_reason for g in groups for t in g.trajectories} == {FinishReason.ABORTED}
    await served.engine.resume()


async def test_whoever_leaves_early_frees_the_slots(served: Served) -> None:
    async for group in served.engine.generate([make_request(0, n=1, max_tokens=1), *(endless(n) for n in range(1, 5))]):
        assert group.number == 0
        break
    await served.until_in_flight([])
    (group,) = await served.collect([make_request(9, max_tokens=3)])
    served.assert_logprobs([group])


async def test_cancelling_at_random_times_leaves_the_engine_whole(served: Served) -> None:
    rng = np.random.default_rng(0)
    for round_ in range(8):
        tasks = [asyncio.create_task(served.collect([endless(4 * round_ + i, n=3)])) for i in range(4)]
        await asyncio.sleep(float(rng.uniform(0, 0.2)))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await served.until_in_flight([])
    groups = await served.collect([make_request(n, max_tokens=6) for n in range(6)])
    served.assert_logprobs(groups)


async def test_activating_without_a_pause_swaps_between_two_steps(served: Served) -> None:
    """vLLM itself would not survive an update while it decodes."""
    task = asyncio.create_task(served.collect([endless(0)]))
    await served.sampled(20)
    version = await served.stage()
    await served.engine.activate(version)
    served.version = version
    np.testing.assert_allclose(await served.engine.probe(), served.probe_reference(), atol=TOLERANCE, rtol=0)
    (group,) = await task
    assert all(len(spans) == 2 for spans in switches([group]))


async def test_a_version_that_does_not_arrive_whole_is_not_staged(served: Served) -> None:
    served.source.model, served.source.break_after = tiny(seed=400), 2
    try:
        with pytest.raises(UpdateFailed, match="the sender is gone"):
            await served.engine.stage_weights(served.version + 1)
    finally:
        served.source.break_after = None
    with pytest.raises(UpdateFailed, match="nothing is staged"):
        await served.engine.activate(served.version + 1)
    np.testing.assert_allclose(await served.engine.probe(), served.probe_reference(), atol=TOLERANCE, rtol=0)
    served.assert_logprobs(await served.collect([make_request(1, max_tokens=5)]))


async def test_an_untied_head_is_updated_too(untied_engine: Served) -> None:
    await untied_engine.update(OnUpdate.INTERRUPT)
    await untied_engine.update(OnUpdate.DRAIN)
    untied_engine.assert_logprobs(await untied_engine.collect([make_request(1, max_tokens=8)]))


async def test_sleeping_is_refused_where_it_would_free_nothing(served: Served) -> None:
    await served.engine.pause(OnUpdate.INTERRUPT)
    with pytest.raises(RunError, match="cannot sleep"):
        await served.engine.sleep()
    await served.engine.resume()
    assert len(await served.collect([make_request(1, max_tokens=3)])) == 1
