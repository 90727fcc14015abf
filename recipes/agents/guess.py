"""Guess a hidden number of 15 in 4 turns: the game, a player to begin with, and the rows.

The player sees the first and the last number that it may be, ``C-Q``, and guesses one, ``J``. It is told ``<`` where
the hidden number is smaller and ``>`` where it is larger; ``=`` would be the end. Numbers are written as letters, so
that a guess is one token. The rows are in guess-train.jsonl and guess-val.jsonl; ``python recipes/agents/guess.py``
writes them again.
"""

import json
import random
import string
from pathlib import Path

NUMBERS, TURNS = 15, 4
LETTERS = string.ascii_uppercase  # as numbers
LOWEST = range(len(LETTERS) - NUMBERS + 1)
HELD_OUT = LOWEST[2::4]  # ranges of 15 that begin here are never played in training
SHORTEST = 4  # of the ranges that are demonstrated


async def play(row, chat, shuffled=False):
    """One game: 1 for the number, 0 without it. ``shuffled``: the answers are a coin's, so nothing can be learned."""
    messages, coin = list(row["messages"]), random.Random(chat.seed)
    hidden = LETTERS.index(row["answer"])
    low, high = (LETTERS.index(letter) for letter in messages[0]["content"].split("-"))
    for _ in range(TURNS):
        turn = await chat.turn(messages, state=f"{low}-{high}")  # what is left: gigpo compares by it
        guess = LETTERS.find(turn.content) if len(turn.content) == 1 else -1
        if guess in (-1, hidden):
            break
        smaller = coin.random() < 0.5 if shuffled else hidden < guess
        messages += [turn.message, {"role": "user", "content": "<" if smaller else ">"}]
        low, high = (low, min(high, guess - 1)) if smaller else (max(low, guess + 1), high)
    return float(guess == hidden)


def demonstrate(rng):
    """A game of a player that guesses any number that is left: of 15 numbers it finds 0.604.

    Ranges have any length from 4 to 26 numbers, so that no range is special to what is learned here.
    """
    numbers = rng.randint(SHORTEST, len(LETTERS))
    lowest = range(len(LETTERS) - numbers + 1)
    low = rng.choice([low for low in lowest if numbers != NUMBERS or low not in HELD_OUT])
    high = low + numbers - 1
    hidden = rng.randint(low, high)
    told, messages = written(low, high), []
    for _ in range(TURNS):
        guess = rng.randint(low, high)
        messages += [{"role": "user", "content": told}, {"role": "assistant", "content": LETTERS[guess]}]
        if guess == hidden:
            break
        told, low, high = ("<", low, guess - 1) if hidden < guess else (">", guess + 1, high)
    return messages


def written(low, high):
    return f"{LETTERS[low]}-{LETTERS[high]}"


def rows(starts):
    """Every number of every range."""
    return [
        {"prompt": written(low, low + NUMBERS - 1), "answer": LETTERS[low + n]}
        for low in starts
        for n in range(NUMBERS)
    ]


if __name__ == "__main__":
    for name, starts in {"train": [low for low in LOWEST if low not in HELD_OUT], "val": HELD_OUT}.items():
        lines = [json.dumps(row) + "\n" for row in rows(starts)]
        (Path(__file__).parent / f"guess-{name}.jsonl").write_text("".join(lines))
