"""Random models of many architectures, and data of many kinds, for ``headway init``."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, Olmo2Config

from headway.models.made_model import character_tokenizer
from tests.engines.train.families import FAMILIES, SIZES

CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;=+-*/()[]{}_?!'\"#\n\\"
POSITIONS = 256
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)
CONFIGS: dict[str, Callable[[], Any]] = {
    **{name: FAMILIES[name] for name in ("llama", "mistral", "qwen2", "qwen3", "qwen3-moe", "mixtral", "gemma")},
    **{name: FAMILIES[name] for name in ("gemma2", "phi3", "gpt2")},
    "gpt-neox": lambda: GPTNeoXConfig(**{key: SIZES[key] for key in SIZES if key != "num_key_value_heads"}),
    "olmo2": lambda: Olmo2Config(**SIZES),
}
"""Architectures, and how small ones are configured."""


def make_model(architecture: str, folder: Path, *, chats: bool) -> Path:
    """Write a random model to ``folder``; ``chats``: with a chat template."""
    tokenizer = character_tokenizer(CHARACTERS, POSITIONS)
    if chats:
        tokenizer.chat_template = TEMPLATE
    config = CONFIGS[architecture]()
    config.vocab_size = len(tokenizer) + 8  # a family's own tokenizer may add tokens
    config.max_position_embeddings = POSITIONS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# ------------------------------------------------------------------------------------------ data


def sums(folder: Path) -> str:
    """Questions and numbers, as JSONL."""
    return _jsonl(folder / "sums.jsonl", [{"question": f"{i}+{i % 7}=", "answer": i + i % 7} for i in range(60)])


def quiz(folder: Path) -> str:
    """Chats and letters, as JSONL."""
    rows = [{"messages": [{"role": "user", "content": f"Which one? {i}"}], "target": "ABCD"[i % 4]} for i in range(60)]
    return _jsonl(folder / "quiz.jsonl", rows)


def verl(folder: Path) -> str:
    """Rows as verl has them, whose answers are worked out, as Parquet."""
    rows = [
        {
            "data_source": "made",
            "prompt": [{"role": "user", "content": f"What is {i} times 2?"}],
            "reward_model": {"style": "rule", "ground_truth": f"It is {i}+{i}.\n#### {2 * i}"},
            "extra_info": {"index": i},
        }
        for i in range(60)
    ]
    path = folder / "verl.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def saved(folder: Path) -> str:
    """Texts and two words, as a folder that `save_to_disk` wrote."""
    import datasets

    rows = [{"text": f"Is {i} even?", "label": "yes" if i % 2 == 0 else "no"} for i in range(60)]
    path = folder / "saved"
    datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return str(path)


def capitals(folder: Path) -> str:
    """Questions and short texts, as CSV."""
    path = folder / "capitals.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["instruction", "output"])
        writer.writerows([f"The capital, number {i}?", f"Town {i}"] for i in range(60))
    return str(path)


def programs(folder: Path) -> str:
    """Tasks and unit tests, as JSONL."""
    rows = [
        {"prompt": f"Write f(x), x + {i}.", "test_list": [f"assert f(1) == {1 + i}", f"assert f(2) == {2 + i}"]}
        for i in range(60)
    ]
    return _jsonl(folder / "programs.jsonl", rows)


def task(folder: Path) -> str:
    """A task of Headway's own."""
    return "sort"


DATA: dict[str, tuple[Callable[[Path], str], bool, str]] = {
    "sums": (sums, False, "math_verify"),
    "quiz": (quiz, True, "regex"),
    "verl": (verl, True, "math_verify"),
    "saved": (saved, False, "regex"),
    "capitals": (capitals, False, "exact_match"),
    "programs": (programs, False, "code"),
    "task": (task, False, "task"),
}
"""Kind of data → how it is written, whether it needs a chat template, and the reward that fits."""


def _jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
