"""The look-up: its tool, the player that warm-up imitates, its rows."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from headway.agents.adapters.mcp_servers import McpServer, McpServerSpec
from headway.agents.adapters.program_loader import load_tools
from headway.agents.interface.tool import Toolbox
from headway.data.files import Columns, read_records
from headway.runtime.user_code import load_function, load_object
from tests.agents.programs.scripted import start

FOLDER = Path(__file__).parents[2] / "recipes" / "agents"
demonstrate, draw, value, score = (
    load_function(f"{FOLDER / 'lookup.py'}:{name}") for name in ("demonstrate", "draw", "value", "score")
)


async def test_the_tool_says_the_digit_of_a_key_and_says_it_again() -> None:
    """Imports transformers, which makes the schema."""
    [tool] = load_tools([f"{FOLDER / 'lookup.py'}:look_up"])
    assert tool.is_async
    assert [(await tool.call({"key": "kqe"})).text for _ in range(2)] == [str(value("kqe"))] * 2


def test_the_control_shows_the_model_the_same_tool() -> None:
    tools = [load_tools([f"{FOLDER / name}:look_up"])[0] for name in ("lookup.py", "lookup_random.py")]
    assert tools[0].schema == tools[1].schema


async def test_an_mcp_server_and_a_class_of_verls_form_show_the_model_the_same_tool_and_say_the_same() -> None:
    pytest.importorskip("mcp", reason="the extra mcp")
    server = McpServer(McpServerSpec("table"), target=lambda: load_object(f"{FOLDER / 'lookup_server.py'}:server"))
    server.load()
    box = Toolbox([*load_tools([f"{FOLDER / 'lookup_verl.py'}:LookUp"])])
    assert [tool.name for tool in (*server.tools, *box.tools)] == ["look_up"] * 2
    for tools in (Toolbox([server]), box):
        async with tools.episode(start()) as given:
            said = await given.tools[0].call({"key": "kqe"})
        assert (said.text, said.failed) == (str(value("kqe")), False)


def test_digits_are_as_good_as_random_so_that_one_of_them_says_nothing_of_the_sum() -> None:
    rng = random.Random(0)
    pairs = [tuple(map(value, draw(rng, held_out=False))) for _ in range(5000)]
    for counts in (Counter(a for a, _ in pairs), Counter((a + b) % 10 for a, b in pairs if a == 3)):
        share = max(counts.values()) / counts.total()
        assert len(counts) == 10
        assert share < 0.15


def test_the_player_mostly_guesses_the_second_value_and_else_says_the_sum() -> None:
    rng, right, both, sums = random.Random(0), 0, 0, 0
    for _ in range(4000):
        messages = demonstrate(rng)
        one, rest = messages[-1]["content"].split("+")
        other, said = map(int, rest.split("="))
        assert said == (int(one) + other) % 10
        keys = messages[0]["content"].split("+")
        if len(messages) == 2:
            assert keys == [one, str(other)]
            sums += 1
            continue
        told = [int(message["content"]) for message in messages if message["role"] == "tool"]
        assert told == [value(key) for key in keys[: len(told)]] == [int(one), other][: len(told)]
        both += len(told) == 2
        right += score(messages[-1]["content"], str(sum(map(value, keys)) % 10)) == 1.0
    games = 4000 - sums
    assert sums / 4000 == pytest.approx(0.5, abs=0.03)
    assert both / games == pytest.approx(0.4, abs=0.04)
    assert right / games == pytest.approx(0.4 + 0.06, abs=0.04)


def test_an_answer_is_right_where_its_last_digit_is() -> None:
    assert [score(said, "2") for said in ("7+5=2", "7+5=2 ", "2", "7+5=3", "")] == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_rows_have_the_sum_and_keys_that_are_either_trained_on_or_held_out() -> None:
    keys = {}
    for name in ("train", "val"):
        records = read_records(str(FOLDER / f"lookup-{name}.jsonl"), Columns())
        assert all(int(r.answer) == sum(map(value, str(r.prompt).split("+"))) % 10 for r in records)
        keys[name] = {key for record in records for key in str(record.prompt).split("+")}
    assert keys["train"].isdisjoint(keys["val"])
