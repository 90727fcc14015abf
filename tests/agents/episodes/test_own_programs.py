"""A program's own ways: rewards of turns in any order, turns that it gives up, no reward at all."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from headway.agents.adapters.user_programs import OwnProgram
from headway.agents.chat.chat_template import ChatRenderer
from headway.agents.episodes.episode_tokens import Chats
from headway.agents.episodes.episode_worker import local_episode_worker
from headway.agents.interface.program_chat import Ask
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, TurnRequest, said
from headway.data.interfaces.episode_groups import Group
from headway.errors import ProgramFailed
from headway.planner.simulation.virtual_clock import run_virtual
from tests.agents.episodes.program_episodes import (
    RENDERER,
    Here,
    Policy,
    Program,
    Slow,
    hosting,
    made,
    request,
    trained,
)


def own(run: Callable[..., Awaitable[Any]]) -> Program:
    """The program of a user's own function, as a worker serves it."""
    loaded = OwnProgram(run, "program own.py:run", {})
    return loaded.serve


def test_rewards_of_turns_go_to_their_tokens_in_whatever_order_turns_end():
    texts = []

    async def run(row: Any, chat: Any) -> None:
        first = asyncio.ensure_future(chat.turn([said("user", "the long one, asked first")]))
        await asyncio.sleep(0.1)
        second = await chat.turn([said("user", "b")])
        texts.extend([(await first).text, second.text])
        chat.reward(10.0, await first)
        chat.reward(1.0, second)

    group = made(own(run), [Slow()])
    rewards = group.trajectories[0].turn_rewards
    by_text = {RENDERER.text(trained(row)): rewards[row.turns[0].number] for row in group.tokens}
    assert by_text == {texts[0]: 10.0, texts[1]: 1.0}


def test_a_prompt_that_is_text_is_text_in_the_row_and_a_users_message_beside_it():
    rows = []

    async def run(row: Any, chat: Any) -> None:
        rows.append(row)
        await chat.turn(row["messages"])

    async def main(**prompt: Any) -> None:
        one = request()
        async with local_episode_worker(Policy(), hosting=hosting(Here(own(run)))) as worker:
            one = replace(one, prompt=replace(one.prompt, **prompt))
            assert [group async for group in worker.generate([one])]

    for prompt in ({"text": "2+2"}, {"text": "<user>2+2<end>", "asked": "2+2"}):
        run_virtual(main(messages=None, **prompt))
        assert (rows[-1]["prompt"], rows[-1]["messages"]) == ("2+2", [said("user", "2+2")])
    run_virtual(main())
    assert rows[-1]["prompt"] == rows[-1]["messages"] == [said("user", "begin")]


def test_the_chat_template_gets_the_variables_of_the_run_and_of_the_row():
    asked = []

    async def run(row: Any, chat: Any) -> None:
        asked.append(await chat.turn([said("user", "x")]))

    async def main(extra: dict[str, Any]) -> tuple[str, Any]:
        template = RENDERER.tokenizer.chat_template
        tokenizer = copy.copy(RENDERER.tokenizer)
        tokenizer.chat_template = template.replace("{%", "{{ style }}{{ mood }}{%", 1)
        chats = Chats(ChatRenderer(tokenizer, {"style": "A", "mood": "B"}))
        starts = []

        async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
            starts.append(start.template_kwargs)
            return await own(run)(start, ask)

        with_row = replace(
            hosting(Here(program)), new_episode=chats.new_episode, template_kwargs={"style": "A", "mood": "B"}
        )
        one = request()
        async with local_episode_worker(Policy(), hosting=with_row) as worker:
            one = replace(one, prompt=replace(one.prompt, extra=extra))
            (group,) = [group async for group in worker.generate([one])]
        return RENDERER.decode(group.tokens[0].prompt_ids), starts[0]

    text, start = run_virtual(main({}))
    assert (text[:2], start) == ("AB", {"style": "A", "mood": "B"})
    text, start = run_virtual(main({"chat_template_kwargs": {"mood": "C"}}))
    assert (text[:2], start) == ("AC", {"style": "A", "mood": "C"})


def test_a_turn_that_was_given_up_has_no_number():
    async def run(row: Any, chat: Any) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(chat.turn([said("user", "slow")]), 2.0)
        for reward, text in ((1.0, "one"), (2.0, "two, which is longer")):
            chat.reward(reward, await chat.turn([said("user", text)]))

    group = made(own(run), [Slow()])
    assert group.trajectories[0].turn_rewards == (1.0, 2.0)
    assert sorted(span.number for row in group.tokens for span in row.turns) == [0, 1]


def test_a_prefix_is_released_also_where_its_call_was_given_up():
    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        asking = asyncio.ensure_future(ask(TurnRequest(start.messages)))
        await asyncio.sleep(0.5)
        asking.cancel()
        raise ProgramFailed("no more")

    policy = Policy(seconds=100)
    (episode,) = made(program, [policy]).trajectories
    assert policy.released == [episode.id]


def test_a_program_that_has_to_give_a_reward_and_gives_none_has_failed_alone():
    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        await ask(TurnRequest(start.messages))
        return EpisodeEnd(None if start.seed % 2 else 1.0)

    async def main() -> Group:
        asked = replace(hosting(Here(program)), gives_reward=True)
        async with local_episode_worker(Policy(), hosting=asked) as worker:
            (group,) = [group async for group in worker.generate([request(8)])]
            return group

    failures = {episode.failure for episode in run_virtual(main()).trajectories}
    assert failures == {
        None,
        "the program gave no reward; return one from it (a command prints it as its last line), or name a "
        "reward.function that scores answers",
    }
