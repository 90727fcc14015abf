"""Programs of the user's own, and the chat that they are given."""

from __future__ import annotations

import asyncio
import random

import pytest

from headway.agents.interface.program_chat import Program
from headway.agents.interface.program_messages import EpisodeEnd
from headway.errors import ProgramAway, ProgramFailed, UserCodeError
from tests.agents.programs.scripted import Script, calling, play, start


async def test_a_program_has_the_row_the_chat_and_its_parameters(program):
    code = """
    async def run(row, chat, goal):
        messages = [*row["messages"], {"role": "user", "content": goal}]
        answer = await chat.turn(messages, max_tokens=5)
        messages += [answer.message, {"role": "user", "content": "sure?"}]
        again = await chat.turn(messages)
        return float(again.text == row["answer"]) + chat.turns + chat.seed
    """
    end = await play(program(code, params={"goal": "Win."}), ask := Script("41", "42"), start(seed=100))
    assert (end.reward, end.turn_rewards) == (103.0, ())
    assert ask.last == [("user", "Play."), ("user", "Win."), ("assistant", "41"), ("user", "sure?")]
    assert [request.max_tokens for request in ask.requests] == [5, None]
    assert [request.state for request in ask.requests] == [None, None]


async def test_a_program_may_name_the_state_of_a_turn(program):
    code = """
    async def run(row, chat, states=("room 3", "room 4")):
        for state in states:
            await chat.turn(row["messages"], state=state)
        return 1
    """
    await play(program(code), ask := Script("a", "b"))
    assert [request.state for request in ask.requests] == ["room 3", "room 4"]
    await play(program(code, params={"states": [(3, 4)]}), ask := Script("a"))
    assert [request.state for request in ask.requests] == ["(3, 4)"]


RETURNING = """
    import numpy as np
    async def run(row, chat):
        await chat.turn(row["messages"])
        await chat.turn(row["messages"])
        return {}
"""


@pytest.mark.parametrize(
    ("returned", "reward", "turns"),
    [
        ("None", None, ()),
        ("1", 1.0, ()),
        ("True", 1.0, ()),
        ("np.float32(0.5)", 0.5, ()),
        ("[0, 1.5]", None, (0.0, 1.5)),
        ("np.array([0, 1.5])", None, (0.0, 1.5)),
        ("(2, [0, 1])", 2.0, (0.0, 1.0)),
        ("(None, (0, 1))", None, (0.0, 1.0)),
    ],
)
async def test_a_reward_is_a_number_a_list_for_turns_or_both(program, returned, reward, turns):
    end = await play(program(RETURNING.format(returned)), Script("a", "b"))
    assert (end.reward, end.turn_rewards) == (reward, turns)


NUMBERS = "expected a number, a list with a number for each turn, both as \\(number, list\\), or None"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("'1.0'", f" returned '1.0', {NUMBERS}"),
        ("{'reward': 1}", f" returned {{'reward': 1}}, {NUMBERS}"),
        ("(1, 2)", rf" returned \(1, 2\), {NUMBERS}"),
        ("[]", rf" returned \[\], {NUMBERS}"),
        ("float('nan')", ": the reward that it returned is nan, expected a finite number"),
        ("[0, float('inf')]", ": the reward that it returned for turn 1 is inf, expected a finite number"),
        ("[1]", " returned a list of 1 rewards for 2 turns; return one for each turn"),
        ("1 / 0", " raised ZeroDivisionError: division by zero"),
        ("exit()", " raised SystemExit"),
    ],
)
async def test_a_reward_that_is_none_is_one_message_that_names_the_function(program, returned, message):
    with pytest.raises(ProgramFailed, match=f"^program agent.py:run{message}"):
        await play(program(RETURNING.format(returned)), Script("a", "b"))


async def test_turns_are_rewarded_on_the_way_and_a_limit_leaves_what_they_have(program):
    code = """
    async def run(row, chat):
        first = await chat.turn(row["messages"])
        await chat.turn(row["messages"])
        chat.reward(1)
        chat.reward(0.5)
        chat.reward(0.25, first)
        await chat.turn(row["messages"])
        await chat.turn(row["messages"])
        return 9
    """
    end = await play(program(code), Script("a", "b", "c"))
    assert (end.reward, end.turn_rewards) == (None, (0.25, 1.5, 0.0))


async def test_a_program_may_meet_the_limit_itself(program):
    code = """
    from headway.errors import EpisodeOver
    async def run(row, chat):
        try:
            while True:
                await chat.turn(row["messages"])
        except EpisodeOver as over:
            return [len(over.limit)] * chat.turns
    """
    assert (await play(program(code), Script("a", "b", limit="tokens"))).turn_rewards == (6.0, 6.0)


@pytest.mark.parametrize("how", ["RuntimeError('lost') from over", "ExceptionGroup('all', [over])"])
async def test_a_limit_that_comes_as_another_error_is_still_the_limit(program, how):
    code = f"""
    async def run(row, chat):
        try:
            await chat.turn(row["messages"])
            chat.reward(1)
            await chat.turn(row["messages"])
        except Exception as over:
            raise {how}
    """
    assert (await play(program(code), Script("a"))).turn_rewards == (1.0,)


@pytest.mark.parametrize(("gives", "returns"), [("chat.reward(n, answer)", "None"), ("pass", "[1, 2, 3]")])
async def test_parallel_turns_are_numbered_as_they_were_asked_for(program, gives, returns):
    code = f"""
    import asyncio
    async def run(row, chat):
        async def one(n):
            answer = await chat.turn([{{"role": "user", "content": str(n)}}])
            {gives}
        async with asyncio.TaskGroup() as group:
            for n in (1, 2, 3):
                group.create_task(one(n))
        return {returns}
    """
    gates = {"1": asyncio.Event(), "2": asyncio.Event()}

    class LastFirst(Script):
        async def __call__(self, request):
            answer = await super().__call__(request)
            content = request.messages[0]["content"]
            if content in gates:
                await gates[content].wait()
            if content != "1":
                gates[str(int(content) - 1)].set()
            return answer

    assert (await play(program(code), LastFirst("a", "b", "c"))).turn_rewards == (1.0, 2.0, 3.0)


async def test_the_global_generators_are_seeded_with_the_episodes_seed_where_no_other_episode_uses_them():
    class Draws(Program):
        async def run(self, start, chat):
            return EpisodeEnd(reward=random.random())

    drawn: dict[bool, list[float | None]] = {True: [], False: []}
    for is_async, rewards in drawn.items():
        loaded = Draws()
        loaded.is_async = is_async
        for seed in (1, 2, 1):
            rewards.append((await play(loaded, Script(), start(seed=seed))).reward)
    assert drawn[False][0] == drawn[False][2] != drawn[False][1]
    assert len(set(drawn[True])) == 3


async def test_tools_are_functions_or_schemas(program):
    code = '''
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: one
            b: other
        """
        return a + b

    def fail() -> int:
        """Fail."""
        raise ValueError("no")

    SCHEMA = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}

    async def run(row, chat):
        messages = [*row["messages"]]
        answer = await chat.turn(messages, tools=[add, fail, SCHEMA])
        messages += [answer.message, *await chat.call_tools(answer)]
        answer = await chat.turn(messages, tools=[SCHEMA])
        messages += [answer.message, *answer.results(["done by hand"])]
        await chat.turn(messages)
    '''
    ask = Script(calling(("add", {"a": 1, "b": 2}), ("fail", {})), calling(("other", {})), "end")
    end = await play(program(code), ask)
    assert [content for role, content in ask.last if role == "tool"] == [
        "3",
        "Error: fail failed: ValueError: no",
        "done by hand",
    ]
    assert [[t["function"]["name"] for t in r.tools or ()] for r in ask.requests] == [
        ["add", "fail", "other"],
        ["other"],
        [],
    ]
    assert ask.requests[2].tools is None
    assert end.tool_errors == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("chat.turn('hello')", "chat.turn() was given 'hello' for messages; expected a list of dicts like"),
        ("chat.turn([])", "chat.turn() was given [] for messages; expected a list of dicts like"),
        ("chat.turn(['hello'])", "chat.turn(): a chat message is 'hello'; expected a dict like"),
        ("chat.turn([{'content': 'x'}])", "chat.turn(): a chat message is {'content': 'x'}; expected"),
        (
            "chat.turn([{'role': 'user', 'content': 5}])",
            "a chat message of user has content 5; expected text, or parts",
        ),
        ("chat.turn([{'role': 'user'}])", "a chat message of user has content None; expected text, or parts"),
        ("chat.turn([{'role': 'tool', 'content': {'a': 1}}])", "a chat message of tool has content {'a': 1}; expected"),
        (
            "chat.turn([{'role': 'user', 'content': [{'type': 'image', 'image': 'x'}]}])",
            "a chat message of user has content {'type': 'image', 'image': 'x'}; expected text, or parts",
        ),
        (
            "chat.turn(row['messages'], max_tokens=0)",
            "max_tokens is 0; expected a whole number from 1",
        ),
        (
            "chat.turn(row['messages'], tools=[{}])",
            "chat.turn(tools=…): a tool has the name None; expected 1 to 128 of a-z",
        ),
        (
            "chat.turn(row['messages'], tools=[{'function': {'name': ''}}])",
            "chat.turn(tools=…): a tool has the name ''; expected 1 to 128 of a-z",
        ),
        ("chat.turn(row['messages'], tools=[look, look])", "chat.turn() was given two tools named 'look'; rename one"),
        (
            "chat.turn(row['messages'], tools=[run])",
            "chat.turn(tools=…): no tool can be made of run(row, chat): there is no",
        ),
        ("late(chat)", "chat.reward(): there was no turn yet; give it what chat.turn() returned"),
        ("bad(row, chat)", "the reward of a turn is 'good', expected a finite number"),
        (
            "schema(row, chat)",
            "call_tools() cannot call 'f', whose schema was given to chat.turn(tools=…); give the function",
        ),
    ],
)
async def test_what_a_program_asks_wrongly_is_one_message(program, call, message):
    code = f"""
    def look() -> str:
        '''Look.'''
    async def late(chat):
        chat.reward(1)
    async def bad(row, chat):
        await chat.turn(row["messages"])
        chat.reward("good")
    async def schema(row, chat):
        answer = await chat.turn(row["messages"], tools=[{{"type": "function", "function": {{"name": "f"}}}}])
        await chat.call_tools(answer)
    async def run(row, chat):
        await {call}
    """
    with pytest.raises(ProgramFailed) as failed:
        await play(program(code), Script(calling(("f", {}))))
    assert str(failed.value).startswith("program agent.py:run: ")
    assert message in str(failed.value)


async def test_rewards_of_turns_given_in_two_ways_are_refused(program):
    code = """
    async def run(row, chat):
        await chat.turn(row["messages"])
        chat.reward(1)
        return [1]
    """
    with pytest.raises(ProgramFailed, match=r"chat\.reward\(\) and returned a list"):
        await play(program(code), Script("a"))


async def test_a_limit_before_the_first_turn_is_no_failure_of_the_program(program):
    code = """
    async def run(row, chat):
        await chat.turn(row["messages"])
    """
    end = await play(program(code), Script(limit="time"))
    assert (end.reward, end.turn_rewards) == (None, ())


async def test_a_program_that_catches_everything_and_asks_for_ever_is_left(program, capsys):
    code = """
    async def run(row, chat):
        while True:
            try:
                await chat.turn(row["messages"])
                chat.reward(1)
            except Exception:
                pass
    """
    ask = Script("a", "b")
    end = await asyncio.wait_for(play(program(code), ask), 100)
    assert end.turn_rewards == (1.0, 1.0)
    assert len(ask.requests) == 3, "the episode worker is not asked again once it has said that the episode is over"
    assert "asked for 100 turns after its episode was over" in capsys.readouterr().err


async def test_others_go_on_while_a_program_asks_after_its_end(program):
    code = """
    async def run(row, chat):
        for _ in range(50):
            try:
                await chat.turn(row["messages"])
            except Exception:
                pass
    """
    ticks = 0

    async def other():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await play(program(code), Script())
    task.cancel()
    assert ticks >= 49


async def test_a_turn_that_is_left_running_finds_the_episode_ended(program):
    code = """
    import asyncio
    LEFT = []
    async def run(row, chat):
        await chat.turn(row["messages"])
        async def later():
            await asyncio.sleep(0)
            await chat.turn(row["messages"])
        LEFT.append(asyncio.create_task(later()))
        return 1.0
    """
    loaded = program(code).load()
    assert (await play(loaded, ask := Script("a", "b"))).reward == 1.0
    [left] = loaded._run.of_an_episode().func.__globals__["LEFT"]
    with pytest.raises(ProgramFailed, match=r"agent\.py:run .*after it had ended"):
        await left
    assert len(ask.requests) == 1


async def test_what_is_away_may_be_tried_again(program):
    code = """
    from headway.errors import Unavailable
    async def run(row, chat):
        raise Unavailable("the sandbox is restarting")
    """
    with pytest.raises(ProgramAway, match=r"program agent\.py:run raised Unavailable: the sandbox is restarting"):
        await play(program(code), Script("a"))


async def test_an_object_of_a_class_makes_each_episode(program):
    code = """
    class Agent:
        def __init__(self, goal=1):
            self.goal, self.count = goal, 0
        async def run(self, row, chat):
            self.count += 1
            await chat.turn(row["messages"])
            return self.goal + self.count

    ready = Agent(5)

    class Callable:
        async def __call__(self, row, chat):
            await chat.turn(row["messages"])
            return 2
    called = Callable()
    """
    loaded = program(code, "Agent", params={"goal": 3}).load()
    assert loaded.is_async
    assert [(await play(loaded, Script("a"))).reward for _ in range(2)] == [4.0, 4.0]
    assert (await play(program(code, "ready"), Script("a"))).reward == 6.0
    assert (await play(program(code, "called"), Script("a"))).reward == 2.0


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (
            "plain",
            {},
            "plain is a plain function, and would hold all other episodes while it waits for the model; write as",
        ),
        ("stream", {}, "stream: it yields, and so returns no reward"),
        ("Plain", {}, "Plain.run is a plain function"),
        (
            "Without",
            {},
            r"it is a class Without without run; a program is async def run\(row, chat\), or a class or an obj",
        ),
        ("Stepping", {}, r"it has step\(\), as environments have; name it in agent.environment"),
        ("number", {}, "it is an object of int without run; a program is"),
        ("one", {}, r"takes \(row\), but is called with \(row, chat\)"),
        (
            "two",
            {"goal": 1},
            r"takes \(row, chat\), .*\(row, chat, goal=1\)",
        ),
        (
            "three",
            {},
            r"takes \(row, chat, goal\), .*\(row, chat\), .*'goal'",
        ),
        ("missing", {}, "has no 'missing'"),
    ],
)
def test_what_is_no_program_is_refused_with_what_one_is(program, name, params, message):
    code = """
    def plain(row, chat): ...
    async def stream(row, chat): yield
    class Plain:
        def run(self, row, chat): ...
    class Without: ...
    class Stepping:
        def step(self, action): ...
    number = 3
    async def one(row): ...
    async def two(row, chat): ...
    async def three(row, chat, goal): ...
    """
    with pytest.raises(UserCodeError, match=message) as refused:
        program(code, name, params=params).load()
    assert f"agent.py:{name}" in str(refused.value)


async def test_a_cancellation_that_user_code_raises_is_its_failure_and_one_from_outside_passes(program):
    code = """
    import asyncio
    async def run(row, chat):
        if (await chat.turn(row["messages"])).text == "raise":
            raise asyncio.CancelledError
        await asyncio.Event().wait()
    """
    loaded = program(code).load()
    with pytest.raises(ProgramFailed, match="raised CancelledError"):
        await play(loaded, Script("raise"))
    task = asyncio.create_task(play(loaded, ask := Script("wait")))
    for _ in range(5):
        await asyncio.sleep(0)
    assert ask.requests
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_leaves_every_except_clause_behind_is_a_failure_too(program):
    code = """
    class TimedOut(BaseException): ...
    async def run(row, chat):
        raise TimedOut("as func_timeout has it")
    """
    with pytest.raises(ProgramFailed, match="raised TimedOut: as func_timeout has it"):
        await play(program(code), Script("a"))
