"""Attention of a step's tokens in the fused forward: decoding rows to the cache, contexts to their past and themselves.

Shape suffixes: A decoding rows, C contexts, N tokens, H query heads, K key-value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from headway.engines.rollout.native.forward import Context, Decoding, alike
from headway.engines.rollout.native.prefix_cache import BLOCK
from headway.engines.rollout.native.windows import BlockMasks, Windows


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The dimensions of a model's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    windows: Windows
    dtype: torch.dtype


class DecodeAttention:
    """Rows that run one token each: where they are in a step, and how they attend."""

    def __init__(self, shape: AttentionShape, decoding: Decoding) -> None:
        self._shape = shape
        self._cache, self._blocks = decoding.cache, decoding.blocks
        self._addresses = decoding.cache.addresses(decoding.lengths)
        self.tokens, self.positions = decoding.tokens, decoding.lengths
        self.count = len(decoding.tokens)
        self.last = torch.arange(self.count, device=decoding.tokens.device)
        # Query heads that share keys attend as if they were query positions: no copy of the keys for each.
        self._queries = (self.count, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """[A, H + 2K, D] → [A, H·D]"""
        self._cache.append(layer, self._addresses, qkv[:, self._shape.heads :])
        queries = qkv[:, : self._shape.heads].reshape(self._queries)
        parts = []
        for block in self._blocks:
            keys, values = self._cache.view(layer, block.start, block.stop, block.span)
            mask = block.windowed if self._shape.windows.layers[layer] else block.mask
            part = F.scaled_dot_product_attention(queries[block.start : block.stop], keys, values, attn_mask=mask)
            parts.append(part.reshape(block.stop - block.start, -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, slots=True)
class _Alike:
    """Contexts that begin at the same place and end in the same block: they attend side by side.

    Their queries and keys are laid out from a block's beginning to a block's end. Where a context has no token, that of
    another place stands in: no token looks there, and what comes of it is dropped.
    """

    count: int
    start: int
    """Tokens of each that are there already."""
    first: int
    """The position at which the layout begins, ``start`` or before it."""
    laid: torch.Tensor | None
    """[C · span] the token of the step that is laid at each place; None: all tokens in their order."""
    places: torch.Tensor | None
    """[N] the place of each token."""
    past: torch.Tensor | None
    """[C, layers, 2K, start, D]"""
    queries: tuple[tuple[slice, int, tuple[torch.Tensor | None, torch.Tensor | None]], ...]
    """The calls of a layer: places of the queries, keys that they attend to, and their masks, full and windowed."""

    def attend(self, layer: int, qkv: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
        """[N, H + 2K, D] → [N, H·D]"""
        laid = qkv if self.laid is None else qkv.index_select(0, self.laid)
        queries, kv = laid.unflatten(0, (self.count, -1)).transpose(1, 2).tensor_split([shape.heads], dim=1)
        if self.past is not None:
            kv = torch.cat([self.past[:, layer], kv[:, :, self.start - self.first :]], dim=2)
        keys, values = kv.chunk(2, dim=1)
        outputs = []
        for places, stop, masks in self.queries:
            mask = masks[shape.windows.layers[layer]]
            outputs.append(
                F.scaled_dot_product_attention(
                    queries[:, :, places],
                    keys[:, :, :stop],
                    values[:, :, :stop],
                    attn_mask=mask,
                    is_causal=mask is None,
                    enable_gqa=True,
                )
            )
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        output = output.transpose(1, 2).reshape(-1, output.shape[1] * output.shape[3])
        return output if self.places is None else output.index_select(0, self.places)


class PrefillAttention:
    """Contexts to prefill: where their tokens are in a step, and how they attend."""

    def __init__(self, shape: AttentionShape, contexts: Sequence[Context], masks: BlockMasks | None) -> None:
        """``masks``: cut the queries into these masks' blocks (see `forward`)."""
        self._shape = shape
        device = contexts[0].tokens.device
        groups = alike(contexts, BLOCK if masks else None)
        self._order = [index for indices in groups for index in indices]
        ordered = [contexts[index] for index in self._order]
        self._lengths = [len(context.tokens) for context in ordered]
        self._groups = [self._lay([contexts[index] for index in indices], masks) for indices in groups]
        self._sizes = [sum(len(contexts[index].tokens) for index in indices) for indices in groups]
        self._stored: list[torch.Tensor] = []
        self.tokens = torch.cat([context.tokens for context in ordered])
        ends = np.cumsum(self._lengths)
        self.count = int(ends[-1])
        before = ends - self._lengths - [context.start for context in ordered]
        self.positions = torch.from_numpy(np.arange(self.count) - np.repeat(before, self._lengths)).to(device)
        self._places = np.argsort(self._order)
        self.last = torch.from_numpy(ends[self._places] - 1).to(device)

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Attention outputs [N, H·D] of one layer, for its queries, keys and values ``qkv`` [N, H + 2K, D]."""
        self._stored.append(qkv[:, self._shape.heads :])
        if len(self._groups) == 1:
            return self._groups[0].attend(layer, qkv, self._shape)
        pieces = qkv.split(self._sizes)
        return torch.cat(
            [group.attend(layer, piece, self._shape) for group, piece in zip(self._groups, pieces, strict=True)]
        )

    def kv(self) -> list[torch.Tensor]:
        """Keys and values [layers, 2K, T, D] of each context's tokens, in the order given."""
        stored = torch.stack(self._stored).transpose(1, 2).split(self._lengths, dim=2)
        return [stored[place] for place in self._places.tolist()]

    def _lay(self, contexts: Sequence[Context], masks: BlockMasks | None) -> _Alike:
        start, device = contexts[0].start, contexts[0].tokens.device
        pasts = [context.past for context in contexts if context.past is not None]
        past = torch.stack(pasts) if pasts else None
        length = len(contexts[0].tokens)
        if masks is None:
            queries = (slice(None), start + length, self._whole(start, length, device))
            return _Alike(len(contexts), start, start, None, None, past, (queries,))
        blocks = range(start // BLOCK, -(-(start + length) // BLOCK))
        first = blocks.start * BLOCK
        lengths = np.array([[len(context.tokens)] for context in contexts])
        at = np.arange(first - start, blocks.stop * BLOCK - start)  # in a context's tokens
        own = (at >= 0) & (at < lengths)
        calls = tuple(
            (
                slice(block * BLOCK - first, (block + 1) * BLOCK - first),
                (block + 1) * BLOCK,
                masks.of(block),
            )
            for block in blocks
        )
        if own.all():
            return _Alike(len(contexts), start, first, None, None, past, calls)
        places = torch.from_numpy(np.flatnonzero(own)).to(device)
        nearest = np.minimum(np.maximum(at, 0), lengths - 1) + (np.cumsum(lengths)[:, None] - lengths)
        laid = torch.from_numpy(nearest.reshape(-1)).to(device)
        return _Alike(len(contexts), start, first, laid, places, past, calls)

    def _whole(self, start: int, length: int, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The masks of contexts that attend in one call; None where SDPA's own causal one is meant."""
        windows, queries = self._shape.windows, range(start, start + length)
        kinds = (start > 0, start > 0 or (windows.size is not None and length > windows.size))
        full, windowed = (
            windows.causal(queries, queries.stop, self._shape.dtype, device, windowed=bool(index)) if masked else None
            for index, masked in enumerate(kinds)
        )
        return full, windowed
