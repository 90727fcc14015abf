"""Part of the contract: versions are exact, and new weights come whole or not at all."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from headway.data.types import FinishReason
from headway.errors import HeadwayError, RunError, UpdateFailed
from headway.interfaces import OnUpdate
from tests.contract.harness import (
    CONTEXT,
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
    tokens_by_version,
    trajectories,
    update,
    versions_of,
)
from tests.contract.reference import assert_logprobs

HALTS = pytest.mark.parametrize("policy", [OnUpdate.INTERRUPT, OnUpdate.KEEP])


class Updating(OfEngine):
    # ------------------------------------------------------------------------------------- versions

    @HALTS
    @scenario()
    async def test_each_version_is_stamped_on_just_the_tokens_that_were_sampled_under_it(
        self, policy: OnUpdate
    ) -> None:
        async with self.harness.serve() as replica:
            first = replica.version
            running = submit(replica, *(endless(number) for number in range(4)))
            counts = {}
            for _ in range(3):
                before = await sampled(replica, 60)
                await replica.engine.pause(policy)
                counts[replica.version] = before + (await replica.engine.stats()).generated_tokens
                await swap(replica)
                await replica.engine.resume()
            groups = await running
            whole = sum(CONTEXT - t.prompt_length for t in trajectories(groups))
            assert sum(t.length for t in trajectories(groups)) == whole
            counts[replica.version] = whole - sum(counts.values())
            assert tokens_by_version(groups) == counts
            assert list(counts) == [first, first + 1, first + 2, first + 3]
            for t in trajectories(groups):
                self.assert_spans(t.version_spans, t.length)
                assert t.started < t.finished
            # Those that decoded all the time have tokens of all versions.
            assert sum(len(t.version_spans) == 4 for t in trajectories(groups)) >= self.harness.slots

    def assert_spans(self, spans: list[list[int]], length: int) -> None:
        assert spans[0][0] == 0
        assert all(a < b and v < w for (a, v), (b, w) in pairwise(spans))
        assert spans[-1][0] < length

    @scenario()
    async def test_a_finished_answer_does_not_count_the_version_that_came_before_it_was_taken(self) -> None:
        async with self.harness.serve() as replica:
            generating = aiter(replica.engine.generate([make_request(0, n=2, max_tokens=3), endless(1, n=2)]))
            finished = [await anext(generating)]
            waiting = asyncio.create_task(anext(generating))
            await taken(replica)  # nobody has taken the second one yet, but it is sampled to its end
            old = replica.version
            await update(replica, OnUpdate.INTERRUPT)
            finished.append(await waiting)
            await generating.aclose()
            assert versions_of(finished) == {old}

    @HALTS
    @scenario()
    async def test_a_version_that_nothing_was_sampled_under_is_nobodys(self, policy: OnUpdate) -> None:
        async with self.harness.serve() as replica:
            first = replica.version
            running = submit(replica, endless(1))
            await sampled(replica, 20)
            await replica.engine.pause(policy)
            await swap(replica)
            waiting = submit(replica, make_request(2))
            await taken(replica, 1, 2)
            await swap(replica)
            await replica.engine.resume()
            assert versions_of(await running) == {first, first + 2}
            assert versions_of(await waiting) == {first + 2}

    @scenario()
    async def test_a_drain_leaves_one_version_in_each_answer(self) -> None:
        async with self.harness.serve() as replica:
            for _ in range(3):
                running = submit(replica, *(make_request(number, max_tokens=20) for number in range(4)))
                await sampled(replica, 10)
                old = replica.version
                assert await update(replica, OnUpdate.DRAIN) == 0
                assert versions_of(await running) == {old}

    @scenario()
    async def test_statistics_name_the_version_and_count_every_token(self) -> None:
        async with self.harness.serve() as replica:
            await update(replica, OnUpdate.DRAIN)
            await replica.engine.stats()
            groups = await collect(replica, [make_request(number, max_tokens=10, length=9) for number in range(2)])
            stats = await replica.engine.stats()
            assert stats.generated_tokens == sum(t.length for t in trajectories(groups)) == 80
            assert 2 * 9 <= stats.prefilled_tokens <= 8 * 9
            assert (stats.running, stats.waiting, stats.version) == (0, 0, replica.version)
            busy = sum(end - start for start, end in stats.busy)
            assert 0 < busy <= stats.slot_seconds <= self.harness.slots * busy
            assert stats.busy[0][0] <= min(t.started for t in trajectories(groups))
            assert max(t.finished for t in trajectories(groups)) <= stats.busy[-1][1]
            again = await replica.engine.stats()
            assert (again.busy, again.slot_seconds, again.generated_tokens, again.prefilled_tokens) == ([], 0, 0, 0)

    # ------------------------------------------------------------------------------------- all or nothing

    @scenario(Feature.BESIDE)
    async def test_weights_arrive_while_it_decodes_and_count_from_their_activation(self) -> None:
        async with self.harness.serve() as replica:
            old = replica.version
            running = submit(replica, endless(1), endless(2))
            await sampled(replica, 20)
            version = await replica.stage()
            await sampled(replica, 20)  # goes on, with what was there
            await replica.engine.pause(OnUpdate.INTERRUPT)
            await replica.engine.activate(version)
            replica.version = version
            await replica.engine.resume()
            groups = await running
            assert versions_of(groups) == {old, version}
            assert tokens_by_version(groups)[old] >= 40
            if Feature.TOKENS in self.harness.features:
                assert_logprobs(replica, groups, self.harness.tolerance)

    @scenario(Feature.BESIDE)
    async def test_a_transfer_that_fails_half_way_leaves_the_old_version_served_and_nothing_staged(self) -> None:
        async with self.harness.serve() as replica:
            old = replica.version
            running = submit(replica, endless(1), endless(2))
            await sampled(replica, 20)
            await self.fail_to_stage(replica)
            await sampled(replica, 20)
            await replica.engine.pause(OnUpdate.INTERRUPT)
            with pytest.raises(UpdateFailed):
                await replica.engine.activate(old + 1)
            await replica.engine.resume()
            groups = await running
            assert versions_of(groups) == {old}
            if Feature.TOKENS in self.harness.features:
                assert_logprobs(replica, groups, self.harness.tolerance)
            await update(replica, OnUpdate.DRAIN)  # the next one comes
            assert versions_of(await collect(replica, [make_request(3)])) == {old + 1}

    @scenario(Feature.BESIDE)
    async def test_a_failed_transfer_takes_what_was_staged_before_with_it(self) -> None:
        async with self.harness.serve() as replica:
            version = await replica.stage()
            await self.fail_to_stage(replica)
            await replica.engine.pause(OnUpdate.INTERRUPT)
            with pytest.raises(UpdateFailed):
                await replica.engine.activate(version)
            await replica.engine.resume()
            assert versions_of(await collect(replica, [make_request(3)])) == {replica.version}

    @scenario(Feature.IN_PLACE)
    async def test_in_place_a_transfer_that_fails_half_way_leaves_nothing_served(self) -> None:
        async with self.harness.serve() as replica:
            old = replica.version
            running = submit(replica, endless(1))
            await sampled(replica, 20)
            await replica.engine.pause(OnUpdate.INTERRUPT)
            await self.fail_to_stage(replica)
            with pytest.raises(UpdateFailed):
                await replica.engine.activate(old + 1)
            for call in (replica.engine.resume, replica.engine.probe):
                with pytest.raises(RunError):
                    await call()
            await swap(replica)
            await replica.engine.resume()
            groups = await running
            assert versions_of(groups) == {old, old + 1}
            assert_logprobs(replica, groups, self.harness.tolerance)

    @scenario(Feature.IN_PLACE)
    async def test_in_place_weights_are_refused_while_it_decodes(self) -> None:
        async with self.harness.serve() as replica:
            running = submit(replica, endless(1))
            await sampled(replica, 4)
            with pytest.raises(UpdateFailed, match="paus"):
                await replica.stage()
            groups = await running
            assert versions_of(groups) == {replica.version}
            assert_logprobs(replica, groups, self.harness.tolerance)

    @scenario()
    async def test_only_what_is_staged_can_be_activated(self) -> None:
        async with self.harness.serve() as replica:
            await replica.engine.pause(OnUpdate.INTERRUPT)
            with pytest.raises(UpdateFailed, match="stage"):
                await replica.engine.activate(replica.version + 1)
            version = await replica.stage()
            with pytest.raises(UpdateFailed, match="stage"):
                await replica.engine.activate(version + 1)
            await replica.engine.activate(version)
            replica.version = version
            with pytest.raises(UpdateFailed, match="stage"):
                await replica.engine.activate(version + 1)
            await replica.engine.resume()
            assert versions_of(await collect(replica, [make_request(3)])) == {version}
            await at_rest(replica)

    @scenario()
    async def test_an_aborted_answer_counts_the_versions_of_its_tokens_alone(self) -> None:
        async with self.harness.serve() as replica:
            old = replica.version
            running = submit(replica, endless(1), endless(2), endless(3))
            await sampled(replica, 20)
            await replica.engine.pause(OnUpdate.INTERRUPT)
            await swap(replica)
            await replica.engine.abort([1, 3])
            await replica.engine.resume()
            groups = {group.number: group for group in await running}
            assert versions_of([groups[1]]) == {old}
            assert versions_of([groups[3]]) == set()
            assert versions_of([groups[2]]) == {old, old + 1}
            assert {t.finish_reason for i in (1, 3) for t in groups[i].trajectories} == {FinishReason.ABORTED}

    async def fail_to_stage(self, replica: Replica) -> None:
        replica.break_transfers(True)
        try:
            with pytest.raises(HeadwayError) as failure:
                await replica.stage()
        finally:
            replica.break_transfers(False)
        assert failure.type is UpdateFailed
