"""Part of the contract: where memory for keys and values is short, answers wait or are parked, and nothing is lost."""

from __future__ import annotations

import numpy as np

from headway.data.types import FinishReason
from headway.interfaces import OnUpdate
from tests.contract.harness import (
    CONTEXT,
    Feature,
    OfEngine,
    at_rest,
    collect,
    endless,
    sampled,
    scenario,
    submit,
    swap,
    trajectories,
    versions_of,
)
from tests.contract.reference import assert_logprobs, forward_logprobs
from tests.contract.serving import Session
from tests.tiers import mostly_slow

LONG = (60, CONTEXT - 20)
"""Answers of a random session: three slots' worth of them do not fit into memory."""


class Preempting(OfEngine):
    @scenario(Feature.TOKENS, Feature.SHORT_MEMORY)
    async def test_answers_that_outgrow_memory_are_parked_and_go_on(self) -> None:
        requests = [endless(number, n=3) for number in range(self.harness.slots + 2)]
        async with self.harness.serve(short_memory=True) as replica:
            groups = await collect(replica, requests)
            stats = await replica.engine.stats()
            assert stats.preempted > 0
            # A token that was sampled is not sampled again, though its keys and values are computed again.
            assert stats.generated_tokens == sum(t.length for t in trajectories(groups))
            assert stats.prefilled_tokens > sum(t.prompt_length for t in trajectories(groups))
            assert [t.length for t in trajectories(groups)] == [CONTEXT - t.prompt_length for t in trajectories(groups)]
            assert {t.finish_reason for t in trajectories(groups)} == {FinishReason.LENGTH}
            assert versions_of(groups) == {replica.version}
            assert_logprobs(replica, groups, self.harness.tolerance)
            await at_rest(replica)

    @scenario(Feature.TOKENS, Feature.SHORT_MEMORY)
    async def test_it_does_not_claim_to_reproduce_what_it_prefills_again(self) -> None:
        async with self.harness.serve(short_memory=True) as replica:
            assert not replica.engine.capabilities.reproducible

    @scenario(Feature.TOKENS, Feature.SHORT_MEMORY)
    async def test_an_answer_that_waited_for_memory_shares_nothing_with_the_version_before(self) -> None:
        """Although the others of its group went on in place, with a prompt of the old version."""
        requests = [endless(number, n=2, length=100) for number in range(3 * self.harness.slots // 2)]
        async with self.harness.serve(short_memory=True) as replica:
            running = submit(replica, *requests)
            await sampled(replica, 40)
            await replica.engine.pause(OnUpdate.KEEP)
            await swap(replica)
            await replica.engine.resume()
            groups = await running
            late = [(g, k) for g in groups for k, t in enumerate(g.trajectories) if t.oldest_version == replica.version]
            assert late
            for group, k in late:
                expected = forward_logprobs(replica.model(replica.version), group, k)
                reported = group.tokens.responses[k].logprobs
                np.testing.assert_allclose(reported, expected, atol=self.harness.tolerance, rtol=0)

    @mostly_slow("seed", range(2), quick=range(1))
    @scenario(Feature.TOKENS, Feature.SHORT_MEMORY)
    async def test_random_commands_lose_nothing_while_answers_are_parked(self, seed: int) -> None:
        async with self.harness.serve(short_memory=True) as replica:
            session = Session(replica, np.random.default_rng(seed), self.harness.features, LONG)
            await session.act()
            for _ in range(8):
                await session.ask()  # enough for all slots, whatever is left of the others
            assert await session.settle(self.harness.tolerance) > 0

    @scenario()
    async def test_an_interrupt_is_no_want_of_memory(self) -> None:
        async with self.harness.serve() as replica:
            running = submit(replica, endless(1), endless(2))
            reports = []
            for _ in range(2):
                reports.append(await replica.engine.stats())
                while reports[-1].generated_tokens == 0:
                    await replica.tick()
                    reports.append(await replica.engine.stats())
                assert (await replica.engine.pause(OnUpdate.INTERRUPT)).interrupted > 0
                await replica.engine.resume()
            await running
            reports.append(await replica.engine.stats())
            assert sum(report.preempted for report in reports) == 0
