"""Tools alone: turns until an answer calls nothing."""

from __future__ import annotations

import pickle

import pytest

from headway.errors import EpisodeOver, ProgramAway
from tests.agents.programs.scripted import Script, calling, play, start, unknown

TOOLS = '''
    import asyncio, random
    from headway.errors import Unavailable

    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: one
            b: other
        """
        return a + b

    def fail() -> str:
        """Fail."""
        raise ConnectionError("no such host")

    def away() -> str:
        """Be away."""
        raise Unavailable("the index is being built")

    def draw() -> float:
        """Draw a number."""
        return random.random()

    ORDER = []

    async def wait(name: str) -> str:
        """Wait.

        Args:
            name: who
        """
        ORDER.append(name)
        await asyncio.sleep(0)
        ORDER.append(name)
        return name + " " + " ".join(ORDER)
'''


async def test_results_of_tools_go_back_to_the_model_until_it_answers_without_a_call(tools):
    ask = Script(
        calling(("add", {"a": 1, "b": 2})), calling(("add", {"a": 3, "b": 4}), ("add", {"a": 5, "b": 6})), "18"
    )
    end = await play(tools(TOOLS, "add"), ask)
    assert (end.reward, end.turn_rewards, end.tool_errors) == (None, (), 0)
    assert [schema["function"]["name"] for schema in ask.requests[0].tools] == ["add"]
    assert [content for role, content in ask.last if role == "tool"] == ["3", "7", "11"]
    assert [m["role"] for m in ask.requests[-1].messages] == ["user", "assistant", "tool", "assistant", "tool", "tool"]
    assert ask.requests[1].messages[-1] == {"role": "tool", "content": "3", "name": "add", "tool_call_id": "call0"}


async def test_a_call_that_cannot_be_made_and_a_tool_that_raises_are_messages_to_the_model(tools):
    ask = Script(calling(unknown("sub"), ("fail", {}), ("add", {"a": 1, "b": 1})), "done")
    end = await play(tools(TOOLS, "add", "fail"), ask)
    assert [content for role, content in ask.last if role == "tool"] == [
        "Error: there is no tool 'sub'",
        "Error: fail failed: ConnectionError: no such host",
        "2",
    ]
    assert end.tool_errors == 1, "only the tool that raised: what cannot be called is the parser's to count"


async def test_a_tool_that_says_it_is_away_ends_the_try_and_the_model_hears_nothing(tools):
    ask = Script(calling(("away", {})), "done")
    with pytest.raises(ProgramAway, match=r"tools tools\.py:away raised Unavailable: the index is being built"):
        await play(tools(TOOLS, "away"), ask)
    assert len(ask.requests) == 1


async def test_a_limit_ends_the_turns_and_nothing_is_lost_of_what_was_counted(tools):
    end = await play(tools(TOOLS, "fail"), Script(calling(("fail", {})), limit="tokens"))
    assert end.tool_errors == 1


async def test_asynchronous_tools_beside_a_synchronous_one_need_no_event_loop_of_the_process(tools):
    calls = calling(("wait", {"name": "x"}), ("add", {"a": 1, "b": 1}))
    ask = Script(calls, calling(("wait", {"name": "y"}), ("wait", {"name": "z"})), "done")
    await play(tools(TOOLS, "wait", "add"), ask)
    assert [content for role, content in ask.last if role == "tool"] == ["x x x", "2", "y x x y z y", "z x x y z y z"]


def test_one_synchronous_tool_makes_the_program_synchronous(tools):
    assert tools(TOOLS, "wait").load().is_async
    loaded = tools(TOOLS, "wait", "add").load()
    assert not loaded.is_async
    described = loaded.describe()
    assert (described.is_async, described.gives_reward) == (False, False)
    assert [tool["function"]["name"] for tool in described.tools] == ["wait", "add"]
    assert loaded.who == "tools tools.py:wait, tools.py:add"
    pickle.dumps(described)


async def test_asynchronous_calls_of_one_answer_run_side_by_side_and_keep_their_order(tools):
    ask = Script(calling(("wait", {"name": "x"}), ("wait", {"name": "y"})), "done")
    await play(tools(TOOLS, "wait"), ask)
    assert [content for role, content in ask.last if role == "tool"] == ["x x y x", "y x y x y"]


async def test_what_global_generators_draw_is_the_episodes(tools):
    spec = tools(TOOLS, "draw")

    async def drawn(seed):
        ask = Script(calling(("draw", {})), "done")
        await play(spec, ask, start(seed=seed))
        return ask.last[-1][1]

    assert await drawn(1) == await drawn(1) != await drawn(2)


def test_the_end_of_an_episode_pickles_and_says_which_limit_it_was():
    over = pickle.loads(pickle.dumps(EpisodeOver("tokens")))
    assert over.limit == "tokens"
    assert str(over) == "the episode is over: its limit of tokens is reached, and there will be no further turn"
