"""Environments of TRL, Gymnasium, GEM and SkyRL-gym, as their packages have them, with a policy that is written."""

from __future__ import annotations

import random
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from headway.agents.adapters.environment_forms import GymProgram, SkyrlProgram, TrlProgram
from headway.agents.adapters.program_loader import ProgramSpec
from headway.agents.interface.program_chat import Program
from headway.agents.interface.program_messages import EpisodeEnd
from headway.errors import ProgramFailed, UserCodeError
from tests.agents.programs.scripted import Script, calling, play, start

THEIRS = Path(__file__).parent / "theirs"


def load(name: str, /, max_turns: int | None = None, **params: Any) -> Program:
    return ProgramSpec(environment=f"{THEIRS}/{name}", params=params, max_turns=max_turns).load()


# GEM


class Bisects:
    """Guesses between the bounds that the hints leave."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high, self.guess = low, high, 0

    def __call__(self, request: Any) -> str:
        said = request.messages[-1]["content"]
        if "higher than" in said:
            self.low = self.guess + 1
        elif "lower than" in said:
            self.high = self.guess - 1
        self.guess = (self.low + self.high) // 2
        return f"It is \\boxed{{{self.guess}}}"


@pytest.mark.parametrize("function", ["game", "tracked"])
async def test_gems_guess_the_number_is_played_from_its_own_prompt(function):
    loaded = load(f"games.py:{function}", name="game:GuessTheNumber-v0-easy")
    assert (type(loaded), loaded.is_async) == (GymProgram, False)
    for seed in range(5):
        end = await play(loaded, ask := Script(*[Bisects(1, 10)] * 4), start("", seed=seed))
        assert end.turn_rewards[-1] == 1.0, "bisection finds one of ten in four turns"
        assert ask.requests[0].messages[0]["content"].startswith("You are playing Guess The Number.")


GAMES = [
    "game:Mastermind-v0-easy",
    "game:Minesweeper-v0-easy",
    "game:TowerofHanoi-v0-easy",
    "game:FifteenPuzzle-v0-easy",
    "game:Game2048-v0-easy",
    "rg:basic_arithmetic",
]


@pytest.mark.parametrize("name", GAMES)
async def test_an_episode_of_gems_is_what_its_environment_does_with_the_seed(name):
    """The reference is the environment itself, stepped by hand after the same seed."""
    import gem

    loaded = load("games.py:game", name=name)
    actions = [f"\\boxed{{{n}}}" for n in ("1 2", "2 1", "up", "reveal 0 0", "A B")]
    for _ in range(2):
        ask = Script(*actions)
        end = await play(loaded, ask, start("", seed=11))
        reference = gem.make(name)
        random.seed(11)
        said = [reference.reset(seed=11)[0]]
        rewards = []
        for action in actions:
            observation, reward, terminated, truncated, _ = reference.step(action)
            rewards.append(float(reward))
            if terminated or truncated:
                break
            said.append(observation)
        assert end.turn_rewards == tuple(rewards)
        heard = [content for role, content in ask.last if role == "user"]
        assert heard == said[: len(heard)]
        assert len(heard) >= len(rewards)


async def test_gems_wrapper_with_tools_runs_the_python_that_the_model_writes():
    """A process of Python is started for the code, which takes a second or two."""
    loaded = load("games.py:with_python", name="rg:basic_arithmetic")
    ask = Script("<python>print(6 * 7)</python>", "\\boxed{0}")
    end = await play(loaded, ask, start(""))
    assert "42" in ask.last[-1][1]
    assert end.turn_rewards[0] == 0.05
    assert len(end.turn_rewards) == 2


# Gymnasium


@pytest.mark.parametrize("name", ["HotCold", "registered"])
async def test_an_environment_of_gymnasiums_in_text_is_played(name):
    loaded = load(f"gyms.py:{name}")
    loaded.describe()
    ends = []
    for _ in range(2):
        ask = Script("0", "99", "x", "50")
        ends.append(await play(loaded, ask, start("", seed=5, hint="even")))
    assert ask.requests[0].messages[0]["content"] == "Find a number below 100. Hint: even."
    assert ends[0] == ends[1]
    turns = 3 if name == "registered" else 4
    assert len(ask.requests) == turns + (name == "HotCold"), "its time limit truncates the registered one"
    assert [content for role, content in ask.last if role == "user"][1:3] == ["up", "down"]


@pytest.mark.parametrize(
    ("name", "space"),
    [("frozen_lake", r"action_space is Discrete\(4\)"), ("cart_pole", r"action_space is Discrete\(2\)")],
)
def test_numeric_environments_of_gymnasiums_are_refused_with_their_space(name, space):
    with pytest.raises(UserCodeError, match=rf"gyms.py:{name}: its {space}, and the model .*gymnasium.ActionWrapper"):
        load(f"gyms.py:{name}").describe()


async def test_frozen_lake_is_played_in_text_through_gymnasiums_wrappers():
    way = ["down", "down", "right", "right", "down", "right"]
    end = await play(load("gyms.py:lake_in_text"), ask := Script(*way), start("Reach 15."))
    assert end.turn_rewards == (0, 0, 0, 0, 0, 1)
    assert [content for role, content in ask.last if role == "user"] == [
        "Reach 15.\n\nYou stand on field 0 of 16.",
        *(f"You stand on field {n} of 16." for n in (4, 8, 9, 10, 14)),
    ]


async def test_what_a_wrapper_of_gymnasiums_raises_is_the_environments_failure():
    with pytest.raises(ProgramFailed, match=r"gyms\.py:lake_in_text: step\(\) raised ValueError: 'north'"):
        await play(load("gyms.py:lake_in_text"), Script("north"))


# SkyRL-gym


@pytest.mark.parametrize("name", ["GSM8kMultiTurnEnv", "registered"])
async def test_skyrls_gsm8k_gives_each_turn_its_reward(name):
    loaded = load(f"skyrls.py:{name}", max_turns=3)
    assert isinstance(loaded, SkyrlProgram)
    row = {"reward_spec": {"method": "rule", "ground_truth": "42"}, "data_source": "gsm8k"}
    end = await play(loaded, ask := Script("none", "#### 41", "#### 42"), start("6 * 7?", **row))
    assert end.turn_rewards == pytest.approx((0, 0.2 / 3, 1))
    assert end.metrics == {"steps": 3.0}
    roles = [role for role, _ in ask.last]
    assert roles == ["user", "assistant", "user", "assistant", "user"]
    assert ask.last[-1][1].startswith("Now provide only the final numeric answer")


@pytest.mark.parametrize(
    ("name", "row", "answer"),
    [
        ("GSM8kEnv", {"reward_spec": {"ground_truth": "42"}}, "#### 42"),
        ("AIMEEnv", {"reward_model": {"ground_truth": "42"}}, "Answer: \\boxed{42}"),
    ],
)
async def test_skyrls_environments_of_one_turn(name, row, answer):
    end = await play(load(f"skyrls.py:{name}"), Script(answer), start(**row))
    assert end.turn_rewards == (1.0,)


async def test_skyrls_sql_queries_a_database_before_it_is_asked_for_the_solution(tmp_path):
    folder = tmp_path / "spider" / "database" / "shop"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "shop.sqlite") as database:
        database.execute("CREATE TABLE goods (name TEXT, price INTEGER)")
        database.execute("INSERT INTO goods VALUES ('pen', 3), ('ink', 7)")
    gold = "SELECT name FROM goods WHERE price = 7"
    row = {"db_id": "shop", "data": "spider", "reward_spec": {"ground_truth": gold}}
    loaded = load("skyrls.py:SQLEnv", max_turns=5, env_config={"db_path": str(tmp_path)})
    query = "<think>look</think><sql>SELECT name, price FROM goods</sql>"
    solution = f"<think>so</think><solution>{gold}</solution>"
    end = await play(loaded, ask := Script(query, solution), start("Which costs 7?", **row))
    assert len(end.turn_rewards) == 2
    assert end.turn_rewards[0] == 0
    assert re.search("observation", ask.last[-1][1])


async def test_an_environment_of_skyrls_whose_row_lacks_its_column_says_which():
    with pytest.raises(ProgramFailed, match=r"GSM8kEnv: making it raised AssertionError: reward_spec"):
        await play(load("skyrls.py:GSM8kEnv"), Script("x"))


# TRL


async def count(loaded: Program, *steps: int) -> tuple[EpisodeEnd, Script]:
    ask = Script(*[calling(("increment", {"step": step})) for step in steps], "done")
    return await play(loaded, ask, start("Count to five.", begin=2)), ask


async def test_an_environment_as_in_trls_guide():
    loaded = load("trls.py:Counter")
    assert (type(loaded), loaded.is_async) == (TrlProgram, False)
    end, ask = await count(loaded, 1, 2, 1)
    assert (end.reward, end.tool_errors) == (1.0, 1)
    assert ask.last[0] == ("user", "Count to five. It begins at 2.")
    assert [c for role, c in ask.last if role == "tool"] == [
        "3",
        "5",
        "Error: increment failed: ValueError: Game over.",
    ]
    assert (await count(loaded, 9))[0].reward == 0.0


async def test_trls_environment_over_harbor_runs_the_models_commands_and_is_scored_when_its_reward_is_read(tmp_path):
    (tmp_path / "data.txt").write_text("a\nb\nc\n")
    loaded = load("trls.py:LocalHarbor")
    assert [tool["function"]["name"] for tool in loaded.describe().tools] == ["bash"]
    commands = ["wc -l < data.txt", "echo -n 3 > answer.txt"]
    ask = Script(*[calling(("bash", {"command": command})) for command in commands], "done")
    end = await play(loaded, ask, start("", task_dir=str(tmp_path)))
    assert end.reward == 1.0
    assert [content for role, content in ask.last if role == "tool"] == ["3\n", "(empty output, rc=0)"]
    assert "You have a single `bash` tool" in ask.last[0][1]


async def test_trls_environment_over_a_server_binds_its_tools_while_it_is_made():
    loaded = load("trls.py:rooms")
    assert [tool["function"]["name"] for tool in loaded.describe().tools] == ["walk"]
    ask = Script(calling(("walk", {"steps": 1})), calling(("walk", {"steps": 2})), "out")
    end = await play(loaded, ask, start("Go.", task_index=4))
    assert (end.reward, end.tool_errors) == (1.0, 0)
    assert ask.last[0] == ("user", "Go.Task 4: find the exit.")
    assert [content for role, content in ask.last if role == "tool"] == ["room 1", "room 3"]
