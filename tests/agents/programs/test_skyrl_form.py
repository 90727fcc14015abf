"""Environments in the form of SkyRL-gym: init(prompt), and steps that give messages."""

from __future__ import annotations

import pytest

from headway.agents.adapters.environment_forms import SkyrlProgram
from headway.errors import ProgramFailed, UserCodeError
from tests.agents.programs.scripted import Script, play, start

GAME = """
    class Game:
        CLOSED = 0

        def __init__(self, env_config=None, extras={}):
            self.config, self.extras, self.turns = env_config, extras, 0

        def init(self, prompt):
            begin = {"role": "system", "content": f"{self.config.get('mood')} {self.extras['max_turns']}"}
            return [begin, *prompt], {}

        def step(self, action):
            self.turns += 1
            done = action == self.extras["answer"]
            reply = [] if done else [{"role": "user", "content": "no"}, {"role": "user", "content": "again"}]
            return {"observations": reply, "reward": float(done), "done": done, "metadata": {}}

        def get_metrics(self):
            return {"steps": self.turns, "mood": "good", "won": True}

        def close(self):
            type(self).CLOSED += 1
"""


def closed(spec):
    import sys

    [module] = [m for m in sys.modules.values() if getattr(m, "__file__", None) == spec.environment.rpartition(":")[0]]
    return module.Game.CLOSED


async def test_messages_of_steps_go_on_the_conversation_and_rewards_are_those_of_turns(environment):
    spec = environment(GAME, params={"env_config": {"mood": "calm"}}, max_turns=5)
    end = await play(spec, ask := Script("1", "42"))
    assert end.turn_rewards == (0.0, 1.0)
    assert end.metrics == {"steps": 2.0, "won": 1.0}
    assert ask.last == [("system", "calm 5"), ("user", "Play."), ("assistant", "1"), ("user", "no"), ("user", "again")]
    assert closed(spec) == 1
    loaded = spec.load()
    described = loaded.describe()
    assert (type(loaded), described.is_async, described.gives_reward) == (SkyrlProgram, False, True)


async def test_a_limit_leaves_rewards_and_metrics_and_the_environment_is_closed(environment):
    spec = environment(GAME, max_turns=5)
    end = await play(spec, Script("1", "2"))
    assert end.turn_rewards == (0.0, 0.0)
    assert end.metrics["steps"] == 2
    assert closed(spec) == 1


async def test_a_postprocessed_action_takes_the_answers_place_in_the_conversation(environment):
    code = """
    class Game:
        def init(self, prompt): return prompt, {}
        def step(self, action):
            cut = action.partition("STOP")[0]
            return dict(observations=[], reward=0, done=cut == "b", postprocessed_action=cut)
    """
    await play(environment(code), ask := Script("a STOP c", "b"))
    assert ask.last == [("user", "Play."), ("assistant", "a ")]


@pytest.mark.parametrize(
    "signature", ["env_config, extras", "extras", "**kwargs", "env_config=None, extras=None, high=3", ""]
)
async def test_the_constructor_is_given_what_it_takes(environment, signature):
    code = f"""
    class Game:
        def __init__(self, {signature}): ...
        def init(self, prompt): return prompt, {{}}
        def step(self, action): return dict(observations=[], reward=1, done=True)
    """
    assert (await play(environment(code), Script("x"))).turn_rewards == (1.0,)


async def test_a_function_with_extras_makes_the_environment(environment):
    code = GAME + "\n    def make(env_config, extras):\n        return Game(env_config, extras)\n"
    end = await play(environment(code, "make", max_turns=1), Script("42"))
    assert end.turn_rewards == (1.0,)


@pytest.mark.parametrize(
    ("init", "step", "message"),
    [
        ("prompt", "{}", r"init\(\) returned \[{'role': .*, expected \(messages, info\)"),
        ("([], {})", "{}", r"init\(\) returned the messages \[\], expected a list of dicts like"),
        ("('text', {})", "{}", r"init\(\) returned the messages 'text', expected a list of dicts like"),
        ("(prompt, {})", "('obs', 1, True, {})", r"step\(\) returned \('obs', 1, True, {}\), expected a dict with obs"),
        (
            "(prompt, {})",
            "dict(observations=[], reward='1', done=True)",
            r"the reward of step\(\) is '1', expected a fin",
        ),
        (
            "(prompt, {})",
            "dict(observations='x', reward=1, done=False)",
            r"step\(\) returned the messages 'x', expected a",
        ),
        (
            "(prompt, {})",
            "dict(observations=[], reward=1, done=False, postprocessed_action=3)",
            r"step\(\) returned postprocessed_action=3, expected text or None",
        ),
        ("1 / 0", "{}", r"init\(\) raised ZeroDivisionError"),
        ("(prompt, {})", "1 / 0", r"step\(\) raised ZeroDivisionError"),
    ],
)
async def test_what_an_environment_does_wrong_is_one_message_and_it_is_closed(environment, init, step, message):
    code = f"""
    class Game:
        CLOSED = 0
        def init(self, prompt): return {init}
        def step(self, action): return {step}
        def close(self): Game.CLOSED += 1
    """
    spec = environment(code)
    with pytest.raises(ProgramFailed, match=f"^environment game.py:Game: {message}"):
        await play(spec, Script("x", "y"))
    assert closed(spec) == 1


async def test_an_environment_whose_row_lacks_what_it_asserts_says_so(environment):
    code = """
    class Game:
        def __init__(self, env_config, extras): assert "reward_spec" in extras, "reward_spec field is required"
        def init(self, prompt): ...
        def step(self, action): ...
    """
    with pytest.raises(ProgramFailed, match="making it raised AssertionError: reward_spec"):
        await play(environment(code), Script("x"))


async def test_a_close_that_raises_costs_nothing(environment, capsys):
    code = """
    class Game:
        def init(self, prompt): return prompt, {}
        def step(self, action): return dict(observations=[], reward=1, done=True)
        def close(self): raise OSError("already closed")
    """
    assert (await play(environment(code), Script("x"))).turn_rewards == (1.0,)
    assert "already closed" in capsys.readouterr().err


async def test_an_asynchronous_environment_shares_its_process(environment):
    code = """
    class Game:
        async def init(self, prompt): return prompt, {}
        async def step(self, action): return dict(observations=[], reward=1, done=True)
        async def close(self): ...
        async def get_metrics(self): return {"x": 1}
    """
    spec = environment(code)
    assert spec.load().is_async
    assert (await play(spec, Script("x"), start())).metrics == {"x": 1.0}


def test_tools_beside_it_are_refused(environment, tools):
    from headway.agents.adapters.program_loader import ProgramSpec

    more = tools('def look() -> int:\n    """Look."""\n    return 1', "look")
    with pytest.raises(UserCodeError, match=r"agent\.tools beside environment game\.py:Game"):
        ProgramSpec(environment=environment(GAME).environment, tools=more.tools).load()
