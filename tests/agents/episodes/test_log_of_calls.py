"""The log of an episode's calls: a program that is run again gets the answers that it had."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headway.agents.episodes.episode_limits import EpisodeLimits
from headway.agents.episodes.episode_worker import EpisodeWorker
from headway.agents.interface.program_chat import Ask
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, TurnRequest, said
from headway.data.types import FinishReason
from headway.errors import EpisodeOver, ProgramAway, RunnerLost
from tests.agents.episodes.program_episodes import LIMITS, Here, Policy, made, talk, trained


def test_what_is_away_for_a_time_is_tried_again_after_a_pause_and_its_turns_are_not_asked_twice():
    tries: list[float] = []

    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        end = await talk(start, ask, 2)
        tries.append(asyncio.get_running_loop().time())
        if len(tries) < 3:
            raise ProgramAway("ConnectionError: no route to host")
        return end

    policy = Policy()
    (episode,) = made(program, [policy]).trajectories
    assert (episode.failure, episode.metrics["tries"], len(policy.calls)) == (None, 3, 2)
    assert tries[2] - tries[1] > tries[1] - tries[0] > 0
    tries.clear()
    limits = EpisodeLimits(400, 5, retries=1)
    (episode,) = made(program, limits=limits).trajectories
    assert episode.failure == "ConnectionError: no route to host"


def test_what_is_never_there_again_is_tried_as_often_as_is_asked_for():
    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        raise ProgramAway("ConnectionError: no route to host")

    (episode,) = made(program, limits=EpisodeLimits(400, 5, retries=1100)).trajectories
    assert (episode.failure, episode.metrics["tries"]) == ("ConnectionError: no route to host", 1101)


def test_a_lost_worker_has_its_program_run_again_with_the_calls_that_the_log_knows():
    whole = made(talk).tokens
    programs, policy = Here(talk), Policy()
    programs.lost = {1: (2, None), 2: (1, False)}
    group = made(programs, [policy])
    assert len(policy.calls) == 3, "no call is made twice"
    assert trained(group.tokens[0]) == trained(whole[0])
    assert group.trajectories[0].metrics["tries"] == 3
    assert group.trajectories[0].again == "its worker was killed by SIGKILL"


def test_what_a_program_does_not_ask_again_is_not_trained():
    tries = 0

    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        nonlocal tries
        tries += 1
        await ask(TurnRequest(start.messages))
        for text in ("one", "two") if tries == 1 else ("three",):
            await ask(TurnRequest([said("user", text)]))
        if tries == 1:
            raise RunnerLost("its worker was killed by SIGKILL", culprit=False)
        return EpisodeEnd(1.0)

    policy = Policy()
    group = made(program, [policy])
    assert len(policy.calls) == 4
    kept = [policy.calls[0], policy.calls[3]]
    assert [row.prompt_ids.tolist() for row in group.tokens] == [call.input_ids.tolist() for call in kept]


def test_what_only_a_lost_try_had_asked_for_makes_no_episode_old():
    """The second turn of the first try is not asked again: its version is that of nothing that is trained."""
    tries, policy = 0, Policy()

    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        nonlocal tries
        tries += 1
        await ask(TurnRequest([said("user", f"one of try {tries}")]))
        if tries == 1:
            await ask(TurnRequest([said("user", "two")]))
            raise RunnerLost("its worker was killed by SIGKILL", culprit=False)
        await asyncio.sleep(1)
        return EpisodeEnd(1.0)

    async def abort_overdue(worker: EpisodeWorker) -> None:
        await asyncio.sleep(2.5)
        policy.version = 3
        await asyncio.sleep(1)
        await worker.abort_older_than(3)

    (episode,) = made(program, [policy], meanwhile=abort_overdue).trajectories
    assert (tries, len(policy.calls)) == (2, 3)
    assert (episode.finish_reason, episode.version_spans[0]) == (FinishReason.STOP, [0, 3])


def test_a_program_that_loses_its_own_workers_is_given_up():
    programs = Here(talk)
    programs.lost = dict.fromkeys(range(1, 20), (1, True))
    (episode,) = made(programs).trajectories
    assert (episode.failure, len(programs.starts)) == ("its worker was killed by SIGKILL", 1 + LIMITS.retries)


def test_a_limit_that_ends_a_program_which_was_run_again_says_why_it_was():
    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        for seconds in (0, 60, 0):
            await ask(TurnRequest(start.messages))
            await asyncio.sleep(seconds)
        return EpisodeEnd(reward=1.0)

    programs = Here(program)
    programs.lost = {1: (1, True)}
    (episode,) = made(programs, limits=EpisodeLimits(400, 5, step_timeout_s=100, episode_timeout_s=30)).trajectories
    assert episode.failure is not None
    assert episode.failure.endswith("; before, its program was run again: its worker was killed by SIGKILL")


async def given_up(ask: Ask, text: str) -> None:
    """Ask for a turn, and wait for it too short a time."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ask(TurnRequest([said("user", text)])), 0.1)


def test_turns_that_nobody_waits_for_count_as_turns_and_are_not_trained():
    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        for n in range(3):
            await given_up(ask, str(n))
        await ask(TurnRequest([said("user", "0")]))  # it is asked for again, and a further one is too many
        with pytest.raises(EpisodeOver):
            await ask(TurnRequest([said("user", "another")]))
        return EpisodeEnd(1.0)

    policy = Policy()
    group = made(program, [policy], limits=EpisodeLimits(max_length=400, max_turns=3))
    assert (len(policy.calls), group.trajectories[0].turns) == (3, 1)
    [row] = group.tokens
    assert row.prompt_ids.tolist() == policy.calls[0].input_ids.tolist()
    assert [turn.number for turn in row.turns] == [0]


@pytest.mark.parametrize("other", [{"max_tokens": 2}, {"stop": ("turn",)}, {"stop_token_ids": (5,)}])
def test_what_is_asked_again_with_another_end_is_another_call(other: Any):
    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        await given_up(ask, "same")
        for more in (other, other, {}):
            await ask(TurnRequest([said("user", "same")], **more))
        return EpisodeEnd(1.0)

    policy = Policy()
    (episode,) = made(program, [policy]).trajectories
    assert (len(policy.calls), episode.turns) == (3, 3)
    told = [(call.sampling.max_tokens, call.sampling.stop, call.sampling.stop_token_ids) for call in policy.calls]
    assert told[1] == told[2] != told[0]
    assert len({call.key for call in policy.calls}) == 3


def test_a_program_that_is_run_again_has_its_calls_whether_it_gives_turns_up_or_not():
    tries = 0

    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        nonlocal tries
        tries += 1
        if tries == 1:
            await given_up(ask, "same")
        for _ in range(3):
            await ask(TurnRequest([said("user", "same")]))
        if tries == 1:
            raise RunnerLost("its worker was killed by SIGKILL", culprit=False)
        return EpisodeEnd(1.0)

    policy = Policy()
    (episode,) = made(program, [policy]).trajectories
    assert (tries, len(policy.calls), episode.turns, episode.failure) == (2, 3, 3, None)


@pytest.mark.parametrize(
    ("rewards", "turn_rewards", "failure"),
    [
        ((1.0, 0.5), (1.0, 0.5), None),
        ({2: 0.5}, (0.0, 0.5), None),
        ((1.0,), (), "a list of 1 rewards for 2 turns"),
        ((1.0, 2.0, 3.0), (), "a list of 3 rewards for 2 turns"),
        ({7: 1.0}, (), "a reward for the answer of turn 7, and it had answers of the turns 0, 2"),
    ],
)
def test_rewards_are_those_of_the_answers_that_an_agent_has_got(rewards: Any, turn_rewards: Any, failure: str | None):
    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        await ask(TurnRequest(start.messages))
        await given_up(ask, "left")
        await ask(TurnRequest([said("user", "third")]))
        return EpisodeEnd(answer_rewards=rewards)

    (episode,) = made(program).trajectories
    assert episode.turn_rewards == turn_rewards
    assert (episode.failure is None) if failure is None else failure in str(episode.failure)
