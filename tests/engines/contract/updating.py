"""Part of the contract: versions are exact, and new weights come whole or not at all."""

from __future__ import annotations

from itertools import pairwise

import pytest

from headway.data.interfaces.rollout import OnUpdate
from headway.errors import HeadwayError, RunError, UpdateFailed
from tests.engines.contract.harness import (
    Feature,
    OfEngine,
    Replica,
    at_rest,
    collect,
    endless,
    in_order,
    make_calls,
    numbers_of,
    of_row,
    sampled,
    scenario,
    submit,
    swap,
    tokens_by_version,
    update,
    versions_of,
)
from tests.engines.contract.reference import assert_logprobs

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
            running = await submit(replica, *(endless(row) for row in range(4)))
            counts = {}
            for _ in range(3):
                before = await sampled(replica, 60)
                await replica.engine.pause(policy)
                counts[replica.version] = before + (await replica.engine.stats()).generated_tokens
                await swap(replica)
                await replica.engine.resume()
            answers = await running
            assert all(answer.whole for answer in answers)
            counts[replica.version] = sum(answer.length for answer in answers) - sum(counts.values())
            assert tokens_by_version(answers) == counts
            assert list(counts) == [first, first + 1, first + 2, first + 3]
            for answer in answers:
                self.assert_spans(answer.done.version_spans, answer.length)
                assert answer.done.started < answer.done.finished
            # Those that decoded all the time have tokens of all versions.
            assert sum(len(answer.versions) == 4 for answer in answers) >= self.harness.slots

    def assert_spans(self, spans: list[list[int]], length: int) -> None:
        assert spans[0][0] == 0
        assert all(a < b and v < w for (a, v), (b, w) in pairwise(spans))
        assert spans[-1][0] < length

    @scenario()
    async def test_a_finished_answer_does_not_count_the_version_that_came_before_it_was_taken(self) -> None:
        async with self.harness.serve() as replica:
            await replica.engine.submit("me", endless(1, n=2))
            old = replica.version
            await update(replica, OnUpdate.DRAIN)  # nobody has taken them yet, but they are sampled to their end
            answers = in_order(await collect(replica, make_calls(2, n=1)))
            assert versions_of(answers) == {replica.version}
            batches, versions = aiter(replica.engine.finished("me")), list[int]()
            while len(versions) < 2:
                versions += [version for done in await anext(batches) for _, version in done.version_spans]
            assert versions == [old, old]
            await batches.aclose()  # type: ignore[attr-defined]

    @HALTS
    @scenario()
    async def test_a_version_that_nothing_was_sampled_under_is_nobodys(self, policy: OnUpdate) -> None:
        async with self.harness.serve() as replica:
            first = replica.version
            running = await submit(replica, endless(1))
            await sampled(replica, 20)
            await replica.engine.pause(policy)
            await swap(replica)
            waiting = await submit(replica, make_calls(2))
            await swap(replica)
            await replica.engine.resume()
            assert versions_of(await running) == {first, first + 2}
            assert versions_of(await waiting) == {first + 2}

    @scenario()
    async def test_a_drain_leaves_one_version_in_each_answer(self) -> None:
        async with self.harness.serve() as replica:
            for _ in range(3):
                running = await submit(replica, *(make_calls(row, max_tokens=20) for row in range(4)))
                await sampled(replica, 10)
                old = replica.version
                assert await update(replica, OnUpdate.DRAIN) == 0
                assert versions_of(await running) == {old}

    @scenario()
    async def test_statistics_name_the_version_and_count_every_token(self) -> None:
        async with self.harness.serve() as replica:
            await update(replica, OnUpdate.DRAIN)
            await replica.engine.stats()
            answers = await collect(replica, *(make_calls(row, max_tokens=10, length=9) for row in range(2)))
            stats = await replica.engine.stats()
            assert stats.generated_tokens == sum(answer.length for answer in answers) == 80
            assert 2 * 9 <= stats.prefilled_tokens <= 8 * 9
            assert stats.cached_tokens == sum(answer.done.cached for answer in answers)
            assert (stats.running, stats.waiting, stats.version) == (0, 0, replica.version)
            busy = sum(end - start for start, end in stats.busy)
            assert 0 < busy <= stats.slot_seconds <= self.harness.slots * busy
            assert stats.busy[0][0] <= min(answer.done.started for answer in answers)
            assert max(answer.done.finished for answer in answers) <= stats.busy[-1][1]
            again = await replica.engine.stats()
            assert (again.busy, again.slot_seconds) == ([], 0)
            assert (again.generated_tokens, again.prefilled_tokens, again.cached_tokens) == (0, 0, 0)

    # ------------------------------------------------------------------------------------- all or nothing

    @scenario(Feature.BESIDE)
    async def test_weights_arrive_while_it_decodes_and_count_from_their_activation(self) -> None:
        async with self.harness.serve() as replica:
            old = replica.version
            running = await submit(replica, endless(1), endless(2))
            await sampled(replica, 20)
            version = await replica.stage()
            await sampled(replica, 20)  # goes on, with what was there
            await replica.engine.pause(OnUpdate.INTERRUPT)
            await replica.engine.activate(version)
            replica.version = version
            await replica.engine.resume()
            answers = await running
            assert versions_of(answers) == {old, version}
            assert tokens_by_version(answers)[old] >= 40
            if Feature.TOKENS in self.harness.features:
                assert_logprobs(replica, answers, self.harness.tolerance)

    @scenario(Feature.BESIDE)
    async def test_a_transfer_that_fails_half_way_leaves_the_old_version_served_and_nothing_staged(self) -> None:
        async with self.harness.serve() as replica:
            old = replica.version
            running = await submit(replica, endless(1), endless(2))
            await sampled(replica, 20)
            await self.fail_to_stage(replica)
            await sampled(replica, 20)
            await replica.engine.pause(OnUpdate.INTERRUPT)
            with pytest.raises(UpdateFailed):
                await replica.engine.activate(old + 1)
            await replica.engine.resume()
            answers = await running
            assert versions_of(answers) == {old}
            if Feature.TOKENS in self.harness.features:
                assert_logprobs(replica, answers, self.harness.tolerance)
            await update(replica, OnUpdate.DRAIN)  # the next one comes
            assert versions_of(await collect(replica, make_calls(3))) == {old + 1}

    @scenario(Feature.BESIDE)
    async def test_a_failed_transfer_takes_what_was_staged_before_with_it(self) -> None:
        async with self.harness.serve() as replica:
            version = await replica.stage()
            await self.fail_to_stage(replica)
            await replica.engine.pause(OnUpdate.INTERRUPT)
            with pytest.raises(UpdateFailed):
                await replica.engine.activate(version)
            await replica.engine.resume()
            assert versions_of(await collect(replica, make_calls(3))) == {replica.version}

    @scenario(Feature.IN_PLACE)
    async def test_in_place_a_transfer_that_fails_half_way_leaves_nothing_served(self) -> None:
        async with self.harness.serve() as replica:
            old = replica.version
            running = await submit(replica, endless(1))
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
            answers = await running
            assert versions_of(answers) == {old, old + 1}
            assert_logprobs(replica, answers, self.harness.tolerance)

    @scenario(Feature.IN_PLACE)
    async def test_in_place_weights_are_refused_while_it_decodes(self) -> None:
        async with self.harness.serve() as replica:
            running = await submit(replica, endless(1))
            await sampled(replica, 4)
            with pytest.raises(UpdateFailed, match="paus"):
                await replica.stage()
            answers = await running
            assert versions_of(answers) == {replica.version}
            assert_logprobs(replica, answers, self.harness.tolerance)

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
            assert versions_of(await collect(replica, make_calls(3))) == {version}
            await at_rest(replica)

    @scenario()
    async def test_an_aborted_answer_counts_the_versions_of_its_tokens_alone(self) -> None:
        async with self.harness.serve() as replica:
            old = replica.version
            parts = [endless(row) for row in (1, 2, 3)]
            running = await submit(replica, *parts, client="me")
            await sampled(replica, 20)
            await replica.engine.pause(OnUpdate.INTERRUPT)
            await swap(replica)
            await replica.engine.abort("me", numbers_of([*parts[0], *parts[2]]))
            await replica.engine.resume()
            answers = await running
            assert versions_of(of_row(answers, 1)) == {old}
            assert versions_of(of_row(answers, 3)) == set()
            assert versions_of(of_row(answers, 2)) == {old, old + 1}
            assert all(answer.aborted for row in (1, 3) for answer in of_row(answers, row))

    async def fail_to_stage(self, replica: Replica) -> None:
        replica.break_transfers(True)
        try:
            with pytest.raises(HeadwayError) as failure:
                await replica.stage()
        finally:
            replica.break_transfers(False)
        assert failure.type is UpdateFailed
