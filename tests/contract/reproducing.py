"""Part of the contract: where an engine says so, a token depends on seed, trajectory, position and weights alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from headway.interfaces import OnUpdate
from tests.contract.harness import (
    Feature,
    OfEngine,
    collect,
    endless,
    make_request,
    sampled,
    scenario,
    submit,
    tokens_of,
)

REQUESTS = [make_request(number, n=5, max_tokens=18) for number in range(6)]


class Reproducing(OfEngine):
    @scenario(Feature.TOKENS, Feature.REPRODUCIBLE)
    async def test_order_and_company_change_no_answer(self) -> None:
        async with self.harness.serve() as replica:
            together = tokens_of(await collect(replica, REQUESTS))
            assert len({tuple(ids) for ids in together.values()}) == len(together) == 30
            backwards = tokens_of(await collect(replica, REQUESTS[::-1]))
            alone = [tokens_of(await collect(replica, [request])) for request in REQUESTS]
            assert backwards == together
            assert {key: ids for one in alone for key, ids in one.items()} == together

    @scenario(Feature.TOKENS, Feature.REPRODUCIBLE)
    async def test_the_time_of_arrival_changes_no_answer(self) -> None:
        rng = np.random.default_rng(5)
        async with self.harness.serve() as replica:
            together = tokens_of(await collect(replica, REQUESTS))
            crowd = submit(replica, *(endless(number, n=1) for number in range(50, 54)))
            tasks = []
            for index in rng.permutation(len(REQUESTS)):
                await sampled(replica, int(rng.integers(1, 30)))
                tasks.append(submit(replica, REQUESTS[index]))
            groups = [group for part in await asyncio.gather(*tasks) for group in part]
            assert tokens_of(groups) == together
            await crowd

    @scenario(Feature.TOKENS, Feature.REPRODUCIBLE)
    async def test_parts_of_a_group_have_the_answers_of_the_whole(self) -> None:
        async with self.harness.serve() as replica:
            whole = tokens_of(await collect(replica, REQUESTS[:1]))
            parts = [replace(REQUESTS[0], n=2, first=3), replace(REQUESTS[0], n=3)]
            assert tokens_of(await collect(replica, parts)) == whole

    @scenario(Feature.TOKENS, Feature.REPRODUCIBLE, Feature.SEVERAL)
    async def test_neither_slots_nor_the_replica_change_an_answer(self) -> None:
        answers = []
        for slots in (1, 3, self.harness.slots, self.harness.crowd):
            async with self.harness.serve(slots=slots) as replica:
                answers.append(tokens_of(await collect(replica, REQUESTS)))
        assert answers[0] == answers[1] == answers[2] == answers[3]

    @scenario(Feature.TOKENS, Feature.REPRODUCIBLE)
    async def test_stopping_and_going_on_in_place_changes_no_answer(self) -> None:
        requests = [endless(number, n=3) for number in range(4)]
        async with self.harness.serve() as replica:
            undisturbed = tokens_of(await collect(replica, requests))
            running = submit(replica, *requests)
            for _ in range(4):
                await sampled(replica, 60)
                await replica.engine.pause(OnUpdate.KEEP)
                await replica.engine.resume()
            assert tokens_of(await running) == undisturbed

    @scenario(Feature.TOKENS, Feature.REPRODUCIBLE)
    async def test_a_request_may_have_a_seed_of_its_own_instead_of_the_runs(self) -> None:
        plain = make_request(1, n=3)
        async with self.harness.serve() as replica:
            own, runs, other = [
                tokens_of(await collect(replica, [make_request(1, n=3, seed=seed)]))
                for seed in (None, self.harness.seed, self.harness.seed + 1)
            ]
            assert own == runs == tokens_of(await collect(replica, [plain]))
            assert all(own[key] != other[key] for key in own)

    @scenario(Feature.TOKENS)
    async def test_epoch_attempt_and_k_give_other_answers(self) -> None:
        requests = [make_request(1, n=3), make_request(1, n=3, attempt=1), make_request(1, n=3, epoch=1)]
        async with self.harness.serve() as replica:
            answers = [ids for r in requests for ids in tokens_of(await collect(replica, [r])).values()]
            assert len({tuple(ids) for ids in answers}) == 9
