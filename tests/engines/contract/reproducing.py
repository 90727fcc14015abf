"""Part of the contract: where an engine says so, a token depends on seed, episode, call, position and weights alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from headway.data.interfaces.rollout import OnUpdate
from tests.engines.contract.harness import (
    Feature,
    OfEngine,
    collect,
    endless,
    make_calls,
    sampled,
    scenario,
    submit,
    tokens_of,
)

PARTS = [make_calls(row, n=5, max_tokens=9) for row in range(6)]


class Reproducing(OfEngine):
    @scenario(Feature.TOKENS, Feature.REPRODUCIBLE)
    async def test_order_and_company_change_no_answer(self) -> None:
        async with self.harness.serve() as replica:
            together = tokens_of(await collect(replica, *PARTS))
            assert len({tuple(ids) for ids in together.values()}) == len(together) == 30
            backwards = tokens_of(await collect(replica, *(part[::-1] for part in PARTS[::-1])))
            assert backwards == together
            for part in PARTS:
                alone = tokens_of(await collect(replica, part))
                assert alone == {call.trajectory: together[call.trajectory] for call in part}

    @scenario(Feature.TOKENS, Feature.REPRODUCIBLE)
    async def test_the_time_of_arrival_changes_no_answer(self) -> None:
        rng = np.random.default_rng(5)
        async with self.harness.serve() as replica:
            together = tokens_of(await collect(replica, *PARTS))
            crowd = await submit(replica, *(endless(row, n=1) for row in range(50, 54)))
            tasks = []
            for index in rng.permutation(len(PARTS)):
                await sampled(replica, int(rng.integers(1, 30)))
                tasks.append(await submit(replica, PARTS[index]))
            assert tokens_of(answer for part in await asyncio.gather(*tasks) for answer in part) == together
            await crowd

    @scenario(Feature.TOKENS, Feature.REPRODUCIBLE)
    async def test_an_answer_is_the_same_whether_others_to_its_prompt_come_with_it_or_not(self) -> None:
        async with self.harness.serve() as replica:
            whole = tokens_of(await collect(replica, PARTS[0]))
            assert tokens_of(await collect(replica, PARTS[0][3:], PARTS[0][:3])) == whole
            one_by_one = [await collect(replica, [call]) for call in PARTS[0]]
            assert tokens_of(answer for (answer,) in one_by_one) == whole

    @scenario(Feature.TOKENS, Feature.REPRODUCIBLE, Feature.SEVERAL)
    async def test_neither_slots_nor_the_replica_change_an_answer(self) -> None:
        answers = []
        for slots in (1, 3, self.harness.slots, self.harness.crowd):
            async with self.harness.serve(slots=slots) as replica:
                answers.append(tokens_of(await collect(replica, *PARTS)))
        assert answers[0] == answers[1] == answers[2] == answers[3]

    @scenario(Feature.TOKENS, Feature.REPRODUCIBLE)
    async def test_stopping_and_going_on_in_place_changes_no_answer(self) -> None:
        parts = [make_calls(row, n=3, max_tokens=60) for row in range(4)]
        async with self.harness.serve() as replica:
            undisturbed = tokens_of(await collect(replica, *parts))
            running = await submit(replica, *parts)
            for _ in range(4):
                await sampled(replica, 60)
                await replica.engine.pause(OnUpdate.KEEP)
                await replica.engine.resume()
            assert tokens_of(await running) == undisturbed

    @scenario(Feature.TOKENS, Feature.REPRODUCIBLE)
    async def test_a_call_may_have_a_seed_of_its_own_instead_of_the_runs(self) -> None:
        async with self.harness.serve() as replica:
            own, runs, other = [
                tokens_of(await collect(replica, make_calls(1, n=3, seed=seed)))
                for seed in (None, self.harness.seed, self.harness.seed + 1)
            ]
            assert own == runs == tokens_of(await collect(replica, make_calls(1, n=3)))
            assert all(own[key] != other[key] for key in own)

    @scenario(Feature.TOKENS, Feature.REPRODUCIBLE)
    async def test_the_same_key_gives_the_same_answer_under_any_number_and_client(self) -> None:
        calls = make_calls(1, n=2, key=2**64 - 1)
        renamed = [replace(call, number=7 + index) for index, call in enumerate(calls)]
        async with self.harness.serve() as replica:
            assert tokens_of(await collect(replica, calls)) == tokens_of(await collect(replica, renamed))

    @scenario(Feature.TOKENS)
    async def test_epoch_attempt_k_and_key_give_other_answers(self) -> None:
        others = [
            make_calls(1, n=3, **other) for other in ({}, {"attempt": 1}, {"epoch": 1}, {"key": 1}, {"key": 2**63})
        ]
        async with self.harness.serve() as replica:
            answers = [answer for calls in others for answer in await collect(replica, calls)]
            assert len({tuple(answer.ids) for answer in answers}) == 15
