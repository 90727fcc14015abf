"""The look-up: its tool, the player that warm-up imitates, its rows."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from headway.data.files import read_records
from headway.programs.tools import load_tools
from headway.user_code import load_function

FOLDER = Path(__file__).parents[2] / "recipes" / "agents"
demonstrate, draw, value = (
    load_function(f"{FOLDER / 'lookup.py'}:{name}") for name in ("demonstrate", "draw", "value")
)


async def test_the_tool_says_the_digit_of_a_key_and_says_it_again() -> None:
    """Imports transformers, which makes the schema."""
    [tool] = load_tools([f"{FOLDER / 'lookup.py'}:look_up"])
    assert tool.is_async
    assert [(await tool.call({"key": "kqe"})).text for _ in range(2)] == [str(value("kqe"))] * 2


def test_the_control_shows_the_model_the_same_tool() -> None:
    tools = [load_tools([f"{FOLDER / name}:look_up"])[0] for name in ("lookup.py", "lookup_random.py")]
    assert tools[0].schema == tools[1].schema


def test_digits_are_as_good_as_random_so_that_one_of_them_says_nothing_of_the_sum() -> None:
    rng = random.Random(0)
    pairs = [tuple(map(value, draw(rng, held_out=False))) for _ in range(5000)]
    for counts in (Counter(a for a, _ in pairs), Counter((a + b) % 10 for a, b in pairs if a == 3)):
        share = max(counts.values()) / counts.total()
        assert len(counts) == 10
        assert share < 0.15


def test_the_player_forgets_some_look_ups_and_knows_the_sum_of_two() -> None:
    rng, right, looked = random.Random(0), 0, Counter[int]()
    for _ in range(2000):
        messages = demonstrate(rng)
        keys = messages[0]["content"].split("+")
        told = [int(message["content"]) for message in messages if message["role"] == "tool"]
        looked[len(told)] += 1
        correct = messages[-1]["content"] == str(sum(map(value, keys)) % 10)
        assert correct or len(told) < 2
        right += correct
    assert looked[2] / 2000 == pytest.approx(0.49, abs=0.04)
    assert right / 2000 == pytest.approx(0.49 + 0.051, abs=0.04)


def test_rows_have_the_sum_and_keys_that_are_either_trained_on_or_held_out() -> None:
    keys = {}
    for name in ("train", "val"):
        records = read_records(str(FOLDER / f"lookup-{name}.jsonl"), prompt_key="prompt")
        assert all(int(r.answer) == sum(map(value, str(r.prompt).split("+"))) % 10 for r in records)
        keys[name] = {key for record in records for key in str(record.prompt).split("+")}
    assert keys["train"].isdisjoint(keys["val"])
