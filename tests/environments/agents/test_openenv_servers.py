"""Environments behind OpenEnv's own server, with a policy that is written."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headway.agents.adapters.program_loader import ProgramSpec
from headway.agents.interface.program_chat import Program
from headway.errors import ProgramAway, ProgramFailed
from tests.agents.programs.scripted import Script, play, start
from tests.agents.programs.served import served

THEIRS = Path(__file__).parent / "theirs" / "openenvs.py"


@contextmanager
def serving(name: str) -> Iterator[str]:
    """A server of the environment ``name`` in a thread, as ``uvicorn`` runs it; gives its address."""
    spec = importlib.util.spec_from_file_location("openenvs", THEIRS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with served(getattr(module, name)()) as address:
        yield address


@pytest.fixture(scope="module")
def guess() -> Iterator[str]:
    with serving("guess") as address:
        yield address


def load(address: str, **params: Any) -> Program:
    return ProgramSpec(environment=f"ws://{address}", params=params).load()


async def test_an_environment_of_openenvs_is_reset_by_the_row_and_stepped_by_text(guess):
    loaded = load(guess)
    end = await play(loaded, ask := Script("45", "60", "57"), start("Play.", seed=7, low=50, other="x"))
    assert (end.turn_rewards, end.metrics) == ((0.0, 0.0, 1.0), {"bad_actions": 0})
    assert [content for role, content in ask.last if role == "user"] == ["Play.\n\nGuess a number.", "<", ">"]


async def test_an_action_that_its_schema_forbids_is_told_to_the_model_and_is_no_step(guess):
    end = await play(load(guess), ask := Script("1000", "", "7"), start("Play.", seed=7))
    assert (end.turn_rewards, end.metrics) == ((0.0, 0.0, 1.0), {"bad_actions": 2})
    told = [content for role, content in ask.last if role == "user"][1:]
    assert (
        told[0] == "Error: the action does not fit: guess: String should have at most 3 characters. Nothing was done."
    )
    assert "at least 1 character" in told[1]


async def test_what_an_environment_of_openenvs_raises_fails_the_episode(guess):
    with pytest.raises(ProgramFailed, match=r"step: .*invalid literal .*'ten'"):
        await play(load(guess), Script("ten"))


async def test_episodes_have_environments_of_their_own_and_wait_for_a_server_that_is_full(guess):
    loaded = load(guess)
    asks = [Script("0", str(seed)) for seed in range(1, 6)]
    ends = await asyncio.gather(*[play(loaded, ask, start("", seed=seed)) for seed, ask in enumerate(asks, 1)])
    assert [end.turn_rewards for end in ends] == [(0.0, 1.0)] * 5


async def test_an_action_of_several_fields_is_written_as_json():
    with serving("walk") as address:
        loaded = load(address)
        end = await play(loaded, ask := Script("right", '{"dx": 1, "dy": 1}', '{"dx": 1, "dy": 0}'), start("Walk."))
        assert (end.turn_rewards, end.metrics) == ((0.0, 0.0, 1.0), {"bad_actions": 1})
        assert [content for role, content in ask.last if role == "user"][::2] == [
            'Walk.\n\n{"at": [0, 0]}',
            '{"at": [1, 1]}',
        ]
    with pytest.raises(ProgramAway):
        await play(loaded, Script("x"))
