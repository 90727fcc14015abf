"""Limits of episodes: of tokens, turns, steps and time, and what becomes of an episode that one ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from headway.agents.episodes.episode_limits import EpisodeLimits
from headway.agents.episodes.episode_worker import EpisodeWorker, local_episode_worker
from headway.agents.interface.program_chat import Ask, Chat
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, TurnRequest, said
from headway.data.interfaces.rollout import GenerateRequest, SamplingParams
from headway.data.types import FinishReason
from headway.errors import EpisodeOver
from headway.planner.simulation.virtual_clock import run_virtual
from tests.agents.episodes.program_episodes import LIMITS, Here, Policy, Slow, hosting, made, request, slow, talk


@pytest.mark.parametrize(("limits", "turns", "limit"), [
    (EpisodeLimits(max_length=400, max_turns=2), 2, "turns"),
    (EpisodeLimits(max_length=75, max_turns=9), 2, "tokens"),
])  # fmt: skip
def test_a_limit_ends_an_episode_which_is_trained_with_the_reward_that_it_has(limits, turns, limit):
    (episode,) = made(lambda start, ask: talk(start, ask, 9), limits=limits).trajectories
    assert (episode.limit, episode.failure, episode.reward, episode.turns) == (limit, None, turns, turns)
    assert sum(at.prompt_length + at.length for at in episode.rows) <= limits.max_length


def test_a_limit_that_is_not_trained_on_fails_the_episode_and_no_other():
    def program(start: EpisodeStart, ask: Ask) -> Awaitable[EpisodeEnd]:
        return talk(start, ask, 2 if start.seed % 2 else 9)

    group = made(program, limits=EpisodeLimits(400, max_turns=4, train_on=()), n=8)
    failed = [episode for episode in group.trajectories if episode.failure is not None]
    assert 0 < len(failed) < 8
    assert {episode.failure for episode in failed} == {"agent.max_turns=4 was reached"}
    assert all(episode.rows == () for episode in failed)
    assert [at.index for episode in group.trajectories for at in episode.rows] == list(range(len(group.tokens)))


def test_a_turn_is_cut_at_its_limit_and_says_so():
    reasons = []

    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        reasons.append((await ask(TurnRequest(start.messages, max_tokens=2))).finish_reason)
        reasons.append((await ask(TurnRequest([*start.messages, said("user", "more")]))).finish_reason)
        return EpisodeEnd(0.0)

    policy = Policy()
    made(program, [policy], limits=EpisodeLimits(400, 5, max_turn_tokens=30))
    assert reasons == ["length", "stop"]
    assert [call.sampling.max_tokens for call in policy.calls] == [2, 30]


@pytest.mark.parametrize(
    ("limits", "max_tokens", "cut_off"),
    [
        (EpisodeLimits(400, 5), 2, False),
        (EpisodeLimits(400, 5, max_turn_tokens=2), None, False),
        (EpisodeLimits(400, 5, max_turn_tokens=3), 2, False),
        (EpisodeLimits(39, 5), None, True),
        (EpisodeLimits(39, 5, max_turn_tokens=30), 50, True),
    ],
)
def test_an_episode_is_cut_off_where_its_last_answer_met_a_limit_of_the_run_and_not_of_its_turn(
    limits, max_tokens, cut_off
):
    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        answer = await ask(TurnRequest(start.messages, max_tokens=max_tokens))
        assert answer.finish_reason == "length"
        return EpisodeEnd(1.0)

    (episode,) = made(program, limits=limits).trajectories
    assert (episode.finish_reason is FinishReason.LENGTH, episode.limit) == (cut_off, None)


def test_a_step_that_takes_too_long_leaves_the_rewards_that_turns_had():
    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        chat = Chat(ask, start, "program game.py:run")
        for _ in range(2):
            await chat.turn(start.messages)
            chat.reward(0.5)
        await chat.turn(start.messages)
        await asyncio.sleep(60)
        return EpisodeEnd()

    (episode,) = made(program, limits=EpisodeLimits(400, 5, step_timeout_s=5, train_on=("step",))).trajectories
    assert (episode.limit, episode.turn_rewards) == ("step", (0.5, 0.5))


def test_an_episode_whose_first_context_is_too_long_has_failed():
    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        with suppress(EpisodeOver):
            await ask(TurnRequest([said("user", "word " * 500)]))
        return EpisodeEnd(reward=1.0)

    (episode,) = made(program).trajectories
    assert (episode.failure, episode.rows) == ("its conversation has the 400 tokens that there may be", ())


def test_a_short_turn_asks_for_no_more_tokens_than_it_may_have():
    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        await ask(TurnRequest(start.messages, max_tokens=1))
        return EpisodeEnd(1.0)

    policy = Policy()

    async def main() -> None:
        async with local_episode_worker(policy, hosting=hosting(Here(program))) as worker:
            sampling = SamplingParams(50, min_tokens=4)
            _ = [group async for group in worker.generate([replace(request(), sampling=sampling)])]

    run_virtual(main())
    assert [(call.sampling.min_tokens, call.sampling.max_tokens) for call in policy.calls] == [(1, 1)]


def test_a_turn_in_flight_is_waited_for_after_another_one_met_a_limit():
    class Long(Slow):
        async def submit(self, client: str, calls: Sequence[GenerateRequest]) -> None:
            for call in calls:
                self.calls.append(call)
                seconds = 30.0 if len(self.calls) == 1 else 1.0
                asyncio.get_running_loop().call_later(seconds, self._answer, call)

    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        long = asyncio.ensure_future(ask(TurnRequest([said("user", "the long one")])))
        await asyncio.sleep(0.01)
        await talk(start, ask, 9)
        await long
        return EpisodeEnd(reward=1.0)

    (episode,) = made(program, [Long()]).trajectories
    assert (episode.reward, episode.failure, episode.limit) == (1.0, None, "turns")


def test_a_step_that_takes_too_long_ends_the_episode_where_it_is():
    limits = EpisodeLimits(400, 5, step_timeout_s=5)
    (episode,) = made(slow, limits=limits).trajectories
    assert episode.failure == "a step took longer than agent.step_timeout_s=5"
    (episode,) = made(slow, limits=EpisodeLimits(400, 5, step_timeout_s=5, train_on=("step",))).trajectories
    assert (episode.failure, episode.turns, len(episode.rows)) == (None, 1, 1)


def test_an_episode_that_takes_too_long_is_refused_its_next_turn():
    limits = EpisodeLimits(400, 5, step_timeout_s=20, episode_timeout_s=6.5, train_on=("time",))
    (episode,) = made(talk_slowly, limits=limits).trajectories
    assert (episode.failure, episode.limit, episode.turns) == (None, "time", 2)


async def talk_slowly(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
    async def ask_later(request: TurnRequest) -> Any:
        await asyncio.sleep(2.5)
        return await ask(request)

    return await talk(start, ask_later)


def test_clocks_stand_still_while_the_policy_is_halted():
    async def halt(worker: EpisodeWorker) -> None:
        await asyncio.sleep(3)
        await worker.route(["a"], halted=True)
        await asyncio.sleep(50)
        await worker.route(["a"])

    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        answer = await ask(TurnRequest(start.messages))
        await asyncio.sleep(51)
        await ask(TurnRequest([*start.messages, answer.message, said("user", "go on")]))
        return EpisodeEnd(1.0)

    (episode,) = made(program, limits=EpisodeLimits(400, 5, step_timeout_s=5), meanwhile=halt).trajectories
    assert (episode.failure, episode.turns) == (None, 2)
    assert episode.metrics["environment_s"] == pytest.approx(2.0)


@pytest.mark.parametrize("catches", [False, True])
def test_a_program_that_asks_for_ever_ends_in_bounded_time(catches):
    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        while True:
            try:
                await ask(TurnRequest(start.messages))
            except EpisodeOver:
                if not catches:
                    raise
                await asyncio.sleep(0.01)

    policy = Policy()
    (episode,) = made(program, [policy]).trajectories
    assert len(policy.calls) == LIMITS.max_turns
    assert episode.limit == "turns" and episode.failure is None


def test_a_program_that_never_returns_is_ended_by_its_step():
    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        await ask(TurnRequest(start.messages))
        await asyncio.sleep(10**6)
        return EpisodeEnd()

    (episode,) = made(program).trajectories
    assert episode.failure == "a step took longer than agent.step_timeout_s=10"


def test_a_reward_that_hangs_after_a_limit_fails_the_episode():
    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        await talk(start, ask, 9)
        await asyncio.Event().wait()
        return EpisodeEnd()

    (episode,) = made(program).trajectories
    assert episode.failure == "a step took longer than agent.step_timeout_s=10"
