"""Environments in the form of Gymnasium and GEM: text in, text out, a reward for each step."""

from __future__ import annotations

import os

import numpy as np
import pytest

from headway.agents.adapters.environment_forms import GymProgram
from headway.agents.adapters.program_loader import ProgramSpec
from headway.agents.interface.program_messages import EpisodeStart, said
from headway.errors import ProgramAway, ProgramFailed, UserCodeError
from tests.agents.programs.scripted import Script, play, start

GAME = """
    import random

    class Game:
        MADE = 0

        def __init__(self, high=10):
            type(self).MADE += 1
            self.high = high
            random.random()

        def reset(self, seed=None, options=None):
            self.target = random.randint(1, self.high)
            self.options, self.tries = options, 0
            return f"Guess from 1 to {self.high} (seed {seed}, {sorted(options)}).", {}

        def step(self, action):
            self.tries += 1
            guess = int(action)
            said = "=" if guess == self.target else "<" if guess < self.target else ">"
            return said, 1.0 if said == "=" else 0.25, said == "=", self.tries == 4, {}
"""
"""The seed reaches this environment by the global generator alone."""


async def test_observations_are_the_users_messages_and_rewards_of_steps_those_of_turns(environment):
    ask = Script("0", "11", "0", "11")
    end = await play(environment(GAME), ask)
    assert end.turn_rewards == (0.25, 0.25, 0.25, 0.25)
    assert end.reward is None
    assert ask.last == [
        ("user", "Play.\n\nGuess from 1 to 10 (seed 7, ['answer'])."),
        ("assistant", "0"),
        ("user", "<"),
        ("assistant", "11"),
        ("user", ">"),
        ("assistant", "0"),
        ("user", "<"),
    ]
    assert len(ask.requests) == 4, "a step after the end is never asked for"


def test_tools_beside_it_are_refused(environment, tools):
    more = tools('def look() -> int:\n    """Look."""\n    return 1', "look")
    with pytest.raises(UserCodeError, match=r"agent\.tools beside environment game\.py:Game"):
        ProgramSpec(environment=environment(GAME).environment, tools=more.tools).load()


async def test_the_same_seed_is_the_same_game_whether_its_environment_is_new_or_used(environment):
    loaded = environment(GAME, params={"high": 10**6}).load()

    async def target(seed):
        replies = []
        for guess in (250_000, 500_000, 750_000):
            ask = Script(str(guess))
            await play(loaded, ask, start(seed=seed))
            replies.append(ask.last[-1][1])
        return replies

    first = await target(3)
    assert first == await target(3)
    assert len({tuple(await target(seed)) for seed in range(8)}) > 1
    game = loaded._instances._make.func
    assert game.MADE == 1, "made once, reset often"


async def test_a_column_seed_makes_all_episodes_of_its_group_the_same_game(environment):
    begin = EpisodeStart("one of a group", [said("user", "")], {"seed": 5}, seed=1)
    await play(environment(GAME), ask := Script("0"), begin)
    assert "(seed 5, " in ask.requests[0].messages[0]["content"]


@pytest.mark.parametrize(
    ("prompt", "first"),
    [
        ("", [("user", "obs")]),
        ([said("system", "Be brief.")], [("system", "Be brief."), ("user", "obs")]),
        ([said("system", "Be brief."), said("user", "Now:")], [("system", "Be brief."), ("user", "Now:\n\nobs")]),
        ([{"role": "user", "content": None}], [("user", "obs")]),
    ],
)
async def test_the_first_observation_ends_the_prompt(environment, prompt, first):
    code = """
    class Game:
        def reset(self, seed): return "obs", {}
        def step(self, action): return "", 0, True, False, {}
    """
    ask = Script("x")
    await play(environment(code), ask, start(prompt))
    assert ask.last == first


async def test_a_limit_leaves_the_rewards_so_far(environment):
    end = await play(environment(GAME), Script("0", "0"))
    assert end.turn_rewards == (0.25, 0.25)


async def test_an_asynchronous_environment_shares_its_process(environment):
    code = """
    class Game:
        async def reset(self, seed): return f"{seed}", {}
        async def step(self, action): return None, True, True, False, {}
    """
    loaded = environment(code).load()
    assert loaded.is_async
    assert (await play(loaded, Script("x"))).turn_rewards == (1.0,)


def test_a_synchronous_environment_is_alone_in_its_process(environment):
    assert not environment(GAME).load().is_async


def one_that(environment, **returns):
    given = {"reset": '("obs", {})', "step": '("obs", 0.0, False, False, {})', "head": "", **returns}
    code = f"""
    import math
    import numpy as np
    {given["head"]}
    class Game:
        def reset(self, seed=None):
            return {given["reset"]}
        def step(self, action):
            return {given["step"]}
    """
    return environment(code)


EXPECTED = r"expected \(observation, reward, terminated, truncated, info\)"


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (
            {"reset": '"obs"'},
            r"reset\(\) returned 'obs', expected \(observation, info\), of which info is a dict",
        ),
        ({"reset": "None"}, r"reset\(\) returned None, expected \(observation, info\)"),
        (
            {"reset": '("obs", "info")'},
            r"reset\(\) returned \('obs', 'info'\), expected \(observation, info\)",
        ),
        (
            {"reset": "(np.zeros(2), {})"},
            r"reset\(\) returned the observation array\(\[0., 0.\]\), and the model reads text",
        ),
        (
            {"step": '("obs", 0.0, True, {})'},
            rf"step\(\) returned \('obs', 0.0, True, {{}}\), {EXPECTED}, as Gymnasium has it since gym 0.26",
        ),
        ({"step": "None"}, rf"step\(\) returned None, {EXPECTED}"),
        ({"step": '("obs", math.nan, True, False, {})'}, r"the reward of step\(\) is nan, expected a finite number"),
        ({"step": '("obs", "1.0", True, False, {})'}, r"the reward of step\(\) is '1.0', expected a finite number"),
        ({"step": '("obs", None, True, False, {})'}, r"the reward of step\(\) is None, expected a finite number"),
        ({"step": '("obs", 1, True, {}, False)'}, r"step\(\) returned {} for truncated, expected True or False"),
        ({"step": "(3, 1, False, False, {})"}, r"step\(\) returned the observation 3, and the model reads text; wrap"),
        ({"step": "1 / 0"}, r"step\(\) raised ZeroDivisionError: division by zero \(game\.py:\d+, in step\)$"),
        ({"reset": "exit(3)"}, r"reset\(\) raised SystemExit: 3 \(game\.py:\d+, in reset\)$"),
    ],
)
async def test_what_an_environment_does_wrong_is_one_message_that_names_it(environment, returns, message):
    with pytest.raises(ProgramFailed, match=f"^environment game.py:Game: {message}"):
        await play(one_that(environment, **returns), Script("x", "y"))


async def test_numbers_of_numpy_are_rewards_and_flags(environment):
    step = '("obs", np.float32(0.5), np.bool_(True), np.False_, {})'
    end = await play(one_that(environment, step=step), Script("x"))
    assert end.turn_rewards == (0.5,)
    assert type(end.turn_rewards[0]) is float


async def test_an_environment_that_failed_is_not_used_again(environment):
    code = """
    class Game:
        broken = False
        def reset(self, seed): return f"broken: {self.broken}", {}
        def step(self, action):
            if action == "break":
                self.broken = True
                raise ValueError("broken")
            return "", 1, True, False, {}
    """
    loaded = environment(code).load()
    with pytest.raises(ProgramFailed):
        await play(loaded, Script("break"))
    await play(loaded, ask := Script("x"), start(""))
    assert ask.last == [("user", "broken: False")]


def test_a_forked_process_makes_environments_of_its_own(environment):
    """What was made before a fork shares its connections with all children."""
    loaded = environment(GAME).load()
    loaded.describe()
    pool = loaded._instances
    assert len(pool._free) == 1
    (made,) = pool._free
    if (child := os.fork()) == 0:
        with pool.one() as one:
            os._exit(one is made)
    assert os.waitpid(child, 0)[1] == 0, "the child makes another"
    assert pool._free == [made]


async def test_the_traceback_goes_to_standard_error(environment, capsys):
    with pytest.raises(ProgramFailed):
        await play(one_that(environment, step="1 / 0"), Script("x"))
    assert "game.py" in (shown := capsys.readouterr().err)
    assert "in step" in shown


@pytest.mark.parametrize(
    ("error", "is_away"),
    [
        ("ConnectionResetError('peer')", True),
        ("TimeoutError('slow')", True),
        ("Unavailable('building')", True),
        ("ExceptionGroup('several', [ValueError('x'), ConnectionRefusedError('y')])", True),
        ("type('ConnectionError', (OSError,), {})('as requests has it')", True),
        ("type('TransportError', (type('HTTPError', (Exception,), {}),), {})('as httpx has it')", True),
        ("urllib.error.URLError('refused')", True),
        ("urllib.error.HTTPError('url', 404, 'not found', {}, None)", False),
        ("ValueError('x')", False),
        ("FileNotFoundError('x')", False),
    ],
)
async def test_what_is_away_for_a_time_is_told_from_what_is_wrong(environment, error, is_away):
    code = f"""
    import urllib.error
    from headway.errors import Unavailable
    class Game:
        def reset(self, seed):
            raise {error}
        def step(self, action): ...
    """
    with pytest.raises(ProgramFailed, match=r"game.py:Game: reset\(\) raised") as failed:
        await play(environment(code), Script("x"))
    assert isinstance(failed.value, ProgramAway) is is_away


async def test_an_error_that_was_raised_from_a_lost_connection_is_away_too(environment):
    code = """
    class Game:
        def reset(self, seed):
            try:
                raise ConnectionRefusedError("no")
            except ConnectionRefusedError as cause:
                raise RuntimeError("the sandbox does not answer") from cause
        def step(self, action): ...
    """
    with pytest.raises(ProgramAway, match="the sandbox does not answer"):
        await play(environment(code), Script("x"))


def test_a_reset_without_a_seed_is_refused(environment):
    code = """
    class Game:
        def reset(self): return "obs", {}
        def step(self, action): ...
    """
    with pytest.raises(UserCodeError, match=r"game\.py:Game: its reset\(\) takes no seed"):
        environment(code).load()


@pytest.mark.parametrize("name", ["action_space", "observation_space"])
def test_numeric_spaces_are_refused_with_their_name(environment, name):
    code = f"""
    class Space: ...
    class Text(Space): ...
    class Discrete(Space):
        def __repr__(self): return "Discrete(4)"
    class Game:
        def __init__(self):
            self.action_space = self.observation_space = Text()
            self.{name} = Discrete()
        def reset(self, seed=None): return "obs", {{}}
        def step(self, action): ...
    """
    with pytest.raises(UserCodeError, match=rf"game\.py:Game: its {name} is Discrete\(4\)"):
        environment(code).load().describe()


async def test_a_function_may_make_the_environment(environment):
    spec = environment(GAME + "\n    def make(high):\n        return Game(high=high)\n", "make", params={"high": 3})
    loaded = spec.load()
    assert isinstance(loaded, GymProgram) and loaded.describe().gives_reward
    await play(loaded, ask := Script("0"))
    assert "from 1 to 3" in ask.requests[0].messages[0]["content"]


@pytest.mark.parametrize("name", ["Game", "make"])
def test_parameters_that_do_not_fit_are_refused_with_the_signature(environment, name):
    spec = environment(GAME + "\n    def make(high):\n        return Game(high=high)\n", name, params={"low": 3})
    with pytest.raises(UserCodeError, match=rf"game\.py:{name}: takes \(high.*\), .*\(low=3\)"):
        spec.load()


def test_an_environment_that_cannot_be_made_is_wrong_before_the_run_and_away_is_away(environment):
    code = """
    class Game:
        def __init__(self): raise {}
        def reset(self, seed=None): ...
        def step(self, action): ...
    """
    with pytest.raises(UserCodeError, match=r"game.py:Game: making it raised KeyError: 'x'"):
        environment(code.format("KeyError('x')")).load().describe()


def test_one_that_is_away_when_it_is_made_is_away(environment):
    code = """
    class Game:
        def __init__(self): raise ConnectionRefusedError("port 80")
        def reset(self, seed=None): ...
        def step(self, action): ...
    """
    with pytest.raises(ProgramAway, match=r"making it raised ConnectionRefusedError: port 80"):
        environment(code).load().describe()


async def test_numpys_global_generator_is_seeded_as_well(environment):
    drawn = "(str(np.random.random()), {})"
    spec = one_that(environment, reset=drawn, step='("", 0, True, False, {})')

    async def first(seed):
        await play(spec, ask := Script("x"), start("", seed=seed))
        return ask.last[0][1]

    np.random.seed(0)
    assert await first(2**32 - 1) == await first(2**32 - 1) != await first(1)
