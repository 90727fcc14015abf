"""Running the policy: the interface, and a forward pass of the unchanged Hugging Face module.

`ModuleForward` works for any decoder whose attention uses a `transformers` cache. It is the reference for checks of the
faster `FusedForward`.

On a CPU the queries of a prefill attend in blocks of `BLOCK` at fixed positions, over the keys up to the block's end,
even if only part of the block is needed. A token's keys and values then have the same bits whether its context is
prefilled as a whole or from some token on, and however long it is: matrix products, the other part, do not depend on
other rows either (see `least_invariant_rows`). On a GPU a step's kernels depend on its shape anyway, and contexts
attend in one call.

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
    """Forward pass of a decoder. It computes with the module's weights as of the last `refresh`."""

    recordable: bool
    """True if a step without contexts can be recorded (see `DecodeGraphs`): it never waits for the device, and its
    weights stay at fixed addresses."""
    shares: bool
    """True if a shared prompt can have an attention call of its own (see `SharedPrompts`)."""
    in_blocks: bool
    """True if neighbouring rows attend in blocks. On a GPU there is one block: the number of kernels determines the
    time of a step."""
    varlen: bool
    """True if each row attends to its own length (see `VarlenDecode`): a step needs no blocks of rows with masks."""

    def step(
        self, decoding: Decoding | None, contexts: Sequence[PrefillContext], least_rows: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run one token for each row of ``decoding``, and all tokens of ``contexts``.

        Every matrix product has at least ``least_rows`` rows (see `least_invariant_rows`), and so must ``decoding`` if
        given: the result for a row or a context does not depend on the others.

        Returns the logits [A + C, V], of the rows and then of each context's last token, and the keys and values
        [layers, 2·kv_heads, P + T, head_dim] of each context.
        """

    def refresh(self) -> None:
        """Rebuild packed weights and other derived data after the module's weights were written."""

    def release(self) -> None:
        """Free all data derived from the weights, until `refresh`."""


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
        """Do nothing: only the module itself holds memory."""

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
        """Run contexts of equal start and last block (see `PrefillBlocks.alike`), block after block.

        Returns for each the logits [V] of its last token, and keys and values [layers, 2·kv_heads, P + T, head_dim].
        """
        start, device = contexts[0].start, contexts[0].tokens.device
        lasts = [start + len(context.tokens) - 1 for context in contexts]
        blocks = self._blocks.cut(start, lasts[0] + 1)
        contexts = [*contexts] * -(-least_rows // (len(contexts) * len(blocks[0])))  # repeated if they are too few
        pasts = [context.past for context in contexts if context.past is not None]
        store = _PrefillStore(self._geometry, torch.stack(pasts) if pasts else None)
        logits = torch.empty(0)
        for block in blocks:
            ids = torch.zeros(len(contexts), len(block), dtype=torch.int64, device=device)
            for row, context in zip(ids, contexts, strict=True):
                part = context.tokens[max(block.start - start, 0) : block.stop - start]
                at = max(start - block.start, 0)
                row[at : at + len(part)] = part
            # Only the needed logits, but at least `least_rows` of them.
            wanted = sorted({last - block.start for last in lasts}) if block is blocks[-1] else [0]
            wanted += [at for at in range(len(block)) if at not in wanted][: max(0, least_rows - len(wanted))]
            # A block may end after the longest context: higher positions would exceed tables of learned positions.
            positions = torch.arange(block.start, block.stop, device=device).clamp_(max=self._last_position)
            known, kept = max(start - block.start, 0), torch.tensor(wanted, device=device)
            logits = self._run(ids, positions.expand_as(ids), self._blocks.masks(block), store.at(known), kept)
        # Not strict: contexts that only fill up the call have rows, too.
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
        """Return logits [B, len(kept), V] at the positions ``kept``. If layers differ, the model gets both masks."""
        # Every attention implementation that supports masks uses a four-dimensional one unchanged.
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
    """Cache that appends each layer's keys and values to the earlier ones."""

    def __init__(self, geometry: KvGeometry, past: torch.Tensor | None) -> None:
        """Start from ``past`` [C, layers, 2·kv_heads, P, head_dim]."""
        super().__init__(layers=[])
        self._geometry = geometry
        self._known = 0
        self.stored: list[torch.Tensor] = [] if past is None else list(past.unbind(1))
        """Keys and values [C, 2·kv_heads, T, head_dim] of each layer."""

    def at(self, known: int) -> _PrefillStore:
        """Prepare for the next block, whose first ``known`` tokens are already cached."""
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
    """Cache that appends one token per row to the slots, and returns a view of them for attention."""

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
"""Number of recorded shapes that are kept: the most recently used."""
REPLAY_TOLERANCE = 1e-2
"""Allowed difference of a replay's logits, relative to the largest. It runs the same kernels in the same order."""


def recorded_rows(rows: int) -> int:
    """Return the number of rows of the recorded step for ``rows`` rows: 1, 2, 4, 8 or a multiple of 16."""
    return next((few for few in (1, 2, 4, 8) if rows <= few), -(-rows // 16) * 16)


class DecodeGraphs:
    """Records and replays decoding steps in one cache: on a GPU one launch instead of about a hundred.

    A kernel of a small model takes less time than its launch from Python, so the GPU waits. A CUDA graph holds a step's
    kernels with all their addresses. It fits one number of rows, one attention span and one division of the KV cache,
    and reads weights, cache and inputs at their addresses during the recording. Therefore steps are filled up to a few
    numbers of rows, spans are rounded up, and each such shape is recorded on its first use. Steps in which prompts
    start are not recorded: their shapes hardly ever recur.

    If a step cannot be recorded, or a replay gives another result, all steps run without recordings.
    """

    def __init__(
        self, forward: PolicyForward, cache: SlotCache, recorder: GraphRecorder, block_of: Callable[..., RowBlock]
    ) -> None:
        """Set up. ``block_of``: `RowBlock.of` for the model's windows and dtype."""
        self._forward, self._cache, self._recorder, self._block_of = forward, cache, recorder, block_of
        self.recorded: OrderedDict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor, Compute]] = OrderedDict()
        """(rows, span, room) -> the graph's input tensors for tokens and lengths, and its replay."""
        self._logits: torch.Tensor | None = None
        """Logits [slots, V], written by every recorded step."""
        self.works = True
        """True as long as no recording has failed."""

    def step(self, tokens: torch.Tensor, lengths: torch.Tensor, positions: int, least_rows: int) -> torch.Tensor | None:
        """One token for each row: ``tokens`` [A] at ``lengths`` [A], all below ``positions``; logits [A, V].

        The result has its own memory. None if steps cannot be recorded.
        """
        if not self.works:
            return None
        wanted = len(tokens)
        rows = min(max(recorded_rows(wanted), least_rows), self._cache.rows)
        span = self._cache.room
        if not self._forward.varlen:
            span = min(-(-positions // RECORDED_SPAN_STEP) * RECORDED_SPAN_STEP, span)
        shape = (rows, span, self._cache.room)
        # Copies: a graph reads its recorded input tensors at each replay, and the caller changes its own in place.
        tokens, lengths = _filled(tokens, rows), _filled(lengths, rows)
        if shape not in self.recorded:
            return self._record(shape, tokens, lengths)[:wanted]
        self.recorded.move_to_end(shape)
        # Into the recorded tensors: the graph reads at their addresses.
        its_tokens, its_lengths, replay = self.recorded[shape]
        its_tokens[:] = tokens
        its_lengths[:] = lengths
        replay()
        assert self._logits is not None
        # A copy: the next replay overwrites the logits, perhaps before the host has read them.
        return self._logits[:wanted].clone()

    def clear(self) -> None:
        """Forget all recordings, before the memory of cache or weights is replaced."""
        # First: a later replay would use the old addresses, even if the memory has a new owner.
        self.recorded.clear()
        self._logits = None
        self._recorder.reset()

    def _record(self, shape: tuple[int, int, int], tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Record the step, and compare a replay with it. Returns its logits [A, V]."""
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
            written.zero_()  # or a replay that computes nothing would pass with the recording's results
            replay()
        except RuntimeError as cause:
            self._give_up(f"a step of {rows} rows could not be recorded: {said_by(cause.__context__ or cause)}")
            return expected
        difference = float((written - expected).abs().max() / expected.abs().max().clamp(min=1))
        if not difference <= REPLAY_TOLERANCE:  # also True for NaN
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
    """Return a copy of ``values``, zero-padded to [rows]: an unused row decodes token 0 at position 0."""
    return F.pad(values, (0, rows - len(values))) if len(values) < rows else values.clone()
