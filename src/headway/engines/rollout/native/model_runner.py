"""The model's side of a step: prefill, decode, sample. It decides nothing about which calls run.

When the engine starts, `least_invariant_rows` tests on the engine's model whether a row's logits depend on the number
of rows:

    decode 34 rows together ─┐
    decode the first 1, 2, 3, … of them ─▶ the same bits? ─▶ the least number of rows from which on they always are

A matrix product of few rows may be summed in another order than one of many, so the last bit of a logit may depend on
the number of rows. With MKL in strict mode (``MKL_CBWR``, see `headway.cluster.machine.worker_setup`), results are
equal from a few rows on: four on one tested CPU, one on another. Smaller steps are filled up. Then sampled tokens
depend only on (seed, trajectory, position, weights), and not on slots, order of arrival or replicas. Products of a
mixture's experts cannot be filled up, as the router chooses their rows: results have to be equal from one row on.

Shape suffixes: A decoding rows, B sequences, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headway.data.interfaces.rollout import SamplingParams
from headway.devices import GraphRecorder, kind_of
from headway.engines.host_copies import to_device
from headway.engines.rollout.native.kv_cache import ROOM_STEP, SlotCache, enough
from headway.engines.rollout.native.policy_forward import RECORDED_SPAN_STEP, DecodeGraphs, PolicyForward
from headway.engines.rollout.native.sampler import BatchSampling, behaviour_logprobs
from headway.engines.rollout.native.step_attention import Decoding, PrefillContext, RowBlock, SharedPrompt
from headway.engines.rollout.native.supported_models import KvGeometry, Windows, has_experts
from headway.errors import ConfigError

TOGETHER = 34
ALONE = (1, 2, 3, 4, 5, 8, 16, 17, 33)
MOST = 16
"""Most rows to which steps are filled up: above this it is not worth it."""


def least_invariant_rows(decode: Callable[[int], torch.Tensor]) -> int | None:
    """Return the least number of rows from which on a row's logits do not depend on the number; None if there is none.

    ``decode(rows)`` returns the logits [rows, V] of the first ``rows`` sequences of a batch of `TOGETHER`.
    """
    together = decode(TOGETHER)
    least = None
    # From the most rows down: a number is safe only if all above it are.
    for rows in reversed(ALONE):
        if not torch.equal(decode(rows), together[:rows]):
            break
        least = rows
    return least if least is not None and least <= MOST else None


logger = logging.getLogger(__name__)

SPAN_STEP = 16
"""Attention spans are rounded up to a multiple of this number, so that kernels see few, aligned shapes."""
BLOCK_ROWS = 8
"""Number of rows of the smallest block with an attention call of its own."""
BLOCK_COST = 256
"""Cost of one more attention call, in row-positions: about 10 µs, measured on a CPU core."""


def blocks_of(spans: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Partition rows that need ``spans`` [A] positions into blocks (start, stop, span), split only where it pays.

    Neighbours should have similar lengths (see `DecodeRows`).
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


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Result of a prefill: enough to start any number of calls from its context."""

    kv: torch.Tensor
    """Keys and values [layers, 2·kv_heads, T, head_dim] of the whole context."""
    logits: torch.Tensor
    """Logits [V] of the next token."""

    def copy(self) -> Prefilled:
        """Return a copy with its own memory; the original may be a view of a whole step's prefill."""
        return Prefilled(self.kv.clone(), self.logits.clone())


class ModelRunner:
    """Owns the model and the KV cache."""

    def __init__(
        self,
        model: PreTrainedModel,
        forward: PolicyForward,
        slots: int,
        max_context: int,
        kv_cache_bytes: int | None,
        recorder: GraphRecorder | None,
    ) -> None:
        """Set up the KV cache. ``recorder`` records decoding steps for replay, if ``forward`` allows (`DecodeGraphs`).

        Raises `ConfigError` if ``kv_cache_bytes`` (None: enough for ``slots``) are too few for one context.
        """
        self._forward = forward
        self.shares = forward.shares
        """True if rows can attend to their prompts separately (see `SharedPrompts`)."""
        self.device, self._dtype = model.device, model.dtype
        self.runs_ahead = kind_of(self.device).runs_ahead
        """Number of steps launched before the tokens of the step before are read."""
        self.slots, self.max_context = slots, max_context
        self._block_of = partial(RowBlock.of, window=Windows.of(model.config, max_context).size, dtype=self._dtype)
        self._least_rows = 1
        self._has_experts = has_experts(model.config)
        self._geometry = KvGeometry.of(model.config)
        self.vocabulary = len(model.get_input_embeddings().weight)
        least_rows = self._least_invariant_rows()
        self.invariant = least_rows is not None
        """True if a row's logits do not depend on the other rows or their number."""
        # Before the cache is made, to whose rows it adds. On one tested CPU, the last bits of a row, and with them the
        # sampled tokens, depended on the number of rows if there were fewer than four.
        self._least_rows = least_rows or self._fixed_rows(slots)
        # Prefills beside decoding rows change how many rows a product has.
        self._mixes = self.invariant or self.device.type != "cpu"
        if not forward.recordable:
            recorder = None
        self.cache = SlotCache(
            self._geometry,
            slots=max(slots, self._least_rows),
            context=max_context,
            dtype=model.dtype,
            device=model.device,
            tokens=self._enough() if kv_cache_bytes is None else self._tokens_in(kv_cache_bytes),
            room_step=ROOM_STEP if recorder is None else RECORDED_SPAN_STEP,  # each room is another shape to record
            least_rows=self._least_rows,  # fewer are filled up (see `least_invariant_rows`)
        )
        self.roomy = self.cache.tokens >= slots * max_context
        """True if there is memory for a whole context in every slot."""
        self._graphs: DecodeGraphs | None = None
        if recorder is not None:
            self._graphs = DecodeGraphs(forward, self.cache, recorder, self._block_of)

    def _tokens_in(self, kv_cache_bytes: int) -> int:
        geometry = self._geometry
        of_token: int = geometry.layers * 2 * geometry.kv_heads * geometry.head_dim * self._dtype.itemsize
        tokens, least = kv_cache_bytes // of_token, self._least_rows * self.max_context
        if tokens < least:
            raise ConfigError(
                f"rollout.kv_cache_gib={kv_cache_bytes / 2**30:.3g} holds the keys and values of {tokens} tokens, of "
                f"{of_token} bytes each, and a replica needs room for {least}: {self._least_rows} rows of "
                f"{self.max_context} (fewer rows are filled up, so that none depends on those beside it); give it "
                f"{least * of_token / 2**30:.3g} or more, or let answers be shorter (data.max_response_length)"
            )
        return min(tokens, self._enough())

    def _enough(self) -> int:
        """Return the number of tokens for `slots` contexts in rows or blocks, and for the rows that fill up a step."""
        return enough(self.slots + self._least_rows - 1, self.max_context)

    @torch.inference_mode()
    def _least_invariant_rows(self) -> int | None:
        """Run the test described in the module. Not on a GPU, where the kernels of a step depend on its shape."""
        if self.device.type != "cpu":
            return None
        context = min(40, self.max_context)
        lengths = 1 + 7 * np.arange(TOGETHER) % (context - 1) if context > 1 else np.zeros(TOGETHER, np.int64)
        tokens = 11 * np.arange(TOGETHER) % self.vocabulary
        noise = torch.Generator().manual_seed(0)

        def decode(rows: int) -> torch.Tensor:
            cache = self._scratch(rows, context)
            noise.manual_seed(0)  # the same keys and values for a row, however many rows there are
            for row in range(rows):
                shape = (self._geometry.layers, 2 * self._geometry.kv_heads, int(lengths[row]), self._geometry.head_dim)
                cache.fill(range(row, row + 1), torch.randn(shape, generator=noise).to(self._dtype))
            return self.decode(tokens[:rows], lengths[:rows], cache)

        least = least_invariant_rows(decode)
        # The router may give an expert a single row, whatever the step's number of rows.
        return None if self._has_experts and least != 1 else least

    def _fixed_rows(self, slots: int) -> int:
        """Return the number of rows of every call if results depend on it; 1 if it cannot be fixed."""
        if self.device.type != "cpu":
            return 1
        so = f"every decoding step is filled up to {slots} rows, and what is sampled depends on rollout.max_concurrent"
        if self._has_experts:
            so = "an expert has as many as the router gives it, and the last bits of what is sampled depend on them"
        logger.warning("a row's logits depend on the number of rows beside it here: %s", so)
        return 1 if self._has_experts else slots

    def step(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        lengths: NDArray[np.int64],
        contexts: Sequence[PrefillContext],
        prompts: Sequence[SharedPrompt] = (),
    ) -> tuple[torch.Tensor, list[Prefilled]]:
        """Run one token for each of rows 0..A-1, ``tokens`` [A] at ``positions`` [A], and all of ``contexts``.

        ``lengths``: the positions on the host. ``prompts``: prompts that rows attend to separately. All in one pass;
        but if a row's result depends on the number of rows, each context has a pass of its own.
        Returns the rows' logits [A, V] and a result for each context.
        """
        if self._graphs is not None and len(tokens) and not contexts:
            most = int(lengths.max()) + 1
            if (logits := self._graphs.step(tokens, positions, most, self._least_rows)) is not None:
                return logits, []
        decoded = torch.empty(0)
        prefilled: list[Prefilled] = []
        rows = self._decoding(tokens, positions, lengths, self.cache, prompts) if len(tokens) else None
        passes: list[tuple[Decoding | None, Sequence[PrefillContext]]] = [(None, [context]) for context in contexts]
        if self._mixes and (rows is not None or contexts):
            passes = [(rows, contexts)]
        elif rows is not None:
            passes.insert(0, (rows, ()))
        for decoding, batch in passes:
            logits, kv = self._forward.step(decoding, batch, self._least_rows)
            if decoding is not None:
                # After the tokens come the rows that fill up the step, and then the contexts.
                decoded, logits = logits[: len(tokens)], logits[len(decoding.tokens) :]
            prefilled += map(Prefilled, kv, logits)
        return decoded, prefilled

    def decode(self, tokens: NDArray[np.int64], lengths: NDArray[np.int64], cache: SlotCache) -> torch.Tensor:
        """Decode like `step`, without contexts, and in a ``cache`` that is not the engine's own."""
        inputs, positions = to_device([tokens, lengths], self.device)
        logits, _ = self._forward.step(self._decoding(inputs, positions, lengths, cache), (), self._least_rows)
        return logits[: len(tokens)]

    def _decoding(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        lengths: NDArray[np.int64],
        cache: SlotCache,
        prompts: Sequence[SharedPrompt] = (),
    ) -> Decoding:
        if (fillers := self._least_rows - len(lengths)) > 0:  # unused rows with one token each
            tokens, positions = F.pad(tokens, (0, fillers)), F.pad(positions, (0, fillers))
            lengths = np.append(lengths, np.zeros(fillers, np.int64))
        blocks = [] if self._forward.varlen else self._blocks(lengths, positions, cache.room, prompts)
        return Decoding(tokens, positions, cache, blocks, prompts)

    def _scratch(self, rows: int, context: int) -> SlotCache:
        """Return another cache for a few short rows, separate from the decoding rows."""
        return SlotCache(self._geometry, slots=rows, context=context, dtype=self._dtype, device=self.device)

    @torch.no_grad()
    def refresh(self) -> None:
        """The model's weights were written."""
        self._forward.refresh()

    def release(self) -> None:
        """Free the KV cache, losing every row, and all that the forward pass derived from the weights."""
        if self._graphs is not None:
            self._graphs.clear()
        self.cache.release()
        self._forward.release()

    def restore(self) -> None:
        """Allocate the memory that `release` freed, once the weights are back."""
        self.cache.allocate()
        self.refresh()

    def score(self, ids: NDArray[np.int64], given: int, temperature: float) -> NDArray[np.float32]:
        """Return log-probs [B, S - given] at ``temperature`` of the tokens of ``ids`` [B, S] after the first ``given``.

        The first one comes from a prefill, the others from decoding steps in a separate cache, by the same code as
        sampling but without replays. Nothing is kept, and no randomness is used.
        """
        rows, length = ids.shape
        cache = self._scratch(max(rows, self._least_rows), self._span(length, self.max_context))
        columns = to_device([*(row[:given] for row in ids), *ids[:, given:].T.copy()], self.device)
        contexts, targets = [PrefillContext(row) for row in columns[:rows]], columns[rows:]
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        _, prefilled = self.step(nothing, nothing, np.zeros(0, np.int64), contexts)
        for row, context in enumerate(prefilled):
            cache.fill(range(row, row + 1), context.kv)
        step = torch.stack([context.logits for context in prefilled])
        sampling = BatchSampling.of([SamplingParams(1, temperature)] * rows, step.shape[1], self.device)
        scores = []
        for at in range(given, length):
            scores.append(behaviour_logprobs(step, sampling).gather(1, targets[at - given][:, None]))
            if at + 1 < length:
                step = self.decode(ids[:, at], np.full(rows, at, np.int64), cache)
        return torch.cat(scores, dim=1).cpu().numpy()

    def _blocks(
        self, lengths: NDArray[np.int64], on_device: torch.Tensor, room: int, prompts: Sequence[SharedPrompt]
    ) -> list[RowBlock]:
        """Partition the rows into neighbours that attend together, each over its own longest row."""
        block = partial(self._block_of, lengths=on_device)
        if not self._forward.in_blocks:
            return [block(range(len(lengths)), self._span(int(lengths.max()) + 1, room))]
        firsts = np.zeros(len(lengths), np.int64)
        for prompt in prompts:
            firsts[prompt.rows] = prompt.length
        ends = [*(np.flatnonzero(np.diff(firsts)) + 1).tolist(), len(lengths)] if prompts else [len(lengths)]
        blocks, begin = [], 0
        for end in ends:
            first = int(firsts[begin])
            blocks += [
                block(range(begin + start, begin + stop), self._span(span, room - first), first=first)
                for start, stop, span in blocks_of(lengths[begin:end] + 1 - first)
            ]
            begin = end
        return blocks

    def _span(self, positions: int, most: int) -> int:
        return min(-(-positions // SPAN_STEP) * SPAN_STEP, most)
