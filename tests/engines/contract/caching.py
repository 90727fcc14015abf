"""Part of the contract: what calls have in common is computed once, as long as one version computes it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headway.data.interfaces.rollout import GenerateRequest, OnUpdate
from tests.engines.contract.harness import (
    BLOCK,
    VOCABULARY,
    Answer,
    Feature,
    OfEngine,
    Replica,
    at_rest,
    collect,
    endless,
    make_calls,
    sampled,
    scenario,
    submit,
    tokens_of,
    update,
)
from tests.engines.contract.reference import assert_logprobs

PROMPT = 4 * BLOCK
"""Tokens of a prompt of several blocks that leaves room for further calls."""
NEW = 5
"""Tokens that come between a call's continuation and the next call's."""


class Caching(OfEngine):
    """Each test has prompts of its own: a replica that many share may still have those of others."""

    @scenario()
    async def test_a_context_that_calls_share_is_prefilled_once(self) -> None:
        async with self.harness.serve() as replica:
            await replica.engine.stats()
            answers = await collect(
                replica, make_calls(111, n=5, length=PROMPT), make_calls(112, n=1, length=PROMPT - 3)
            )
            stats = await replica.engine.stats()
            contexts = PROMPT + PROMPT - 3
            assert contexts <= stats.prefilled_tokens <= contexts + 4 * BLOCK
            assert 4 * (PROMPT - BLOCK) <= stats.cached_tokens <= 4 * PROMPT
            assert sum(answer.done.cached for answer in answers) == stats.cached_tokens
            self.check(replica, answers)
            await at_rest(replica)

    @scenario(Feature.JOINING)
    async def test_what_comes_while_another_call_has_its_context_finds_it(self) -> None:
        async with self.harness.serve() as replica:
            calls = endless(121, n=3, length=PROMPT)
            first = await submit(replica, calls[:1])
            await sampled(replica, 4)
            for call in calls[1:]:
                (answer,) = await collect(replica, [replace(call, sampling=make_calls(1)[0].sampling)])
                assert PROMPT - BLOCK <= answer.done.cached <= PROMPT
                self.check(replica, [answer])
            self.check(replica, await first)

    @scenario()
    async def test_calls_that_wait_for_a_slot_find_the_context_too(self) -> None:
        async with self.harness.serve() as replica:
            n = 2 * self.harness.slots + 3
            answers = await collect(replica, make_calls(131, n=n, length=PROMPT, max_tokens=5))
            assert sum(answer.done.cached >= PROMPT - BLOCK for answer in answers) == n - 1
            self.check(replica, answers)

    # ------------------------------------------------------------------------------------- further calls

    @scenario()
    async def test_a_call_that_continues_an_earlier_one_finds_it(self) -> None:
        """Over several turns, of episodes that have a prompt in common."""
        async with self.harness.serve() as replica:
            first = make_calls(141, n=3, length=PROMPT, max_tokens=7, goes_on=True)
            conversation = _Conversation(replica)
            answers = await conversation.turn(first)
            self.check(replica, answers)
            for key in range(1, 4):
                await replica.engine.stats()
                ends = {answer.id: len(answer.prompt) + answer.length for answer in answers}
                answers = await conversation.turn([further(answer, key=key) for answer in answers])
                self.check(replica, answers)
                stats = await replica.engine.stats()
                for answer in answers:
                    assert ends[answer.id] - BLOCK <= answer.done.cached <= ends[answer.id]
                assert stats.cached_tokens == sum(answer.done.cached for answer in answers)
                assert stats.prefilled_tokens <= 3 * (BLOCK + NEW)
            await replica.engine.release([call.trajectory for call in first])
            await conversation.leave()
            await at_rest(replica)

    @scenario()
    async def test_leaving_gives_up_what_was_kept_for_the_clients_episodes(self) -> None:
        async with self.harness.serve() as replica:
            self.check(replica, await collect(replica, make_calls(151, length=PROMPT, goes_on=True)))
            await at_rest(replica)

    @pytest.mark.parametrize("policy", [OnUpdate.DRAIN, OnUpdate.INTERRUPT])
    @scenario()
    async def test_further_calls_share_nothing_with_the_version_before(self, policy: OnUpdate) -> None:
        async with self.harness.serve() as replica:
            conversation = _Conversation(replica)
            answers = await conversation.turn(make_calls(161, n=2, length=PROMPT, goes_on=True))
            await update(replica, policy)
            (first,), (second,) = [await conversation.turn([further(answer, key=1)]) for answer in answers]
            assert first.done.cached == 0
            assert second.done.cached <= PROMPT  # what the first one has computed under the new version
            assert first.versions == second.versions == [replica.version]
            self.check(replica, [first, second])
            await conversation.leave()
            await at_rest(replica)

    @scenario()
    async def test_after_keeping_an_episode_may_go_on_with_the_old_keys_and_values_and_no_other_does(self) -> None:
        async with self.harness.serve() as replica:
            conversation = _Conversation(replica)
            (answer,) = await conversation.turn(make_calls(171, n=1, length=PROMPT, goes_on=True))
            await update(replica, OnUpdate.KEEP)
            (going_on,) = await conversation.turn([further(answer, key=1)])
            assert going_on.whole
            assert going_on.versions == [replica.version]
            (another,) = await conversation.turn(make_calls(171, n=1, first=1, length=PROMPT))
            self.check(replica, [another])
            await conversation.leave()
            await at_rest(replica)

    @scenario(Feature.TOKENS)
    async def test_contexts_that_part_at_any_place_are_kept_apart(self) -> None:
        """Forks of an episode: in its prompt, in its continuation, behind it; in the middle of a block, at its end."""
        async with self.harness.serve() as replica:
            conversation = _Conversation(replica)
            (answer,) = await conversation.turn(make_calls(181, n=1, length=PROMPT - 5, max_tokens=9, goes_on=True))
            forks = [
                _with_another_token(further(answer, key=key), at)
                for key, at in enumerate((3, BLOCK, PROMPT - 20, PROMPT - 5, PROMPT - 1, PROMPT + 7), 2)
            ]
            self.check(replica, await conversation.turn(forks))
            for fork in forks:
                self.check(replica, await conversation.turn([replace(fork, number=fork.number + 50)]))
            await conversation.leave()
            await at_rest(replica)

    @scenario(Feature.TOKENS, Feature.REPRODUCIBLE)
    async def test_finding_a_context_changes_no_answer(self) -> None:
        parts = [make_calls(row, n=2, length=PROMPT - row) for row in range(3)]
        async with self.harness.serve() as replica:
            together = tokens_of(await collect(replica, *parts))
            again = tokens_of(await collect(replica, *parts))
            apart = tokens_of([answer for part in parts for call in part for answer in await collect(replica, [call])])
            assert together == again == apart

    @scenario()
    async def test_further_calls_survive_an_interrupt_and_the_end_of_others(self) -> None:
        async with self.harness.serve() as replica:
            conversation = _Conversation(replica)
            answers = await conversation.turn(make_calls(201, n=4, length=PROMPT, goes_on=True))
            calls = [further(answer, key=1, max_tokens=30) for answer in answers]
            gone = await submit(replica, calls[2:])
            running = asyncio.create_task(conversation.turn(calls[:2]))
            await sampled(replica, 8)
            await replica.engine.pause(OnUpdate.INTERRUPT)
            gone.cancel()
            await asyncio.wait([gone])
            await replica.engine.resume()
            self.check(replica, await running)
            await conversation.leave()
            await at_rest(replica)

    def check(self, replica: Replica, answers: Sequence[Answer]) -> None:
        assert all(answer.whole for answer in answers)
        if Feature.TOKENS in self.harness.features:
            assert_logprobs(replica, answers, self.harness.tolerance)


class _Conversation:
    """A client that stays for several calls of its episodes."""

    def __init__(self, replica: Replica) -> None:
        self._engine = replica.engine
        self._batches = aiter(self._engine.finished("conversation"))

    async def turn(self, calls: Sequence[GenerateRequest]) -> list[Answer]:
        """In the order of ``calls``."""
        await self._engine.submit("conversation", calls)
        finished = {}
        while len(finished) < len(calls):
            finished |= {done.number: done for done in await anext(self._batches)}
        return [Answer(call, finished[call.number]) for call in calls]

    async def leave(self) -> None:
        await self._batches.aclose()  # type: ignore[attr-defined]


def further(answer: Answer, *, key: int, **changes: Any) -> GenerateRequest:
    """A call with the context and continuation of another one, and a few new tokens."""
    new = np.random.default_rng(key).integers(2, VOCABULARY, NEW)
    ids = np.concatenate([answer.prompt, _continuation(answer), new]).astype(np.int32)
    if answer.done.tokens is None:  # simulated contexts say how much of them was there (`simulate.contexts`)
        ids[:] = len(ids) - NEW
    sampling = replace(answer.call.sampling, **changes)
    return replace(answer.call, number=100 * answer.call.number + key, input_ids=ids, key=key, sampling=sampling)


def _continuation(answer: Answer) -> NDArray[np.int32]:
    """[T] What was sampled; anything where that has a length alone."""
    return np.zeros(answer.length, np.int32) if answer.done.tokens is None else answer.tokens.ids


def _with_another_token(call: GenerateRequest, at: int) -> GenerateRequest:
    ids = call.input_ids.copy()
    ids[at] = 2 + (ids[at] - 1) % (VOCABULARY - 2)
    return replace(call, input_ids=ids)
