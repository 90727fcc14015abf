"""Groups of programs' episodes where replicas leave, calls are refused or ended, and groups held or aborted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from headway.agents.episodes.episode_worker import EpisodeWorker, local_episode_worker
from headway.agents.interface.program_chat import Ask
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart
from headway.data.interfaces.rollout import Completion, GenerateRequest, Priority
from headway.data.types import FinishReason, SampledTokens
from headway.errors import DataError, RunError
from headway.planner.simulation.virtual_clock import run_virtual
from tests.agents.episodes.program_episodes import LIMITS, RENDERER, Here, Policy, hosting, made, request, slow, talk


def test_a_turn_whose_replica_leaves_is_asked_of_another_and_the_episode_goes_on_there():
    first, second = Policy("a"), Policy("b")

    async def leave(worker: EpisodeWorker) -> None:
        await asyncio.sleep(1.5)
        await worker.leave("a")

    group = made(talk, [first, second], meanwhile=leave)
    assert [len(first.calls), len(second.calls)] == [2, 2]
    assert second.calls[0].input_ids.tolist() == first.calls[1].input_ids.tolist()
    assert second.calls[0].key == first.calls[1].key
    assert group.trajectories[0].turns == 3


def test_turns_go_to_the_replica_that_has_the_prefix():
    policies = [Policy("a"), Policy("b")]
    made(talk, policies)
    assert sorted(len(policy.calls) for policy in policies) == [0, 3]


def test_a_call_that_an_engine_refuses_fails_its_episode_alone():
    class Refusing(Policy):
        async def submit(self, client: str, calls: Sequence[GenerateRequest]) -> None:
            if len(self.calls) == 2:
                raise DataError("the context is too long for this engine")
            await super().submit(client, calls)

    (episode,) = made(talk, [Refusing()]).trajectories
    assert episode.failure == "the context is too long for this engine"


def test_groups_are_aborted_between_turns_by_the_age_of_what_was_sampled():
    async def abort(worker: EpisodeWorker) -> None:
        await asyncio.sleep(5)
        await worker.abort_older_than(0)
        await worker.abort_older_than(1)

    group = made(slow, meanwhile=abort)
    (episode,) = group.trajectories
    assert (episode.finish_reason, episode.rows, episode.turns) == (FinishReason.ABORTED, (), 1)


def test_a_group_is_aborted_with_a_turn_in_flight():
    async def abort(worker: EpisodeWorker) -> None:
        await asyncio.sleep(1.5)
        await worker.abort_older_than(5)

    (episode,) = made(talk, meanwhile=abort).trajectories
    assert (episode.finish_reason, episode.turns) == (FinishReason.ABORTED, 1)


def test_a_call_that_an_engine_ends_aborts_its_group():
    policy = Policy()

    async def abort(worker: EpisodeWorker) -> None:
        await asyncio.sleep(1.5)
        nothing = SampledTokens.nothing()
        finished = Completion(policy.calls[-1].number, 0, [], FinishReason.ABORTED, 0.0, 0.0, nothing)
        policy._batches.put_nowait([finished])

    (episode,) = made(talk, [policy], meanwhile=abort).trajectories
    assert (episode.finish_reason, episode.turns) == (FinishReason.ABORTED, 1)


def test_tokens_of_the_calls_that_an_engine_ends_count_in_every_episode_of_the_group():
    """The second one's came with the first one's, by whose end the group was aborted before it was read."""
    policy = Policy()

    async def abort(worker: EpisodeWorker) -> None:
        await asyncio.sleep(1.5)
        policy.end(*policy.calls[-2:], lengths=(3, 2))

    episodes = made(talk, [policy], n=2, meanwhile=abort).trajectories
    first = len(RENDERER.encode(policy.says(policy.calls[0]))) + 1
    for episode, cut in zip(episodes, (3, 2), strict=True):
        assert (episode.finish_reason, episode.turns, episode.length) == (FinishReason.ABORTED, 2, first + cut)
        assert (episode.version_spans, episode.rows) == ([[0, 0], [first, 7]], ())


def test_held_groups_wait_while_those_that_were_started_finish():
    async def main() -> list[str]:
        told: list[str] = []
        async with local_episode_worker(Policy(), hosting=hosting(Here(talk))) as worker:

            async def group(number: int) -> None:
                (finished,) = [group async for group in worker.generate([request(number=number)])]
                told.append(f"group {finished.number}")

            first = asyncio.ensure_future(group(1))
            await asyncio.sleep(0.5)
            holding = asyncio.ensure_future(worker.hold())
            await asyncio.sleep(0)
            second = asyncio.ensure_future(group(2))
            await holding
            told.append("held")
            await asyncio.sleep(100)
            told.append("goes on")
            await worker.go_on()
            await asyncio.gather(first, second)
        return told

    assert run_virtual(main()) == ["group 1", "held", "goes on", "group 2"]


def test_held_out_episodes_wait_for_room_and_their_time_with_them():
    open_now, most = 0, [0, 0]

    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        nonlocal open_now
        open_now += 1
        most[0] = max(most[0], open_now)
        try:
            return await slow(start, ask)  # 10 seconds, of the 12 that an episode may take
        finally:
            open_now -= 1

    async def main(priority: Priority) -> None:
        most[0] = 0
        limits = replace(LIMITS, episode_timeout_s=12)
        hosted = replace(hosting(Here(program), limits), held_out_at_once=3)
        async with local_episode_worker(Policy(), hosting=hosted) as worker:
            asked = [replace(request(4, number), priority=priority) for number in range(2)]
            groups = [group async for group in worker.generate(asked)]
            assert [one.limit for group in groups for one in group.trajectories] == [None] * 8
        most[1] = most[0]

    run_virtual(main(Priority.VALIDATION))
    assert most[1] == 3
    run_virtual(main(Priority.TRAINING))
    assert most[1] == 8


def test_held_groups_hear_of_the_end():
    async def main() -> None:
        worker = EpisodeWorker("episode-worker")
        await worker.hold()
        waiting = asyncio.ensure_future(anext(worker.generate([request()])))
        await asyncio.sleep(0)
        worker.end(RunError("all is over"))
        with pytest.raises(RunError, match="all is over"):
            await waiting

    run_virtual(main())
