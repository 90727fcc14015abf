"""The states that turns are taken in: what the policy is told since its last answer, or what a program names."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import pytest

from headway.agents.episodes.episode_tokens import Chats, TokenRows, state_key
from headway.agents.interface.program_chat import Ask
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, Message, TurnRequest, said, tool_result
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import Completion
from headway.data.types import FinishReason, RowTokens, SampledTokens
from tests.agents.episodes.conftest import renderer_of
from tests.agents.episodes.program_episodes import Here, made


def states(group: Group) -> list[dict[int, int]]:
    """Of each episode: turn → state."""
    return [
        {turn.number: turn.state for at in episode.rows for turn in group.tokens[at.index].turns}
        for episode in group.trajectories
    ]


async def two_ways(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
    """Every second episode takes a step more before it is in the kitchen."""
    chat: list[Message] = list(start.messages)
    for room in ("hall", "kitchen") if start.seed % 2 else ("kitchen",):
        chat += [(await ask(TurnRequest(list(chat)))).message, said("user", f"You are in the {room}.")]
    await ask(TurnRequest(chat))
    return EpisodeEnd(1.0)


def test_equal_observations_are_one_state_in_all_episodes_whatever_came_before():
    group = made(programs := Here(two_ways), n=8)
    # Programs begin in the order of episodes.
    long = [start.seed % 2 == 1 for start in programs.starts]
    assert set(long) == {True, False}
    found = states(group)
    assert [len(of_turns) for of_turns in found] == [3 if more else 2 for more in long]
    begin, hall, kitchen = found[long.index(True)].values()
    assert len({begin, hall, kitchen}) == 3
    expected = [[begin, hall, kitchen] if more else [begin, kitchen] for more in long]
    assert [list(of_turns.values()) for of_turns in found] == expected
    rows = pickle.loads(pickle.dumps(group.tokens))
    assert [row.turns for row in rows] == [row.turns for row in group.tokens]


def test_a_program_names_states_and_turns_of_several_conversations_share_them():
    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        for n, state in enumerate(("a", "b", "a", None)):
            await ask(TurnRequest([said("user", f"conversation {n}")], state=state))
        return EpisodeEnd(1.0)

    group = made(program, n=2)
    assert len(group.tokens) == 8
    for of_turns in states(group):
        assert [of_turns[n] for n in range(3)] == [state_key(b"a"), state_key(b"b"), state_key(b"a")]
        assert of_turns[3] not in (state_key(b"a"), state_key(b"b"))


def test_a_turn_that_is_renumbered_or_asked_again_keeps_its_state():
    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        with suppress(TimeoutError):  # an answer takes 1 s
            await asyncio.wait_for(ask(TurnRequest([said("user", "given up")], state="given up")), 0.5)
        for n in range(3):
            await ask(TurnRequest([said("user", f"{n}")], state=f"{n}"))
        return EpisodeEnd(1.0)

    _, *others = names = ["given up", "0", "1", "2"]
    assert states(made(program)) == [{n: state_key(name.encode()) for n, name in enumerate(others)}]
    programs = Here(program)
    programs.lost[1] = (2, True)
    group = made(programs)
    assert group.trajectories[0].metrics["tries"] == 2
    # By the second try the answer is there that the first one did not wait for.
    assert states(group) == [{n: state_key(name.encode()) for n, name in enumerate(names)}]


def of_messages(template: str, *chats: Sequence[Message]) -> list[int]:
    """The states of turns of one episode, each asked with one of these chats."""
    renderer = renderer_of(template)
    episode = Chats(renderer).new_episode()
    for n, chat in enumerate(chats):
        prompted = asyncio.run(episode.prompt(request := TurnRequest(list(chat))))
        ids = np.append(renderer.encode(f"<think>{n}</think>well"), min(renderer.end_ids)).astype(np.int32)
        tokens = SampledTokens(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32))
        finished = Completion(n, len(ids), [[0, 0]], FinishReason.STOP, 0.0, 0.0, tokens)
        episode.answered(prompted, request, finished, n)
    found = {turn.number: turn.state for row in episode.rows() for turn in row.turns}
    return [found[n] for n in range(len(chats))]


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "llama3"])
def test_a_state_is_what_messages_say_not_how_the_template_writes_the_past(template: str):
    """Qwen3's cuts thinking out of earlier answers, so that a fork begins at each turn."""
    begin, on = said("user", "begin"), said("user", "on")
    one = said("assistant", "<think>0</think>well")
    edited = said("assistant", "something else")
    found = of_messages(
        template,
        [begin],
        [begin, one, on],
        [begin, one, on, said("assistant", "<think>1</think>well"), on],
        [begin, edited, on],
        [begin, edited, {"role": "user", "content": [{"type": "text", "text": "on"}], "name": None}],
        [begin, edited, said("user", "off")],
    )
    assert len(set(found[1:5])) == 1
    assert len({found[0], found[1], found[5]}) == 3


def test_results_of_tools_are_one_state_whatever_the_number_of_their_call():
    begin, answer = said("user", "begin"), said("assistant", "well")
    results = [[begin, answer, tool_result(f"call0000{n}", "look", text)] for n, text in enumerate(("3", "3", "4"))]
    one, same, other = of_messages("qwen2_5", *results)
    assert one == same != other


def test_without_messages_a_state_is_what_the_context_has_beyond_its_row():
    def sampled(*ids: int) -> SampledTokens:
        return SampledTokens(np.array(ids, np.int32), np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32))

    one, other = TokenRows(), TokenRows()
    one.add([1, 2], sampled(5))
    one.add([1, 2, 5, 9, 8], sampled(6, 7))
    one.add([1, 2, 5, 9, 8, 6, 7, 9, 8], sampled(6))
    other.add([1, 2], sampled(7))
    other.add([1, 2, 7, 9, 8], sampled(6))
    (first,), (second,) = one.rows(), other.rows()
    begin, told, again = (turn.state for turn in first.turns)
    assert told == again != begin
    assert [turn.state for turn in second.turns] == [begin, told]


def test_an_answer_that_is_all_of_its_episode_has_the_state_0():
    row = RowTokens.answer(np.array([1], np.int32), SampledTokens.nothing())
    assert [turn.state for turn in pickle.loads(pickle.dumps((row,)))[0].turns] == [0]
