"""Attention over packed lines, in place of a model's own, by `transformers`' registry of attention functions.

    q, k, v of a line ─▶ for each part of the layout: queries and keys gathered ─▶ attention ─▶ merged ─▶ the line

A token whose keys lie in several parts gets their results weighted by what each part's scores sum to:
out = Σ exp(lse_p − lse)·out_p with lse = log Σ exp(lse_p). With ``out`` and ``lse`` of all parts together each part's
backward pass is that of attention over its keys alone, as in ring attention (Liu et al. 2023, arXiv:2310.01889).

Shape suffixes: L tokens of a line, H heads, G heads of keys and values, D head size, B items, Q queries, K keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import embedding_bag
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headway.devices import kind_of
from headway.models.attention.packed_layout import AttentionKind, AttentionPart, PackedLayout

NAME = "headway_packed"
"""Name of this attention among those of `transformers`."""

# What is beneath `scaled_dot_product_attention`, which gives no log-sum-exp: without it parts cannot be merged.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "1 H L D"],
    key: Float[Tensor, "1 G L D"],
    value: Float[Tensor, "1 G L E"],
    attention_mask: Tensor | None,
    *,
    layout: PackedLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " H"] | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "1 L H E"], None]:
    """Attend as ``layout`` says. The arguments are those that `transformers` gives its attention functions.

    Args:
        sliding_window: a token attends only to tokens less than this many positions before it.
        softcap: scores are cap · tanh(score / cap).
        s_aux: a score of each head that takes part in the softmax and has no value (attention sinks).

    Raises:
        ValueError: there is a mask, or more than one line: a layout cannot express these.
    """
    if attention_mask is not None or len(query) != 1:
        raise ValueError("packed attention takes one line of tokens, and a layout in place of a mask")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if (ranks := layout.ranks) is not None:
        if query.shape[1] % ranks.size:
            raise ValueError(f"{ranks.size} ranks cannot divide {query.shape[1]} heads (actor.parallel.cp)")
        query, key, value = ranks.to_heads(query), ranks.to_heads(key), ranks.to_heads(value)
        s_aux = None if s_aux is None else ranks.own_heads(s_aux)
    out: Tensor
    if kind_of(query.device).flex_attention:
        from headway.models.attention.flex_attention import flex  # imports compilers, which CPUs do without

        out = flex(query, key, value, layout, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux)
    else:
        parts = layout.parts(sliding_window)
        q_LHD, k_LGD, v_LGE = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        if query.device.type == "cpu" and softcap is None and s_aux is None and query.shape[-1] == value.shape[-1]:
            out = _Flash.apply(q_LHD, k_LGD, v_LGE, parts, scale).unsqueeze(0)  # type: ignore[no-untyped-call]
        else:
            out = _by_definition(q_LHD, k_LGD, v_LGE, parts, scale, softcap, s_aux).unsqueeze(0)
    return out if ranks is None else ranks.to_tokens(out), None


# Compiled layers (model.compile) call it as it is: what it does depends on the layout.
ALL_ATTENTION_FUNCTIONS.register(NAME, torch.compiler.disable(packed_attention))


# ------------------------------------------------------------------------------------------ parts


Places = Int[Tensor, " N"] | slice


def _take(line: Float[Tensor, "L ..."], places: Places) -> Float[Tensor, "N ..."]:
    """Return the tokens at ``places``: a view if ``places`` is a slice, else a copy."""
    taken: Tensor = line[places] if isinstance(places, slice) else line.index_select(0, places)
    return taken


def _put(line: Float[Tensor, "L ..."], places: Places, values: Float[Tensor, "N ..."]) -> None:
    if isinstance(places, slice):
        line[places] = values
    else:
        line.index_copy_(0, places, values)


def _replaced(line: Float[Tensor, "L ..."], places: Places, values: Float[Tensor, "N ..."]) -> Float[Tensor, "L ..."]:
    """Return ``line`` with ``values`` at ``places``. Differentiable."""
    if isinstance(places, slice):
        return torch.cat([line[: places.start], values, line[places.stop :]])
    return line.index_copy(0, places, values)


def _gather(line: Float[Tensor, "L G D"], places: Places, items: int, heads: int) -> Tensor:
    """Take the tokens at ``places``, as [B, H, N / B, D]; heads of keys are repeated for those of queries."""
    own = line.shape[1]
    gathered: Tensor = _take(line, places).unflatten(0, (items, -1)).transpose(1, 2)
    return gathered if own == heads else gathered.repeat_interleave(heads // own, dim=1)


def _operands(part: AttentionPart, q_LHD: Tensor, k_LGD: Tensor, v_LGE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a part, [B, H, N, …] each."""
    heads = q_LHD.shape[1]
    keys, values = (_gather(line, part.keys, part.items, heads) for line in (k_LGD, v_LGE))
    return _gather(q_LHD, part.queries, part.items, heads), keys, values


def _as_line(line: Float[Tensor, "L G D"], grad: Float[Tensor, "B H N D"]) -> Float[Tensor, "BN G D"]:
    """Return the gradient by tokens of ``line``, given the gradient of the tensor that `_gather` took from it."""
    heads, own = grad.shape[1], line.shape[1]
    if own != heads:
        grad = grad.unflatten(1, (own, heads // own)).sum(2)
    return grad.transpose(1, 2).reshape(-1, own, line.shape[2]).to(line.dtype)


def _add(line: Float[Tensor, "L G D"], places: Places, values: Float[Tensor, "N G D"]) -> None:
    """Add ``values`` at ``places``, each of which is there once."""
    if isinstance(places, slice):
        line[places] += values
    else:
        line.index_copy_(0, places, line.index_select(0, places).add_(values))


def _summed(part: AttentionPart, values: Float[Tensor, "N G D"]) -> tuple[Places, Float[Tensor, "U G D"]]:
    """Return the places of a part's keys, and the sum of ``values`` at each place."""
    if part.sums is None:
        return part.keys, values
    # Much quicker than `index_add`, and the same each time.
    sums = embedding_bag(part.sums.order, values.flatten(1), part.sums.offsets, mode="sum")
    return part.sums.places, sums.unflatten(1, values.shape[1:])


def _kept(part: AttentionPart, values: Float[Tensor, "B H Q ..."]) -> Float[Tensor, "M H ..."]:
    """Return the values of the queries that are not dropped, in the order of ``part.places``."""
    flat = values.transpose(1, 2).flatten(0, 1)
    return flat if part.kept is None else flat.index_select(0, part.kept)


def _merged(
    out_LHE: Tensor, lse_LH: Tensor, part: AttentionPart, own_MHE: Tensor, own_MH: Tensor
) -> tuple[Float[Tensor, "M H E"], Float[Tensor, "M H"]]:
    """Merge the results of a part's queries so far with the results of the part itself."""
    so_far_MH = _take(lse_LH, part.places)
    both_MH = torch.logaddexp(so_far_MH, own_MH)
    so_far_MHE = _take(out_LHE, part.places).to(both_MH.dtype)
    so_far_MHE = so_far_MHE * (so_far_MH - both_MH).exp().unsqueeze(-1)
    return so_far_MHE + own_MHE.to(both_MH.dtype) * (own_MH - both_MH).exp().unsqueeze(-1), both_MH


class _Flash(torch.autograd.Function):
    """Attention by torch's flash kernels for CPUs, part by part."""

    @staticmethod
    def forward(
        ctx: Any, q_LHD: Tensor, k_LGD: Tensor, v_LGD: Tensor, parts: Sequence[AttentionPart], scale: float
    ) -> Float[Tensor, "L H D"]:
        tokens, heads, _ = q_LHD.shape
        out_LHD = torch.empty_like(q_LHD, memory_format=torch.contiguous_format)
        # In float32 at least: parts are merged by differences of these, for which bfloat16 is too coarse.
        lse_LH = torch.empty(tokens, heads, dtype=torch.promote_types(q_LHD.dtype, torch.float32))
        for part in parts:
            mask, causal = _as_dtype(part.mask, q_LHD.dtype), part.kind is AttentionKind.CAUSAL
            out, lse = _flash(*_operands(part, q_LHD, k_LGD, v_LGD), 0.0, causal, attn_mask=mask, scale=scale)
            own_MHD, own_MH = _kept(part, out), _kept(part, lse.to(lse_LH.dtype))
            if part.kind is AttentionKind.SUBTREE:
                own_MHD, own_MH = _merged(out_LHD, lse_LH, part, own_MHD, own_MH)
            _put(out_LHD, part.places, own_MHD.to(out_LHD.dtype))
            _put(lse_LH, part.places, own_MH)
        ctx.save_for_backward(q_LHD, k_LGD, v_LGD, out_LHD, lse_LH)
        ctx.parts, ctx.scale = parts, scale
        return out_LHD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_LHD, k_LGD, v_LGD, out_LHD, lse_LH = ctx.saved_tensors
        grad_q = torch.empty(q_LHD.shape, dtype=lse_LH.dtype)  # parts that cover each query once come first
        grad_k, grad_v = (torch.zeros(t.shape, dtype=lse_LH.dtype) for t in (k_LGD, v_LGD))
        for part in ctx.parts:
            grad_NHD = _take(grads[0], part.queries)
            if part.dropped is not None:
                # These queries count in another item: their gradient would be added twice.
                grad_NHD = grad_NHD.index_fill(0, part.dropped, 0.0)
            grad_BHQD = grad_NHD.unflatten(0, (part.items, -1)).transpose(1, 2)
            lse_BHQ = _take(lse_LH, part.queries).unflatten(0, (part.items, -1)).transpose(1, 2)
            out_BHQD = _gather(out_LHD, part.queries, part.items, q_LHD.shape[1])
            operands = grad_BHQD, *_operands(part, q_LHD, k_LGD, v_LGD), out_BHQD, lse_BHQ
            mask, causal = _as_dtype(part.mask, q_LHD.dtype), part.kind is AttentionKind.CAUSAL
            of_q, of_k, of_v = _flash_backward(*operands, 0.0, causal, attn_mask=mask, scale=ctx.scale)
            to_queries = _add if part.kind is AttentionKind.SUBTREE else _put
            to_queries(grad_q, part.places, _kept(part, of_q).to(grad_q.dtype))
            _add(grad_k, *_summed(part, _as_line(grad_k, of_k)))
            _add(grad_v, *_summed(part, _as_line(grad_v, of_v)))
        return grad_q.to(q_LHD.dtype), grad_k.to(q_LHD.dtype), grad_v.to(q_LHD.dtype), None, None


def _by_definition(
    q_LHD: Tensor,
    k_LGD: Tensor,
    v_LGE: Tensor,
    parts: Sequence[AttentionPart],
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Float[Tensor, "L H E"]:
    """Attend with all scores of a part at once, for cases without a kernel: soft caps, sinks, values of another size.

    In float32, or float64 for float64.
    """
    tokens, heads, _ = q_LHD.shape
    dtype = torch.promote_types(q_LHD.dtype, torch.float32)
    out_LHE = q_LHD.new_zeros(tokens, heads, v_LGE.shape[2], dtype=dtype)
    lse_LH = q_LHD.new_full((tokens, heads), -math.inf, dtype=dtype)
    for part in parts:
        queries, keys, values = _operands(part, q_LHD, k_LGD, v_LGE)
        scores = (queries @ keys.transpose(-1, -2)).to(dtype) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)  # before the mask, whose -inf it would make -softcap
        if part.mask is not None:
            scores = scores + part.mask
        elif part.kind is AttentionKind.CAUSAL:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        lse = scores.logsumexp(-1)
        own_MHE, own_MH = _kept(part, (scores - lse.unsqueeze(-1)).exp() @ values.to(dtype)), _kept(part, lse)
        if part.kind is AttentionKind.SUBTREE:
            own_MHE, own_MH = _merged(out_LHE, lse_LH, part, own_MHE, own_MH)
        # Not in place: autograd needs the values that later parts replace.
        out_LHE = _replaced(out_LHE, part.places, own_MHE)
        lse_LH = _replaced(lse_LH, part.places, own_MH)
    if sinks_H is not None:
        # A sink adds exp(s) to the softmax's denominator alone: that scales the result by σ(lse − s).
        out_LHE = out_LHE * torch.sigmoid(lse_LH - sinks_H.to(dtype)).unsqueeze(-1)
    return out_LHE.to(q_LHD.dtype)


def _as_dtype(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return mask if mask is None or mask.dtype == dtype else mask.to(dtype)
