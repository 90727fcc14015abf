"""Part of the contract: nothing is lost by a pause, a sleep or an abort, and nothing is sampled meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from headway.data.interfaces.rollout import OnUpdate, Priority
from headway.errors import RunError
from tests.engines.contract.harness import (
    Answer,
    Feature,
    OfEngine,
    at_rest,
    endless,
    in_order,
    make_calls,
    numbers_of,
    of_row,
    sampled,
    scenario,
    submit,
    swap,
    update,
    versions_of,
)
from tests.engines.contract.reference import assert_logprobs

TICKS = 20
HALTS = pytest.mark.parametrize("policy", [OnUpdate.INTERRUPT, OnUpdate.KEEP])


class Pausing(OfEngine):
    @pytest.mark.parametrize("policy", OnUpdate)
    @scenario()
    async def test_every_answer_comes_to_its_end_over_many_pauses(self, policy: OnUpdate) -> None:
        """Takes long over vLLM on a busy machine: the longest of its answers has 47 tokens, over three pauses."""
        parts = [make_calls(row, n=3, max_tokens=12 + 5 * row) for row in range(8)]
        async with self.harness.serve() as replica:
            running = await submit(replica, *parts)
            for _ in range(3):
                await sampled(replica, 10)
                await replica.engine.pause(policy)
                await replica.engine.pause(policy)  # twice is once
                if policy is OnUpdate.DRAIN:
                    stats = await replica.engine.stats()
                    assert (stats.running, stats.waiting) == (0, 0)
                    running, last = await submit(replica, *parts), running
                    self.assert_whole(await last)
                await replica.engine.resume()
            answers = await running
            self.assert_whole(answers)
            if Feature.TOKENS in self.harness.features:
                assert_logprobs(replica, answers, self.harness.tolerance)
            await at_rest(replica)

    def assert_whole(self, answers: Sequence[Answer]) -> None:
        assert [(a.row, a.id.k) for a in in_order(answers)] == [(row, k) for row in range(8) for k in range(3)]
        assert all(answer.whole for answer in answers)

    @HALTS
    @scenario()
    async def test_a_paused_engine_takes_calls_and_samples_nothing(self, policy: OnUpdate) -> None:
        async with self.harness.serve() as replica:
            running = await submit(replica, endless(1))
            await sampled(replica, 8)
            await replica.engine.pause(policy)
            await replica.engine.stats()
            waiting = await submit(replica, make_calls(2, max_tokens=3))
            for _ in range(TICKS):
                await replica.tick()
            stats = await replica.engine.stats()
            assert (stats.generated_tokens, stats.prefilled_tokens, stats.busy) == (0, 0, [])
            assert stats.running + stats.waiting == 8
            assert not running.done()
            assert not waiting.done()
            await replica.engine.resume()
            assert [answer.length for answer in await waiting] == [3] * 4
            assert len(await running) == 4

    @scenario()
    async def test_a_drain_finishes_what_was_submitted_and_starts_nothing_that_came_later(self) -> None:
        async with self.harness.serve() as replica:
            earlier = await submit(replica, *(make_calls(row, max_tokens=20) for row in range(4)))
            await sampled(replica, 5)
            pausing = asyncio.create_task(replica.engine.pause(OnUpdate.DRAIN))
            await replica.tick()
            late = await submit(replica, *(make_calls(row, max_tokens=5) for row in range(10, 13)))
            assert (await pausing).interrupted == 0
            assert (await replica.engine.stats()).waiting == 12
            for _ in range(TICKS):
                await replica.tick()
            assert not late.done()
            assert [answer.length for answer in await earlier] == [20] * 16
            await swap(replica)
            await replica.engine.resume()
            answers = await late
            assert [answer.length for answer in answers] == [5] * 12
            assert versions_of(answers) == {replica.version}

    @scenario()
    async def test_a_drain_of_nothing_is_over_at_once_and_holds_what_comes(self) -> None:
        async with self.harness.serve() as replica:
            await replica.engine.pause(OnUpdate.DRAIN)
            waiting = await submit(replica, make_calls(1))
            await swap(replica)
            await replica.engine.resume()
            assert versions_of(await waiting) == {replica.version}

    @scenario()
    async def test_an_interrupt_ends_a_drain_that_is_under_way(self) -> None:
        async with self.harness.serve() as replica:
            running = await submit(replica, endless(1), endless(2))
            await sampled(replica, 20)
            draining = asyncio.create_task(replica.engine.pause(OnUpdate.DRAIN))
            await replica.tick()
            await replica.engine.pause(OnUpdate.INTERRUPT)
            await draining
            assert (await replica.engine.stats()).waiting == 8
            await replica.engine.resume()
            assert [answer.whole for answer in await running] == [True] * 8

    @scenario()
    async def test_an_interrupt_counts_the_answers_that_it_cut(self) -> None:
        async with self.harness.serve() as replica:
            running = await submit(replica, endless(1, n=3), endless(2, n=2))
            await sampled(replica, 10)
            assert (await replica.engine.pause(OnUpdate.INTERRUPT)).interrupted == 5
            assert (await replica.engine.pause(OnUpdate.INTERRUPT)).interrupted == 0
            await replica.engine.resume()
            await running
            assert (await replica.engine.pause(OnUpdate.INTERRUPT)).interrupted == 0
            await replica.engine.resume()

    # ------------------------------------------------------------------------------------- abort

    @scenario()
    async def test_aborted_calls_are_yielded_as_they_are_and_all_others_finish(self) -> None:
        parts = [endless(row) for row in range(4)]
        async with self.harness.serve() as replica:
            running = await submit(replica, *parts, client="me")
            await sampled(replica, 10 * self.harness.slots)
            await replica.engine.abort("me", numbers_of([*parts[1], *parts[3]]))
            answers = await running
            for row in (0, 2):
                assert all(answer.whole for answer in of_row(answers, row))
            for row in (1, 3):
                assert all(answer.aborted for answer in of_row(answers, row))
            assert all(answer.length > 5 and not answer.whole for answer in of_row(answers, 1))
            # The fourth had not begun: there are slots for two rows.
            assert [(answer.length, answer.versions) for answer in of_row(answers, 3)] == [(0, [])] * 4
            if Feature.TOKENS in self.harness.features:
                assert all(answer.ids == [] for answer in of_row(answers, 3))
                assert_logprobs(replica, answers, self.harness.tolerance)
            await at_rest(replica)

    @scenario()
    async def test_one_call_of_a_prompt_is_aborted_and_the_others_go_on(self) -> None:
        async with self.harness.serve() as replica:
            running = await submit(replica, calls := endless(1, n=self.harness.slots + 2), client="me")
            await sampled(replica, 20)
            await replica.engine.abort("me", [calls[0].number, calls[-1].number])
            answers = in_order(await running)
            assert [answer.aborted for answer in answers] == [True, *[False] * self.harness.slots, True]
            assert [answer.length > 0 for answer in answers] == [*[True] * (self.harness.slots + 1), False]
            if Feature.TOKENS in self.harness.features:
                assert_logprobs(replica, answers, self.harness.tolerance)
            await at_rest(replica)

    @scenario()
    async def test_numbers_that_are_unknown_finished_or_anothers_are_ignored(self) -> None:
        async with self.harness.serve() as replica:
            running = await submit(replica, endless(1, n=2), make_calls(2, n=1, max_tokens=2), client="me")
            await sampled(replica, 40)
            everything = numbers_of([*endless(1, n=2), *make_calls(2, n=1)])
            for client, numbers in (("another", everything), ("me", [77, everything[-1]]), ("me", [])):
                await replica.engine.abort(client, numbers)
            await replica.engine.release([make_calls(9)[0].trajectory])
            assert all(answer.whole for answer in await running)
            await replica.engine.abort("me", everything)
            await at_rest(replica)

    @pytest.mark.parametrize("policy", OnUpdate)
    @scenario()
    async def test_an_abort_reaches_what_is_paused_and_what_waits_for_the_end_of_the_pause(
        self, policy: OnUpdate
    ) -> None:
        async with self.harness.serve() as replica:
            running = await submit(replica, endless(1), endless(2), client="first")
            await sampled(replica, 20)
            pausing = asyncio.create_task(replica.engine.pause(policy))
            await replica.tick()
            later = await submit(replica, endless(3), endless(4), client="second")
            await replica.engine.abort("first", numbers_of([*endless(1), *endless(2)]))  # ends a drain, too
            await replica.engine.abort("second", numbers_of(endless(4)))
            await pausing
            assert all(answer.aborted for answer in await running)
            assert (await replica.engine.stats()).waiting == 4
            await replica.engine.resume()
            answers = await later
            assert all(answer.whole for answer in of_row(answers, 3))
            assert all(answer.aborted and answer.length == 0 for answer in of_row(answers, 4))

    @scenario()
    async def test_training_calls_with_a_token_of_an_older_version_are_overdue_and_no_others(self) -> None:
        async with self.harness.serve() as replica:
            half = self.harness.slots // 2
            # Of 5 only a part has begun when the update comes, and 6 has not.
            old = await submit(replica, endless(7, n=half), endless(5, n=half + 2), endless(6, n=2))
            validation = await submit(replica, endless(3, n=1, priority=Priority.VALIDATION))
            await sampled(replica, 40)
            await replica.engine.abort_older_than(replica.version)
            await update(replica, OnUpdate.INTERRUPT)
            await sampled(replica, 20)
            await replica.engine.abort_older_than(replica.version)
            await replica.engine.abort_older_than(replica.version)
            answers = await old
            assert [answer.aborted for answer in of_row(answers, 7)] == [True] * half
            assert [answer.aborted for answer in of_row(answers, 5)] == [True] * half + [False] * 2
            assert [answer.aborted for answer in of_row(answers, 6)] == [False] * 2
            assert all(answer.whole for answer in [*answers, *await validation] if not answer.aborted)

    @scenario()
    async def test_an_abort_while_paused_counts_the_tokens_that_there_are(self) -> None:
        async with self.harness.serve() as replica:
            running = await submit(replica, endless(1), endless(2))
            await sampled(replica, 20)
            await replica.engine.pause(OnUpdate.KEEP)
            await swap(replica)
            # No token of the new version yet, all of the old one.
            await replica.engine.abort_older_than(replica.version)
            answers = await running
            assert all(answer.aborted for answer in answers)
            assert versions_of(answers) == {replica.version - 1}
            await replica.engine.resume()
            await at_rest(replica)

    # ------------------------------------------------------------------------------------- sleep

    @HALTS
    @scenario(Feature.SLEEP)
    async def test_asleep_it_takes_calls_and_weights_and_loses_nothing(self, policy: OnUpdate) -> None:
        async with self.harness.serve() as replica:
            old = replica.version
            running = await submit(replica, *(endless(row) for row in range(3)))
            await sampled(replica, 80)
            await replica.engine.pause(policy)
            await replica.engine.sleep()
            later = await submit(replica, make_calls(9, max_tokens=6))
            with pytest.raises(RunError, match="asleep"):
                await replica.engine.resume()
            await swap(replica)
            await replica.engine.wake()
            await replica.engine.stats()
            for _ in range(TICKS):
                await replica.tick()
            assert (await replica.engine.stats()).generated_tokens == 0  # awake, and still paused
            await replica.engine.resume()
            answers = await running
            assert versions_of(answers) == {old, old + 1}
            assert versions_of(await later) == {old + 1}
            assert all(answer.whole for answer in answers)
            if Feature.TOKENS in self.harness.features:
                assert_logprobs(replica, answers, self.harness.tolerance)  # all of them were prefilled again
            await at_rest(replica)

    @scenario(Feature.SLEEP)
    async def test_without_its_weights_it_goes_on_only_with_new_ones(self) -> None:
        async with self.harness.serve() as replica:
            running = await submit(replica, endless(1))
            await sampled(replica, 20)
            await replica.engine.pause(OnUpdate.INTERRUPT)
            await replica.engine.sleep(keep_weights=False)
            await replica.engine.wake()
            with pytest.raises(RunError):
                await replica.engine.resume()
            await swap(replica)
            await replica.engine.resume()
            answers = await running
            assert versions_of(answers) == {replica.version - 1, replica.version}
            if Feature.TOKENS in self.harness.features:
                assert_logprobs(replica, answers, self.harness.tolerance)

    @scenario(Feature.SLEEP)
    async def test_it_is_not_put_to_sleep_while_it_decodes(self) -> None:
        async with self.harness.serve() as replica:
            running = await submit(replica, endless(1))
            await sampled(replica, 4)
            with pytest.raises(RunError, match="paus"):
                await replica.engine.sleep()
            assert len(await running) == 4
