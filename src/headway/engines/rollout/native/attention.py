"""Attention of a step's tokens in the fused forward: decoding rows to the cache, contexts to themselves.

Shape suffixes: A decoding rows, B contexts, N tokens, H query heads, K key-value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headway.engines.rollout.native.forward import Decoding, by_length
from headway.engines.rollout.native.windows import Windows


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


class PrefillAttention:
    """Whole contexts, equally long ones side by side: they attend in one call."""

    def __init__(self, shape: AttentionShape, contexts: Sequence[torch.Tensor]) -> None:
        self._shape = shape
        self._device = contexts[0].device
        groups = by_length(contexts)
        self._order = [index for indices in groups for index in indices]
        self._lengths = [len(contexts[index]) for index in self._order]
        self._groups = [(len(indices), len(contexts[indices[0]])) for indices in groups]
        self._stored: list[torch.Tensor] = []
        self._masks: dict[int, torch.Tensor] = {}
        self.tokens = torch.cat([contexts[index] for index in self._order])
        self.positions = torch.cat([torch.arange(length, device=self._device) for length in self._lengths])
        self.count = len(self.tokens)
        ends = torch.tensor(self._lengths, device=self._device).cumsum(0)
        self._places = torch.tensor(self._order, device=self._device).argsort()
        self.last = ends[self._places] - 1

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Attention outputs [N, H·D] of one layer, for its queries, keys and values ``qkv`` [N, H + 2K, D]."""
        shape = self._shape
        self._stored.append(qkv[:, shape.heads :])
        outputs, start = [], 0
        for count, length in self._groups:
            stop = start + count * length
            heads = qkv[start:stop].unflatten(0, (count, length)).transpose(1, 2)
            queries, keys, values = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
            mask = self._mask(layer, length)
            out = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
            outputs.append(out.transpose(1, 2).reshape(stop - start, -1))
            start = stop
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def kv(self) -> list[torch.Tensor]:
        """Keys and values [layers, 2K, T, D] of each context, in the order given."""
        stored = torch.stack(self._stored).transpose(1, 2).split(self._lengths, dim=2)
        return [stored[place] for place in self._places.tolist()]

    def _mask(self, layer: int, length: int) -> torch.Tensor | None:
        """The mask of a window; None where all that is before a token is in its window."""
        windows = self._shape.windows
        if windows.size is None or not windows.layers[layer] or length <= windows.size:
            return None
        if length not in self._masks:
            self._masks[length] = windows.causal(length, self._shape.dtype, self._device, windowed=True)
        return self._masks[length]
