"""A faster forward pass for Llama, Mistral, Qwen2 and Qwen3: the same arithmetic in fewer, larger operations.

At a few million parameters, a decoding step of the module spends a third of its time between operations. Here q, k, v
and gate, up are one matrix product each, keys and values are stored in one write, and products add the residuals. The
module's own parameters become views of the joined matrices. `refresh` updates everything derived from them: on a CPU
the larger matrices have a second copy, see `Projection`.

Shape suffixes: N tokens, A decoding rows, C contexts, H query heads, K key-value heads,
D head_dim.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from headway.config.sizing.process_memory import PACKED_FROM
from headway.engines.rollout.native.kv_cache import SlotCache
from headway.engines.rollout.native.policy_forward import ModuleForward, PolicyForward
from headway.engines.rollout.native.step_attention import (
    AttentionShape,
    DecodeAttention,
    Decoding,
    PrefillAttention,
    PrefillBlocks,
    PrefillContext,
    RowBlock,
    places_do_not_matter,
)
from headway.engines.rollout.native.supported_models import KvGeometry, Windows, check_kind, not_served
from headway.engines.rollout.native.varlen_attention import WITHOUT_VARLEN, VarlenDecode, VarlenPrefill, has_varlen
from headway.errors import ModelError, said_by

_DTYPES = (torch.float32, torch.bfloat16)


def can_pack(weight: torch.Tensor) -> bool:
    """Tell whether kernels for packed weights exist here and would be faster for ``weight``."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in _DTYPES
        and weight.numel() >= PACKED_FROM
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and (weight.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class Projection:
    """Linear map x ↦ x · Wᵀ (+ b), with W [out, in] and b [out] read again at each `refresh`.

    A decoding step multiplies a few rows by every weight of the model. The usual product first reorders the weights for
    its kernel, which costs as much as the product itself. oneDNN accepts reordered weights: this is 1.2 to 2.8 times as
    fast from half a million weights on, and a row's result depends less on the number of other rows. The reordered copy
    takes the weights' memory once more, and is rebuilt after each update.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._transposed, self._bias = weight, weight.t(), bias
        self._packs = can_pack(weight)
        self._packed: torch.Tensor | None = None
        self.refresh()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] → [N, out]"""
        if self._packed is None:
            return F.linear(x, self._weight, self._bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._packed, self._bias, "none", [], "")
        return out

    def added_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual`` [N, out] + the projection of ``x`` [N, in], in one product."""
        if self._packed is None:
            bias = self._bias
            return torch.addmm(residual if bias is None else residual + bias, x, self._transposed)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self._bias, "add")
        return out

    def refresh(self) -> None:
        """Note that the weights were written."""
        if self._packs:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight.detach())

    def release(self) -> None:
        """Free the copy until the next `refresh`."""
        self._packed = None


class RmsNorm:
    """(x [.., D], weight, broadcast against x) ↦ x / √(mean(x²) + ε) · weight, over the last dimension.

    RMSNorm (Zhang & Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019, eq. 4) in few operations. On GPUs
    PyTorch has one kernel for it. On CPUs its ``rms_norm`` consists of nine operations, and at a few rows the call
    overhead dominates.
    """

    def __init__(self, eps: float, device: torch.device, dtype: torch.dtype) -> None:
        self._eps = eps
        # Left to PyTorch: lower precision needs another dtype than x's for the sum of squares.
        self._by_hand = device.type == "cpu" and dtype == torch.float32
        self._eps_tensor = torch.tensor([eps], dtype=dtype, device=device)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1]
        if not self._by_hand:
            return F.rms_norm(x, (size,), None, self._eps) * weight
        squares = (x * x).sum(-1, keepdim=True)
        return (x * torch.add(self._eps_tensor, squares, alpha=1 / size).rsqrt_()).mul_(weight)


logger = logging.getLogger(__name__)

FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_FIXED_ROPE = frozenset({"default", "dynamic", "linear", "llama3", "longrope", "yarn"})
"""Kinds of rotary embedding whose angles depend only on the position, within the contexts that `prepare` allows."""

_TOLERANCE = {torch.float32: 1e-4}
"""Allowed difference of logits, relative to the largest. With the 8 bits of bfloat16 the module itself is up to 2⁻⁶
off the float32 result of its weights, and another order of the same operations differs from it by as much."""

Attend = Callable[[int, torch.Tensor], torch.Tensor]
"""Function of (layer, queries, keys and values [N, H + 2K, D]) that returns [N, H·D]."""


def best_forward(model: PreTrainedModel, max_context: int) -> PolicyForward:
    """Return the fused forward pass if a trial shows that it equals the module's, else the module's own."""
    config = model.config
    check_kind(config, max_context)
    windows = Windows.of(config, max_context)
    module = ModuleForward(model, max_context, windows)
    # Shorter windows in the trial: its contexts would not fill the model's own windows.
    # With the model's own windows, the trial passed a kernel that ignores windows.
    tried = windows if windows.size is None else replace(windows, size=min(windows.size, 3))
    try:
        expected = _brief_logits(ModuleForward(model, max_context, tried), model, tried, max_context)
    except torch.OutOfMemoryError:  # says nothing about the model's code
        raise
    except Exception as cause:  # the model's own code, of any family
        said = str(cause) if isinstance(cause, ModelError) else said_by(cause)
        raise not_served(config, f"its code does not take the engine's cache or masks ({said})") from cause
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if config.model_type not in FAMILY or rope not in _FIXED_ROPE or config.hidden_act != "silu":
        return module
    fused = FusedForward(model, max_context, tried)
    for varlen in (True, False) if fused.varlen else (False,):
        fused.varlen = varlen
        try:
            difference = float((expected - _brief_logits(fused, model, tried, max_context)).abs().max())
            largest = float(expected.abs().max())
            if difference <= _TOLERANCE.get(model.dtype, 2**-5) * max(1.0, largest):
                fused.attend_within(windows, max_context)  # with its own windows: the trial's were shorter
                return fused
            why = f"it differs from the module by {difference:.2g} in logits of up to {largest:.3g}"
        except RuntimeError as cause:
            if not varlen or isinstance(cause, torch.OutOfMemoryError):
                raise
            why = said_by(cause)  # a device without such a kernel
        instead = WITHOUT_VARLEN if varlen else "decoding with the module itself, slower"
        logger.warning("the fused forward of %s is not used as it is: %s; %s", config.model_type, why, instead)
    return module


def _brief_logits(forward: PolicyForward, model: PreTrainedModel, windows: Windows, max_context: int) -> torch.Tensor:
    """Return the logits [4, V] of a short prefill of two contexts, in two parts, and of a token decoded after each."""
    length = min(8, max_context - 1)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(2 * length, device=model.device) * 7919 % vocabulary).view(2, length)
    lengths = torch.tensor([length, max(length // 2, 1)], device=model.device)
    rows = [row[:count] for row, count in zip(ids, lengths.tolist(), strict=True)]
    first = min(2, len(rows[1]) - 1)
    with torch.inference_mode():
        cache = SlotCache(
            KvGeometry.of(model.config), slots=2, context=length + 1, dtype=model.dtype, device=model.device
        )
        pasts = forward.step(None, [PrefillContext(row[:first]) for row in rows], 1)[1] if first else [None, None]
        rest = [PrefillContext(row[first:], past) for row, past in zip(rows, pasts, strict=True)]
        prefilled, kv = forward.step(None, rest, 1)
        for row, of in enumerate(kv):
            cache.fill(range(row, row + 1), of)
        block = RowBlock.of(range(2), length + 1, lengths, windows.size, model.dtype)
        decoded, _ = forward.step(Decoding(ids[:, 0], lengths, cache, [block]), (), 1)
        return torch.cat([prefilled, decoded]).float()


class _HeadNorms:
    """Norms of queries and keys, in one product."""

    def __init__(self, query: torch.Tensor, key: torch.Tensor, heads: int, kv_heads: int) -> None:
        self.weights = query.detach().expand(heads, -1), key.detach().expand(kv_heads, -1)
        self.joint = torch.cat(self.weights)
        """Copy [H + K, D] of the weights at the last `refresh`."""

    def refresh(self) -> None:
        torch.cat(self.weights, out=self.joint)  # not another tensor: a recorded step reads the old one's memory


@dataclass(frozen=True, slots=True)
class _FusedLayer:
    input_norm: torch.Tensor
    qkv: Projection
    head_norms: _HeadNorms | None
    out: Projection
    mlp_norm: torch.Tensor
    gate_up: Projection
    down: Projection


def _with_fillers(parts: Sequence[torch.Tensor], fillers: int) -> torch.Tensor:
    """Concatenate ``parts``, followed by ``fillers`` zeros."""
    joint = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    return F.pad(joint, (0, fillers)) if fillers else joint


class FusedForward:
    """`PolicyForward` of the Llama family. Repacks the module's parameters: they become views of joint matrices."""

    recordable = True

    def __init__(self, model: PreTrainedModel, max_context: int, windows: Windows) -> None:
        config, decoder = model.config, model.get_decoder()
        geometry = KvGeometry.of(config)
        self.shape = AttentionShape(
            int(config.num_attention_heads), geometry.kv_heads, geometry.head_dim, windows, model.dtype
        )
        self._blocks = PrefillBlocks(windows, max_context, model.dtype, model.device)
        self.in_blocks = model.device.type == "cpu"
        self.shares = windows.size is None and self.in_blocks and places_do_not_matter(self.shape)
        self.varlen = has_varlen(self.shape, model.device)
        self._norm = RmsNorm(float(config.rms_norm_eps), model.device, model.dtype)
        self._embedding = model.get_input_embeddings()
        self._final_norm = decoder.norm
        with torch.no_grad():
            self._layers = [_pack(layer, self.shape.heads, self.shape.kv_heads) for layer in decoder.layers]
            self._head = _joint(model.get_output_embeddings())
            self._projections = [self._head]
            for layer in self._layers:
                self._projections += [layer.qkv, layer.out, layer.gate_up, layer.down]
            self._cos, self._sin = self._rotation(decoder.rotary_emb, max_context, model)

    def attend_within(self, windows: Windows, max_context: int) -> None:
        """Have layers attend within ``windows`` from now on; the same layers as before have to be windowed."""
        self.shape = replace(self.shape, windows=windows)
        self._blocks = PrefillBlocks(windows, max_context, self.shape.dtype, self._cos.device)

    def step(
        self, decoding: Decoding | None, contexts: Sequence[PrefillContext], least_rows: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        parts: list[DecodeAttention | PrefillAttention | VarlenPrefill] = []
        if decoding is not None:
            parts.append((VarlenDecode if self.varlen else DecodeAttention)(self.shape, decoding))
        if contexts:
            shape, blocks = self.shape, self._blocks
            prefill = VarlenPrefill(shape, contexts) if self.varlen else PrefillAttention(shape, contexts, blocks)
            parts.append(prefill)
        counts = [part.count for part in parts]
        fillers = max(0, least_rows - sum(counts))

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            if len(parts) == 1 and not fillers:
                return parts[0].attend(layer, qkv)
            pieces = qkv.split([*counts, fillers])
            outputs = [part.attend(layer, piece) for part, piece in zip(parts, pieces, strict=False)]
            outputs += [pieces[-1][:, : self.shape.heads].flatten(1)] if fillers else []
            return torch.cat(outputs)

        tokens = _with_fillers([part.tokens for part in parts], fillers)
        positions = _with_fillers([part.positions for part in parts], fillers)
        hidden = self._run(tokens, self._cos[positions], self._sin[positions], attend)
        starts = accumulate(counts, initial=0)
        last = _with_fillers([start + part.last for start, part in zip(starts, parts, strict=False)], 0)
        wanted = len(last)
        if contexts:  # else every row is wanted
            hidden = hidden[_with_fillers([last], max(0, least_rows - wanted))]
        logits = self._head(self._norm(hidden, self._final_norm.weight))[:wanted]
        return logits, prefill.kv() if contexts else []

    def refresh(self) -> None:
        for projection in self._projections:
            projection.refresh()
        for layer in self._layers:
            if layer.head_norms is not None:
                layer.head_norms.refresh()

    def release(self) -> None:
        for projection in self._projections:
            projection.release()

    def _run(self, tokens: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return the hidden states [N, hidden] of ``tokens`` [N] before the final norm; ``cos``, ``sin`` [N, 1, D]."""
        x = F.embedding(tokens, self._embedding.weight)
        rotated, half = self.shape.heads + self.shape.kv_heads, self.shape.head_dim // 2
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._norm(x, layer.input_norm)).view(len(tokens), -1, self.shape.head_dim)
            to_rotate = qkv[:, :rotated]
            qk = to_rotate if layer.head_norms is None else self._norm(to_rotate, layer.head_norms.joint)
            # The right-hand side's operands are copies, so that the product may overwrite their source.
            torch.addcmul(qk * cos, qk.roll(half, -1), sin, out=to_rotate)
            x = layer.out.added_to(x, attend(index, qkv))
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, -1)
            x = layer.down.added_to(x, F.silu(gate).mul_(up))
        return x

    def _rotation(
        self, rotary: nn.Module, max_context: int, model: PreTrainedModel
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the module's cosines and sines, [max_context, 1, D]; sines have the sign for the swapped halves."""
        like = torch.empty(1, dtype=model.dtype, device=model.device)
        cos, sin = rotary(like, torch.arange(max_context, device=model.device).unsqueeze(0))
        cos, sin = (table[0].unsqueeze(1).clone() for table in (cos, sin))  # copies: the sine is changed in place
        sin[:, :, : self.shape.head_dim // 2].neg_()
        return cos, sin


def _pack(layer: Any, heads: int, kv_heads: int) -> _FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = None
    if hasattr(attention, "q_norm"):
        norms = _HeadNorms(attention.q_norm.weight, attention.k_norm.weight, heads, kv_heads)
    return _FusedLayer(
        input_norm=layer.input_layernorm.weight,
        qkv=_joint(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=norms,
        out=_joint(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=_joint(mlp.gate_proj, mlp.up_proj),
        down=_joint(mlp.down_proj),
    )


def _joint(*linears: nn.Linear) -> Projection:
    """Join linear layers with the same input into one projection; their parameters become views of its weights."""
    weight = _share([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return Projection(weight, _share(biases) if biases else None)


def _share(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(parameters) == 1:
        return parameters[0].detach()
    joint = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, joint.split([len(p) for p in parameters]), strict=True):
        # A view, so that an update of the parameter is in the joint matrix. `refresh` has to renew all copies (packed
        # weights, joint norms), or the engine goes on with the old version; the probe of an update would notice that.
        parameter.data = part
    return joint
