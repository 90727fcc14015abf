"""Running the policy: the interface, and the path that takes a Hugging Face module exactly as it is.

`ModuleForward` works for any decoder whose attention goes through a `transformers` cache, and is the reference that the
faster path (`fused`) is checked against.

Shape suffixes: A decoding rows, B prompts, S padded prompt length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import Cache, PreTrainedModel

from headway.engines.rollout.native.cache import KvGeometry, SlotCache
from headway.engines.rollout.native.windows import FULL, SLIDING, Windows
from headway.errors import ModelError


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Consecutive decoding rows that attend together: rows start..stop-1, over the first ``span`` positions."""

    start: int
    stop: int
    span: int
    mask: torch.Tensor
    """[stop - start, 1, 1, span], 0 where a row has a token (the new one included), else -inf."""
    windowed: torch.Tensor
    """Mask like ``mask`` for layers with a sliding window: 0 only for the last tokens of each row."""

    @classmethod
    def of(cls, rows: range, span: int, lengths: torch.Tensor, window: int | None, dtype: torch.dtype) -> RowBlock:
        """Select ``rows`` of those whose new token is at ``lengths`` [A]."""
        newest = lengths[rows.start : rows.stop, None]
        positions = torch.arange(span, device=lengths.device)
        zeros = torch.zeros(len(rows), span, dtype=dtype, device=lengths.device)
        mask = zeros.masked_fill_(positions > newest, -torch.inf)
        windowed = mask if window is None else mask.masked_fill(positions <= newest - window, -torch.inf)
        return cls(rows.start, rows.stop, span, mask[:, None, None], windowed[:, None, None])


@dataclass(frozen=True, slots=True)
class Decoding:
    """Rows 0..A-1 of a cache, which run one token each."""

    tokens: torch.Tensor
    """[A]"""
    lengths: torch.Tensor
    """[A] positions of the tokens."""
    cache: SlotCache
    """Cache that stores the rows' keys and values."""
    blocks: list[RowBlock]
    """Blocks that together have each row once."""


class PolicyForward(Protocol):
    """A decoder's forward pass. It computes with the module's weights as of the last `refresh`."""

    recordable: bool
    """A step without contexts never waits for the device, and reads weights where they stay (see `graphs`)."""

    def step(
        self, decoding: Decoding | None, contexts: Sequence[torch.Tensor], least_rows: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run one token for each row that is ``decoding``, and whole ``contexts`` [T] each, of one token at least.

        No context is padded to the length of another, and every matrix product has ``least_rows`` rows at least (see
        `invariance`), as many as ``decoding`` has, if there is any: what comes out of a row or a context does not
        depend on those beside it.

        Returns the logits [A + B, V], of the rows and then at each context's last token, and the contexts' keys and
        values [layers, 2·kv_heads, T, head_dim] each.
        """

    def refresh(self) -> None:
        """The module's weights were written: derive from them again what is derived."""

    def release(self) -> None:
        """Give up what is derived from the weights, until `refresh`."""


class ModuleForward:
    """Runs the module itself, with a cache that writes into slots."""

    recordable = False

    def __init__(self, model: PreTrainedModel, windows: Windows) -> None:
        self._model = model
        self._windows = windows
        self._geometry = KvGeometry.of(model.config)

    def step(
        self, decoding: Decoding | None, contexts: Sequence[torch.Tensor], least_rows: int
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

    def _prefill(self, contexts: Sequence[torch.Tensor], least_rows: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        logits: dict[int, torch.Tensor] = {}
        kv: dict[int, torch.Tensor] = {}
        for indices in by_length(contexts):
            ids = torch.stack([contexts[i] for i in indices])
            if ids.numel() < least_rows:
                ids = ids.repeat(-(-least_rows // ids.numel()), 1)
            batch, length = ids.shape
            mask, windowed = (
                self._windows.causal(length, self._model.dtype, ids.device, windowed=kind).expand(batch, 1, -1, -1)
                for kind in (False, True)
            )
            store = _PrefillStore(self._geometry)
            positions = torch.arange(length, device=ids.device)
            ends = self._run(ids, positions.expand(batch, -1), mask, windowed, store, positions[-least_rows:])
            logits.update(zip(indices, ends[:, -1], strict=False))
            kv.update(zip(indices, torch.stack(store.stored).unbind(1), strict=False))
        return torch.stack([logits[i] for i in range(len(contexts))]), [kv[i] for i in range(len(contexts))]

    def _decode(self, decoding: Decoding) -> torch.Tensor:
        tokens, lengths = decoding.tokens, decoding.lengths
        span = max(block.span for block in decoding.blocks)
        mask = torch.full((len(tokens), 1, 1, span), -torch.inf, dtype=self._model.dtype, device=tokens.device)
        windowed = mask.clone()
        for block in decoding.blocks:
            mask[block.start : block.stop, :, :, : block.span] = block.mask
            windowed[block.start : block.stop, :, :, : block.span] = block.windowed
        store = _DecodeStore(decoding.cache, decoding.cache.addresses(lengths), span)
        one = torch.zeros(1, dtype=torch.int64, device=tokens.device)
        return self._run(tokens.unsqueeze(1), lengths.unsqueeze(1), mask, windowed, store, one).squeeze(1)

    def _run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        windowed: torch.Tensor,
        store: Cache,
        kept: torch.Tensor,
    ) -> torch.Tensor:
        """Logits [B, len(kept), V] at the positions ``kept``. A model with layers of both kinds takes both masks."""
        masks = {FULL: mask, SLIDING: windowed} if self._windows.mixed else windowed
        # A four-dimensional mask is taken as it is, by every attention implementation that takes masks at all.
        output = self._model(
            input_ids=ids,
            attention_mask=masks,
            position_ids=positions,
            past_key_values=store,
            use_cache=True,
            logits_to_keep=kept,
        )
        logits: torch.Tensor = output.logits
        return logits


def by_length(contexts: Sequence[torch.Tensor]) -> list[list[int]]:
    """Indices of contexts that are equally long, together."""
    groups: dict[int, list[int]] = {}
    for index, context in enumerate(contexts):
        groups.setdefault(len(context), []).append(index)
    return list(groups.values())


class _PrefillStore(Cache):
    """Collects each layer's keys and values."""

    def __init__(self, geometry: KvGeometry) -> None:
        super().__init__(layers=[])
        self._geometry = geometry
        self.stored: list[torch.Tensor] = []

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
        self.stored.append(torch.cat([key_states, value_states], dim=1))
        return key_states, value_states


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
