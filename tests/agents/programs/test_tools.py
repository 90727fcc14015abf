"""Tools are the user's functions: typed, documented, and called without ever raising."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from transformers.utils import get_json_schema

from headway.agents.adapters.program_loader import load_tools
from headway.agents.interface.tool import Tool, Toolbox, make_tool
from headway.errors import UserCodeError

FILE = '''
import asyncio

def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b

async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long
    """
    await asyncio.sleep(0)
    return f"waited {seconds} s"

def untyped(a, b: int, c):
    """Do.

    Args:
        a: a
        b: b
    """

def undocumented(a: int):
    pass

def half_documented(a: int):
    """Do."""

def of_a_class(a: object):
    """Do.

    Args:
        a: a
    """

def of_an_unknown_type(a: "Nobody"):
    """Do.

    Args:
        a: a
    """

def any_number(*a: int):
    """Do."""

class Thing:
    """A thing."""
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tools.py"
    path.write_text(FILE)
    return path


async def test_tools_are_loaded_with_their_schemas_and_called_by_name(file):
    add, wait = load_tools([f"{file}:add", f"{file}:wait"])
    assert add.schema == get_json_schema(add.function)
    assert (add.name, add.is_async, wait.is_async) == ("add", False, True)
    assert (await add.call({"a": 1})).text == "3"
    assert (await wait.call({"seconds": 0.5})).text == "waited 0.5 s"


@pytest.mark.parametrize(
    ("name", "said_so"),
    [
        ("untyped", r"untyped\(a, b: int, c\): .*no type on a, c;"),
        ("undocumented", r"undocumented\(a: int\): .*no docstring"),
        ("half_documented", "docstring .*'a'"),
        ("of_a_class", "Couldn't convert the type hint"),
        ("of_an_unknown_type", "name 'Nobody' is not defined"),
        ("any_number", r"'\*a: int' cannot be given by name"),
        ("Thing", "it is a type"),
        ("missing", "has no 'missing'"),
    ],
)
def test_what_no_tool_can_be_made_of_is_refused_with_the_reason_and_what_a_tool_is(file, name, said_so):
    with pytest.raises(UserCodeError, match=said_so) as refused:
        load_tools([f"{file}:{name}"])
    assert f"{file}:{name}: " in str(refused.value)


@pytest.mark.parametrize("kind", ["str", ["integer", "nil"]])
def test_a_schema_with_a_type_that_json_lacks_is_refused_at_the_start(kind):
    parameters = {"type": "object", "properties": {"type": {"type": "string"}, "x": {"items": {"type": kind}}}}
    schema = {"type": "function", "function": {"name": "f", "description": "f", "parameters": parameters}}
    with pytest.raises(
        UserCodeError, match=r"own.py:f: .* 'f' have properties\.x\.items\.type=.*; expected array, boo"
    ):
        Toolbox([Tool("f", schema, print, origin="own.py:f")])
    parameters["properties"].pop("x")
    Toolbox([Tool("f", schema, print, origin="own.py:f")])


def test_two_tools_of_one_name_are_refused(file):
    with pytest.raises(UserCodeError, match=r"'add' already, of .*tools\.py:add"):
        Toolbox(load_tools([f"{file}:add", f"{file}:add"]))


class Game:
    def __init__(self) -> None:
        self.guesses: list[int] = []

    def guess(self, n: int) -> str:
        """Guess.

        Args:
            n: the number
        """
        self.guesses.append(n)
        return "<"


async def test_a_method_is_a_tool_of_its_object():
    game = Game()
    tool = make_tool(game.guess, "game.py:Game.guess")
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["n"]
    assert (await tool.call({"n": 3})).text == "<"
    assert game.guesses == [3]


def returning(value):
    def give() -> str:
        """Give."""
        return value

    return make_tool(give, "here")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("é\n", "é\n"),
        (3, "3"),
        (None, "null"),
        ({"a": ["é", 1.5]}, '{"a": ["é", 1.5]}'),
        (Path("x"), "x"),
        ("\ud800", "\\ud800"),
    ],
)
async def test_the_model_reads_text_as_it_is_and_data_as_json(value, text):
    result = await returning(value).call({})
    assert (result.text, result.failed) == (text, False)


def raising(error):
    def fail() -> str:
        """Fail."""
        raise error

    return make_tool(fail, "here")


async def test_what_a_tool_raises_is_a_message_to_the_model():
    result = await raising(KeyError("x")).call({})
    assert (result.text, result.failed) == ("Error: fail failed: KeyError: 'x'", True)
    assert (await raising(SystemExit(1)).call({})).failed
    assert (await returning(3).call({"n": 1})).text.startswith("Error: give failed: TypeError: ")


async def test_cancelling_passes_through_a_tool():
    with pytest.raises(asyncio.CancelledError):
        await raising(asyncio.CancelledError()).call({})


async def test_a_value_that_cannot_be_shown_is_a_failure_of_the_tool():
    deep: list[object] = []
    for _ in range(sys.getrecursionlimit() * 2):
        deep = [deep]
    assert (await returning(deep).call({})).failed
