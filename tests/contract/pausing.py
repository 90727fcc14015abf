"""Part of the contract: nothing is lost by a pause, a sleep or an abort, and nothing is sampled meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from headway.data.types import FinishReason
from headway.errors import RunError
from headway.interfaces import FinishedGroup, OnUpdate, Priority
from tests.contract.harness import (
    CONTEXT,
    Feature,
    OfEngine,
    at_rest,
    endless,
    make_request,
    sampled,
    scenario,
    submit,
    swap,
    taken,
    trajectories,
    update,
    versions_of,
)
from tests.contract.reference import assert_logprobs

TICKS = 20
HALTS = pytest.mark.parametrize("policy", [OnUpdate.INTERRUPT, OnUpdate.KEEP])


class Pausing(OfEngine):
    @pytest.mark.parametrize("policy", OnUpdate)
    @scenario()
    async def test_every_answer_comes_to_its_end_over_many_pauses(self, policy: OnUpdate) -> None:
        requests = [make_request(number, n=3, max_tokens=20 + 8 * number) for number in range(8)]
        async with self.harness.serve() as replica:
            running = submit(replica, *requests)
            for _ in range(4):
                await sampled(replica, 10)
                await replica.engine.pause(policy)
                await replica.engine.pause(policy)  # twice is once
                if policy is OnUpdate.DRAIN:
                    assert await replica.engine.in_flight() == []
                    running, last = submit(replica, *requests), running
                    self.assert_whole(await last)
                await replica.engine.resume()
            groups = await running
            self.assert_whole(groups)
            if Feature.TOKENS in self.harness.features:
                assert_logprobs(replica, groups, self.harness.tolerance)
            await at_rest(replica)

    def assert_whole(self, groups: Sequence[FinishedGroup]) -> None:
        answers = trajectories(groups)
        assert [(t.id.row, t.id.k) for t in answers] == [(row, k) for row in range(8) for k in range(3)]
        assert [t.length for t in answers] == [20 + 8 * t.id.row for t in answers]
        assert {t.finish_reason for t in answers} == {FinishReason.LENGTH}

    @HALTS
    @scenario()
    async def test_a_paused_engine_takes_requests_and_samples_nothing(self, policy: OnUpdate) -> None:
        async with self.harness.serve() as replica:
            running = submit(replica, endless(1))
            await sampled(replica, 8)
            await replica.engine.pause(policy)
            await replica.engine.stats()
            waiting = submit(replica, make_request(2, max_tokens=3))
            await taken(replica, 1, 2)
            for _ in range(TICKS):
                await replica.tick()
            stats = await replica.engine.stats()
            assert (stats.generated_tokens, stats.prefilled_tokens, stats.busy) == (0, 0, [])
            assert stats.running + stats.waiting == 8
            assert not running.done()
            assert not waiting.done()
            await replica.engine.resume()
            assert [t.length for t in trajectories(await waiting)] == [3] * 4
            assert len(trajectories(await running)) == 4

    @scenario()
    async def test_a_drain_finishes_what_was_submitted_and_starts_nothing_that_came_later(self) -> None:
        async with self.harness.serve() as replica:
            earlier = submit(replica, *(make_request(number, max_tokens=20) for number in range(4)))
            await sampled(replica, 5)
            pausing = asyncio.create_task(replica.engine.pause(OnUpdate.DRAIN))
            await replica.tick()
            late = submit(replica, *(make_request(number, max_tokens=5) for number in range(10, 13)))
            assert (await pausing).interrupted == 0
            assert await replica.engine.in_flight() == [10, 11, 12]
            for _ in range(TICKS):
                await replica.tick()
            assert not late.done()
            assert [t.length for t in trajectories(await earlier)] == [20] * 16
            await swap(replica)
            await replica.engine.resume()
            groups = await late
            assert [t.length for t in trajectories(groups)] == [5] * 12
            assert versions_of(groups) == {replica.version}

    @scenario()
    async def test_a_drain_of_nothing_is_over_at_once_and_holds_what_comes(self) -> None:
        async with self.harness.serve() as replica:
            await replica.engine.pause(OnUpdate.DRAIN)
            waiting = submit(replica, make_request(1))
            await taken(replica, 1)
            await swap(replica)
            await replica.engine.resume()
            assert versions_of(await waiting) == {replica.version}

    @scenario()
    async def test_an_interrupt_ends_a_drain_that_is_under_way(self) -> None:
        async with self.harness.serve() as replica:
            running = submit(replica, endless(1), endless(2))
            await sampled(replica, 20)
            draining = asyncio.create_task(replica.engine.pause(OnUpdate.DRAIN))
            await replica.tick()
            await replica.engine.pause(OnUpdate.INTERRUPT)
            await draining
            assert await replica.engine.in_flight() == [1, 2]
            await replica.engine.resume()
            assert len(trajectories(await running)) == 8

    @scenario()
    async def test_an_interrupt_counts_the_answers_that_it_cut(self) -> None:
        async with self.harness.serve() as replica:
            running = submit(replica, endless(1, n=3), endless(2, n=2))
            await sampled(replica, 10)
            assert (await replica.engine.pause(OnUpdate.INTERRUPT)).interrupted == 5
            assert (await replica.engine.pause(OnUpdate.INTERRUPT)).interrupted == 0
            await replica.engine.resume()
            await running
            assert (await replica.engine.pause(OnUpdate.INTERRUPT)).interrupted == 0
            await replica.engine.resume()

    # ------------------------------------------------------------------------------------- abort

    @scenario()
    async def test_aborted_groups_are_yielded_as_they_are_and_all_others_finish(self) -> None:
        async with self.harness.serve() as replica:
            running = submit(replica, *(endless(number) for number in range(4)))
            await sampled(replica, 10 * self.harness.slots)
            await replica.engine.abort([1, 3, 77])
            assert await replica.engine.in_flight() == [0, 2]
            groups = {group.number: group for group in await running}
            assert [{t.finish_reason for t in groups[i].trajectories} for i in range(4)] == [
                {FinishReason.LENGTH},
                {FinishReason.ABORTED},
                {FinishReason.LENGTH},
                {FinishReason.ABORTED},
            ]
            assert all(5 < t.length < CONTEXT - t.prompt_length for t in groups[1].trajectories)
            # The fourth had not begun: there are slots for two groups.
            assert [(t.length, t.version_spans, t.oldest_version) for t in groups[3].trajectories] == [
                (0, [], None)
            ] * 4
            assert all(t.length == CONTEXT - t.prompt_length for i in (0, 2) for t in groups[i].trajectories)
            if Feature.TOKENS in self.harness.features:
                assert_logprobs(replica, list(groups.values()), self.harness.tolerance)
            await at_rest(replica)

    @scenario()
    async def test_what_had_finished_before_its_group_was_aborted_stays_finished(self) -> None:
        async with self.harness.serve(slots=self.harness.slots) as replica:
            slots = self.harness.slots
            running = submit(replica, make_request(0, n=slots + 2, max_tokens=40))
            await sampled(replica, 40 * slots + 4)
            await replica.engine.abort([0])
            ends = [(t.finish_reason, t.length == 40) for t in trajectories(await running)]
            assert ends == [(FinishReason.LENGTH, True)] * slots + [(FinishReason.ABORTED, False)] * 2

    @pytest.mark.parametrize("policy", OnUpdate)
    @scenario()
    async def test_an_abort_reaches_what_is_paused_and_what_waits_for_the_end_of_the_pause(
        self, policy: OnUpdate
    ) -> None:
        async with self.harness.serve() as replica:
            running = submit(replica, endless(1), endless(2))
            await sampled(replica, 20)
            pausing = asyncio.create_task(replica.engine.pause(policy))
            await replica.tick()
            later = submit(replica, endless(3), endless(4))
            await taken(replica, 1, 2, 3, 4)
            await replica.engine.abort([1, 2, 4])  # ends a drain, too
            await pausing
            assert {t.finish_reason for t in trajectories(await running)} == {FinishReason.ABORTED}
            assert await replica.engine.in_flight() == [3]
            await replica.engine.resume()
            ends = {t.id.row: t.finish_reason for t in trajectories(await later)}
            assert ends == {3: FinishReason.LENGTH, 4: FinishReason.ABORTED}

    @scenario()
    async def test_validation_is_not_aborted_by_the_number_of_a_group(self) -> None:
        async with self.harness.serve() as replica:
            running = submit(replica, endless(1, n=2, priority=Priority.VALIDATION), endless(1, n=2))
            await sampled(replica, 20)
            assert await replica.engine.in_flight() == [1]
            await replica.engine.abort([1])
            aborted, validation = await running
            assert {t.finish_reason for t in aborted.trajectories} == {FinishReason.ABORTED}
            assert {t.finish_reason for t in validation.trajectories} == {FinishReason.LENGTH}

    @scenario()
    async def test_groups_with_a_token_of_an_older_version_are_overdue_and_no_others(self) -> None:
        async with self.harness.serve() as replica:
            half = self.harness.slots // 2
            # Of the second one only a part has begun when the update comes, and the third has not.
            old = submit(replica, endless(7, n=half), endless(5, n=half + 2), endless(6, n=2))
            validation = submit(replica, endless(3, n=1, priority=Priority.VALIDATION))
            await sampled(replica, 40)
            assert await replica.engine.abort_older_than(replica.version) == []
            await update(replica, OnUpdate.INTERRUPT)
            await sampled(replica, 20)
            assert await replica.engine.abort_older_than(replica.version) == [7, 5]
            assert await replica.engine.abort_older_than(replica.version) == []
            ends = {group.number: {t.finish_reason for t in group.trajectories} for group in await old}
            assert ends == {7: {FinishReason.ABORTED}, 5: {FinishReason.ABORTED}, 6: {FinishReason.LENGTH}}
            assert {t.finish_reason for t in trajectories(await validation)} == {FinishReason.LENGTH}

    @scenario()
    async def test_an_abort_while_paused_counts_the_tokens_that_there_are(self) -> None:
        async with self.harness.serve() as replica:
            running = submit(replica, endless(1), endless(2))
            await sampled(replica, 20)
            await replica.engine.pause(OnUpdate.KEEP)
            await swap(replica)
            # No token of the new version yet, all of the old one.
            assert await replica.engine.abort_older_than(replica.version) == [1, 2]
            assert await replica.engine.in_flight() == []
            assert versions_of(await running) == {replica.version - 1}
            await replica.engine.resume()
            await at_rest(replica)

    # ------------------------------------------------------------------------------------- sleep

    @HALTS
    @scenario(Feature.SLEEP)
    async def test_asleep_it_takes_requests_and_weights_and_loses_nothing(self, policy: OnUpdate) -> None:
        async with self.harness.serve() as replica:
            old = replica.version
            running = submit(replica, *(endless(number) for number in range(3)))
            await sampled(replica, 80)
            await replica.engine.pause(policy)
            await replica.engine.sleep()
            later = submit(replica, make_request(9, max_tokens=6))
            with pytest.raises(RunError, match="asleep"):
                await replica.engine.resume()
            await swap(replica)
            await replica.engine.wake()
            await replica.engine.stats()
            for _ in range(TICKS):
                await replica.tick()
            assert (await replica.engine.stats()).generated_tokens == 0  # awake, and still paused
            await replica.engine.resume()
            groups = await running
            assert versions_of(groups) == {old, old + 1}
            assert versions_of(await later) == {old + 1}
            assert all(t.length == CONTEXT - t.prompt_length for t in trajectories(groups))
            if Feature.TOKENS in self.harness.features:
                assert_logprobs(replica, groups, self.harness.tolerance)  # all of them were prefilled again
            await at_rest(replica)

    @scenario(Feature.SLEEP)
    async def test_without_its_weights_it_goes_on_only_with_new_ones(self) -> None:
        async with self.harness.serve() as replica:
            running = submit(replica, endless(1))
            await sampled(replica, 20)
            await replica.engine.pause(OnUpdate.INTERRUPT)
            await replica.engine.sleep(keep_weights=False)
            await replica.engine.wake()
            with pytest.raises(RunError):
                await replica.engine.resume()
            await swap(replica)
            await replica.engine.resume()
            groups = await running
            assert versions_of(groups) == {replica.version - 1, replica.version}
            if Feature.TOKENS in self.harness.features:
                assert_logprobs(replica, groups, self.harness.tolerance)

    @scenario(Feature.SLEEP)
    async def test_it_is_not_put_to_sleep_while_it_decodes(self) -> None:
        async with self.harness.serve() as replica:
            running = submit(replica, endless(1))
            await sampled(replica, 4)
            with pytest.raises(RunError, match="paus"):
                await replica.engine.sleep()
            assert len(trajectories(await running)) == 4
