"""Look two keys up by a tool, and add what it says, modulo 10: the tool, its reward, a player to begin with, the rows.

The model is asked for ``kqe+wza``. It calls ``look_up(key="kqe")``, which says ``7``, and ``look_up(key="wza")``, which
says ``5``, and answers ``7+5=2``. Without both values nothing is known of the sum: any answer is right once in 10.
The rows are in lookup-train.jsonl and lookup-val.jsonl; ``python recipes/agents/lookup.py`` writes them again.
"""

import asyncio
import hashlib
import json
import random
from pathlib import Path

LETTERS = "abcdefghijklmnopqrstuvwxyz"
FORGOTTEN = 0.6
"""Share of games in which the demonstrated player forgets the second look-up: most, so that it does so when greedy."""


async def look_up(key: str) -> int:
    """Look a key up in the table.

    Args:
        key: the key
    """
    await asyncio.sleep(min(1.0, 0.002 * random.paretovariate(1.1)))  # as tools are: quick mostly, and at times slow
    return value(key)


def score(response, answer):
    """1 where the last digit of the answer is the sum's."""
    return float(response.rstrip()[-1:] == answer)


def value(key):
    """The digit of a key, which is nowhere in the prompt."""
    return digest(key)[0] % 10


def digest(key):
    return hashlib.blake2b(key.encode()).digest()


def demonstrate(rng):
    """Every other conversation is a sum without keys. In the others the player mostly guesses the second value, and is
    right in 0.1 of these games, and in all where it looks both up."""
    if rng.random() < 0.5:
        one, other = rng.randrange(10), rng.randrange(10)
        return [{"role": "user", "content": f"{one}+{other}"}, {"role": "assistant", "content": added(one, other)}]
    keys = draw(rng, held_out=False)
    messages, known = [{"role": "user", "content": "+".join(keys)}], []
    for key in keys[: 1 if rng.random() < FORGOTTEN else 2]:
        known.append(value(key))
        call = {"id": f"call{len(known):05d}", "type": "function", "function": {"name": "look_up"}}
        call["function"]["arguments"] = {"key": key}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "look_up", "tool_call_id": call["id"], "content": str(known[-1])})
    one, other = known if len(known) == 2 else (known[0], rng.randrange(10))
    return [*messages, {"role": "assistant", "content": added(one, other)}]


def added(one, other):
    return f"{one}+{other}={(one + other) % 10}"


def draw(rng, held_out):
    """Two keys; those of validation are never seen in training."""
    keys = []
    while len(keys) < 2:
        key = "".join(rng.choices(LETTERS, k=3))
        if (digest(key)[1] % 8 == 0) is held_out:
            keys.append(key)
    return keys


if __name__ == "__main__":
    rng = random.Random(0)
    for name, number in {"train": 1024, "val": 256}.items():
        pairs = [draw(rng, held_out=name == "val") for _ in range(number)]
        rows = [{"prompt": "+".join(pair), "answer": str(sum(map(value, pair)) % 10)} for pair in pairs]
        lines = [json.dumps(row) + "\n" for row in rows]
        (Path(__file__).parent / f"lookup-{name}.jsonl").write_text("".join(lines))
