"""Log-probs and entropy of given tokens, from hidden states, without ever holding [tokens × vocabulary].

A chunk's logits live only while that chunk is computed; the backward pass computes them again. Beside inputs and
outputs the forward pass holds about three [chunk_tokens × vocabulary] float32 matrices at once, the backward pass about
three, and the gradient of the head's weight once in float32.

Shape suffixes: M tokens, C tokens of a chunk, H hidden size, V vocabulary.

Also here: a few fixed sequences whose log-probs tell whether two holders of a policy serve the same weights.

Checksums prove that the right bytes arrived; the probe proves that what computes uses them. It is cheap enough for
every update, and its sequences are spread over the vocabulary so that embedding and head are sampled broadly.

    ids [4, 6]:   │ p p p p │ r r │      log-probs of the r, sequence by sequence: [8]
                    prefill   first from the prefill's logits, the other after decoding it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from headway.config.sizing.process_memory import chunk_tokens
from headway.data.packing import CollatedRow
from headway.devices import kind_of
from headway.models.cpu_linear import linear
from headway.models.logits import PLAIN, LogitRule


def default_chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Number of tokens in a chunk whose [chunk × vocabulary] float32 logits suit the device.

    It depends on the device's whole memory and not on what is free, so that equal devices compute equal chunks.
    """
    return chunk_tokens(vocabulary, kind_of(device).total_memory(device))


def chunked_logprobs(
    hidden: Float[Tensor, "*tokens H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, " V"] | None,
    targets: Int[Tensor, "*tokens"],
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    rule: LogitRule = PLAIN,
    compiled: bool = False,
) -> tuple[Float[Tensor, "*tokens"], Float[Tensor, "*tokens"]]:
    """Log-prob (nats) of ``targets`` under softmax(logits / temperature), and its entropy.

    The logits are hidden · weightᵀ + bias, under ``rule``. The product is computed in the inputs' dtype; ``rule``,
    softmax and sums in float32 (float64 for float64 inputs), which is the dtype of the results. Both results have a
    gradient; that of the entropy costs nothing unless it is used.

    Args:
        hidden: what the head reads at the position that predicts each target.
        temperature: positive; logits are divided by it.
        chunk_tokens: tokens computed at once; the default suits the device. The results do not depend on it.
        rule: the model's own scale and soft cap (`headway.models.logits.logit_rule`).
        compiled: compile what is computed of a chunk; results differ in the last bits.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; log-probs need a positive one")
    chunk = chunk_tokens or default_chunk_tokens(weight.shape[0], weight.device)
    logprobs_M, entropy_M = _ChunkedLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, targets.reshape(-1), temperature, rule, chunk, compiled
    )
    if targets.ndim == 1:  # no view of an output: FSDP2 hooks onto what a module returns, and warns of views
        return logprobs_M, entropy_M
    return logprobs_M.view(targets.shape), entropy_M.view(targets.shape)


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def scaled_logits(
    hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, rule: LogitRule, temperature: float
) -> Float[Tensor, "C V"]:
    """The model's logits, divided by the temperature. Only for functions that build no graph: it works in place."""
    output_CV = linear(hidden_CH, weight_VH, bias_V).to(accumulation_dtype(hidden_CH))
    if rule.cap is None:
        factor = rule.scale / temperature
        return output_CV if factor == 1.0 else output_CV.mul_(factor)
    return output_CV.mul_(rule.scale / rule.cap).tanh_().mul_(rule.cap / temperature)


def slope(logits_CV: Tensor, rule: LogitRule, temperature: float) -> Float[Tensor, "C V"] | float:
    """Derivative of `scaled_logits` with respect to what the output layer gives: scale · (1 − tanh²) / temperature."""
    factor = rule.scale / temperature
    if rule.cap is None:
        return factor
    return (logits_CV * (temperature / rule.cap)).square_().neg_().add_(1.0).mul_(factor)


class _ChunkedLogProbs(torch.autograd.Function):
    """Log-prob of the target and entropy, whose backward pass computes each chunk's logits again.

    With p = softmax(z) and entropy S = −Σ p·log p:  ∂log p_t/∂z = 1_t − p,  ∂S/∂z = −p·(log p + S).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_M: Tensor,
        temperature: float,
        rule: LogitRule,
        chunk: int,
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # an entropy that is only reported then costs no backward pass
        dtype = accumulation_dtype(hidden_MH)
        logprobs_M = torch.empty(len(targets_M), dtype=dtype, device=hidden_MH.device)
        entropy_M = torch.empty_like(logprobs_M)
        compute = _of_chunks(_logprobs, compiled)
        for start in range(0, len(targets_M), chunk):
            part = slice(start, start + chunk)
            logprobs_M[part], entropy_M[part] = compute(
                weight_VH, bias_V, rule, temperature, hidden_MH[part], targets_M[part]
            )
        ctx.save_for_backward(hidden_MH, weight_VH, bias_V, targets_M, entropy_M)
        ctx.temperature, ctx.rule, ctx.chunk = temperature, rule, chunk
        ctx.compiled = compiled
        return logprobs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        targets_M = ctx.saved_tensors[3]
        of_head = head_gradients(ctx, grads, _normalised, lambda part: (targets_M[part],), ctx.compiled)
        return *of_head, None, None, None, None, None


def _logprobs(
    weight_VH: Tensor, bias_V: Tensor | None, rule: LogitRule, temperature: float, hidden_CH: Tensor, targets_C: Tensor
) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"]]:
    """Log-probs of the targets of one chunk, and entropies."""
    logp_CV = scaled_logits(hidden_CH, weight_VH, bias_V, rule, temperature).log_softmax(dim=-1)
    # −inf logits (a masked vocabulary entry) have p = 0 and contribute nothing: 0·log 0 is 0
    return logp_CV.gather(1, targets_C[:, None]).squeeze(1), torch.special.entr(logp_CV.exp()).sum(dim=-1)


Normalised = tuple[Tensor, Tensor, Tensor | None]
"""Log-probs of a chunk [C, V], the place of each target among the V, and which targets are there; None for all."""


def _normalised(logits_CV: Tensor, targets_C: Tensor) -> Normalised:
    return logits_CV.log_softmax(dim=-1), targets_C, None


def _of_chunks(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    """Return ``function`` of a head and one chunk's tensors: as it is, or compiled once for chunks of all lengths."""
    if not compiled:
        return function

    def run(weight_VH: Tensor, bias_V: Tensor | None, *given: Any) -> Any:
        # Detached: whether a gradient is wanted is nothing to these functions, and would be another variant.
        given = tuple(one.detach() if isinstance(one, Tensor) else one for one in given)
        tensors = [one for one in given if isinstance(one, Tensor)]
        if len(tensors[0]) == 1:  # for torch another variant
            return function(weight_VH, bias_V, *given)
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, 0)
        return _compiled(function)(weight_VH.detach(), None if bias_V is None else bias_V.detach(), *given)

    return run


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function)
    return compiled


def head_gradients(
    ctx: Any,
    grads: tuple[Tensor | None, ...],
    normalised: Callable[..., Normalised],
    given: Callable[[slice], tuple[Any, ...]],
    compiled: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden states, weight and bias of an output layer, of which ``ctx`` has saved what it read.

    The logits of each chunk are computed again. ``normalised`` makes log-probs of them, from what is ``given`` for the
    chunk, and may work in place.
    """
    grad_logprobs_M, grad_entropy_M = grads
    hidden_MH, weight_VH, bias_V, targets_M, entropy_M, *_ = ctx.saved_tensors
    dtype = entropy_M.dtype
    grad_hidden_MH = torch.zeros_like(hidden_MH) if ctx.needs_input_grad[0] else None
    grad_weight_VH = torch.zeros_like(weight_VH, dtype=dtype) if ctx.needs_input_grad[1] else None
    grad_bias_V = torch.zeros_like(bias_V, dtype=dtype) if ctx.needs_input_grad[2] else None
    compute = _of_chunks(_chunk_gradient, compiled)
    for start in range(0, len(targets_M) if len(weight_VH) else 0, ctx.chunk):
        part = slice(start, start + ctx.chunk)
        grad_CV, of_bias_V = compute(
            weight_VH,
            bias_V,
            ctx.rule,
            ctx.temperature,
            hidden_MH[part],
            None if grad_logprobs_M is None else grad_logprobs_M[part],
            None if grad_entropy_M is None else grad_entropy_M[part],
            entropy_M[part],
            normalised,
            grad_bias_V is not None,
            *given(part),
        )
        if grad_bias_V is not None:
            grad_bias_V += of_bias_V
        if grad_hidden_MH is not None:
            grad_hidden_MH[part] = linear(grad_CV, weight_VH.t())
        if grad_weight_VH is not None:
            grad_weight_VH += linear(grad_CV.t(), hidden_MH[part].t())
    return (
        grad_hidden_MH,
        None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype),
        None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype),
    )


def _chunk_gradient(
    weight_VH: Tensor,
    bias_V: Tensor | None,
    rule: LogitRule,
    temperature: float,
    hidden_CH: Tensor,
    grad_logp_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    entropy_C: Tensor,
    normalised: Callable[..., Normalised],
    with_bias: bool,
    *given: Any,
) -> tuple[Float[Tensor, "C V"], Float[Tensor, " V"] | None]:
    """Gradient of what the output layer gives for one chunk, in its dtype, and that of the bias."""
    logits_CV = scaled_logits(hidden_CH, weight_VH, bias_V, rule, temperature)
    factor = slope(logits_CV, rule, temperature)
    logp_CV, targets_C, there_C = normalised(logits_CV, *given)
    del logits_CV
    grad_CV = grad_logits(logp_CV, targets_C, grad_logp_C, grad_entropy_C, entropy_C, there_C)
    grad_CV = grad_CV.mul_(factor)  # before the cast, or it would be rounded twice
    return grad_CV.to(hidden_CH.dtype), grad_CV.sum(dim=0) if with_bias else None


def grad_logits(
    logp_CV: Tensor,
    targets_C: Tensor,
    grad_logp_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    entropy_C: Tensor,
    there_C: Tensor | None = None,
) -> Float[Tensor, "C V"]:
    """Gradient with respect to the scaled logits of Σ grad_logp·log p_target + Σ grad_entropy·S.

    ``there_C``: which targets are among the V; None for all.
    """
    p_CV = logp_CV.exp()
    if grad_entropy_C is None:
        grad_CV = p_CV
        grad_CV.mul_(_or_zeros(grad_logp_C, entropy_C).neg().unsqueeze(1))
    else:
        inner_CV = (logp_CV + entropy_C.unsqueeze(1)).mul_(grad_entropy_C.unsqueeze(1))
        inner_CV.add_(_or_zeros(grad_logp_C, entropy_C).unsqueeze(1))
        # p is 0 where log p is −inf, and 0·(−inf) is NaN
        grad_CV = inner_CV.mul_(p_CV).neg_().masked_fill_(p_CV == 0, 0.0)
    if grad_logp_C is not None:
        of_targets_C = grad_logp_C if there_C is None else grad_logp_C.where(there_C, 0.0)
        grad_CV.scatter_add_(1, targets_C.unsqueeze(1), of_targets_C.unsqueeze(1).to(grad_CV.dtype))
    return grad_CV


def _or_zeros(grad_C: Tensor | None, like_C: Tensor) -> Tensor:
    return torch.zeros_like(like_C) if grad_C is None else grad_C


PROBE_SEQUENCES = 4
PROBE_PREFILL = 4
"""Number of tokens of each sequence that are given: its prompt."""
PROBE_SCORED = 2
"""Number of last tokens of each sequence whose log-probs are compared."""

_GOLDEN = 0x9E3779B97F4A7C15
"""2⁶⁴ divided by the golden ratio: multiples of it, modulo 2⁶⁴, are spread evenly however many there are."""


def probe_sequences(vocab_size: int) -> NDArray[np.int64]:
    """Token ids [4, 6] below ``vocab_size``: the same for the same size, everywhere."""
    count = PROBE_SEQUENCES * (PROBE_PREFILL + PROBE_SCORED)
    ids = [((k * _GOLDEN) % 2**64 * vocab_size) >> 64 for k in range(1, count + 1)]
    return np.array(ids, np.int64).reshape(PROBE_SEQUENCES, -1)


def probe_rows(vocab_size: int) -> list[CollatedRow]:
    """The sequences as an engine's rows: `PROBE_PREFILL` prompt tokens, then the response."""
    blank = np.zeros(PROBE_SCORED, np.float32)
    return [
        CollatedRow(
            input_ids=ids.astype(np.int32),
            prompt_length=PROBE_PREFILL,
            logprobs=blank,
            versions=np.zeros(PROBE_SCORED, np.int32),
            loss_mask=np.ones(PROBE_SCORED, np.bool_),
        )
        for ids in probe_sequences(vocab_size)
    ]


def probe_vector(responses: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """The probe [8] from the [2] log-probs of each of `probe_rows`, in order: what a replica's ``probe`` returns."""
    return np.concatenate(responses).astype(np.float32)
