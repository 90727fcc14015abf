"""Random sessions: what must come of calls, whatever else an engine is told meanwhile."""

from __future__ import annotations

import asyncio

import numpy as np

from headway.data.interfaces.rollout import GenerateRequest, OnUpdate
from tests.engines.contract.harness import (
    Answer,
    Feature,
    Replica,
    at_rest,
    make_calls,
    numbers_of,
    submit,
    swap,
    update,
)
from tests.engines.contract.reference import assert_logprobs

ROUNDS = 6
"""How often a random session does each of the things that it does."""


class Session:
    """Calls, pauses, updates, sleeps, aborts and departures in a random order, and what must come of them."""

    def __init__(
        self,
        replica: Replica,
        rng: np.random.Generator,
        features: frozenset[Feature],
        lengths: tuple[int, int] = (2, 70),
        rounds: int = ROUNDS,
    ) -> None:
        """``lengths`` of answers: from the first to below the second."""
        self.replica = replica
        self.rng = rng
        self.features = features
        self.lengths = lengths
        self.rounds = rounds
        self.clients: dict[str, asyncio.Task[list[Answer]]] = {}
        self.asked: dict[str, list[GenerateRequest]] = {}
        self.submitted: dict[str, int] = {}
        """Client → version at its submission."""
        self.may_abort: dict[str, set[int]] = {}
        """Client → calls that were to be aborted, some of which were finished before."""

    async def run(self, tolerance: float) -> None:
        await self.act()
        await self.settle(tolerance)

    async def act(self) -> None:
        actions = [self.ask, self.ask, self.halt, self.update, self.abort, self.abort_overdue, self.leave]
        if Feature.SLEEP in self.features:
            actions.append(self.sleep)
        # Fixed beforehand: other draws depend on what has finished by then.
        for index in self.rng.permutation(self.rounds * len(actions)):
            await actions[index % len(actions)]()
            for _ in range(self.rng.integers(0, 6)):
                await self.replica.tick()

    async def settle(self, tolerance: float) -> int:
        """Wait for all answers and look at them; how often some were parked for want of memory."""
        whole = 0
        for client, task in self.clients.items():
            answers = await task
            assert sorted(answer.done.number for answer in answers) == numbers_of(self.asked[client])
            whole += sum(self.check(client, answer) for answer in answers)
            if Feature.TOKENS in self.features:
                assert_logprobs(self.replica, answers, tolerance)
        assert whole > 0
        preempted = (await self.replica.engine.stats()).preempted
        await at_rest(self.replica)
        return preempted

    def check(self, client: str, answer: Answer) -> bool:
        """Whether it came to its end."""
        assert answer.versions == sorted(set(answer.versions))
        assert all(self.submitted[client] <= version <= self.replica.version for version in answer.versions)
        assert answer.whole or answer.aborted
        if answer.aborted:
            assert answer.done.number in self.may_abort[client]
        return answer.whole

    # ------------------------------------------------------------------------------------- commands

    async def ask(self) -> None:
        client, calls = f"client {len(self.submitted)}", list[GenerateRequest]()
        for _ in range(self.rng.integers(1, 4)):
            n, length = (int(x) for x in self.rng.integers((1, self.lengths[0]), (6, self.lengths[1])))
            calls += make_calls(100 * len(self.submitted) + len(calls), n=n, max_tokens=length)
        self.submitted[client] = self.replica.version
        self.asked[client], self.may_abort[client] = calls, set()
        self.clients[client] = await submit(self.replica, calls, client=client)

    async def halt(self) -> None:
        # What is kept and updated has log-probs of two versions at once, which the reference here does not know.
        await self.replica.engine.pause(OnUpdate(self.rng.choice(list(OnUpdate))))
        await self.replica.engine.resume()

    async def update(self) -> None:
        await update(self.replica, OnUpdate(self.rng.choice([OnUpdate.DRAIN, OnUpdate.INTERRUPT])))

    async def sleep(self) -> None:
        keep_weights = bool(self.rng.integers(2))
        await self.replica.engine.pause(OnUpdate.KEEP)
        await self.replica.engine.sleep(keep_weights=keep_weights)
        await self.ask()
        if not keep_weights or self.rng.integers(2):
            await swap(self.replica)
        await self.replica.engine.wake()
        await self.replica.engine.resume()

    async def abort(self) -> None:
        if unfinished := self.unfinished():
            client = unfinished[self.rng.integers(len(unfinished))]
            numbers = numbers_of(self.asked[client])[:: int(self.rng.integers(1, 3))]
            self.may_abort[client].update(numbers)
            await self.replica.engine.abort(client, numbers)

    async def abort_overdue(self) -> None:
        if self.rng.random() < 0.5:
            for client in self.unfinished():
                if self.submitted[client] < self.replica.version:
                    self.may_abort[client].update(numbers_of(self.asked[client]))
            await self.replica.engine.abort_older_than(self.replica.version)

    async def leave(self) -> None:
        if unfinished := self.unfinished():
            client = unfinished[self.rng.integers(len(unfinished))]
            task = self.clients.pop(client)
            task.cancel()
            await asyncio.wait([task])

    def unfinished(self) -> list[str]:
        return [client for client, task in self.clients.items() if not task.done()]
