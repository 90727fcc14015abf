"""The guessing game: its rules, the player that warm-up imitates, its rows."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from headway.data.files import read_records
from headway.programs.messages import TurnRequest
from headway.programs.program import ProgramSpec
from headway.user_code import load_function
from tests.programs.scripted import Script, play, start

FILE = Path(__file__).parents[2] / "recipes" / "agents" / "guess.py"
demonstrate, tell = load_function(f"{FILE}:demonstrate"), load_function(f"{FILE}:tell")
NUMBERS, TURNS = 15, 4


async def game(hidden: int, *guesses: str, shuffled: bool = False) -> tuple[float | None, list[str]]:
    """The reward of a game in which these guesses are made, and all that the player was told."""
    program = ProgramSpec(program=f"{FILE}:play", params={"shuffled": shuffled}).load()
    script = Script(*guesses)
    end = await play(program, script, start("20-34", answer=hidden))
    return end.reward, [str(content) for role, content in script.last if role == "user"]


async def test_the_player_is_told_what_is_left_until_it_has_the_number() -> None:
    assert await game(23, "27", "22", "24", "23") == (1.0, ["20-34", "<20-26", ">23-26", "<23-23"])


async def test_four_wrong_guesses_lose_and_so_does_what_is_no_number() -> None:
    assert await game(23, "27", "27", "27", "27") == (0.0, ["20-34", "<20-26", "<20-26", "<20-26"])
    assert await game(23, "27", "2<") == (0.0, ["20-34", "<20-26"])


async def test_halving_finds_every_number() -> None:
    for hidden in range(20, 35):
        low, high = 20, 34
        guesses: list[str] = []
        while not guesses or int(guesses[-1]) != hidden:
            guess = (low + high) // 2
            guesses.append(str(guess))
            _, low, high = tell(guess, hidden < guess, low, high)
        reward, _ = await game(hidden, *guesses)
        assert (reward, len(guesses) <= TURNS) == (1.0, True)


async def test_shuffled_answers_say_nothing_of_the_number() -> None:
    assert await game(23, *["27"] * 4, shuffled=True) == await game(0, *["27"] * 4, shuffled=True)


@cache
def chance(numbers: int, turns: int) -> float:
    """The share of games that a player wins who guesses any number that is left."""
    if not numbers or not turns:
        return 0.0
    below = sum(n / numbers * chance(n, turns - 1) for n in range(numbers))
    return (1 + 2 * below) / numbers


async def test_who_guesses_any_number_that_is_left_wins_three_games_of_five() -> None:
    program, rng = ProgramSpec(program=f"{FILE}:play").load(), random.Random(0)

    def guess(request: TurnRequest) -> str:
        low, high = request.messages[-1]["content"].lstrip("<>").split("-")
        return str(rng.randint(int(low), int(high)))

    ends = [await play(program, Script(*[guess] * TURNS), start("20-34", answer=20 + n % 15)) for n in range(3000)]
    assert chance(NUMBERS, TURNS) == pytest.approx(0.604, abs=0.001)
    assert sum(end.reward or 0.0 for end in ends) / len(ends) == pytest.approx(0.604, abs=0.03)


def test_the_demonstrated_player_is_such_a_one() -> None:
    rng, games = random.Random(0), 3000
    turns = []
    for _ in range(games):
        messages = demonstrate(rng)
        guesses = [int(message["content"]) for message in messages if message["role"] == "assistant"]
        ranges = [message["content"].lstrip("<>").split("-") for message in messages if message["role"] == "user"]
        assert all(int(low) <= guess <= int(high) for guess, (low, high) in zip(guesses, ranges, strict=True))
        turns.append(len(guesses))
    for most in (1, 2, 3):  # games that take all turns may be lost
        assert sum(n <= most for n in turns) / games == pytest.approx(chance(NUMBERS, most), abs=0.03)
    assert max(turns) == TURNS


def test_rows_have_every_number_of_ranges_that_are_either_played_or_held_out() -> None:
    files = {name: str(FILE.parent / f"guess-{name}.jsonl") for name in ("train", "val")}
    lows: dict[str, set[int]] = {}
    for name, file in files.items():
        records = read_records(file, prompt_key="prompt")
        lows[name] = {int(str(record.prompt).split("-")[0]) for record in records}
        expected = {(f"{low}-{low + NUMBERS - 1}", low + n) for low in lows[name] for n in range(NUMBERS)}
        assert len(records) == len(expected)
        assert {(record.prompt, record.answer) for record in records} == expected
    assert lows["train"].isdisjoint(lows["val"])
