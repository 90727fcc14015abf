"""Sampling for a whole batch at once. A row's randomness comes from its key and position, never from time or batch.

    logits [A, V] ─▶ biases, penalty, temperature, filters ─▶ log-probs ─▶ inverse CDF at one uniform per row ─▶ token

Also here: the tokens that a row has seen (`SeenTokens`), for penalties, and the check for stop strings (`completed`).

Shape suffixes: A rows of the batch, V vocabulary.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headway.data.interfaces.rollout import SamplingParams
from headway.devices import kind_of
from headway.engines.host_copies import to_device
from headway.errors import said_by

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class BatchSampling:
    """Sampling options of each row of a batch. An option is None if no row uses it, so that the common case is free."""

    temperature: torch.Tensor | None = None
    """[A, 1] float32; 1 for greedy rows: their log-probs come from the unscaled softmax."""
    top_k: torch.Tensor | None = None
    """[A, 1] int64."""
    top_p: torch.Tensor | None = None
    """[A, 1] float32."""
    greedy: torch.Tensor | None = None
    """[A] bool."""
    min_p: torch.Tensor | None = None
    """[A, 1] float32."""
    penalty: torch.Tensor | None = None
    """[A, 1] float32."""
    seen: torch.Tensor | None = None
    """[A, V] bool: True at the tokens that the penalty applies to."""
    biased: torch.Tensor | None = None
    """[2, E] int64: rows and tokens of the biased logits, each pair once."""
    bias: torch.Tensor | None = None
    """[E] float32: numbers added to the `biased` logits."""

    @classmethod
    def of(
        cls,
        rows: Sequence[SamplingParams],
        vocabulary: int,
        device: torch.device,
        written: NDArray[np.int64] | None = None,
    ) -> BatchSampling:
        """Bring the `numbers` of a batch to its device."""
        numbers = cls.numbers(rows, vocabulary, written)
        return cls(**dict(zip(numbers, to_device([*numbers.values()], device), strict=True)))

    @staticmethod
    def numbers(
        rows: Sequence[SamplingParams], vocabulary: int, written: NDArray[np.int64] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Return the sampling parameters of a batch's rows: field -> array. Greedy rows are not scaled or filtered.

        ``written``: [A] number of tokens that each row has, for ``min_tokens``. Default: 0.
        """
        kinds = {id(params): params for params in rows}.values()  # few different ones; hashing all is slow
        numbers: dict[str, NDArray[Any]] = {}

        def column(
            name: str, value: Callable[[SamplingParams], float], off: float, dtype: type[np.generic] = np.float32
        ) -> None:
            if any(value(p) != off for p in kinds):
                numbers[name] = np.array([value(p) for p in rows], dtype)[:, None]

        column("temperature", lambda p: p.temperature or 1.0, 1.0)
        limit = vocabulary
        column("top_k", lambda p: min(p.top_k, limit) if p.top_k and p.temperature else limit, limit, np.int64)
        column("top_p", lambda p: p.top_p if p.temperature else 1.0, 1.0)
        column("min_p", lambda p: p.min_p if p.temperature else 0.0, 0.0)
        column("penalty", lambda p: p.repetition_penalty, 1.0)
        if any(p.temperature == 0 for p in kinds):
            numbers["greedy"] = np.array([p.temperature == 0 for p in rows])
        if any(p.logit_bias or p.min_tokens for p in kinds):
            entries = _bias(rows, written)
            numbers["biased"] = np.array(list(entries), np.int64).reshape(-1, 2).T.copy()  # reshaped: it may be empty
            numbers["bias"] = np.array(list(entries.values()), np.float32)
        return numbers


def _bias(rows: Sequence[SamplingParams], written: NDArray[np.int64] | None) -> dict[tuple[int, int], float]:
    """Return the sums to add to logits: (row, token) -> sum."""
    entries: dict[tuple[int, int], float] = {}
    for row, params in enumerate(rows):
        for token, bias in params.logit_bias:
            entries[row, token] = entries.get((row, token), 0.0) + bias
        # After the biases: none of them may lift a barred stop token.
        if params.min_tokens > (0 if written is None else written[row]):
            entries.update({(row, token): -math.inf for token in params.stop_token_ids})
    return entries


def sample(logits: torch.Tensor, sampling: BatchSampling, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row.

    Args:
        logits: [A, V], any floating dtype; computed on in float32.
        sampling: sampling options of each row.
        uniform: [A] float64 in [0, 1).

    Returns:
        Tokens [A] int64, and their log-probs [A] float32 (nats) under the distribution from which they were sampled:
        after all steps of `SamplingParams`; for greedy rows, without temperature and filters.
    """
    if has_kernel(logits.device):
        return _by_kernel(logits, sampling, uniform)
    logprobs = behaviour_logprobs(logits, sampling)
    tokens = inverse_cdf(logprobs, uniform)
    if sampling.greedy is not None:
        tokens = torch.where(sampling.greedy, logprobs.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _by_kernel(logits: torch.Tensor, s: BatchSampling, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample like `sample`, in one kernel. Raises an error without Triton."""
    from headway.engines.rollout.native.sampling_kernel import sample_rows

    adjusted = _adjusted(logits, s)
    drawn: tuple[torch.Tensor, torch.Tensor] = sample_rows(
        adjusted, uniform, s.temperature, s.top_k, s.top_p, s.min_p, s.greedy
    )
    return drawn


def behaviour_logprobs(logits: torch.Tensor, sampling: BatchSampling) -> torch.Tensor:
    """Return float32 log-probs [A, V] of the distribution that tokens are drawn from; -inf for filtered tokens.

    The steps of `SamplingParams` are applied in the order listed there, each to the result of the step before.
    """
    logits = _adjusted(logits.float(), sampling)
    if sampling.temperature is not None:
        logits = logits / sampling.temperature
    if sampling.min_p is not None:
        # In logs: p ≥ min_p · p_max, and log 0 = -inf keeps all.
        least = logits.amax(-1, keepdim=True) + sampling.min_p.log()
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_k is not None or sampling.top_p is not None:
        logits = _filtered(logits, sampling.top_k, sampling.top_p)
    return torch.log_softmax(logits, -1)


def _adjusted(logits: torch.Tensor, sampling: BatchSampling) -> torch.Tensor:
    """Return logits [A, V] with biases and penalties, in float32 if there are any."""
    if sampling.biased is not None and sampling.bias is not None:
        rows, tokens = sampling.biased
        logits = logits.float()
        logits = logits.index_put((rows, tokens), logits[rows, tokens] + sampling.bias)
    if sampling.penalty is not None and sampling.seen is not None:
        logits = logits.float()
        penalised = torch.where(logits > 0, logits / sampling.penalty, logits * sampling.penalty)
        logits = torch.where(sampling.seen, penalised, logits)
    return logits


@functools.cache
def has_kernel(device: torch.device) -> bool:
    """Tell whether one kernel samples a batch on ``device`` (see `sampling_kernel`). Logs why a GPU has none."""
    if not kind_of(device).compiles_kernels:
        return False
    noise = torch.Generator().manual_seed(0)
    logits, uniform = torch.randn(4, 9000, generator=noise), torch.rand(4, dtype=torch.float64, generator=noise)
    rows = [
        SamplingParams(1),
        SamplingParams(1, 0.7, top_p=0.8),
        SamplingParams(1, top_k=9),
        SamplingParams(1, min_p=0.1),
    ]
    cpu = torch.device("cpu")
    expected = sample(logits, BatchSampling.of(rows, logits.shape[1], cpu), uniform)
    try:
        on_device = _by_kernel(logits.to(device), BatchSampling.of(rows, logits.shape[1], device), uniform.to(device))
        wrong = max(
            float((ours.cpu().float() - of.float()).abs().max()) for ours, of in zip(on_device, expected, strict=True)
        )
        why = "" if wrong <= 1e-3 else f"what one kernel gives differs by {wrong:.2g}"  # also for NaN
    except Exception as cause:  # Triton's errors have no common base, and it may be missing
        why = f"one kernel cannot be had ({said_by(cause)})"
    if why:
        logger.warning("tokens are sampled by many operations on %s: %s", device, why)
    return not why


def _filtered(logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
    """Return logits with -inf outside the filters. The most likely token always stays; ties go to the lower index."""
    # Stable: of equal logits, of which bfloat16 has many, the same ones are cut each time.
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ranks = torch.arange(logits.shape[1], device=logits.device)
        ordered = ordered.masked_fill(ranks >= top_k, -torch.inf)
    if top_p is not None:
        probs = torch.softmax(ordered, -1)
        mass_before = probs.cumsum(-1) - probs
        outside = mass_before >= top_p
        # The likeliest token stays whatever top_p is: in a row without any, all log-probs would be NaN.
        outside[:, 0] = False
        # top_p = 1 is off: rounding in the cumulative sum must not cut the tail.
        ordered = ordered.masked_fill(outside & (top_p < 1), -torch.inf)
    return torch.empty_like(ordered).scatter_(1, order, ordered)


def inverse_cdf(logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return for each row the first token whose cumulative probability exceeds ``uniform``: [A].

    It never has probability 0. The cumulative sum is in float64, and the uniform is scaled by its total, so that the
    sum always exceeds it in the end.
    """
    probs = logprobs.exp()
    cumulative = probs.cumsum(-1, dtype=torch.float64)  # in float32 the tail of a large vocabulary is lost to rounding
    threshold = (uniform * cumulative[:, -1]).unsqueeze(1)
    # Search from the right: otherwise a uniform of 0 would draw a first token of probability 0.
    tokens = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=logprobs.shape[1] - 1)
    return tokens.squeeze(1)


class SeenTokens:
    """Flags of the tokens in each decoding row's prompt and answer, for repetition penalties.

    The flags, a row per slot, are allocated for the first trajectory with a penalty.

    Example:
        >>> seen = SeenTokens(slots=2, vocabulary=4, device=torch.device("cpu"))
        >>> seen.add(0, np.array([1, 3]))
        >>> seen.record(torch.tensor([0]), torch.tensor([2]))
        >>> seen.of(active=1)
        tensor([[False,  True,  True,  True]])
    """

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        self._shape = (slots, vocabulary)
        self._device = device
        self._flags: torch.Tensor | None = None

    def add(self, row: int, tokens: NDArray[np.integer]) -> None:
        """Start ``row`` with these tokens. Only for a trajectory with a penalty."""
        if self._flags is None:
            self._flags = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        # The row still has the flags of the call before.
        self._flags[row] = False
        self._flags[row, to_device([tokens.astype(np.int64)], self._device)[0]] = True

    def record(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Note the new token of each of ``rows`` [R], which have a penalty; ``tokens`` [A] are those of all rows."""
        if self._flags is not None and len(rows):
            self._flags[rows, tokens[rows]] = True

    def move(self, source: int, target: int) -> None:
        if self._flags is not None:
            self._flags[target] = self._flags[source]

    def of(self, active: int) -> torch.Tensor | None:
        """Return the flags [active, V] of rows 0..active-1; meaningless for rows without a penalty."""
        return None if self._flags is None else self._flags[:active]


MARGIN = 4
"""Number of further tokens to decode: at the start, a tokenizer may drop a space or have half a character."""


def window(stop: Sequence[str]) -> int:
    """Return the number of last tokens that may contain one of ``stop``: each token has at least one byte of it."""
    return max(len(text.encode()) for text in stop) + MARGIN


def completed(tail: Sequence[int], stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> bool:
    """Tell whether the last token of ``tail``, an answer's last `window` tokens, completed one of ``stop``."""
    now, before = decode(tail), decode(tail[:-1])
    old = len(before.rstrip("\N{REPLACEMENT CHARACTER}"))  # a character that was incomplete before counts as new
    return any(text in now[max(0, old - len(text) + 1) :] for text in stop)
