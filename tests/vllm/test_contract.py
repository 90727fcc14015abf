"""The engine's contract: tokens, log-probs, versions, seeds and fates, over a real vLLM."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from headway.data.types import FinishReason
from headway.engines.rollout.native.sampling import BatchSampling, behaviour_logprobs
from headway.errors import DataError, RunError
from headway.interfaces import GenerateRequest, OnUpdate, Priority
from tests.engines.rollout.support import STOP, VOCABULARY, make_request, reference_logprobs, tokens_of
from tests.vllm.serving import CONTEXT, SLOTS, TOLERANCE, Served, endless


async def test_log_probs_are_those_of_a_plain_forward(served: Served) -> None:
    groups = await served.collect([make_request(number, max_tokens=20) for number in range(4)])
    served.assert_logprobs(groups)
    for group in groups:
        for response in group.tokens.responses:
            assert response.loss_mask.all()
            assert set(response.versions.tolist()) == {served.version}


async def test_an_answer_ends_with_its_stop_token_or_at_its_limit(served: Served) -> None:
    groups = await served.collect([make_request(number, n=6, max_tokens=30) for number in range(3)])
    reasons = set()
    for group in groups:
        for trajectory, response in zip(group.trajectories, group.tokens.responses, strict=True):
            reasons.add(trajectory.finish_reason)
            ids = response.ids.tolist()
            assert STOP not in ids[:-1]
            assert (trajectory.finish_reason is FinishReason.STOP) == (ids[-1] == STOP)
            assert trajectory.finish_reason is FinishReason.STOP or len(ids) == 30
            assert trajectory.length == len(ids)
            assert trajectory.text == served.tokenizer.decode(ids, skip_special_tokens=True)
            assert trajectory.started <= trajectory.finished
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("length", [1, CONTEXT - 1, CONTEXT - 2])
async def test_prompts_of_any_length_that_leaves_room_are_served(served: Served, length: int) -> None:
    (group,) = await served.collect([endless(1, n=2, length=length)])
    assert [t.length for t in group.trajectories] == [CONTEXT - length] * 2
    assert [t.prompt_length for t in group.trajectories] == [length] * 2
    served.assert_logprobs([group])


@pytest.mark.parametrize(
    "request_",
    [make_request(0, length=CONTEXT), make_request(0, max_tokens=0), make_request(0, top_p=0.0)],
    ids=["no room", "no tokens", "no mass"],
)
async def test_what_cannot_be_served_is_refused_before_anything_is_submitted(served: Served, request_: object) -> None:
    with pytest.raises(DataError):
        await served.collect([endless(1), request_])  # type: ignore[list-item]
    assert await served.engine.in_flight() == []


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 7},
        {"top_p": 0.7},
        {"temperature": 0.8, "top_k": 12, "top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 0.0},
        {"logit_bias": ((5, 3.0), (7, -1e4), (5, 1.0))},
    ],
    ids=", ".join,
)
async def test_a_log_prob_is_that_of_the_distribution_that_was_sampled_from(
    served: Served, options: dict[str, object]
) -> None:
    request = make_request(2, n=4, max_tokens=12, stop_token_ids=(), **options)
    (group,) = await served.collect([request])
    for response in group.tokens.responses:
        ids = torch.from_numpy(np.concatenate([group.tokens.prompt_ids, response.ids]).astype(np.int64))
        with torch.no_grad():
            logits = served.model(input_ids=ids[None]).logits[0, len(group.tokens.prompt_ids) - 1 : -1]
        sampling = BatchSampling.of([request.sampling] * len(logits), VOCABULARY, torch.device("cpu"))
        reference = behaviour_logprobs(logits, sampling)
        expected = reference.gather(1, torch.from_numpy(response.ids.astype(np.int64))[:, None]).squeeze(1)
        np.testing.assert_allclose(response.logprobs, expected.numpy(), atol=TOLERANCE, rtol=0)
        if options.get("temperature") == 0.0:
            assert response.ids.tolist() == logits.argmax(-1).tolist()


async def test_a_stop_string_ends_the_answer_that_completes_it(served: Served) -> None:
    stop = ("a", "bc")
    options = {"max_tokens": 60, "stop_token_ids": (), "stop": stop}
    groups = await served.collect([make_request(number, n=6, **options) for number in range(3)])
    stopped = 0
    for group in groups:
        for trajectory, response in zip(group.trajectories, group.tokens.responses, strict=True):
            if trajectory.finish_reason is FinishReason.STOP:
                stopped += 1
                assert trajectory.text.endswith(stop)
            assert not any(
                text in served.tokenizer.decode(response.ids[:-1], skip_special_tokens=True) for text in stop
            )
    assert stopped > 9
    served.assert_logprobs(groups)


async def test_no_stop_token_is_sampled_before_the_minimum(served: Served) -> None:
    biased = {"logit_bias": ((STOP, 30.0),), "min_tokens": 5, "max_tokens": 9}
    (group,) = await served.collect([make_request(3, n=4, **biased)])
    assert [t.length for t in group.trajectories] == [6] * 4
    assert [t.finish_reason for t in group.trajectories] == [FinishReason.STOP] * 4


async def test_a_groups_answers_differ_and_the_same_seeds_give_the_same_ones(served: Served) -> None:
    requests = [make_request(number, n=6, max_tokens=16, stop_token_ids=()) for number in range(3)]
    first = tokens_of(await served.collect(requests))
    assert len({tuple(ids) for ids in first.values()}) == len(first)
    # In another order, one by one, and in two parts.
    again: dict[tuple[int, int], list[int]] = {}
    for request in reversed(requests):
        again |= tokens_of(await served.collect([request]))
    assert again == first
    part = await served.collect([replace(requests[0], n=2, first=4)])
    assert [r.ids.tolist() for r in part[0].tokens.responses] == [first[0, 4], first[0, 5]]


async def test_another_attempt_and_another_seed_give_other_answers(served: Served) -> None:
    plain = make_request(1, n=2, max_tokens=16, stop_token_ids=())
    other = make_request(1, n=2, max_tokens=16, stop_token_ids=(), attempt=1)
    seeded = make_request(1, n=2, max_tokens=16, stop_token_ids=(), seed=99)
    answers = [tuple(tokens_of(await served.collect([r])).values()) for r in (plain, other, seeded)]
    assert answers[0] != answers[1] != answers[2] != answers[0]


async def test_more_trajectories_than_slots_wait_and_all_come_to_an_end(served: Served) -> None:
    groups = await served.collect([make_request(number, n=5, max_tokens=10) for number in range(8)])
    assert [group.number for group in groups] == list(range(8))
    assert all(len(group.trajectories) == 5 for group in groups)
    served.assert_logprobs(groups)


async def test_validation_starts_before_training_that_waits(served: Served) -> None:
    training = [endless(number, n=SLOTS) for number in range(3)]
    validation = make_request(100, n=1, max_tokens=4, stop_token_ids=(), priority=Priority.VALIDATION)
    order: list[int] = []

    async def note(requests: list[GenerateRequest]) -> None:
        async for group in served.engine.generate(requests):
            order.append(group.number)  # noqa: PERF401 - while the others are under way

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(note(training))
        await served.sampled(SLOTS)
        tasks.create_task(note([validation]))
    assert order.index(100) == 1


async def test_statistics_count_every_token_and_the_time_that_they_took(served: Served) -> None:
    await served.engine.stats()
    groups = await served.collect([make_request(number, n=4, max_tokens=10, length=9) for number in range(2)])
    stats = await served.engine.stats()
    assert stats.generated_tokens == sum(t.length for g in groups for t in g.trajectories)
    assert 2 * 9 <= stats.prefilled_tokens <= 8 * 9
    assert (stats.running, stats.waiting, stats.version) == (0, 0, served.version)
    assert len(stats.busy) >= 1
    busy = sum(end - start for start, end in stats.busy)
    assert 0 < busy <= stats.slot_seconds <= SLOTS * busy
    started = [t.started for g in groups for t in g.trajectories]
    assert stats.busy[0][0] < min(started)
    assert max(t.finished for g in groups for t in g.trajectories) <= stats.busy[-1][1]
    assert (await served.engine.stats()).busy == []


async def test_steps_are_told_with_what_each_computed(served: Served) -> None:
    prompt, tokens = 9, 10
    await served.collect([make_request(1, n=1, max_tokens=tokens, stop_token_ids=(), length=prompt)])
    stats = await served.engine.stats()
    ((active, prefilled, seconds, cached),) = stats.prefill_steps
    assert (active, prefilled, cached) == (1, prompt, prompt)
    assert seconds > 0
    ((active, (steps, seconds, cached)),) = stats.decode_steps.items()
    # Each has the keys and values of the prompt and of all tokens before the one that it samples.
    assert (active, steps, cached) == (1, tokens - 1, sum(prompt + before for before in range(1, tokens)))
    assert seconds > 0


async def test_steps_add_up_to_what_was_generated_over_interrupts_and_aborts(served: Served) -> None:
    task = asyncio.create_task(served.collect([endless(number, n=3) for number in range(5)]))
    parts = []
    for _ in range(3):
        await asyncio.sleep(0.1)
        await served.engine.pause(OnUpdate.INTERRUPT)
        parts.append(await served.engine.stats())
        await served.engine.resume()
    await served.engine.abort([1, 4])
    groups = await task
    parts.append(await served.engine.stats())
    assert sum(part.generated_tokens for part in parts) == sum(t.length for g in groups for t in g.trajectories)
    for part in parts:
        decoded = sum(active * steps for active, (steps, _, _) in part.decode_steps.items())
        assert decoded + sum(active for active, _, _, _ in part.prefill_steps) == part.generated_tokens
        assert sum(tokens for _, tokens, _, _ in part.prefill_steps) == part.prefilled_tokens
        # What an interrupt cut is prefilled again.
        assert part.prefilled_tokens > 0
    await served.collect([make_request(1, n=1, max_tokens=1, length=5)])
    ((_, _, _, cached),) = (await served.engine.stats()).prefill_steps
    assert cached == 5  # nothing is left of the others


async def test_the_probe_is_at_the_temperature_of_the_run(served: Served) -> None:
    probe = await served.engine.probe()
    np.testing.assert_allclose(probe, served.probe_reference(), atol=TOLERANCE, rtol=0)
    core = served.engine._core
    assert core is not None
    core._temperature = 0.5
    try:
        np.testing.assert_allclose(await served.engine.probe(), served.probe_reference(0.5), atol=TOLERANCE, rtol=0)
    finally:
        core._temperature = 1.0


async def test_a_probe_between_steps_changes_nothing(served: Served) -> None:
    requests = [endless(number, n=2) for number in range(2)]
    undisturbed = tokens_of(await served.collect(requests))
    task = asyncio.create_task(served.collect(requests))
    for _ in range(3):
        await served.sampled(20)
        np.testing.assert_allclose(await served.engine.probe(), served.probe_reference(), atol=TOLERANCE, rtol=0)
    assert tokens_of(await task) == undisturbed


async def test_an_engine_without_weights_of_its_own_to_come_cannot_update(served: Served) -> None:
    updates, served.engine._updates = served.engine._updates, None
    try:
        with pytest.raises(RunError, match="without a weight transport"):
            await served.engine.stage_weights(5)
        with pytest.raises(RunError, match="nothing is staged"):
            await served.engine.activate(5)
    finally:
        served.engine._updates = updates


async def test_the_reference_is_not_trivial(served: Served) -> None:
    """Guards the others: two versions' models disagree by far more than the tolerance."""
    (group,) = await served.collect([make_request(1, n=1, max_tokens=8, stop_token_ids=())])
    own = reference_logprobs(served.model, group, 0)
    from tests.vllm.serving import tiny

    other = reference_logprobs(tiny(seed=991), group, 0)
    assert np.abs(own - other).max() > 1000 * TOLERANCE


def test_it_says_what_it_can_do(served: Served) -> None:
    capabilities = served.engine.capabilities
    assert capabilities.on_update == frozenset(OnUpdate)
    assert capabilities.double_buffered
    assert not capabilities.sleep
