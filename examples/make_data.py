"""Write training data for Headway: additions, one JSON object a line, with the columns that it reads by default.

python examples/make_data.py train.jsonl
python examples/make_data.py train.jsonl --digits 3 --prompt 'What is {a} + {b}? Answer with the number alone.'
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path


def additions(rows: int, digits: int, prompt: str, seed: int) -> Iterator[dict[str, str]]:
    """``prompt`` is what the model reads, ``answer`` what the reward compares with.

    Further columns may stand beside them: a reward gets those that its signature names.
    """
    rng = random.Random(seed)
    for _ in range(rows):
        a, b = rng.randrange(10**digits), rng.randrange(10**digits)
        yield {"prompt": prompt.format(a=a, b=b), "answer": str(a + b)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write additions as JSONL with the columns prompt and answer.")
    parser.add_argument("path", type=Path, help="the file to write, like train.jsonl")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--digits", type=int, default=2, help="of each number, at most")
    parser.add_argument("--prompt", default="{a}+{b}=", help="the text around the numbers (default: {a}+{b}=)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = additions(options.rows, options.digits, options.prompt, options.seed)
    with options.path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


if __name__ == "__main__":
    main()
