"""Part of the contract: where memory for keys and values is short, answers wait or are parked, and nothing is lost."""

from __future__ import annotations

import numpy as np

from headway.data.interfaces.rollout import OnUpdate
from tests.engines.contract.harness import (
    Feature,
    OfEngine,
    at_rest,
    collect,
    endless,
    sampled,
    scenario,
    submit,
    swap,
    versions_of,
)
from tests.engines.contract.reference import assert_logprobs
from tests.engines.contract.sessions import ROUNDS, Session
from tests.tiers import mostly_slow

LONG = (60, 110)
"""Answers of a random session: three slots' worth of them do not fit into memory."""


class Preempting(OfEngine):
    @scenario(Feature.TOKENS, Feature.SHORT_MEMORY)
    async def test_answers_that_outgrow_memory_are_parked_and_go_on(self) -> None:
        """Over 5 s where the engine is vLLM, of which one with little memory is started here."""
        parts = [endless(row, n=3) for row in range(self.harness.slots + 2)]
        async with self.harness.serve(short_memory=True) as replica:
            answers = await collect(replica, *parts)
            stats = await replica.engine.stats()
            assert stats.preempted > 0
            # A token that was sampled is not sampled again, though its keys and values are computed again.
            assert stats.generated_tokens == sum(answer.length for answer in answers)
            assert stats.prefilled_tokens > sum(len(part[0].input_ids) for part in parts)
            assert len(answers) == 3 * len(parts)
            assert all(answer.whole for answer in answers)
            assert versions_of(answers) == {replica.version}
            assert_logprobs(replica, answers, self.harness.tolerance)
            await at_rest(replica)

    @scenario(Feature.TOKENS, Feature.SHORT_MEMORY)
    async def test_it_does_not_claim_to_reproduce_what_it_prefills_again(self) -> None:
        async with self.harness.serve(short_memory=True) as replica:
            assert not replica.engine.capabilities.reproducible

    @scenario(Feature.TOKENS, Feature.SHORT_MEMORY)
    async def test_an_answer_that_waited_for_memory_shares_nothing_with_the_version_before(self) -> None:
        """Although others with its context went on in place, with keys and values of the old version."""
        parts = [endless(row, n=2, length=100) for row in range(3 * self.harness.slots // 2)]
        async with self.harness.serve(short_memory=True) as replica:
            running = await submit(replica, *parts)
            await sampled(replica, 40)
            await replica.engine.pause(OnUpdate.KEEP)
            await swap(replica)
            await replica.engine.resume()
            late = [answer for answer in await running if answer.versions[0] == replica.version]
            assert late
            assert_logprobs(replica, late, self.harness.tolerance)

    @mostly_slow(("seed", "rounds"), [(0, 2), (0, ROUNDS), (1, ROUNDS)], quick=[(0, 2)])
    @scenario(Feature.TOKENS, Feature.SHORT_MEMORY)
    async def test_random_commands_lose_nothing_while_answers_are_parked(self, seed: int, rounds: int) -> None:
        """Takes long on a busy machine: answers wait for memory, and are prefilled again and again."""
        async with self.harness.serve(short_memory=True) as replica:
            session = Session(replica, np.random.default_rng(seed), self.harness.features, LONG, rounds)
            await session.act()
            for _ in range(4):
                await session.ask()  # enough for all slots, whatever is left of the others
            assert await session.settle(self.harness.tolerance) > 0

    @scenario()
    async def test_an_interrupt_is_no_want_of_memory(self) -> None:
        async with self.harness.serve() as replica:
            running = await submit(replica, endless(1), endless(2))
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
