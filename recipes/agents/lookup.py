"""Look two keys up by a tool, and add what it says, modulo 10: the tool, a player to begin with, and the rows.

The model is asked for ``kqe+wza``. It calls ``look_up(key="kqe")``, which says ``7``, and ``look_up(key="wza")``, which
says ``5``, and answers ``2``. Without both values nothing is known of the sum: any answer is right once in 10 times.
The rows are in lookup-train.jsonl and lookup-val.jsonl; ``python recipes/agents/lookup.py`` writes them again.
"""

import asyncio
import hashlib
import json
import random
from pathlib import Path

LETTERS = "abcdefghijklmnopqrstuvwxyz"
FORGOTTEN = 0.3
"""Share of look-ups that the demonstrated player forgets."""


async def look_up(key: str) -> int:
    """Look a key up in the table.

    Args:
        key: the key
    """
    await asyncio.sleep(min(1.0, 0.002 * random.paretovariate(1.1)))  # as tools are: quick mostly, and at times slow
    return value(key)


def value(key):
    """The digit of a key, which is nowhere in the prompt."""
    return digest(key)[0] % 10


def digest(key):
    return hashlib.blake2b(key.encode()).digest()


def demonstrate(rng):
    """A player that forgets some look-ups, and then guesses: it is right in 0.54 of all games."""
    keys = draw(rng, held_out=False)
    messages, known = [{"role": "user", "content": "+".join(keys)}], []
    for key in keys:
        if rng.random() < FORGOTTEN:
            continue
        known.append(value(key))
        call = {"id": f"call{len(known):05d}", "type": "function", "function": {"name": "look_up"}}
        call["function"]["arguments"] = {"key": key}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "look_up", "tool_call_id": call["id"], "content": str(known[-1])})
    answer = sum(known) % 10 if len(known) == len(keys) else rng.randrange(10)
    return [*messages, {"role": "assistant", "content": str(answer)}]


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
