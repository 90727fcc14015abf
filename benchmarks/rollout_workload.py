"""Workload of ``make bench-rollout``: models of three sizes, and requests whose lengths are prescribed.

Every engine gets the same prompts and writes the same number of tokens for each: there is no stop token, and each
request has its own ``max_tokens``. Lengths are not drawn but are the quantiles of their distribution, in a random
order, so that a batch of 32 has the shape of one of 128. Nothing here needs torch: all workers make their requests
from the cell alone.

    uniform       as many requests as slots, all prompts and all answers equally long
    long-tailed   as many requests as slots, prompts and answers log-normal: most short, few as long as is allowed
    ragged        the same with twice as many requests as slots: a slot that is free is taken again
    prefill       long prompts, one token each
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import NormalDist

from benchmarks.table import Ratio

PROMPT = 32
"""Tokens of a prompt where all are equally long."""
LONGEST_PROMPT = 64
SHORTEST_PROMPT = 4
PREFILL_PROMPT = 256
"""Tokens of a prompt where prefill alone is measured."""
MEDIAN_SHARE = 1 / 8
"""Median of log-normal lengths ÷ the longest that is allowed."""
SIGMA = 1.0
"""Of their logarithm: the mean is a fifth of the longest, and one in fifty is cut to it."""
BATCHED_TOKENS = 2048
"""Of one step that prefills, for every engine that asks."""


@dataclass(frozen=True, slots=True)
class Size:
    """A Qwen3-like decoder with tied embeddings."""

    name: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    prefill_requests: int
    """Prompts of the cells that prefill alone."""
    small: bool = True
    """What is aimed at differs."""

    def make(self, folder: Path) -> int:
        """Write the model with random weights; how many parameters it has, tied ones once."""
        import torch
        from transformers import AutoModelForCausalLM, Qwen3Config
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        config = Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder)
        return sum(parameter.numel() for parameter in model.parameters())


SIZES: Mapping[str, Size] = {
    size.name: size
    for size in (
        Size("1m", 512, 128, 5, heads=4, kv_heads=2, head_dim=32, intermediate=448, prefill_requests=32),
        Size("3m", 512, 192, 6, heads=6, kv_heads=2, head_dim=32, intermediate=640, prefill_requests=32),
        Size("100m", 32_000, 640, 15, 10, 5, head_dim=64, intermediate=2048, prefill_requests=8, small=False),
    )
}


class Kind(StrEnum):
    UNIFORM = "uniform"
    LONG_TAILED = "long-tailed"
    RAGGED = "ragged"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings with which an engine is loaded."""

    size: str
    threads: int
    concurrent: int
    """Sequences that decode at once."""
    tokens: int
    """The longest answer."""

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer."""
        return max(LONGEST_PROMPT + self.tokens, PREFILL_PROMPT + 1)


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement."""

    size: str
    threads: int
    concurrent: int
    kind: Kind
    tokens: int
    """The longest answer; 1 for prefill."""

    @property
    def name(self) -> str:
        return f"{self.size}, threads {self.threads}, concurrent {self.concurrent}: {self.kind} {self.tokens}"

    @property
    def aim(self) -> Ratio | None:
        """Tokens per second of the native engine ÷ of the best other one."""
        small = SIZES[self.size].small
        if self.kind == Kind.PREFILL:
            return None
        if self.kind == Kind.UNIFORM:
            return Ratio(1.4 if small else 1.2)
        return Ratio(3.0 if small else 2.0)


@dataclass(frozen=True, slots=True)
class Request:
    prompt: tuple[int, ...]
    tokens: int
    """Of its answer, exactly."""


def requests(cell: Cell) -> list[Request]:
    """Requests of ``cell``: a function of its fields alone."""
    size = SIZES[cell.size]
    order = random.Random(f"{cell.concurrent} {cell.kind} {cell.tokens}")
    match cell.kind:
        case Kind.UNIFORM:
            prompts, answers = [PROMPT] * cell.concurrent, [cell.tokens] * cell.concurrent
        case Kind.PREFILL:
            prompts, answers = [PREFILL_PROMPT] * size.prefill_requests, [1] * size.prefill_requests
        case Kind.LONG_TAILED | Kind.RAGGED:
            count = cell.concurrent * (2 if cell.kind == Kind.RAGGED else 1)
            prompts = long_tailed(count, SHORTEST_PROMPT, LONGEST_PROMPT)
            answers = long_tailed(count, 1, cell.tokens)
            order.shuffle(prompts)
            order.shuffle(answers)
    return [
        Request(tuple(order.randrange(1, size.vocabulary) for _ in range(prompt)), answer)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def long_tailed(count: int, least: int, most: int) -> list[int]:
    """``count`` quantiles of a log-normal distribution, cut to ``least`` … ``most``; ascending."""
    quantiles = ((k + 0.5) / count for k in range(count))
    lengths = (exp(log(MEDIAN_SHARE * most) + SIGMA * NormalDist().inv_cdf(q)) for q in quantiles)
    return [min(max(round(length), least), most) for length in lengths]


def work(cell: Cell, asked: Sequence[Request]) -> int:
    """Number of tokens that count: of the answers, or of the prompts where prefill alone is measured."""
    if cell.kind == Kind.PREFILL:
        return sum(len(request.prompt) for request in asked)
    return sum(request.tokens for request in asked)


def cells(
    sizes: Sequence[str],
    threads: Sequence[int],
    concurrent: Sequence[int],
    tokens: Sequence[int],
    kinds: Sequence[Kind] = tuple(Kind),
) -> list[Cell]:
    """All of them; those that share a `Setting` one behind the other. Prefill is measured at the fewest concurrent."""
    made = []
    decoded = [kind for kind in Kind if kind in kinds and kind != Kind.PREFILL]
    for setting in product(sizes, threads, concurrent):
        if Kind.PREFILL in kinds and setting[2] == min(concurrent):
            made.append(Cell(*setting, Kind.PREFILL, 1))
        made += [Cell(*setting, kind, most) for most, kind in product(tokens, decoded)]
    return made
