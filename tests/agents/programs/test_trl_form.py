"""Environments in the form of TRL: reset(**row), methods that are tools, get_reward()."""

from __future__ import annotations

import pytest

from headway.agents.adapters.program_loader import ProgramSpec
from headway.agents.interface.program_messages import said
from headway.errors import ProgramFailed, UserCodeError
from tests.agents.programs.scripted import Script, calling, play, start

COUNTER = '''
    class Base:
        def look(self) -> dict:
            """Look."""
            return {"count": self._count}

    class Game(Base):
        MADE = 0

        def __init__(self):
            type(self).MADE += 1
            self.resets = 0

        def reset(self, goal=3, **row):
            self._count, self.goal, self.row = 0, goal, row
            self.resets += 1
            return f" Count to {goal}." if goal else None

        def increment(self, step: int) -> int:
            """Count.

            Args:
                step: how far
            """
            if step < 0:
                raise ValueError("only upwards")
            self._count += step
            return self._count

        @property
        def public(self):
            raise RuntimeError("properties are not looked at")

        def _helper(self, untyped):
            ...

        def get_reward(self):
            return float(self._count == self.goal)
'''


async def test_reset_ends_the_prompt_methods_are_tools_and_get_reward_is_the_reward(environment):
    ask = Script(calling(("increment", {"step": 1})), calling(("increment", {"step": 2}), ("look", {})), "done")
    end = await play(environment(COUNTER), ask, start("Go.", goal=3, level="x"))
    assert (end.reward, end.turn_rewards, end.tool_errors) == (1.0, (), 0)
    assert ask.last[0] == ("user", "Go. Count to 3.")
    assert [content for role, content in ask.last if role == "tool"] == ["1", "3", "{'count': 3}"], "as str() has them"
    assert [tool["function"]["name"] for tool in ask.requests[0].tools] == ["increment", "look"]


async def test_a_tool_that_raises_is_a_message_and_a_limit_still_has_the_reward(environment):
    ask = Script(calling(("increment", {"step": -1})), calling(("increment", {"step": 3})))
    end = await play(environment(COUNTER), ask)
    assert next(c for role, c in ask.last if role == "tool") == "Error: increment failed: ValueError: only upwards"
    assert (end.reward, end.tool_errors) == (1.0, 1)


async def test_an_environment_is_made_once_and_reset_for_each_episode(environment):
    spec = environment(COUNTER + "\n    def make():\n        return Game()\n", "make")
    loaded = spec.load()
    described = loaded.describe()
    assert (described.gives_reward, described.columns) == (True, ())
    assert [tool["function"]["name"] for tool in described.tools] == ["increment", "look"]
    for goal in (1, 2):
        end = await play(loaded, Script(calling(("increment", {"step": goal})), "done"), start(goal=goal))
        assert end.reward == 1.0
    make = loaded._instances._make.func
    assert make.__globals__["Game"].MADE == 1


@pytest.mark.parametrize(
    ("prompt", "returned", "first"),
    [
        ("Go.", "' now'", [("user", "Go. now")]),
        ("Go.", "None", [("user", "Go.")]),
        ([{"role": "user", "content": None}], "'Hi'", [("user", "Hi")]),
        ([], "'Hi'", [("user", "Hi")]),
        ([said("system", "s")], "'Hi'", [("system", "s"), ("user", "Hi")]),
        ("Go.", "[{'type': 'text', 'text': '!'}]", [("user", "Go.!")]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "Go."}]}],
            "'!'",
            [("user", [{"type": "text", "text": "Go."}, {"type": "text", "text": "!"}])],
        ),
    ],
)
async def test_what_reset_returns_is_appended_to_the_last_message(environment, prompt, returned, first):
    code = f"""
    class Game:
        def reset(self, **row): return {returned}
        def get_reward(self): return 1
    """
    begin = start(prompt)
    await play(environment(code), ask := Script("x"), begin)
    assert ask.last == first
    assert begin.messages == start(prompt).messages, "the row is as it was, for the next episode of the group"


async def test_reset_is_given_the_row_with_its_prompt_and_only_what_it_names(environment):
    code = """
    class Game:
        def reset(self, prompt, answer, level="easy"): return f"{prompt} {answer} {level}"
        def get_reward(self): return 1
    """
    loaded = environment(code).load()
    assert loaded.describe().columns == ("answer",)
    await play(loaded, ask := Script("x"), start("", other=1))
    assert ask.last == [("user", "[{'role': 'user', 'content': ''}] 42 easy")]


async def test_a_column_that_reset_needs_and_the_row_lacks_is_named(environment):
    code = """
    class Game:
        def reset(self, level): ...
        def get_reward(self): return 1
    """
    lacking = r"game\.py:Game: reset\(\) needs 'level', .*answer, prompt"
    with pytest.raises(ProgramFailed, match=lacking):
        await play(environment(code), Script("x"))


@pytest.mark.parametrize(
    ("body", "reward"),
    [
        ("def get_reward(self): return True", 1.0),
        ("async def get_reward(self): return 0.5", 0.5),
        ("reward = 0.25", 0.25),
        ("reward = None", None),
        ("other = 1", None),
    ],
)
async def test_the_reward_is_that_of_get_reward_else_the_attribute(environment, body, reward):
    code = f"""
    class Game:
        {body}
        def reset(self, **row): ...
        def look(self) -> str:
            '''Look.'''
            return "nothing"
    """
    assert (await play(environment(code), Script("x"))).reward == reward


@pytest.mark.parametrize(
    ("reset", "reward", "message"),
    [
        ("return 3", "return 1", r"reset\(\) returned 3, expected text, .*None"),
        ("return ('obs', {})", "return 1", r"reset\(\) returned \('obs', {}\), expected text"),
        ("raise KeyError('x')", "return 1", r"reset\(\) raised KeyError: 'x'"),
        ("...", "return float('nan')", r"get_reward\(\) returned is nan"),
        ("...", "return '1'", r"get_reward\(\) returned is '1'"),
        ("...", "return None", r"get_reward\(\) returned is None"),
        ("...", "raise OSError('disk')", r"get_reward\(\) raised OSError: disk"),
        (
            "return [{'type': 'image'}]",
            "return 1",
            r"blocks that are no text",
        ),
    ],
)
async def test_what_an_environment_does_wrong_is_one_message_that_names_it(environment, reset, reward, message):
    code = f"""
    class Game:
        def reset(self, **row): {reset}
        def get_reward(self): {reward}
    """
    with pytest.raises(ProgramFailed, match=message) as failed:
        await play(environment(code), Script("x"))
    assert "game.py:Game" in str(failed.value) or "blocks" in str(failed.value)


def test_a_public_method_that_no_tool_can_be_made_of_is_refused_with_what_to_do(environment):
    code = """
    class Game:
        def reset(self, **row): ...
        def helper(self, x): ...
    """
    refused = r"environment game\.py:Game\.helper: .*no type on x\b"
    with pytest.raises(UserCodeError, match=refused):
        environment(code).load().describe()


async def test_tools_beside_an_environment_are_offered_with_its_own(environment, tools):
    more = tools('def add(a: int) -> int:\n    """Add.\n\n    Args:\n        a: one\n    """\n    return a + 1', "add")
    spec = environment(COUNTER)
    both = ProgramSpec(environment=spec.environment, tools=more.tools)
    ask = Script(calling(("add", {"a": 1}), ("increment", {"step": 3})), "done")
    assert (await play(both, ask)).reward == 1.0
    assert [tool["function"]["name"] for tool in ask.requests[0].tools] == ["add", "increment", "look"]


def test_a_tool_of_a_name_that_the_environment_has_is_refused(environment, tools):
    more = tools('def look() -> int:\n    """Look."""\n    return 1', "look")
    both = ProgramSpec(environment=environment(COUNTER).environment, tools=more.tools)
    with pytest.raises(UserCodeError, match=r"tool named 'look' already, of .*tools\.py:look"):
        both.load().describe()


@pytest.mark.parametrize(("reset", "shares"), [("async def", True), ("def", False)])
def test_only_an_environment_of_coroutines_shares_its_process(environment, reset, shares):
    code = f"""
    class Game:
        {reset} reset(self, **row): ...
        async def look(self) -> str:
            '''Look.'''
        async def get_reward(self): return 1
    """
    assert environment(code).load().is_async is shares


async def test_methods_that_are_bound_while_an_environment_is_made_are_tools(environment):
    code = """
    class Game:
        def __init__(self):
            def look(self) -> str:
                '''Look.'''
                return "dark"
            type(self).look = look
        def reset(self, **row): ...
        def get_reward(self): return 1
    """
    await play(environment(code), ask := Script(calling(("look", {})), "done"))
    assert ask.last[-1] == ("tool", "dark")


BLOCKS = """
    class Game:
        def reset(self, **row): ...
        def get_reward(self): return 1
        def show(self, kind: str) -> list:
            '''Show.

            Args:
                kind: of block
            '''
            return [{"type": "text", "text": "a"}, {"type": kind, "text": "b"}]
"""


async def test_blocks_of_text_that_a_tool_returns_are_text_and_images_end_the_episode(environment):
    await play(environment(BLOCKS), ask := Script(calling(("show", {"kind": "text"})), "done"))
    assert ask.last[-1] == ("tool", "ab")
    with pytest.raises(ProgramFailed, match="blocks that are no text"):
        await play(environment(BLOCKS), Script(calling(("show", {"kind": "image"})), "done"))
