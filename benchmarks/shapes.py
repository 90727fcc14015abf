"""Random models, rows and lengths that benchmarks and checks compute with, and the arithmetic of training on them.

Operations are counted per token and pass, of which there are three (forward, and twice as much backward): 2 for each
weight of the layers and token, 2 for each of the head's and answer token, 4 · heads · head size for each layer and pair
of tokens of which one sees the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.data.packing import CollatedRow, token_budget_batches
from headway.data.types import TrajectoryId

MEDIAN_SHARE = 1 / 8
"""Median of log-normal lengths ÷ the longest that is allowed."""
SIGMA = 1.0
"""Of their logarithm: the mean is a fifth of the longest, and one in fifty is cut to it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with tied embeddings."""

    name: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    context: int = 1024

    def config(self, family: str = "qwen3", **changes: Any) -> Any:
        """Return the configuration of transformers, of ``qwen2`` or ``qwen3``."""
        import transformers

        sizes = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": True,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
            **({"head_dim": self.hidden // self.heads} if family == "qwen3" else {}),
        }
        return getattr(transformers, f"{family.capitalize()}Config")(**{**sizes, **changes})

    def random(self, family: str = "qwen3", seed: int = 0, **changes: Any) -> Any:
        """Return the model in float32, with random weights of this seed."""
        import torch
        from transformers import AutoModelForCausalLM

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(self.config(family, **changes), dtype=torch.float32)

    def make(self, folder: Path, dtype: str = "float32", characters: str = "") -> int:
        """Write a random model to ``folder``, with a tokenizer of ``characters`` if any.

        Returns the number of its parameters, tied ones once.
        """
        import torch
        from transformers.utils.logging import disable_progress_bar

        from headway.models.made_model import character_tokenizer

        disable_progress_bar()
        model = self.random(pad_token_id=0, eos_token_id=1 if characters else None)
        model.to(getattr(torch, dtype)).save_pretrained(folder)
        if characters:
            character_tokenizer(characters, self.context).save_pretrained(folder)
        return sum(parameter.numel() for parameter in model.parameters())


SIZES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("1m", 512, 128, 5, heads=4, kv_heads=2, intermediate=448),
        Shape("3m", 512, 192, 6, heads=6, kv_heads=2, intermediate=640),
        Shape("10m", 4096, 320, 7, heads=10, kv_heads=5, intermediate=1024),
        Shape("100m", 32_000, 640, 15, heads=10, kv_heads=5, intermediate=2048),
    )
}


def long_tailed(count: int, least: int, most: int) -> list[int]:
    """Return ``count`` quantiles of a log-normal distribution, cut to ``least`` … ``most``; ascending."""
    quantiles = ((k + 0.5) / count for k in range(count))
    lengths = (exp(log(MEDIAN_SHARE * most) + SIGMA * NormalDist().inv_cdf(q)) for q in quantiles)
    return [min(max(round(length), least), most) for length in lengths]


def random_row(
    prompt: NDArray[Any],
    answer: NDArray[Any],
    advantages: Any,
    logprob: float = 0.0,
    episode: TrajectoryId | None = None,
) -> CollatedRow:
    """Return a row to train on. ``advantages``: one for each token of the answer, or one for all."""
    length = len(answer)
    return CollatedRow(
        input_ids=np.concatenate([prompt, answer]).astype(np.int32),
        prompt_length=len(prompt),
        logprobs=np.full(length, logprob, np.float32),
        versions=np.zeros(length, np.int32),
        loss_mask=np.ones(length, np.bool_),
        columns={"advantages": np.broadcast_to(np.asarray(advantages, np.float32), length).copy()},
        episode=episode,
    )


def group_rows(prompts: Sequence[int], answers: Sequence[int], vocabulary: int) -> list[CollatedRow]:
    """Return random rows: groups of equally many answers to a prompt each, of these lengths, one behind the other."""
    noise, n = np.random.default_rng(0), len(answers) // len(prompts)
    rows = []
    for group, length in enumerate(prompts):
        prompt = noise.integers(1, vocabulary, length)
        for k, answer in enumerate(answers[group * n : (group + 1) * n]):
            ids, episode = noise.integers(1, vocabulary, answer), TrajectoryId(0, group, 0, k)
            rows.append(random_row(prompt, ids, noise.standard_normal(), -log(vocabulary), episode))
    return rows


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens and pairs that a step computes, by the layout of its micro-batches."""

    tokens: int
    """Tokens that go through the layers, padding included."""
    answers: int
    """Tokens that go through the head."""
    pairs: int
    """Pairs of tokens of which one sees the other, padding included."""

    def flops(self, shape: Shape) -> float:
        """Return the operations of a step, forward and backward."""
        width = shape.hidden // shape.heads
        attention = shape.hidden * width * (2 * shape.heads + 2 * shape.kv_heads)
        layers = shape.layers * (attention + 3 * shape.hidden * shape.intermediate)
        head = shape.hidden * shape.vocabulary
        products = 2 * layers * self.tokens + 2 * head * self.answers
        return float(3 * (products + 4 * shape.hidden * shape.layers * self.pairs))


def work(layout: str, rows: Sequence[CollatedRow], budget: int) -> Work:
    """Return the work of ``rows`` in micro-batches of ``budget`` tokens; a ``layout`` of another name pads."""
    lengths, answers = [len(row.input_ids) for row in rows], sum(len(row.logprobs) for row in rows)
    if layout == "packed":
        return Work(sum(lengths), answers, sum(map(_causal, lengths)))
    if layout != "shared":  # rows are as long as the longest of their micro-batch
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
