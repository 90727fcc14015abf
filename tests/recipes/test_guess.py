"""The guessing game: its rules, the player that warm-up imitates, its rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from headway.agents.adapters.program_loader import ProgramSpec
from headway.agents.interface.program_messages import Message, TurnRequest
from headway.data.files import Columns, read_records
from headway.runtime.user_code import load_function
from tests.agents.programs.scripted import Script, play, start
from tests.integration.support import ONE_CORE, train

FILE = Path(__file__).parents[2] / "recipes" / "agents" / "guess.py"
demonstrate = load_function(f"{FILE}:demonstrate")
NUMBERS, TURNS = 15, 4


async def game(hidden: str, *guesses: str, shuffled: bool = False) -> tuple[float | None, list[str]]:
    """The reward of a game in which these guesses are made, and all that the player was told."""
    program = ProgramSpec(program=f"{FILE}:play", params={"shuffled": shuffled}).load()
    script = Script(*guesses)
    end = await play(program, script, start("C-Q", answer=hidden))
    return end.reward, [str(content) for role, content in script.last if role == "user"]


async def test_the_player_is_told_which_way_the_number_is_until_it_has_it() -> None:
    assert await game("F", "J", "E", "G", "F") == (1.0, ["C-Q", "<", ">", "<"])


@pytest.mark.parametrize(
    ("guesses", "left"), [("JEGF", ["2-16", "2-8", "5-8", "5-5"]), ("ZAFF", ["2-16", "2-16", "2-16"])]
)
async def test_a_turn_is_taken_in_the_state_of_the_numbers_that_are_left(guesses: str, left: list[str]) -> None:
    script = Script(*guesses)
    await play(ProgramSpec(program=f"{FILE}:play").load(), script, start("C-Q", answer="F"))
    assert [request.state for request in script.requests] == left


async def test_four_wrong_guesses_lose_and_so_does_what_is_no_number() -> None:
    assert await game("F", "J", "J", "J", "J") == (0.0, ["C-Q", "<", "<", "<"])
    assert await game("F", "J", "E>") == (0.0, ["C-Q", "<"])
    assert await game("F", "J", "") == (0.0, ["C-Q", "<"])


async def test_halving_finds_every_number() -> None:
    for hidden in range(15):
        low, high = 0, 14
        guesses: list[int] = []
        while not guesses or guesses[-1] != hidden:
            guesses.append((low + high) // 2)
            low, high = (low, guesses[-1] - 1) if hidden < guesses[-1] else (guesses[-1] + 1, high)
        reward, _ = await game("CDEFGHIJKLMNOPQ"[hidden], *("CDEFGHIJKLMNOPQ"[guess] for guess in guesses))
        assert (reward, len(guesses) <= TURNS) == (1.0, True)


async def test_shuffled_answers_say_nothing_of_the_number() -> None:
    assert await game("F", *"JJJJ", shuffled=True) == await game("C", *"JJJJ", shuffled=True)


@cache
def chance(numbers: int, turns: int) -> float:
    """The share of games that a player wins who guesses any number that is left."""
    if not numbers or not turns:
        return 0.0
    below = sum(n / numbers * chance(n, turns - 1) for n in range(numbers))
    return (1 + 2 * below) / numbers


def span(messages: Sequence[Message]) -> tuple[str, str]:
    """The first and the last number that is left after what was guessed and told."""
    low, high = str(messages[0]["content"]).split("-")
    for guessed, told in zip(messages[1::2], messages[2::2], strict=False):
        number = ord(str(guessed["content"]))
        low, high = (low, min(high, chr(number - 1))) if told["content"] == "<" else (max(low, chr(number + 1)), high)
    return low, high


async def test_who_guesses_any_number_that_is_left_wins_three_games_of_five() -> None:
    program, rng = ProgramSpec(program=f"{FILE}:play").load(), random.Random(0)

    def guess(request: TurnRequest) -> str:
        low, high = span(request.messages)
        return chr(rng.randint(ord(low), ord(high)))

    ends = [
        await play(program, Script(*[guess] * TURNS), start("C-Q", answer="CDEFGHIJKLMNOPQ"[n % 15]))
        for n in range(3000)
    ]
    assert chance(NUMBERS, TURNS) == pytest.approx(0.604, abs=0.001)
    assert sum(end.reward or 0.0 for end in ends) / len(ends) == pytest.approx(0.604, abs=0.03)


def test_the_demonstrated_player_is_such_a_one_on_ranges_of_any_length() -> None:
    rng, games = random.Random(0), 3000
    turns, expected = [], [0.0] * TURNS
    for _ in range(games):
        messages = demonstrate(rng)
        guesses = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        for at in guesses:
            low, high = span(messages[:at])
            assert low <= messages[at]["content"] <= high
        turns.append(len(guesses))
        first, last = span(messages[:1])
        for most in range(TURNS):
            expected[most] += chance(ord(last) - ord(first) + 1, most) / games
    for most in (1, 2, 3):  # games that take all turns may be lost
        assert sum(n <= most for n in turns) / games == pytest.approx(expected[most], abs=0.03)
    assert max(turns) == TURNS


def test_rows_have_every_number_of_ranges_that_are_either_played_or_held_out() -> None:
    lows = {}
    for name in ("train", "val"):
        records = read_records(str(FILE.parent / f"guess-{name}.jsonl"), Columns())
        lows[name] = {str(record.prompt)[0] for record in records}
        expected = {
            (f"{low}-{chr(ord(low) + NUMBERS - 1)}", chr(ord(low) + n)) for low in lows[name] for n in range(NUMBERS)
        }
        assert len(records) == len(expected)
        assert {(record.prompt, record.answer) for record in records} == expected
    assert lows["train"] | lows["val"] == set("ABCDEFGHIJKL")
    assert lows["train"].isdisjoint(lows["val"])


def test_no_demonstrated_game_has_a_range_that_is_held_out() -> None:
    held_out = {record.prompt for record in read_records(str(FILE.parent / "guess-val.jsonl"), Columns())}
    rng = random.Random(1)
    shown = {demonstrate(rng)[0]["content"] for _ in range(5000)}
    assert held_out.isdisjoint(shown)
    lengths = {ord(last) - ord(first) + 1 for first, last in (text.split("-") for text in shown)}
    assert lengths == set(range(4, 27))


@pytest.mark.timeout(1800)
@pytest.mark.slow
def test_the_model_learns_to_halve_ranges_that_it_never_played(tmp_path: Path) -> None:
    """The recipe's run, in one process: minutes of one core, half of them the warm-up.

    After half of it 37 to 42 of the 45 problems are won, by the order in which answers end; at its end 41 to 43.
    With shuffled answers no player wins more than 4 of 15 games.
    """
    result = train(FILE.with_suffix(".yaml"), tmp_path / "run", *ONE_CORE, "rollout.test_freq=-1")
    before, after = result["eval"][0], result["eval"][-1]
    assert (before["version"], after["version"], result["balanced"]) == (0, 32, True)
    assert after["accuracy"] > before["accuracy"] + 0.1
    assert after["accuracy"] > 0.83
