"""Part of the contract: every call is answered once, whoever else is there, or refused at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from headway.data.interfaces.rollout import GenerateRequest, OnUpdate, Priority
from headway.data.types import FinishReason
from headway.errors import ClientGone, DataError, RunError
from tests.engines.contract.harness import (
    CONTEXT,
    VOCABULARY,
    Feature,
    OfEngine,
    Replica,
    at_rest,
    collect,
    endless,
    make_calls,
    numbers_of,
    of_row,
    sampled,
    scenario,
    submit,
    until,
)
from tests.engines.contract.reference import assert_logprobs
from tests.engines.contract.sessions import ROUNDS, Session
from tests.tiers import mostly_slow


def one(**changes: object) -> GenerateRequest:
    (call,) = make_calls(0, n=1, **changes)  # type: ignore[arg-type]
    return call


REFUSED: dict[str, GenerateRequest] = {
    "no context": replace(one(), input_ids=np.zeros(0, np.int32)),
    "no room": one(length=CONTEXT),
    "a token above the vocabulary": replace(one(), input_ids=np.array([3, VOCABULARY], np.int32)),
    "no tokens": one(max_tokens=0),
    "a negative temperature": one(temperature=-0.1),
    "no mass": one(top_p=0.0),
    "more than all mass": one(top_p=1.1),
    "a negative rank": one(top_k=-1),
    "a share above one": one(min_p=1.5),
    "no penalty": one(repetition_penalty=0.0),
    "a bias of an unknown token": one(logit_bias=((VOCABULARY, 1.0),)),
    "an infinite bias": one(logit_bias=((3, float("-inf")),)),
    "a minimum above the maximum": one(max_tokens=4, min_tokens=5),
    "an empty stop string": one(stop=("",)),
}
QUICK_REFUSED = ("no room", "a token above the vocabulary", "an infinite bias", "an empty stop string")
"""Others are refused where these are, by `check_sampling`."""


class Serving(OfEngine):
    # ------------------------------------------------------------------------------------- what is given back

    @scenario()
    async def test_every_call_has_its_own_result_under_its_number(self) -> None:
        """Over 5 s where the engine is vLLM: the first test of those that share one starts it."""
        calls = [
            call for row in range(5) for call in make_calls(row, n=row + 1, max_tokens=5 + row, epoch=2, attempt=1)
        ]
        async with self.harness.serve() as replica:
            answers = await collect(replica, calls)
            assert sorted(answer.done.number for answer in answers) == numbers_of(calls)
            for answer in answers:
                assert answer.length == answer.call.sampling.max_tokens
                assert answer.done.finish_reason is FinishReason.LENGTH
                assert answer.done.version_spans == [[0, replica.version]]
                assert answer.done.started <= answer.done.finished
            await at_rest(replica)

    @scenario(Feature.TOKENS)
    async def test_tokens_and_metadata_of_a_call_agree(self) -> None:
        async with self.harness.serve() as replica:
            for answer in await collect(replica, make_calls(3, n=3, first=2)):
                arrays = (answer.tokens.ids, answer.tokens.logprobs, answer.tokens.versions)
                assert [a.dtype for a in arrays] == [np.int32, np.float32, np.int32]
                assert {len(a) for a in arrays} == {answer.length}

    @pytest.mark.parametrize("length", [1, 2, CONTEXT - 2, CONTEXT - 1])
    @scenario()
    async def test_a_context_of_any_length_that_leaves_room_is_continued(self, length: int) -> None:
        async with self.harness.serve() as replica:
            answers = await collect(
                replica, make_calls(1, n=3, length=length, max_tokens=CONTEXT - length), make_calls(2)
            )
            ends = [(answer.length, answer.done.finish_reason) for answer in of_row(answers, 1)]
            assert ends == [(CONTEXT - length, FinishReason.LENGTH)] * 3
            if Feature.TOKENS in self.harness.features:
                assert_logprobs(replica, answers, self.harness.tolerance)

    @scenario(Feature.TOKENS)
    async def test_the_end_of_the_context_ends_an_answer(self) -> None:
        async with self.harness.serve() as replica:
            answers = await collect(replica, make_calls(1, n=2, length=CONTEXT - 5, max_tokens=10 * CONTEXT))
            assert [(a.length, a.done.finish_reason) for a in answers] == [(5, FinishReason.LENGTH)] * 2

    @scenario()
    async def test_calls_of_one_prompt_may_come_apart_and_be_sampled_in_other_ways(self) -> None:
        """As ReMax's greedy baseline is, behind the group's sampled answers."""
        async with self.harness.serve() as replica:
            running = await submit(
                replica,
                make_calls(4, n=3, max_tokens=30),
                make_calls(4, n=1, first=3, max_tokens=20, temperature=0.0),
                make_calls(5, n=1),
            )
            other = await submit(replica, make_calls(4, n=2, first=7, max_tokens=30))
            answers = [*await running, *await other]
            assert [a.id.k for a in of_row(answers, 4)] == [0, 1, 2, 3, 7, 8]
            assert [a.length for a in of_row(answers, 4)] == [30, 30, 30, 20, 30, 30]
            if Feature.TOKENS in self.harness.features:
                assert len({tuple(answer.ids) for answer in of_row(answers, 4)}) == 6

    # ------------------------------------------------------------------------------------- clients and batches

    @scenario(Feature.TOGETHER)
    async def test_what_one_step_finishes_comes_in_one_batch(self) -> None:
        async with self.harness.serve() as replica:
            calls = [call for row, tokens in enumerate([20, 20, 9]) for call in make_calls(row, n=2, max_tokens=tokens)]
            await replica.engine.submit("me", calls)
            batches = aiter(replica.engine.finished("me"))
            came = [sorted(numbers_of(await anext(batches)))]
            if came[0] != numbers_of(calls):  # all at once, where nobody listened for eleven steps
                came.append(sorted(numbers_of(await anext(batches))))
                assert came == [numbers_of(calls[4:]), numbers_of(calls[:4])]
            await batches.aclose()  # type: ignore[attr-defined]
            await at_rest(replica)

    @scenario()
    async def test_what_was_finished_before_anybody_listened_is_there(self) -> None:
        async with self.harness.serve() as replica:
            calls = make_calls(1, n=2, max_tokens=4)
            await replica.engine.submit("me", calls)
            await replica.engine.pause(OnUpdate.DRAIN)
            await replica.engine.resume()
            batches, came = aiter(replica.engine.finished("me")), list[int]()
            while len(came) < len(calls):
                came += numbers_of(await anext(batches))
            assert sorted(came) == numbers_of(calls)
            await batches.aclose()  # type: ignore[attr-defined]

    @scenario()
    async def test_clients_may_use_the_same_numbers_and_get_their_own_results(self) -> None:
        async with self.harness.serve() as replica:
            calls = [[replace(call, number=call.number % 2) for call in make_calls(row, n=2)] for row in range(4)]
            calls[1] = [replace(call, sampling=replace(call.sampling, max_tokens=7)) for call in calls[1]]
            running = [await submit(replica, part, client=f"client {row}") for row, part in enumerate(calls)]
            for row, task in enumerate(running):
                answers = await task
                assert sorted(answer.done.number for answer in answers) == [0, 1]
                assert {answer.length for answer in answers} == {7 if row == 1 else 16}
                if Feature.TOKENS in self.harness.features:
                    assert_logprobs(replica, answers, self.harness.tolerance)
            await at_rest(replica)

    @scenario()
    async def test_a_number_that_is_in_use_is_refused_and_harms_nobody(self) -> None:
        async with self.harness.serve() as replica:
            running = await submit(replica, endless(1, n=2), client="me")
            for calls in ([*make_calls(2), *make_calls(1, n=1)], [*make_calls(2), *make_calls(2, n=1)]):
                with pytest.raises(DataError, match="number"):
                    await replica.engine.submit("me", calls)
            assert all(answer.whole for answer in await running)
            await at_rest(replica)

    @scenario()
    async def test_a_clients_results_are_read_by_one(self) -> None:
        async with self.harness.serve() as replica:
            running = await submit(replica, make_calls(1), client="me")
            with pytest.raises(RunError, match="already"):
                await anext(aiter(replica.engine.finished("me")))
            assert len(await running) == 4
            # Whoever has left may come back.
            assert len(await (await submit(replica, make_calls(1), client="me"))) == 4

    # ------------------------------------------------------------------------------------- who goes first

    @scenario()
    async def test_calls_start_in_order_and_are_yielded_when_they_are_done(self) -> None:
        half = self.harness.slots // 2
        parts = [make_calls(row, n=half, max_tokens=tokens) for row, tokens in enumerate([150, 8, 20, 8, 4])]
        async with self.harness.serve() as replica:
            answers = await collect(replica, *parts)
            # Two rows at a time: 1 makes room for 2, 2 for 3, 3 for 4, and 0 is still there.
            assert [answer.row for answer in answers[::half]] == [1, 2, 3, 4, 0]
            started = [min(answer.done.started for answer in of_row(answers, row)) for row in range(5)]
            assert started == sorted(started)

    @scenario()
    async def test_validation_starts_before_training_that_waits(self) -> None:
        slots = self.harness.slots
        async with self.harness.serve() as replica:
            training = await submit(replica, *(endless(row, n=slots) for row in range(3)))
            await sampled(replica, slots)
            validation = await submit(
                replica, *(make_calls(row, n=2, max_tokens=4, priority=Priority.VALIDATION) for row in (100, 99))
            )
            answers = [*await training, *await validation]
            first = {row: min(answer.done.started for answer in of_row(answers, row)) for row in (0, 2, 100)}
            assert first[0] < first[100] <= first[2]
            last = max(answer.done.finished for answer in validation.result())
            assert last <= min(answer.done.finished for answer in of_row(answers, 1))

    # ------------------------------------------------------------------------------------- what is refused

    @mostly_slow("case", REFUSED, quick=QUICK_REFUSED)
    @scenario(Feature.TOKENS)
    async def test_what_cannot_be_served_is_refused_and_harms_nobody_else(self, case: str) -> None:
        async with self.harness.serve() as replica:
            running = await submit(replica, make_calls(1, max_tokens=40), client="me")
            await sampled(replica, 4)
            with pytest.raises(DataError):
                await replica.engine.submit("me", [*make_calls(2), REFUSED[case], *make_calls(3)])
            stats = await replica.engine.stats()
            assert stats.running + stats.waiting <= 4
            answers = await running
            assert [answer.length for answer in answers] == [40] * 4
            assert_logprobs(replica, answers, self.harness.tolerance)
            await at_rest(replica)

    @scenario()
    async def test_no_calls_are_no_answers(self) -> None:
        async with self.harness.serve() as replica:
            await replica.engine.submit("me", [])
            assert len(await (await submit(replica, make_calls(1), client="me"))) == 4
            await at_rest(replica)

    # ------------------------------------------------------------------------------------- many, and at random

    @scenario()
    async def test_thousands_of_calls_at_random_times_are_each_answered_once(self) -> None:
        """Takes long: its many calls arrive one by one, while others decode."""
        rng = np.random.default_rng(11)
        many, slots = self.harness.many, self.harness.crowd
        waits = rng.exponential(self.harness.arrival_s, many).cumsum()
        tokens = rng.integers(1, 4, many)
        answered: Counter[tuple[int, int, FinishReason]] = Counter()

        async def ask(replica: Replica, row: int, wait: float) -> None:
            await asyncio.sleep(wait)
            for call in await collect(replica, make_calls(row, n=1, max_tokens=int(tokens[row]), length=4)):
                answered[call.row, call.length, call.done.finish_reason] += 1

        async with self.harness.serve(slots=slots) as replica:
            await replica.engine.stats()
            async with asyncio.TaskGroup() as tasks:
                for row, wait in enumerate(waits.tolist()):
                    tasks.create_task(ask(replica, row, wait))
            assert answered == Counter({(row, int(tokens[row]), FinishReason.LENGTH): 1 for row in range(many)})
            assert (await replica.engine.stats()).generated_tokens == tokens.sum()
            await at_rest(replica)

    @scenario()
    async def test_leaving_drops_what_was_not_yielded_and_nothing_of_other_clients(self) -> None:
        async with self.harness.serve() as replica:
            running = await submit(replica, endless(9, n=2))
            await replica.engine.submit("me", [*make_calls(0, n=1, max_tokens=2), *endless(1), *endless(2)])
            batches = replica.engine.finished("me")
            async for batch in batches:
                assert numbers_of(batch) == [0]
                break
            await batches.aclose()  # type: ignore[attr-defined]
            await until(replica, lambda: self.has(replica, 2))
            assert [answer.whole for answer in await running] == [True, True]
            await at_rest(replica)

    @scenario()
    async def test_a_client_that_is_gone_without_leaving_is_dropped_and_nothing_of_other_clients(self) -> None:
        async with self.harness.serve() as replica:
            running = await submit(replica, endless(9, n=2))
            await replica.engine.submit("gone", [*endless(1, n=1), *endless(2, n=1)])
            batches = replica.engine.finished("gone")
            reading = asyncio.ensure_future(anext(batches))  # type: ignore[arg-type]
            await replica.tick()
            await until(replica, lambda: self.has(replica, 4))
            await replica.engine.drop("gone")
            await until(replica, lambda: self.has(replica, 2))
            with pytest.raises(ClientGone, match="'gone' is gone"):
                await reading
            with pytest.raises(ClientGone, match="'gone' was given up"):  # it comes back: another one has its place
                await replica.engine.submit("gone", make_calls(3))
            with pytest.raises(ClientGone, match="'gone' was given up"):
                await anext(aiter(replica.engine.finished("gone")))
            await replica.engine.drop("unknown")
            assert [answer.whole for answer in await running] == [True, True]
            await at_rest(replica)

    async def has(self, replica: Replica, calls: int) -> bool:
        """Whether there are just so many calls in the engine."""
        stats = await replica.engine.stats()
        return stats.running + stats.waiting == calls

    @pytest.mark.parametrize("policy", OnUpdate)
    @scenario()
    async def test_leaving_while_paused_frees_everything(self, policy: OnUpdate) -> None:
        async with self.harness.serve() as replica:
            running = await submit(replica, endless(1), endless(2), endless(3))
            await sampled(replica, 20)
            pausing = asyncio.create_task(replica.engine.pause(policy))
            await replica.tick()
            held = await submit(replica, endless(4))
            for task in (running, held):
                task.cancel()
                await asyncio.wait([task])
            await pausing
            await at_rest(replica)
            await replica.engine.resume()
            assert len(await collect(replica, make_calls(5))) == 4

    @scenario()
    async def test_cancelling_at_random_times_frees_everything_and_disturbs_nobody(self) -> None:
        """Takes long over vLLM on a busy machine: six rounds of calls beside others that decode."""
        rng = np.random.default_rng(3)
        async with self.harness.serve() as replica:
            steady = [make_calls(row, n=2, max_tokens=50) for row in range(20)]
            undisturbed = await submit(replica, *steady[:10])
            for round_ in range(6):
                tasks = [
                    await submit(replica, *(endless(100 * round_ + 10 * i + j, n=3) for j in range(2)))
                    for i in range(5)
                ]
                for index in rng.permutation(5):
                    await asyncio.sleep(float(rng.uniform(0, 8 * self.harness.step_s)))
                    tasks[index].cancel()
                await asyncio.wait(tasks)
                if round_ == 3:
                    others = await submit(replica, *steady[10:])
            answers = [*await undisturbed, *await others]
            assert [answer.length for answer in answers] == [50] * 40
            if Feature.TOKENS in self.harness.features:
                assert_logprobs(replica, answers, self.harness.tolerance)
            await at_rest(replica)

    @mostly_slow(("seed", "rounds"), [(1, 3), *((seed, ROUNDS) for seed in range(4))], quick=[(1, 3)])
    @scenario()
    async def test_random_commands_lose_nothing_and_stamp_every_token(self, seed: int, rounds: int) -> None:
        """Gives commands and calls for some seconds, of a native engine's."""
        async with self.harness.serve() as replica:
            session = Session(replica, np.random.default_rng(seed), self.harness.features, rounds=rounds)
            await session.run(self.harness.tolerance)
