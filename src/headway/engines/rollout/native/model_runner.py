"""The model's side of a step: prefill, decode, sample. Mechanism only; who runs where is decided elsewhere.

When the engine starts, `least_invariant_rows` finds out on its own model whether a row's logits depend on the rows
beside it:

    decode 34 rows together ─┐
    decode the first 1, 2, 3, … of them ─▶ the same bits? ─▶ the least number of rows from which on they always are

A matrix product of few rows may be summed in another order than one of many, so that the last bit of a logit tells
with how many others a sequence was decoded. With MKL told to be strict about it (``MKL_CBWR``, see
`headway.cluster.machine.worker_setup`), a few rows are as good as any number: four on one CPU that was tried, one on
another. Calls of fewer rows are filled up. Then sampled tokens are a function of (seed, trajectory, position, weights)
alone: slots, order of arrival and replicas do not matter. Products of a mixture's experts have as few rows as the
router gives them, and cannot be filled up: there one row has to be as good as many.

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
"""Number of rows above which filling up is not worth it."""


def least_invariant_rows(decode: Callable[[int], torch.Tensor]) -> int | None:
    """Return the least number of rows from which on a row's logits are the same for any number; None if there is none.

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
"""Attention spans are rounded up to a multiple of this, so that kernels see few and aligned shapes."""
BLOCK_ROWS = 8
"""Rows of the smallest block that attends on its own."""
BLOCK_COST = 256
"""The cost of one more attention call, in row-positions: about 10 µs, measured on a CPU core."""


def blocks_of(spans: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Partition rows that need ``spans`` [A] positions into (start, stop, span), where splitting pays.

    This relies on neighbours being of similar length (see `DecodeRows`).
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
    """The result of a prefill: enough to start any number of calls from its context."""

    kv: torch.Tensor
    """[layers, 2·kv_heads, T, head_dim] of the whole context."""
    logits: torch.Tensor
    """[V], of the token that follows."""

    def copy(self) -> Prefilled:
        """Copy it: this one is a view of what a whole step has prefilled."""
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
        """``recorder``: of decoding steps, which are then replayed (see `DecodeGraphs`), where ``forward`` can be.

        Raises `ConfigError` where ``kv_cache_bytes`` (None: enough for ``slots``) are too few for one context.
        """
        self._forward = forward
        self.shares = forward.shares
        """Rows can attend to their prompts apart (see `SharedPrompts`)."""
        self.device, self._dtype = model.device, model.dtype
        self.runs_ahead = kind_of(self.device).runs_ahead
        """Steps that are launched before the tokens of the one before are read."""
        self.slots, self.max_context = slots, max_context
        self._block_of = partial(RowBlock.of, window=Windows.of(model.config, max_context).size, dtype=self._dtype)
        self._least_rows = 1
        self._has_experts = has_experts(model.config)
        self._geometry = KvGeometry.of(model.config)
        self.vocabulary = len(model.get_input_embeddings().weight)
        least_rows = self._least_invariant_rows()
        self.invariant = least_rows is not None
        """A row's logits do not depend on how many are beside it, or on which."""
        # Before the cache is made, to whose rows it adds. On a CPU that was tried, the last bits of a row depended on
        # how many were beside it wherever there were fewer than four, and so did what was sampled.
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
            room_step=ROOM_STEP if recorder is None else RECORDED_SPAN_STEP,  # another room is another shape to record
            least_rows=self._least_rows,  # fewer are filled up (see `least_invariant_rows`)
        )
        self.roomy = self.cache.tokens >= slots * max_context
        """There is memory for a whole context in every slot."""
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
        """Tokens for `slots` contexts in rows or in blocks, beside the rows that fill a step up."""
        return enough(self.slots + self._least_rows - 1, self.max_context)

    @torch.inference_mode()
    def _least_invariant_rows(self) -> int | None:
        """See `invariance`. On a GPU the kernels of a step differ with its shape: not looked for."""
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
        # A product of an expert has as many rows as the router gives it: one, whatever a step has.
        return None if self._has_experts and least != 1 else least

    def _fixed_rows(self, slots: int) -> int:
        """Rows of every call, where their number matters: then that is always the same."""
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
        """One token for each of rows 0..A-1, ``tokens`` [A] at ``positions`` [A], and all of ``contexts``.

        ``lengths``: the positions as the host has them. ``prompts``: those that rows attend to apart. In one pass,
        except where a row's result depends on the number of rows: then each context has one of its own.
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
                # Behind the tokens are rows that fill the step up; the contexts begin behind those.
                decoded, logits = logits[: len(tokens)], logits[len(decoding.tokens) :]
            prefilled += map(Prefilled, kv, logits)
        return decoded, prefilled

    def decode(self, tokens: NDArray[np.int64], lengths: NDArray[np.int64], cache: SlotCache) -> torch.Tensor:
        """Decode as `step` does, without contexts, and in another cache than the engine's own."""
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
        if (fillers := self._least_rows - len(lengths)) > 0:  # rows that nobody uses, with one token each
            tokens, positions = F.pad(tokens, (0, fillers)), F.pad(positions, (0, fillers))
            lengths = np.append(lengths, np.zeros(fillers, np.int64))
        blocks = [] if self._forward.varlen else self._blocks(lengths, positions, cache.room, prompts)
        return Decoding(tokens, positions, cache, blocks, prompts)

    def _scratch(self, rows: int, context: int) -> SlotCache:
        """Another cache, for a few short rows beside those that decode."""
        return SlotCache(self._geometry, slots=rows, context=context, dtype=self._dtype, device=self.device)

    @torch.no_grad()
    def refresh(self) -> None:
        """The model's weights were written."""
        self._forward.refresh()

    def release(self) -> None:
        """Free the KV cache, every row of which is lost, and what the forward pass derived from the weights."""
        if self._graphs is not None:
            self._graphs.clear()
        self.cache.release()
        self._forward.release()

    def restore(self) -> None:
        """The weights are there again: take the memory that `release` gave up."""
        self.cache.allocate()
        self.refresh()

    def score(self, ids: NDArray[np.int64], given: int, temperature: float) -> NDArray[np.float32]:
        """Log-probs [B, S - given] of the tokens of ``ids`` [B, S] behind the first ``given``, at ``temperature``.

        The first comes from a prefill, the others from decoding steps in a cache of their own: the paths that sampling
        takes, but that no step is replayed. Nothing is kept, and no randomness is used.
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
