"""Attention over packed lines on GPUs, by torch's FlexAttention: one kernel, with the layout's mask.

Token q attends to token k if k ≤ q < (end of k's subtree) and, in a layer with a window, if their positions are close
enough. Blocks without such a pair cost nothing.

Shape suffixes: L tokens of a line, H heads, G heads of keys and values, D head size, E that of values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from headway.models.attention.packed_layout import PackedLayout

VARIANTS = 64
"""Number of variants of a kernel that may be compiled in a process."""


def flex(
    query: Float[Tensor, "1 H L D"],
    key: Float[Tensor, "1 G L D"],
    value: Float[Tensor, "1 G L E"],
    layout: PackedLayout,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Float[Tensor, " H"] | None,
    compiled: bool = True,
) -> Float[Tensor, "1 L H E"]:
    """Attend as ``layout`` says. For the arguments see `headway.models.attention.packed_attention`.

    ``compiled=False``: use torch's reference implementation, on any device. It is for tests: it holds all scores at
    once.
    """
    mask = block_mask(layout, window, compiled=compiled)
    # TRITON: left to itself torch takes its kernel for decoding where a line is short (under 128 tokens). That one has
    # no configuration for float32, and is one more variant to compile.
    out, aux = _kernel(flex_attention, compiled)(
        query,
        key,
        value,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
        kernel_options={"BACKEND": "TRITON"} if compiled else None,
    )
    if sinks is not None:
        share = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[:, None])
        out = (out * share.unsqueeze(-1)).to(query.dtype)
    result: Tensor = out.transpose(1, 2)
    return result.contiguous()


def block_mask(layout: PackedLayout, window: int | None, *, compiled: bool = True) -> BlockMask:
    """Make the mask of a layout under a ``window``, once for all layers that have it."""
    if window not in layout.masks:
        ends_L, positions_L = layout.ends_L, layout.positions_L
        # The window is in a tensor: a number would be compiled in, and torch gives up on a function of which it has
        # compiled a few variants (`recompile_limit`), those with and without a gradient among them, and computes all
        # scores at once from then on.
        oldest_L = torch.full_like(positions_L, -1) if window is None else positions_L - window

        def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q < ends_L[k]) & (positions_L[k] > oldest_L[q])

        tokens = len(positions_L)
        layout.masks[window] = _kernel(create_block_mask, compiled)(
            sees, B=None, H=None, Q_LEN=tokens, KV_LEN=tokens, device=layout.device
        )
    mask: BlockMask = layout.masks[window]
    return mask


@cache
def _capped(cap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


@cache
def _kernel(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    if not compiled:
        return function
    # Each kind of head, with and without a gradient or a soft cap, is a variant; beyond its limit torch computes all
    # scores at once, and says so in one warning.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    return torch.compile(function)
