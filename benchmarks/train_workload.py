"""Workload of ``make bench-train``, and its arithmetic: models of three sizes, groups of rows, operations.

Rows are made from the cell alone, so that every side computes the very same loss. Where a cell is uniform, all prompts
and all answers are equally long: nothing is padded, and what sharing saves is all that differs. In long-tailed cells
prompts and answers are the quantiles of log-normal distributions, in a random order.

Operations are counted per token and pass, of which there are three (forward, and twice as much backward): 2 for each
weight of the layers and token, 2 for each of the head's and answer token, 4 · heads · head size for each layer and pair
of tokens of which one sees the other.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from benchmarks.rollout_workload import SIZES as ROLLOUT_SIZES
from benchmarks.rollout_workload import Size, long_tailed
from headway.data.packing import CollatedRow, token_budget_batches
from headway.data.types import TrajectoryId

LENGTH = 128
"""Tokens of a row where all are equally long."""
LONGEST_PROMPT = 128
LONGEST_ANSWER = 512
SHORTEST = 4
"""Fewest tokens of a prompt and of an answer where lengths are long-tailed."""
BUDGET = 4096
"""Tokens of a micro-batch: six of the longest rows."""
PASSES = 3

SIZES: Mapping[str, Size] = {
    "1m": ROLLOUT_SIZES["1m"],
    "10m": Size("10m", 4096, 320, 7, heads=10, kv_heads=5, head_dim=32, intermediate=1024, prefill_requests=0),
    "100m": ROLLOUT_SIZES["100m"],
}
ROWS: Mapping[str, int] = {"1m": 128, "10m": 32, "100m": 16}
"""Rows of a step by size, so that a step takes a second or a few."""


class Kind(StrEnum):
    """A side of the benchmark, by how it lays rows out."""

    PLAIN = "plain"
    """A loop over transformers, which pads."""
    PADDED = "padded"
    PACKED = "packed"
    SHARED = "shared"
    """Packed, and a group's prompt computed once."""


class Lengths(StrEnum):
    """Prompt tokens to answer tokens."""

    SHORT_PROMPTS = "1:4"
    EVEN = "1:1"
    LONG_PROMPTS = "8:1"
    LONG_TAILED = "long-tailed"

    @property
    def prompt(self) -> int:
        """Tokens of a prompt in a row of `LENGTH`. Raises `ValueError` for long-tailed lengths."""
        prompt, answer = map(int, self.split(":"))
        return round(LENGTH * prompt / (prompt + answer))


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement."""

    size: str
    lengths: Lengths
    n: int
    """Answers to each prompt."""

    @property
    def name(self) -> str:
        return f"{self.size}, {self.lengths}, n = {self.n}"


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens and pairs that one side computes in a step, by the layout of its micro-batches."""

    tokens: int
    """Tokens that go through the layers, padding included."""
    answers: int
    """Tokens that go through the head."""
    pairs: int
    """Pairs of tokens of which one sees the other, padding included."""

    def flops(self, size: Size) -> float:
        """Operations of a step, forward and backward."""
        width = size.heads * size.head_dim
        attention = size.hidden * size.head_dim * (2 * size.heads + 2 * size.kv_heads)
        layers = size.layers * (attention + 3 * size.hidden * size.intermediate)
        head = size.hidden * size.vocabulary
        once = 2 * layers * self.tokens + 2 * head * self.answers + 4 * width * size.layers * self.pairs
        return float(PASSES * once)


def cells(sizes: Sequence[str], kinds: Sequence[Lengths], ns: Sequence[int]) -> list[Cell]:
    """Every combination; long-tailed lengths with the fewest answers to a prompt alone."""
    return [
        Cell(size, lengths, n)
        for size in sizes
        for lengths in kinds
        for n in ns
        if lengths is not Lengths.LONG_TAILED or n == min(ns)
    ]


def rows_of(cell: Cell) -> list[CollatedRow]:
    """Rows of one step: groups of ``n`` answers to a prompt, one behind the other. A function of the cell alone."""
    count, vocabulary = ROWS[cell.size], SIZES[cell.size].vocabulary
    groups = count // cell.n
    if cell.lengths is Lengths.LONG_TAILED:
        order = random.Random(cell.name)
        prompts = long_tailed(groups, SHORTEST, LONGEST_PROMPT)
        answers = long_tailed(count, SHORTEST, LONGEST_ANSWER)
        order.shuffle(prompts)
        order.shuffle(answers)
    else:
        prompts = [cell.lengths.prompt] * groups
        answers = [LENGTH - cell.lengths.prompt] * count
    noise = np.random.default_rng(0)
    rows = []
    for group, prompt in enumerate(prompts):
        ids = noise.integers(1, vocabulary, prompt)
        for k, answer in enumerate(answers[group * cell.n : (group + 1) * cell.n]):
            rows.append(
                CollatedRow(
                    input_ids=np.concatenate([ids, noise.integers(1, vocabulary, answer)]).astype(np.int32),
                    prompt_length=prompt,
                    logprobs=np.full(answer, -np.log(vocabulary), np.float32),
                    versions=np.zeros(answer, np.int32),
                    loss_mask=np.ones(answer, np.bool_),
                    columns={"advantages": np.full(answer, noise.standard_normal(), np.float32)},
                    episode=TrajectoryId(0, group, 0, k),
                )
            )
    return rows


def work(kind: Kind, rows: Sequence[CollatedRow], budget: int = BUDGET) -> Work:
    """Work of ``kind`` on ``rows`` in micro-batches of ``budget`` tokens."""
    lengths, answers = [len(row.input_ids) for row in rows], sum(len(row.logprobs) for row in rows)
    if kind is Kind.PACKED:
        return Work(sum(lengths), answers, sum(map(_causal, lengths)))
    if kind is not Kind.SHARED:  # rows are as long as the longest of their micro-batch
        shapes = [(len(batch), max(lengths[i] for i in batch)) for batch in token_budget_batches(lengths, budget)]
        tokens = sum(count * longest for count, longest in shapes)
        return Work(tokens, answers, sum(count * _causal(longest) for count, longest in shapes))
    # A group's prompt counts once, or as often as there have to be micro-batches for its answers.
    groups: dict[int, list[CollatedRow]] = {}
    for row in rows:
        assert row.episode is not None
        groups.setdefault(row.episode.row, []).append(row)
    tokens = pairs = 0
    for group in groups.values():
        prompt, own = group[0].prompt_length, [len(row.logprobs) for row in group]
        times = max(1, -(-sum(own) // max(1, budget - prompt)))
        tokens += times * prompt + sum(own)
        pairs += times * _causal(prompt) + sum(answer * prompt + _causal(answer) for answer in own)
    return Work(tokens, answers, pairs)


def _causal(length: int) -> int:
    return length * (length + 1) // 2
