"""Guess a hidden number of 15 in 4 turns: the game, a player to begin with, and the rows.

The player sees the numbers that it may be, ``20-34``, and guesses: ``27``. It is told which way to go and what is left:
``<20-26``. The rows are in guess-train.jsonl and guess-val.jsonl; ``python recipes/agents/guess.py`` writes them again.
"""

import json
import random
from pathlib import Path

NUMBERS, TURNS = 15, 4
LOWEST = range(10, 90, 5)
HELD_OUT = LOWEST[2::5]  # ranges that begin here are never played in training: 20-34, 45-59, 70-84


async def play(row, chat, shuffled=False):
    """One game: 1 for the number, 0 without it. ``shuffled``: the answers are a coin's, so nothing can be learned."""
    messages, coin = list(row["prompt"]), random.Random(chat.seed)
    low, high = map(int, messages[0]["content"].split("-"))
    for _ in range(TURNS):
        turn = await chat.turn(messages)
        guess = int(turn.content) if turn.content.isdecimal() else None
        if guess is None or guess == row["answer"]:
            break
        smaller = coin.random() < 0.5 if shuffled else row["answer"] < guess
        told, low, high = tell(guess, smaller, low, high)
        messages += [turn.message, {"role": "user", "content": told}]
    return float(guess == row["answer"])


def tell(guess, smaller, low, high):
    """What the player is told after a wrong guess, and the numbers that are left."""
    low, high = (low, min(high, guess - 1)) if smaller else (max(low, guess + 1), high)
    return f"{'<' if smaller else '>'}{low}-{high}", low, high


def demonstrate(rng):
    """A game of a player that guesses any number that is left: it finds the number in 0.604 of all games."""
    low = rng.choice([low for low in LOWEST if low not in HELD_OUT])
    high = low + NUMBERS - 1
    hidden = rng.randint(low, high)
    told, messages = f"{low}-{high}", []
    for _ in range(TURNS):
        guess = rng.randint(low, high)
        messages += [{"role": "user", "content": told}, {"role": "assistant", "content": str(guess)}]
        if guess == hidden:
            break
        told, low, high = tell(guess, hidden < guess, low, high)
    return messages


def rows(starts):
    """Every number of every range."""
    return [{"prompt": f"{low}-{low + NUMBERS - 1}", "answer": low + n} for low in starts for n in range(NUMBERS)]


if __name__ == "__main__":
    for name, starts in {"train": [low for low in LOWEST if low not in HELD_OUT], "val": HELD_OUT}.items():
        lines = [json.dumps(row) + "\n" for row in rows(starts)]
        (Path(__file__).parent / f"guess-{name}.jsonl").write_text("".join(lines))
