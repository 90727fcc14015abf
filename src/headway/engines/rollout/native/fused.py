"""A faster forward pass for the Llama family (Llama, Qwen2, Qwen3): the same arithmetic in fewer, larger operations.

At a few million parameters, a decoding step of the module spends a third of its time between operations. Here q, k, v
and gate, up are one matrix product each, keys and values are stored in one write, and residuals are added by the
product that makes them. The module's own parameters become views of the packed matrices, so that there is no second
copy of the weights, and nothing to refresh after an update.

Shape suffixes: N tokens, A decoding rows, B prompts, S padded prompt length, H query heads, K key-value heads,
D head_dim.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from headway.engines.rollout.native.cache import KvGeometry, SlotCache
from headway.engines.rollout.native.forward import ModuleForward, PolicyForward, RowBlock, by_length

logger = logging.getLogger(__name__)

FAMILY = frozenset({"llama", "qwen2", "qwen3"})
_FIXED_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary embedding whose angles depend on the position alone, not on the longest one seen."""

Attend = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, queries [N, H, D], keys and values [N, 2K, D]) → [N, H·D]."""


def best_forward(model: PreTrainedModel, max_context: int) -> PolicyForward:
    """The fused forward where it is known to equal the module, else the module itself."""
    module = ModuleForward(model)
    config = model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if config.model_type not in FAMILY or rope not in _FIXED_ROPE or config.hidden_act != "silu":
        return module
    fused = FusedForward(model, max_context)
    difference = _largest_difference(module, fused, model, max_context)
    if difference <= (1e-4 if model.dtype == torch.float32 else 5e-2):
        return fused
    logger.warning(
        "the fused forward of %s differs from the module by %.2g in log-probs; decoding with the module itself, slower",
        config.model_type,
        difference,
    )
    return module


def _largest_difference(module: PolicyForward, fused: PolicyForward, model: PreTrainedModel, max_context: int) -> float:
    """Between the log-probs of both over a short prefill and one decoded token."""
    length = min(8, max_context - 1)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(2 * length, device=model.device) * 7919 % vocabulary).view(2, length)
    lengths = torch.tensor([length, max(length // 2, 1)], device=model.device)
    contexts = [row[:count] for row, count in zip(ids, lengths.tolist(), strict=True)]
    logprobs = []
    with torch.inference_mode():
        for forward in (module, fused):
            cache = SlotCache(
                KvGeometry.of(model.config), slots=2, context=length + 1, dtype=model.dtype, device=model.device
            )
            prefilled, kv = forward.prefill(contexts, 1)
            for row in range(2):
                cache.fill(range(row, row + 1), kv[row])
            beyond = torch.arange(length + 1, device=model.device) > lengths[:, None, None, None]
            mask = torch.zeros(beyond.shape, dtype=model.dtype, device=model.device).masked_fill_(beyond, -torch.inf)
            decoded = forward.decode(ids[:, 0], lengths, cache, [RowBlock(0, 2, length + 1, mask)])
            logprobs.append(torch.log_softmax(torch.cat([prefilled, decoded]).float(), -1))
    return float((logprobs[0] - logprobs[1]).abs().max())


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class FusedForward:
    """`PolicyForward` of the Llama family. Repacks the module's parameters: its projections become views."""

    def __init__(self, model: PreTrainedModel, max_context: int) -> None:
        config, decoder = model.config, model.get_decoder()
        geometry = KvGeometry.of(config)
        self._kv_heads, self._head_dim = geometry.kv_heads, geometry.head_dim
        self._heads = int(config.num_attention_heads)
        self._eps = float(config.rms_norm_eps)
        self._embedding = model.get_input_embeddings()
        self._head = model.get_output_embeddings()
        self._final_norm = decoder.norm
        with torch.no_grad():
            self._layers = [_pack(layer) for layer in decoder.layers]
            self._cos, self._sin = self._rotation(decoder.rotary_emb, max_context, model)

    def prefill(self, contexts: Sequence[torch.Tensor], least_rows: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        # Equally long ones side by side: they attend in one call.
        order = [index for indices in by_length(contexts) for index in indices]
        lengths = [len(contexts[index]) for index in order]
        counts = [len(indices) for indices in by_length(contexts)]
        device, rows = contexts[0].device, sum(lengths)
        fillers = max(0, least_rows - rows)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        stored: list[torch.Tensor] = []

        def attend(layer: int, queries: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            stored.append(kv[:rows])
            outputs, start, first = [], 0, 0
            for count in counts:
                length = lengths[first]
                stop = start + count * length
                of_q = queries[start:stop].unflatten(0, (count, length)).transpose(1, 2)
                of_kv = kv[start:stop].unflatten(0, (count, length)).transpose(1, 2)
                out = F.scaled_dot_product_attention(
                    of_q, of_kv[:, : self._kv_heads], of_kv[:, self._kv_heads :], is_causal=True, enable_gqa=True
                )
                outputs.append(out.transpose(1, 2).reshape(stop - start, -1))
                start, first = stop, first + count
            outputs += [queries[rows:].flatten(1)] if fillers else []
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

        ids = torch.cat([contexts[index] for index in order])
        ids, positions = F.pad(ids, (0, fillers)), F.pad(positions, (0, fillers))
        hidden = self._run(ids, self._cos[positions], self._sin[positions], attend)
        ends = torch.tensor(lengths, device=device).cumsum(0)
        back = torch.tensor(order, device=device).argsort()
        last = F.pad(ends[back] - 1, (0, max(0, least_rows - len(order))))
        kv = torch.stack(stored).transpose(1, 2).split(lengths, dim=2)  # [layers, 2K, N, D], context by context
        places = back.tolist()
        return self._logits(hidden[last])[: len(order)], [kv[place] for place in places]

    def decode(
        self, tokens: torch.Tensor, lengths: torch.Tensor, cache: SlotCache, blocks: list[RowBlock]
    ) -> torch.Tensor:
        addresses = cache.addresses(lengths)
        # Query heads that share keys attend as if they were query positions: no copy of the keys for each.
        shape = (len(tokens), self._kv_heads, self._heads // self._kv_heads, self._head_dim)

        def attend(layer: int, queries: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            cache.append(layer, addresses, kv)
            queries = queries.reshape(shape)
            parts = []
            for block in blocks:
                keys, values = cache.view(layer, block.start, block.stop, block.span)
                part = F.scaled_dot_product_attention(
                    queries[block.start : block.stop], keys, values, attn_mask=block.mask
                )
                parts.append(part.reshape(block.stop - block.start, -1))
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return self._logits(self._run(tokens, self._cos[lengths], self._sin[lengths], attend))

    def _run(self, tokens: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states [N, hidden] before the final norm, of ``tokens`` [N]; ``cos``, ``sin`` [N, 1, 2, D/2]."""
        x = F.embedding(tokens, self._embedding.weight)
        rotated = self._heads + self._kv_heads
        for index, layer in enumerate(self._layers):
            qkv = F.linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)
            qkv = qkv.view(len(tokens), -1, self._head_dim)
            qk = qkv[:, :rotated]
            if layer.head_norms is not None:
                normed = F.rms_norm(qk, (self._head_dim,), None, self._eps)
                torch.mul(normed[:, : self._heads], layer.head_norms[0], out=qkv[:, : self._heads])
                torch.mul(normed[:, self._heads :], layer.head_norms[1], out=qkv[:, self._heads : rotated])
            halves = qk.unflatten(-1, (2, -1))
            # The right-hand side is complete before anything is written: ``flip`` copies.
            halves.copy_(torch.addcmul(halves * cos, halves.flip(-2), sin))
            attended = attend(index, qkv[:, : self._heads], qkv[:, self._heads :])
            x = _add_linear(x, attended, layer.out, layer.out_bias)
            gate, up = F.linear(self._norm(x, layer.mlp_norm), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            x = _add_linear(x, F.silu(gate).mul_(up), layer.down, layer.down_bias)
        return x

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(self._norm(hidden, self._final_norm.weight), self._head.weight, self._head.bias)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._eps)

    def _rotation(
        self, rotary: nn.Module, max_context: int, model: PreTrainedModel
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The module's own cosines and sines, [max_context, 1, 2, D/2]; the sine signed for the swapped halves."""
        like = torch.empty(1, dtype=model.dtype, device=model.device)
        cos, sin = rotary(like, torch.arange(max_context, device=model.device).unsqueeze(0))
        cos, sin = (table[0].view(max_context, 1, 2, self._head_dim // 2).clone() for table in (cos, sin))
        sin[:, :, 0].neg_()
        return cos, sin


def _add_linear(x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x`` + ``update`` · ``weight``ᵀ (+ ``bias``)."""
    return torch.addmm(x if bias is None else x + bias, update, weight.t())


def _pack(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = _join(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up, gate_up_bias = _join(mlp.gate_proj, mlp.up_proj)
    norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
    return _Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=qkv,
        qkv_bias=qkv_bias,
        head_norms=norms,
        out=attention.o_proj.weight,
        out_bias=attention.o_proj.bias,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=mlp.down_proj.weight,
        down_bias=mlp.down_proj.bias,
    )


def _join(*linears: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight (and bias) for several projections of the same input; theirs become views of it."""
    weight = _share([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return weight, _share(biases) if biases else None


def _share(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    joint = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, joint.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return joint
