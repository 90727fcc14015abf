"""Attention of a step over sequences of different lengths, in one call per layer: FlashAttention, if the device has it.

    contexts   queries of all contexts, one after the other ─▶ keys of all contexts, including cached ones
    rows       one query each ─▶ the row's own keys, in the cache

Nothing is padded, masked or copied: a decoding step reads exactly the keys of its rows. The operator is that of
`torch.nn.attention.varlen.varlen_attn`, whose wrapper lacks ``seqused_k``, the rows' lengths, in torch 2.11.

Shape suffixes: as in `step_attention`, and S keys of all contexts, L layers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from headway.devices import kind_of
from headway.engines.host_copies import to_device
from headway.engines.rollout.native.step_attention import AttentionShape, DecodeAttention, Decoding, PrefillContext

logger = logging.getLogger(__name__)

_flash = torch.ops.aten._flash_attention_forward.default
"""(queries [N, H, D], keys, values [S, K, D], where those of each sequence begin [C + 1] and [C + 1], the most of one,
twice, …) → outputs [N, H, D], and more. The last query of a sequence attends to its last key."""
DTYPES = (torch.bfloat16, torch.float16)
MOST_HEAD_DIM = 256
WITHOUT_VARLEN = (
    "prefills take an attention call for each length, and rows read as far as the longest: attention to sequences of "
    "different lengths is not used here"
)
"""Text of warnings: the consequence of having no such kernel."""


class VarlenPrefill:
    """Attention of contexts of any lengths to prefill, and the places of their tokens in a step."""

    def __init__(self, shape: AttentionShape, contexts: Sequence[PrefillContext]) -> None:
        self._shape = shape
        device = contexts[0].tokens.device
        starts = np.array([context.start for context in contexts])
        self._lengths = np.array([len(context.tokens) for context in contexts])
        ends, self._ends = self._lengths.cumsum(), (starts + self._lengths).cumsum()
        self.count = int(ends[-1])
        self.tokens = torch.cat([context.tokens for context in contexts])
        index = np.arange(self.count)
        positions = index - np.repeat(ends - self._lengths - starts, self._lengths)
        places = index + np.repeat(self._ends - ends, self._lengths)
        bounds = [np.array([0, *each], np.int32) for each in (ends, self._ends)]
        self.positions, self._places, self.last, *self._bounds = to_device(
            [positions, places, ends - 1, *bounds], device
        )
        self._most = int(self._lengths.max()), int((starts + self._lengths).max())
        layers, kv_heads, size = len(shape.windows.layers), shape.kv_heads, shape.head_dim
        self._kv = torch.empty(layers, int(self._ends[-1]), 2 * kv_heads, size, dtype=shape.dtype, device=device)
        """[L, S, 2K, D]"""
        for context, end, length in zip(contexts, self._ends.tolist(), self._lengths.tolist(), strict=True):
            if context.past is not None:
                self._kv[:, end - length - context.start : end - length] = context.past.transpose(1, 2)

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Attention outputs [N, H·D] of one layer, for its queries, keys and values ``qkv`` [N, H + 2K, D]."""
        shape, kv = self._shape, self._kv[layer]
        kv.index_copy_(0, self._places, qkv[:, shape.heads :])
        window = shape.windows.size if shape.windows.layers[layer] else None
        operands = qkv[:, : shape.heads], kv[:, : shape.kv_heads], kv[:, shape.kv_heads :], *self._bounds, *self._most
        causal, left = window is None, -1 if window is None else window - 1
        # The causal mask is aligned at the last key, which belongs to a context's last query.
        output: torch.Tensor = _flash(*operands, 0.0, causal, False, window_size_left=left, window_size_right=0)[0]
        return output.flatten(1)

    def kv(self) -> list[torch.Tensor]:
        """Return the keys and values [layers, 2K, P + T, D] of each context, in the order given."""
        ends = self._ends.tolist()
        return [self._kv[:, start:end].transpose(1, 2) for start, end in pairwise([0, *ends])]


class VarlenDecode(DecodeAttention):
    """Attention of rows that run one token each, over exactly their own keys; ignores a step's blocks of rows."""

    def __init__(self, shape: AttentionShape, decoding: Decoding) -> None:
        super().__init__(shape, decoding)
        bounds = self._cache.bounds[: self.count + 1]
        self._each = bounds
        """Start [A + 1] of each row's query."""
        used = decoding.lengths.int() + 1  # with the new token, which is stored before rows attend
        begins = bounds * self._cache.row_stride
        self._keys = [(begins, used)]
        """Start [A + 1] and number [A] of each row's keys: for full layers, then for windowed ones."""
        if (size := shape.windows.size) is not None:
            before = (used - size).clamp_(min=0)
            windowed = begins.clone()  # a copy: full layers read `begins`
            windowed[:-1] += before
            self._keys.append((windowed, used - before))

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """[A, H + 2K, D] → [A, H·D]"""
        self._cache.append(layer, self._addresses, qkv[:, self._shape.heads :])
        keys, values = self._cache.in_line(layer)
        begins, used = self._keys[self._shape.windows.layers[layer]]
        operands = qkv[:, : self._shape.heads], keys, values, self._each, begins, 1, self._cache.room
        output: torch.Tensor = _flash(*operands, 0.0, False, False, seqused_k=used)[0]
        return output.flatten(1)


def has_varlen(shape: AttentionShape, device: torch.device) -> bool:
    """Tell whether the device's kernels may attend to sequences of different lengths in one call.

    `best_forward` compares the result with the module's. Logs the reason if a device should have them and has none.
    """
    if not kind_of(device).varlen_attention:
        return False
    if shape.dtype in DTYPES and not shape.head_dim % 8 and shape.head_dim <= MOST_HEAD_DIM:
        return True
    logger.warning(
        "heads of %d numbers in %s are not what FlashAttention is for: %s", shape.head_dim, shape.dtype, WITHOUT_VARLEN
    )
    return False
