"""The model's side of a step: prefill, decode, sample. Mechanism only; who runs where is decided elsewhere.

Shape suffixes: A decoding rows, B contexts of one prefill, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headway.data.collate import token_budget_batches
from headway.engines.rollout.native.cache import KvGeometry, SlotCache
from headway.engines.rollout.native.forward import PolicyForward, RowBlock
from headway.engines.rollout.native.sampling import BatchSampling, behaviour_logprobs, sample
from headway.engines.rollout.native.work import Prefilled
from headway.interfaces import SamplingParams

SPAN_STEP = 16
"""Attention spans are rounded up to a multiple of this, so that kernels see few and aligned shapes."""
BLOCK_ROWS = 8
"""Rows of the smallest block that attends on its own."""
BLOCK_COST = 256
"""What one more attention call costs, in row-positions: about 10 µs, measured on a CPU core."""


def blocks_of(spans: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Partition rows that need ``spans`` [A] positions into (start, stop, span), where splitting pays.

    Rows are not moved: this relies on neighbours being of similar length.
    """
    blocks: list[tuple[int, int, int]] = []
    for start in range(0, len(spans), BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, len(spans))
        span = int(spans[start:stop].max())
        if blocks:
            first, _, before = blocks[-1]
            joint = max(before, span)
            wasted = (start - first) * (joint - before) + (stop - start) * (joint - span)
            if wasted <= BLOCK_COST:
                blocks[-1] = (first, stop, joint)
                continue
        blocks.append((start, stop, span))
    return blocks


class Runner:
    """Owns the model and the KV cache."""

    def __init__(
        self,
        model: PreTrainedModel,
        forward: PolicyForward,
        *,
        slots: int,
        max_context: int,
        max_batched_tokens: int,
        pad_token_id: int,
    ) -> None:
        self._forward = forward
        self._device, self._dtype = model.device, model.dtype
        self._positions = torch.arange(max_context, device=model.device)
        self._max_batched_tokens = max_batched_tokens
        self._pad_token_id = pad_token_id
        self.cache = SlotCache(
            KvGeometry.of(model.config), slots=slots, context=max_context, dtype=model.dtype, device=model.device
        )

    def prefill(self, contexts: Sequence[NDArray[np.int64]]) -> Iterator[tuple[int, Prefilled]]:
        """Run whole contexts, ``max_batched_tokens`` (padding included) at a time; yields (index, result)."""
        lengths = [len(context) for context in contexts]
        for batch in token_budget_batches(lengths, self._max_batched_tokens):
            padded = np.full((len(batch), lengths[batch[0]]), self._pad_token_id, np.int64)
            for row, index in enumerate(batch):
                padded[row, : lengths[index]] = contexts[index]
            logits, kv = self._forward.prefill(
                self._to_device(padded), self._to_device(np.array([lengths[index] for index in batch]))
            )
            for row, index in enumerate(batch):
                yield index, Prefilled(kv[:, row, :, : lengths[index]], logits[row])

    def decode(
        self, tokens: NDArray[np.int64], lengths: NDArray[np.int64], cache: SlotCache | None = None
    ) -> torch.Tensor:
        """One token for each of rows 0..A-1: ``tokens`` [A] at positions ``lengths`` [A]. Logits [A, V].

        ``cache`` is another one than the engine's own, whose rows are then not touched.
        """
        on_device = self._to_device(lengths)
        cache = self.cache if cache is None else cache
        return self._forward.decode(self._to_device(tokens), on_device, cache, self._blocks(lengths, on_device))

    def score(self, ids: NDArray[np.int64], given: int, temperature: float) -> NDArray[np.float32]:
        """Log-probs [B, S - given] of the tokens of ``ids`` [B, S] behind the first ``given``, at ``temperature``.

        The first comes from a prefill, the others from decoding steps in a cache of their own: the paths that sampling
        takes. Nothing is kept, and no randomness is used.
        """
        rows, length = ids.shape
        cache = self.cache.scratch(rows, self._span(length))
        logits = [torch.empty(0)] * rows
        for row, prefilled in self.prefill(list(ids[:, :given])):
            cache.fill(range(row, row + 1), prefilled.kv)
            logits[row] = prefilled.logits
        sampling = BatchSampling.of([SamplingParams(1, temperature)] * rows, logits[0].shape[0], self._device)
        step = torch.stack(logits)
        scores = []
        for at in range(given, length):
            targets = self._to_device(ids[:, at])
            scores.append(behaviour_logprobs(step, sampling).gather(1, targets[:, None]))
            if at + 1 < length:
                step = self.decode(ids[:, at], np.full(rows, at, np.int64), cache)
        return torch.cat(scores, dim=1).cpu().numpy()

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingParams],
        uniforms: NDArray[np.float64],
        written: NDArray[np.int64],
        seen: torch.Tensor | None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """One token per row of ``logits`` [A, V]: tokens [A] and their log-probs [A]. See `BatchSampling.of`."""
        sampling = BatchSampling.of(rows, logits.shape[1], self._device, written, seen)
        tokens, logprobs = sample(logits, sampling, self._to_device(uniforms))
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    def _blocks(self, lengths: NDArray[np.int64], on_device: torch.Tensor) -> list[RowBlock]:
        """Partition the rows into neighbours that attend together, each over its own longest row."""
        # On a GPU the time of a step is the number of its kernels: one block.
        whole = (0, len(lengths), int(lengths.max()) + 1)
        blocks = blocks_of(lengths + 1) if self._device.type == "cpu" else [whole]
        return [self._block(start, stop, span, on_device) for start, stop, span in blocks]

    def _block(self, start: int, stop: int, span: int, lengths: torch.Tensor) -> RowBlock:
        span = self._span(span)
        beyond = self._positions[:span] > lengths[start:stop, None]
        mask = torch.zeros(beyond.shape, dtype=self._dtype, device=self._device).masked_fill_(beyond, -torch.inf)
        return RowBlock(start, stop, span, mask[:, None, None])

    def _span(self, positions: int) -> int:
        return min(-(-positions // SPAN_STEP) * SPAN_STEP, self.cache.context)

    def _to_device(self, array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
