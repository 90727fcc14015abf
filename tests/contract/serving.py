"""Part of the contract: every request is answered once, whoever else is there, or refused at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from headway.data.types import FinishReason, Prompt
from headway.errors import DataError
from headway.interfaces import FinishedGroup, GenerateRequest, OnUpdate, Priority, SamplingParams
from tests.contract.harness import (
    CONTEXT,
    VOCABULARY,
    Feature,
    OfEngine,
    Replica,
    at_rest,
    collect,
    endless,
    make_request,
    sampled,
    scenario,
    submit,
    swap,
    taken,
    text_of,
    tokens_of,
    trajectories,
    until,
    update,
)
from tests.contract.reference import assert_logprobs
from tests.tiers import mostly_slow

REFUSED: dict[str, GenerateRequest] = {
    "no prompt": replace(make_request(0), prompt=Prompt(0, 0, 0, "test", "", np.zeros(0, np.int32))),
    "no room": make_request(0, length=CONTEXT),
    "a token above the vocabulary": replace(
        make_request(0), prompt=Prompt(0, 0, 0, "test", "", np.array([3, VOCABULARY], np.int32))
    ),
    "no answers": make_request(0, n=0),
    "no tokens": make_request(0, max_tokens=0),
    "a negative temperature": make_request(0, temperature=-0.1),
    "no mass": make_request(0, top_p=0.0),
    "more than all mass": make_request(0, top_p=1.1),
    "a negative rank": make_request(0, top_k=-1),
    "a share above one": make_request(0, min_p=1.5),
    "no penalty": make_request(0, repetition_penalty=0.0),
    "a bias of an unknown token": make_request(0, logit_bias=((VOCABULARY, 1.0),)),
    "an infinite bias": make_request(0, logit_bias=((3, float("-inf")),)),
    "a minimum above the maximum": make_request(0, max_tokens=4, min_tokens=5),
    "an empty stop string": make_request(0, stop=("",)),
}

ROUNDS = 6
"""How often a random session does each of the things that it does."""


class Serving(OfEngine):
    # ------------------------------------------------------------------------------------- what is given back

    @scenario()
    async def test_a_group_has_its_answers_in_order_and_says_whose_they_are(self) -> None:
        requests = [
            make_request(number, n=number + 1, max_tokens=5 + number, epoch=2, attempt=1) for number in range(5)
        ]
        async with self.harness.serve() as replica:
            groups = {group.number: group for group in await collect(replica, requests)}
            for request in requests:
                group = groups[request.number]
                assert [t.id for t in group.trajectories] == [request.prompt.trajectory_id(k) for k in range(request.n)]
                for t in group.trajectories:
                    assert t.replica == replica.engine.name
                    assert t.prompt_length == len(request.prompt.token_ids)
                    assert t.length == request.sampling.max_tokens
                    assert t.finish_reason is FinishReason.LENGTH
                    assert t.version_spans == [[0, replica.version]]
                    assert t.started <= t.finished
            await at_rest(replica)

    @scenario(Feature.TOKENS)
    async def test_tokens_and_metadata_of_a_group_agree(self) -> None:
        async with self.harness.serve() as replica:
            request = make_request(3, n=3, first=2)
            (group,) = await collect(replica, [request])
            assert group.tokens.prompt_ids.tolist() == request.prompt.token_ids.tolist()
            assert group.tokens.prompt_ids.dtype == np.int32
            for t, response in zip(group.trajectories, group.tokens.responses, strict=True):
                arrays = (response.ids, response.logprobs, response.versions, response.loss_mask)
                assert [a.dtype for a in arrays] == [np.int32, np.float32, np.int32, np.bool_]
                assert {len(a) for a in arrays} == {t.length}
                assert t.text == text_of(response.ids.tolist())

    @pytest.mark.parametrize("length", [1, 2, CONTEXT - 2, CONTEXT - 1])
    @scenario()
    async def test_a_prompt_of_any_length_that_leaves_room_is_answered(self, length: int) -> None:
        async with self.harness.serve() as replica:
            groups = await collect(replica, [endless(1, n=3, length=length), make_request(2)])
            ends = [(t.prompt_length, t.length, t.finish_reason) for t in trajectories(groups) if t.id.row == 1]
            assert ends == [(length, CONTEXT - length, FinishReason.LENGTH)] * 3
            if Feature.TOKENS in self.harness.features:
                assert_logprobs(replica, groups, self.harness.tolerance)

    @scenario(Feature.TOKENS)
    async def test_the_end_of_the_context_ends_an_answer(self) -> None:
        async with self.harness.serve() as replica:
            request = make_request(1, n=2, length=CONTEXT - 5, max_tokens=10 * CONTEXT)
            (group,) = await collect(replica, [request])
            assert [(t.length, t.finish_reason) for t in group.trajectories] == [(5, FinishReason.LENGTH)] * 2

    @scenario()
    async def test_parts_of_one_group_may_be_on_one_replica(self) -> None:
        """As ReMax's greedy baseline is, behind the group's sampled answers."""
        sampled_part = make_request(4, n=3, max_tokens=30)
        greedy = replace(sampled_part, n=1, first=3, sampling=SamplingParams(20, temperature=0.0))
        async with self.harness.serve() as replica:
            running = submit(replica, sampled_part, greedy, make_request(5, n=1))
            other = submit(replica, replace(sampled_part, n=2, first=7))
            await taken(replica, 4, 5)  # a number comes once
            parts = {len(group.trajectories): group for group in await running if group.number == 4}
            assert [t.id.k for t in parts[3].trajectories] == [0, 1, 2]
            assert [(t.id.k, t.length) for t in parts[1].trajectories] == [(3, 20)]
            assert [t.id.k for group in await other for t in group.trajectories] == [7, 8]
            if Feature.TOKENS in self.harness.features:
                assert len({tuple(ids) for ids in tokens_of([*parts.values(), *other.result()]).values()}) == 6

    @scenario()
    async def test_an_abort_ends_all_parts_of_a_group(self) -> None:
        async with self.harness.serve() as replica:
            running = submit(replica, endless(4, n=2), endless(4, n=2, first=2), endless(5, n=1))
            await sampled(replica, 20)
            await replica.engine.abort([4])
            assert await replica.engine.in_flight() == [5]
            ends = {(t.id.row, t.finish_reason) for t in trajectories(await running)}
            assert ends == {(4, FinishReason.ABORTED), (5, FinishReason.LENGTH)}

    # ------------------------------------------------------------------------------------- who goes first

    @scenario()
    async def test_groups_start_in_order_and_are_yielded_when_they_are_done(self) -> None:
        slots = self.harness.slots
        requests = [make_request(n, n=slots // 2, max_tokens=m) for n, m in enumerate([150, 8, 20, 8, 4])]
        async with self.harness.serve() as replica:
            groups = await collect(replica, requests)
            # Two at a time: 1 makes room for 2, 2 for 3, 3 for 4, and 0 is still there.
            assert [group.number for group in groups] == [1, 2, 3, 4, 0]
            started = [min(t.started for t in trajectories(groups) if t.id.row == n) for n in range(5)]
            assert started == sorted(started)

    @scenario()
    async def test_validation_starts_before_training_that_waits(self) -> None:
        slots = self.harness.slots
        async with self.harness.serve() as replica:
            training = submit(replica, *(endless(number, n=slots) for number in range(3)))
            await sampled(replica, slots)
            validation = submit(
                replica, *(make_request(n, n=2, max_tokens=4, priority=Priority.VALIDATION) for n in (100, 1))
            )
            order = {
                row: t.started for t in trajectories([*await training, *await validation]) if (row := t.id.row) != 1
            }
            assert order[0] < order[100] <= order[2]
            first, second = (max(t.finished for t in g.trajectories) for g in validation.result())
            assert max(first, second) <= min(t.finished for t in training.result()[1].trajectories)
            assert await replica.engine.in_flight() == []

    # ------------------------------------------------------------------------------------- what is refused

    @pytest.mark.parametrize("case", REFUSED)
    @scenario(Feature.TOKENS)
    async def test_what_cannot_be_served_is_refused_and_harms_nobody_else(self, case: str) -> None:
        async with self.harness.serve() as replica:
            running = submit(replica, make_request(1, max_tokens=40))
            await sampled(replica, 4)
            with pytest.raises(DataError):
                await collect(replica, [make_request(2), REFUSED[case], make_request(3)])
            assert set(await replica.engine.in_flight()) <= {1}
            groups = await running
            assert [t.length for t in trajectories(groups)] == [40] * 4
            assert_logprobs(replica, groups, self.harness.tolerance)
            await at_rest(replica)

    @scenario()
    async def test_no_requests_are_no_groups(self) -> None:
        async with self.harness.serve() as replica:
            assert await collect(replica, []) == []

    # ------------------------------------------------------------------------------------- many, and at random

    @scenario()
    async def test_thousands_of_requests_at_random_times_are_each_answered_once(self) -> None:
        """Takes long: its many requests arrive one by one, while others decode."""
        rng = np.random.default_rng(11)
        many, slots = self.harness.many, self.harness.crowd
        waits = rng.exponential(self.harness.arrival_s, many).cumsum()
        tokens = rng.integers(1, 4, many)
        requests = [make_request(n, n=1, max_tokens=int(count), length=4) for n, count in enumerate(tokens)]
        answered: Counter[tuple[int, int, FinishReason]] = Counter()

        async def ask(replica: Replica, request: GenerateRequest, wait: float) -> None:
            await asyncio.sleep(wait)
            async for group in replica.engine.generate([request]):
                (t,) = group.trajectories
                answered[t.id.row, t.length, t.finish_reason] += 1

        async with self.harness.serve(slots=slots) as replica:
            await replica.engine.stats()
            async with asyncio.TaskGroup() as tasks:
                for request, wait in zip(requests, waits.tolist(), strict=True):
                    tasks.create_task(ask(replica, request, wait))
            assert answered == Counter({(n, int(tokens[n]), FinishReason.LENGTH): 1 for n in range(many)})
            assert (await replica.engine.stats()).generated_tokens == tokens.sum()
            await at_rest(replica)

    @scenario()
    async def test_leaving_early_drops_what_was_not_yielded_and_nothing_else(self) -> None:
        async with self.harness.serve() as replica:
            running = submit(replica, endless(9, n=2))
            generating = replica.engine.generate([make_request(0, n=1, max_tokens=2), endless(1), endless(2)])
            async for group in generating:
                assert group.number == 0
                break
            await generating.aclose()  # type: ignore[attr-defined]
            await taken(replica, 9)
            await replica.engine.stats()
            assert (await replica.engine.stats()).waiting == 0
            assert [t.length for t in trajectories(await running)] == [
                CONTEXT - t.prompt_length for t in trajectories(running.result())
            ]
            await at_rest(replica)

    @pytest.mark.parametrize("policy", OnUpdate)
    @scenario()
    async def test_leaving_while_paused_frees_everything(self, policy: OnUpdate) -> None:
        async with self.harness.serve() as replica:
            running = submit(replica, endless(1), endless(2), endless(3))
            await sampled(replica, 20)
            pausing = asyncio.create_task(replica.engine.pause(policy))
            await replica.tick()
            held = submit(replica, endless(4))
            await taken(replica, 1, 2, 3, 4)
            for task in (running, held):
                task.cancel()
                await asyncio.wait([task])
            await pausing
            await at_rest(replica)
            await replica.engine.resume()
            assert len(await collect(replica, [make_request(5)])) == 1

    @scenario()
    async def test_cancelling_at_random_times_frees_everything_and_disturbs_nobody(self) -> None:
        rng = np.random.default_rng(3)
        async with self.harness.serve() as replica:
            steady = [make_request(number, n=2, max_tokens=60) for number in range(40)]
            undisturbed = submit(replica, *steady[:20])
            for round_ in range(12):
                calls = [
                    submit(replica, *(endless(100 * round_ + 10 * i + j, n=3) for j in range(2))) for i in range(5)
                ]
                for call in rng.permutation(5):
                    await asyncio.sleep(float(rng.uniform(0, 8 * self.harness.step_s)))
                    calls[call].cancel()
                await asyncio.wait(calls)
                if round_ == 6:
                    others = submit(replica, *steady[20:])
            groups = [*await undisturbed, *await others]
            assert [t.length for t in trajectories(groups)] == [60] * 80
            if Feature.TOKENS in self.harness.features:
                assert_logprobs(replica, groups, self.harness.tolerance)
            await at_rest(replica)

    @mostly_slow("seed", range(4), quick=range(2))
    @scenario()
    async def test_random_commands_lose_nothing_and_stamp_every_token(self, seed: int) -> None:
        async with self.harness.serve() as replica:
            await Session(replica, np.random.default_rng(seed), self.harness.features).run(self.harness.tolerance)


class Session:
    """Requests, pauses, updates, sleeps, aborts and departures in a random order, and what must come of them."""

    def __init__(
        self,
        replica: Replica,
        rng: np.random.Generator,
        features: frozenset[Feature],
        lengths: tuple[int, int] = (2, 70),
    ) -> None:
        """``lengths`` of answers: from the first to below the second."""
        self.replica = replica
        self.rng = rng
        self.features = features
        self.lengths = lengths
        self.calls: dict[asyncio.Task[list[FinishedGroup]], list[GenerateRequest]] = {}
        self.submitted: dict[int, int] = {}
        """Group → version at its submission."""
        self.aborted: set[int] = set()

    async def run(self, tolerance: float) -> None:
        await self.act()
        await self.settle(tolerance)

    async def act(self) -> None:
        actions = [self.ask, self.ask, self.halt, self.update, self.abort, self.abort_overdue, self.leave]
        if Feature.SLEEP in self.features:
            actions.append(self.sleep)
        # Fixed beforehand: other draws depend on what has finished by then.
        for index in self.rng.permutation(ROUNDS * len(actions)):
            await actions[index % len(actions)]()
            for _ in range(self.rng.integers(0, 6)):
                await self.replica.tick()

    async def settle(self, tolerance: float) -> int:
        """Wait for all answers and look at them; how often some were parked for want of memory."""
        whole = 0
        for call, requests in self.calls.items():
            groups = await call
            assert sorted(group.number for group in groups) == sorted(request.number for request in requests)
            whole += sum(map(self.check, groups, [_request_of(group, requests) for group in groups]))
            if Feature.TOKENS in self.features:
                assert_logprobs(self.replica, groups, tolerance)
        assert whole > 0
        preempted = (await self.replica.engine.stats()).preempted
        await at_rest(self.replica)
        return preempted

    def check(self, group: FinishedGroup, request: GenerateRequest) -> int:
        """How many of its answers came to their end."""
        assert [t.id.k for t in group.trajectories] == list(range(request.n))
        for t in group.trajectories:
            versions = [version for _, version in t.version_spans]
            assert versions == sorted(set(versions))
            assert all(self.submitted[group.number] <= v <= self.replica.version for v in versions)
            if t.finish_reason is FinishReason.LENGTH:
                assert t.length == request.sampling.max_tokens
            else:
                assert t.finish_reason is FinishReason.ABORTED
                assert group.number in self.aborted
        return sum(t.finish_reason is FinishReason.LENGTH for t in group.trajectories)

    # ------------------------------------------------------------------------------------- commands

    async def ask(self) -> None:
        requests = []
        for _ in range(self.rng.integers(1, 4)):
            number = len(self.submitted)
            self.submitted[number] = self.replica.version
            n, length = (int(x) for x in self.rng.integers((1, self.lengths[0]), (6, self.lengths[1])))
            requests.append(make_request(number, n=n, max_tokens=length))
        self.calls[submit(self.replica, *requests)] = requests

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
        if numbers := await self.replica.engine.in_flight():
            self.aborted.add(chosen := int(self.rng.choice(numbers)))
            await self.replica.engine.abort([chosen])
            assert chosen not in await self.replica.engine.in_flight()

    async def abort_overdue(self) -> None:
        if self.rng.random() < 0.5:
            self.aborted.update(await self.replica.engine.abort_older_than(self.replica.version))

    async def leave(self) -> None:
        if running := [call for call in self.calls if not call.done()]:
            call = running[self.rng.integers(len(running))]
            gone = [request.number for request in self.calls.pop(call)]
            call.cancel()
            await asyncio.wait([call])

            async def dropped() -> bool:
                return not {*gone} & {*await self.replica.engine.in_flight()}

            await until(self.replica, dropped)


def _request_of(group: FinishedGroup, requests: list[GenerateRequest]) -> GenerateRequest:
    return next(request for request in requests if request.number == group.number)
