"""Running the policy: the interface, and the path that takes a Hugging Face module exactly as it is.

`ModuleForward` works for any decoder whose attention goes through a `transformers` cache, and is the reference that the
faster path (`FusedForward`) is checked against.

On a CPU the queries of a prefill attend block by block: `BLOCK` of them, at fixed places, over the keys up to the
block's end, whatever part of it is to be computed. A token's keys and values are then the same bits whether its context
is prefilled whole or from some token on, and however long it is: matrix products, the other part of it, do not depend
on what is beside a row (see `least_invariant_rows`). On a GPU, whose kernels of a step differ with its shape anyway,
contexts attend in one call.

Also here: decoding steps that are recorded once and replayed (`DecodeGraphs`).

Shape suffixes: A decoding rows, C contexts, V vocabulary.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import Cache, PreTrainedModel

from headway.devices import Compute, GraphRecorder
from headway.engines.rollout.native.kv_cache import SlotCache
from headway.engines.rollout.native.step_attention import Decoding, PrefillBlocks, PrefillContext, RowBlock
from headway.engines.rollout.native.supported_models import FULL, SLIDING, KvGeometry, Windows
from headway.errors import ModelError, said_by


class PolicyForward(Protocol):
    """A decoder's forward pass. It computes with the module's weights as of the last `refresh`."""

    recordable: bool
    """True where a step without contexts can be recorded (see `DecodeGraphs`): it never waits for the device, and the
    weights that it reads stay where they are."""
    shares: bool
    """True where a shared prompt can have an attention call of its own (see `SharedPrompts`)."""
    in_blocks: bool
    """True where neighbouring rows attend in blocks. On a GPU there is one block: a step takes as long as it has
    kernels."""
    varlen: bool
    """True where each row attends to its own length (see `VarlenDecode`): a step needs no blocks of rows with masks."""

    def step(
        self, decoding: Decoding | None, contexts: Sequence[PrefillContext], least_rows: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run one token for each row that is ``decoding``, and all tokens of ``contexts``.

        Every matrix product has at least ``least_rows`` rows (see `least_invariant_rows`), and so has ``decoding``, if
        it is given: the result for a row or a context does not depend on the others.

        Returns the logits [A + C, V], of the rows and then at each context's last token, and keys and values
        [layers, 2·kv_heads, P + T, head_dim] of each context.
        """

    def refresh(self) -> None:
        """Derive packed weights and the like anew, after the module's weights were written."""

    def release(self) -> None:
        """Free what was derived from the weights, until `refresh`."""


class ModuleForward:
    """Runs the module itself, with a cache that writes into slots."""

    recordable = shares = in_blocks = varlen = False

    def __init__(self, model: PreTrainedModel, max_context: int, windows: Windows) -> None:
        self._model = model
        self._windows = windows
        self._geometry = KvGeometry.of(model.config)
        self._last_position = max_context - 1
        self._blocks = PrefillBlocks(windows, max_context, model.dtype, model.device)

    def step(
        self, decoding: Decoding | None, contexts: Sequence[PrefillContext], least_rows: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        logits = [] if decoding is None else [self._decode(decoding)]
        kv: list[torch.Tensor] = []
        if contexts:
            prefilled, kv = self._prefill(contexts, least_rows)
            logits.append(prefilled)
        return logits[0] if len(logits) == 1 else torch.cat(logits), kv

    def refresh(self) -> None:
        """Do nothing: no copies are derived from the weights."""

    def release(self) -> None:
        """Do nothing: no memory is held beside the module's own."""

    def _prefill(self, contexts: Sequence[PrefillContext], least_rows: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        results: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for indices in self._blocks.alike(contexts):
            of_indices = self._run_blocks([contexts[index] for index in indices], least_rows)
            results.update(zip(indices, of_indices, strict=True))
        logits, kv = zip(*(results[index] for index in range(len(contexts))), strict=True)
        return torch.stack(logits), list(kv)

    def _run_blocks(
        self, contexts: Sequence[PrefillContext], least_rows: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Run contexts that are alike (see `PrefillBlocks`), block after block.

        Returns the logits [V] at each one's last token, and keys and values [layers, 2·kv_heads, P + T, head_dim].
        """
        start, device = contexts[0].start, contexts[0].tokens.device
        lasts = [start + len(context.tokens) - 1 for context in contexts]
        blocks = self._blocks.cut(start, lasts[0] + 1)
        contexts = [*contexts] * -(-least_rows // (len(contexts) * len(blocks[0])))  # some twice, if they are too few
        pasts = [context.past for context in contexts if context.past is not None]
        store = _PrefillStore(self._geometry, torch.stack(pasts) if pasts else None)
        logits = torch.empty(0)
        for block in blocks:
            ids = torch.zeros(len(contexts), len(block), dtype=torch.int64, device=device)
            for row, context in zip(ids, contexts, strict=True):
                part = context.tokens[max(block.start - start, 0) : block.stop - start]
                at = max(start - block.start, 0)
                row[at : at + len(part)] = part
            # No more logits than are wanted, and enough of them.
            wanted = sorted({last - block.start for last in lasts}) if block is blocks[-1] else [0]
            wanted += [at for at in range(len(block)) if at not in wanted][: max(0, least_rows - len(wanted))]
            # A block may end behind the longest context: positions beyond would leave the tables of learned ones.
            positions = torch.arange(block.start, block.stop, device=device).clamp_(max=self._last_position)
            known, kept = max(start - block.start, 0), torch.tensor(wanted, device=device)
            logits = self._run(ids, positions.expand_as(ids), self._blocks.masks(block), store.at(known), kept)
        # Not strict: contexts that only fill the call up have rows, too.
        results = zip(lasts, logits, torch.stack(store.stored).unbind(1), strict=False)
        return [(row[wanted.index(last - blocks[-1].start)], kv[:, :, : last + 1]) for last, row, kv in results]

    def _decode(self, decoding: Decoding) -> torch.Tensor:
        tokens, lengths = decoding.tokens, decoding.lengths
        (block,) = decoding.blocks
        store = _DecodeStore(decoding.cache, decoding.cache.addresses(lengths), block.span)
        one = torch.zeros(1, dtype=torch.int64, device=tokens.device)
        masks = (block.mask, block.windowed)
        return self._run(tokens.unsqueeze(1), lengths.unsqueeze(1), masks, store, one).squeeze(1)

    def _run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        masks: Sequence[torch.Tensor],
        store: Cache,
        kept: torch.Tensor,
    ) -> torch.Tensor:
        """Logits [B, len(kept), V] at the positions ``kept``. A model with layers of both kinds takes both."""
        # A four-dimensional mask is taken as it is, by every attention implementation that takes masks at all.
        full, windowed = (mask.expand(len(ids), 1, -1, -1) for mask in masks)
        output = self._model(
            input_ids=ids,
            attention_mask={FULL: full, SLIDING: windowed} if self._windows.mixed else windowed,
            position_ids=positions,
            past_key_values=store,
            use_cache=True,
            logits_to_keep=kept,
        )
        logits: torch.Tensor = output.logits
        return logits


class _PrefillStore(Cache):
    """Collects each layer's keys and values, behind those that are there."""

    def __init__(self, geometry: KvGeometry, past: torch.Tensor | None) -> None:
        """``past``: [C, layers, 2·kv_heads, P, head_dim]"""
        super().__init__(layers=[])
        self._geometry = geometry
        self._known = 0
        self.stored: list[torch.Tensor] = [] if past is None else list(past.unbind(1))
        """[C, 2·kv_heads, T, head_dim] of each layer."""

    def at(self, known: int) -> _PrefillStore:
        """Take the next block, of which the first ``known`` tokens are there."""
        self._known = known
        return self

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        expected = (self._geometry.kv_heads, self._geometry.head_dim)
        for states in (key_states, value_states):
            if (states.shape[1], states.shape[3]) != expected:
                raise ModelError(
                    f"the native rollout engine expects keys and values of (heads, head_dim) {expected} in every "
                    f"layer; layer {layer_idx} has {(states.shape[1], states.shape[3])}"
                )
        kv = torch.cat([key_states, value_states], dim=1)[:, :, self._known :]
        if layer_idx == len(self.stored):
            self.stored.append(kv)
        else:
            self.stored[layer_idx] = torch.cat([self.stored[layer_idx], kv], dim=2)
        keys, values = self.stored[layer_idx].chunk(2, dim=1)
        return keys, values


class _DecodeStore(Cache):
    """Appends one token per row to the slots, and gives attention a view of them."""

    def __init__(self, cache: SlotCache, addresses: torch.Tensor, span: int) -> None:
        super().__init__(layers=[])
        self._cache, self._addresses, self._span = cache, addresses, span

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._cache.append(layer_idx, self._addresses, torch.cat([key_states, value_states], dim=1).squeeze(2))
        return self._cache.view(layer_idx, 0, len(self._addresses), self._span)


logger = logging.getLogger(__name__)

RECORDED_SPAN_STEP = 256
"""Spans of recorded steps are rounded up to a multiple of this."""
MOST_RECORDED = 64
"""Recorded shapes that are kept, the ones used last."""
REPLAY_TOLERANCE = 1e-2
"""The difference of a replay's logits that is allowed, relative to the largest: the same kernels in the same order."""


def recorded_rows(rows: int) -> int:
    """Rows of the recorded step that ``rows`` rows take part in: 1, 2, 4, 8 and the multiples of 16."""
    return next((few for few in (1, 2, 4, 8) if rows <= few), -(-rows // 16) * 16)


class DecodeGraphs:
    """Runs decoding steps in one cache by recording and replaying them: on a GPU one launch, where a step is a hundred.

    A kernel of a small model takes less time than its launch from Python, so that the GPU waits. A CUDA graph holds a
    step's kernels with all their addresses: it fits one number of rows, one span of attention and one division of the
    KV cache, and reads the weights, the cache and the step's own inputs where they lay when it was recorded. Steps are
    therefore filled up to a few numbers of rows, their spans rounded up, and each such shape is recorded when it comes
    for the first time. Steps in which prompts start are not recorded: their shapes hardly ever come again.

    Where a step cannot be recorded, or what is replayed is not what was computed, all steps run as they are.
    """

    def __init__(
        self, forward: PolicyForward, cache: SlotCache, recorder: GraphRecorder, block_of: Callable[..., RowBlock]
    ) -> None:
        """``block_of``: `RowBlock.of` for the model's windows and dtype."""
        self._forward, self._cache, self._recorder, self._block_of = forward, cache, recorder, block_of
        self.recorded: OrderedDict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor, Compute]] = OrderedDict()
        """By rows, span and room: the tensors that a graph reads tokens and lengths from, and its replay."""
        self._logits: torch.Tensor | None = None
        """[slots, V] which every recorded step writes."""
        self.works = True
        """True as long as no recording has failed."""

    def step(self, tokens: torch.Tensor, lengths: torch.Tensor, positions: int, least_rows: int) -> torch.Tensor | None:
        """One token for each row: ``tokens`` [A] at ``lengths`` [A], all below ``positions``; logits [A, V].

        The result is memory of its own. None where steps cannot be recorded.
        """
        if not self.works:
            return None
        wanted = len(tokens)
        rows = min(max(recorded_rows(wanted), least_rows), self._cache.rows)
        span = self._cache.room
        if not self._forward.varlen:
            span = min(-(-positions // RECORDED_SPAN_STEP) * RECORDED_SPAN_STEP, span)
        shape = (rows, span, self._cache.room)
        # Copies: a graph reads what it was recorded with at each replay, and the caller changes its own in place.
        tokens, lengths = _filled(tokens, rows), _filled(lengths, rows)
        if shape not in self.recorded:
            return self._record(shape, tokens, lengths)[:wanted]
        self.recorded.move_to_end(shape)
        # Into the tensors that the graph has recorded: it reads their addresses, whatever Python calls them.
        its_tokens, its_lengths, replay = self.recorded[shape]
        its_tokens[:] = tokens
        its_lengths[:] = lengths
        replay()
        assert self._logits is not None
        # A copy: the next replay writes over them, perhaps before the host has read these.
        return self._logits[:wanted].clone()

    def clear(self) -> None:
        """The cache's memory or the weights' is about to be another: forget what was recorded."""
        # Before the memory goes: a graph that is replayed later uses its addresses, whoever has them by then.
        self.recorded.clear()
        self._logits = None
        self._recorder.reset()

    def _record(self, shape: tuple[int, int, int], tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Record the step and compare a replay with it; its logits [A, V]."""
        rows, span, _ = shape

        def forward() -> torch.Tensor:
            blocks = [] if self._forward.varlen else [self._block_of(range(rows), span, lengths)]
            return self._forward.step(Decoding(tokens, lengths, self._cache, blocks), (), 1)[0]

        expected = forward()  # also stores the rows' tokens in the cache, where the replay below stores the same again
        if self._logits is None:
            self._logits = expected.new_zeros(self._cache.slots, expected.shape[1])
        written = self._logits[:rows]

        def compute() -> None:
            written.copy_(forward())

        try:
            replay = self._recorder.record(compute)
            written.zero_()  # so that a replay that computes nothing does not pass with what recording left there
            replay()
        except RuntimeError as cause:
            self._give_up(f"a step of {rows} rows could not be recorded: {said_by(cause.__context__ or cause)}")
            return expected
        difference = float((written - expected).abs().max() / expected.abs().max().clamp(min=1))
        if not difference <= REPLAY_TOLERANCE:  # holds also for NaN
            self._give_up(f"a replayed step of {rows} rows differs from the step by {difference:.2g}, relative")
            return expected
        self.recorded[shape] = tokens, lengths, replay
        if len(self.recorded) > MOST_RECORDED:
            self.recorded.popitem(last=False)
        return expected

    def _give_up(self, why: str) -> None:
        logger.warning(
            "%s; decoding without CUDA graphs from here on (rollout.enforce_eager=true does so at once)", why
        )
        self.clear()
        self.works = False


def _filled(values: torch.Tensor, rows: int) -> torch.Tensor:
    """A copy of ``values``, zero-padded to [rows]: an unused row decodes token 0 at position 0."""
    return F.pad(values, (0, rows - len(values))) if len(values) < rows else values.clone()
