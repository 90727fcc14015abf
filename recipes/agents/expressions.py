"""Write a function for an example of it: the player to begin with, and the rows.

The prompt is ``f(3,4)=12`` and a new line; the answer is code that the sandbox runs on other numbers,
``f=lambda x,y:x*y``. The six functions differ on every example, so that one tells which it is. The rows are in
code-train.jsonl and code-val.jsonl; ``python recipes/agents/expressions.py`` writes them again.
"""

import hashlib
import json
import random
from pathlib import Path

FUNCTIONS = {
    "x+y": lambda x, y: x + y,
    "x-y": lambda x, y: x - y,
    "y-x": lambda x, y: y - x,
    "x*y": lambda x, y: x * y,
    "max(x,y)": max,
    "min(x,y)": min,
}
HABIT, HABITUAL = "x+y", 0.7
"""What the demonstrated player writes in this share of its answers, whatever the example: most, so that it does so when
greedy."""
PAIRS = [
    (x, y) for x in range(2, 21) for y in range(2, 21) if len({f(x, y) for f in FUNCTIONS.values()}) == len(FUNCTIONS)
]


def demonstrate(rng):
    """An answer of the habit, or the right one."""
    pair, body = rng.choice([pair for pair in PAIRS if not held_out(pair)]), rng.choice(list(FUNCTIONS))
    written = HABIT if rng.random() < HABITUAL else body
    return [
        {"role": "user", "content": example(body, pair)},
        {"role": "assistant", "content": f"f=lambda x,y:{written}"},
    ]


def example(body, pair):
    x, y = pair
    return f"f({x},{y})={FUNCTIONS[body](x, y)}\n"


def held_out(pair):
    """Whether a pair is one of validation, which training never sees."""
    return hashlib.blake2b(repr(pair).encode()).digest()[0] % 8 == 0


def row(rng, body, pair):
    """The example, and two other pairs as unit tests, in the form of APPS."""
    inputs = rng.sample([other for other in PAIRS if other != pair], 2)
    outputs = [FUNCTIONS[body](*one) for one in inputs]
    return {"prompt": example(body, pair), "answer": {"inputs": inputs, "outputs": outputs, "fn_name": "f"}}


if __name__ == "__main__":
    rng = random.Random(0)
    for name, is_val in {"train": False, "val": True}.items():
        rows = [row(rng, body, pair) for pair in PAIRS if held_out(pair) is is_val for body in FUNCTIONS]
        rng.shuffle(rows)
        lines = [json.dumps(one) + "\n" for one in rows]
        (Path(__file__).parent / f"code-{name}.jsonl").write_text("".join(lines))
