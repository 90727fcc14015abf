"""Write small training files for Headway: additions, with the columns that it reads by default or those of public data.

python examples/make_data.py train.jsonl
python examples/make_data.py train.jsonl --digits 3 --prompt 'What is {a} + {b}? Answer with the number alone.'
python examples/make_data.py train.parquet --like gsm8k        # the columns of GSM8K as verl prepares it
python examples/make_data.py train.parquet --like dapo-math    # those of DAPO-Math-17k
"""

from __future__ import annotations

import argparse
import json
import random
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PLAIN = "{a}+{b}="
GSM8K = "A shelf holds {a} books, and {b} more are put on it. How many books does it hold then?"
DAPO_MATH = "Find the sum of ${a}$ and ${b}$."


def plain(prompt: str, a: int, b: int, index: int, rng: random.Random) -> dict[str, Any]:
    """``prompt`` is what the model reads, ``answer`` what the reward compares with.

    Further columns may stand beside them: a reward gets those that its signature names.
    """
    return {"prompt": prompt.format(a=a, b=b), "answer": str(a + b)}


def gsm8k(prompt: str, a: int, b: int, index: int, rng: random.Random) -> dict[str, Any]:
    """A row of ``openai/gsm8k`` as verl's preprocessing leaves it."""
    question = prompt.format(a=a, b=b)
    return {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "content": question + ' Let\'s think step by step and output the final answer after "####".',
                "role": "user",
            }
        ],
        "ability": "math",
        "reward_model": {"ground_truth": str(a + b), "style": "rule"},
        "extra_info": {
            "answer": f"It is {a}+{b}=<<{a}+{b}={a + b}>>{a + b}.\n#### {a + b}",
            "index": index,
            "question": question,
            "split": "train",
        },
    }


def dapo_math(prompt: str, a: int, b: int, index: int, rng: random.Random) -> dict[str, Any]:
    """A row of DAPO-Math-17k."""
    content = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
        f"{prompt.format(a=a, b=b)}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(a + b), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": str(uuid.UUID(int=rng.getrandbits(128), version=4))},
    }


KINDS: dict[str, tuple[Callable[..., dict[str, Any]], str]] = {
    "plain": (plain, PLAIN),
    "gsm8k": (gsm8k, GSM8K),
    "dapo-math": (dapo_math, DAPO_MATH),
}
"""What makes a row, and its prompt unless another is given."""


def additions(kind: str, rows: int, digits: int, prompt: str | None, seed: int) -> Iterator[dict[str, Any]]:
    make, usual = KINDS[kind]
    rng = random.Random(seed)
    for index in range(rows):
        a, b = rng.randrange(10**digits), rng.randrange(10**digits)
        yield make(usual if prompt is None else prompt, a, b, index, rng)


def write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
        return
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write additions as JSONL or Parquet.")
    parser.add_argument("path", type=Path, help="the file to write, like train.jsonl or train.parquet")
    parser.add_argument("--like", choices=KINDS, default="plain", help="whose columns (default: prompt and answer)")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--digits", type=int, default=2, help="of each number, at most")
    parser.add_argument("--prompt", help=f"the text around the numbers (default: {PLAIN}, or a question)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.path.suffix not in (".jsonl", ".parquet"):
        parser.error(f"{options.path}: expected a file that ends in .jsonl or .parquet")
    write(options.path, additions(options.like, options.rows, options.digits, options.prompt, options.seed))


if __name__ == "__main__":
    main()
