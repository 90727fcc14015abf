"""Log-probs and entropy of given tokens, from hidden states, without ever holding [tokens × vocabulary].

A chunk's logits live only while that chunk is computed; the backward pass computes them again. Beside inputs and
outputs the forward pass holds about three [chunk_tokens × vocabulary] float32 matrices at once, the backward pass about
three, and the gradient of the head's weight once in float32.

Ranks may divide the vocabulary (`VocabularyPart`), so that none has a whole row of logits.

Shape suffixes: M tokens, C tokens of a chunk, H hidden size, V vocabulary, or this rank's part of it.

Also here: a few fixed sequences whose log-probs tell whether two holders of a policy serve the same weights.

Checksums prove that the right bytes arrived; the probe proves that the model computes with them. It is cheap enough for
every update, and its sequences are spread over the vocabulary so that embedding and head are sampled broadly.

    ids [4, 6]:   │ p p p p │ r r │      log-probs of the r, sequence by sequence: [8]
                    prefill   first from the prefill's logits, the other after decoding it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from headway.config.sizing.process_memory import chunk_tokens
from headway.data.packing import CollatedRow
from headway.devices import kind_of
from headway.models.cpu_linear import linear
from headway.models.logits import PLAIN, LogitRule


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """Part of the vocabulary: the rows of the output layer that a rank has."""

    group: ProcessGroup
    """The ranks that divide the vocabulary. All compute log-probs of the same tokens."""
    first: int
    """Id of the part's first token."""

    def places(self, targets_C: Int[Tensor, " C"], size: int) -> tuple[Int[Tensor, " C"], Tensor]:
        """Return each target's index among the part's ``size`` tokens, and a mask of the targets that are among them.

        The index is 0 for a target of another rank.
        """
        places_C = targets_C - self.first
        own_C = (places_C >= 0) & (places_C < size)
        return places_C.where(own_C, 0), own_C


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
    part: VocabularyPart | None = None,
) -> tuple[Float[Tensor, "*tokens"], Float[Tensor, "*tokens"]]:
    """Log-prob (nats) of ``targets`` under softmax(logits / temperature), and its entropy.

    The logits are hidden · weightᵀ + bias, under ``rule``. The product is computed in the inputs' dtype; ``rule``,
    softmax and sums in float32 (float64 for float64 inputs), which is the dtype of the results. Both results have a
    gradient; that of the entropy costs nothing unless it is used.

    Args:
        hidden: hidden states that the head reads, at the position that predicts each target.
        temperature: positive; logits are divided by it.
        chunk_tokens: tokens computed at once; the default suits the device. The results do not depend on it.
        rule: the model's own scale and soft cap (`headway.models.logits.logit_rule`).
        compiled: compile the computation of a chunk; results differ in the last bits. Ignored with a ``part``.
        part: the part of the vocabulary in ``weight`` and ``bias``. Then all ranks need equal ``chunk_tokens``.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; log-probs need a positive one")
    chunk = chunk_tokens or default_chunk_tokens(weight.shape[0], weight.device)
    hidden_MH, targets_M = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    logprobs_M, entropy_M = _ChunkedLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden_MH, weight, bias, targets_M, rule.at(temperature), chunk, compiled and part is None, part
    )
    if targets.ndim == 1:  # no view of an output: FSDP2 hooks onto what a module returns, and warns of views
        return logprobs_M, entropy_M
    return logprobs_M.view(targets.shape), entropy_M.view(targets.shape)


def _logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, rule: LogitRule) -> Float[Tensor, "C V"]:
    """The logits by ``rule``. Only for functions that build no graph: it works in place."""
    output_CV = linear(hidden_CH, weight_VH, bias_V).to(torch.promote_types(hidden_CH.dtype, torch.float32))
    if rule.cap is None:
        return output_CV if rule.scale == 1.0 else output_CV.mul_(rule.scale)
    return output_CV.mul_(rule.scale / rule.cap).tanh_().mul_(rule.cap)


def _slope(logits_CV: Tensor, rule: LogitRule) -> Float[Tensor, "C V"] | float:
    """Derivative of `_logits` with respect to what the output layer gives: scale · (1 − tanh²)."""
    if rule.cap is None:
        return rule.scale
    return (logits_CV / rule.cap).square_().neg_().add_(1.0).mul_(rule.scale)


class _ChunkedLogProbs(torch.autograd.Function):
    """Log-prob of the target and entropy, whose backward pass computes each chunk's logits again.

    With p = softmax(z) and entropy S = −Σ p·log p:  ∂log p_t/∂z = 1_t − p,  ∂S/∂z = −p·(log p + S).

    Where ranks divide the vocabulary each has a part of z. The gradient of the hidden states is summed over them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_M: Tensor,
        rule: LogitRule,
        chunk: int,
        compiled: bool,
        part: VocabularyPart | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # an entropy that is only reported then costs no backward pass
        dtype = torch.promote_types(hidden_MH.dtype, torch.float32)
        logprobs_M = torch.empty(len(targets_M), dtype=dtype, device=hidden_MH.device)
        entropy_M = torch.empty_like(logprobs_M)
        logsum_M = None if part is None else torch.empty_like(logprobs_M)
        compute = _of_chunks(_logprobs, compiled)
        for start in range(0, len(targets_M), chunk):
            of = slice(start, start + chunk)
            given = weight_VH, bias_V, rule, hidden_MH[of], targets_M[of]
            if part is None or logsum_M is None:
                logprobs_M[of], entropy_M[of] = compute(*given)
            else:
                logprobs_M[of], entropy_M[of], logsum_M[of] = _logprobs_of_part(*given, part)
        ctx.save_for_backward(hidden_MH, weight_VH, bias_V, targets_M, entropy_M, logsum_M)
        ctx.rule, ctx.chunk, ctx.compiled, ctx.part = rule, chunk, compiled, part
        return logprobs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_MH, weight_VH, bias_V, targets_M, entropy_M, logsum_M = ctx.saved_tensors
        dtype = entropy_M.dtype
        grad_hidden_MH = torch.zeros_like(hidden_MH) if ctx.needs_input_grad[0] else None
        # In float32 at least: sums over many chunks in bfloat16 would lose small addends.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=dtype) if ctx.needs_input_grad[1] else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=dtype) if ctx.needs_input_grad[2] else None
        compute = _of_chunks(_chunk_gradient, ctx.compiled)
        # Of a small vocabulary a rank may have no row.
        for start in range(0, len(targets_M) if len(weight_VH) else 0, ctx.chunk):
            of = slice(start, start + ctx.chunk)
            given = (None if each is None else each[of] for each in (*grads, entropy_M, logsum_M))
            grad_CV, of_bias_V = compute(weight_VH, bias_V, ctx.rule, hidden_MH[of], targets_M[of], *given, ctx.part)
            if grad_bias_V is not None:
                grad_bias_V += of_bias_V
            if grad_hidden_MH is not None:
                grad_hidden_MH[of] = linear(grad_CV, weight_VH.t())
            if grad_weight_VH is not None:
                grad_weight_VH += linear(grad_CV.t(), hidden_MH[of].t())
        if grad_hidden_MH is not None and ctx.part is not None:
            # Each rank has only its own part of the vocabulary's contribution to the gradient.
            dist.all_reduce(grad_hidden_MH, group=ctx.part.group)
        grad_weight_VH = None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        grad_bias_V = None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_hidden_MH, grad_weight_VH, grad_bias_V, *(None,) * 5  # as many as `forward` has arguments


def _logprobs(
    weight_VH: Tensor, bias_V: Tensor | None, rule: LogitRule, hidden_CH: Tensor, targets_C: Tensor
) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"]]:
    """Log-probs of the targets of one chunk, and entropies."""
    logp_CV = _logits(hidden_CH, weight_VH, bias_V, rule).log_softmax(dim=-1)
    # −inf logits (a masked vocabulary entry) have p = 0 and contribute nothing: 0·log 0 is 0
    return logp_CV.gather(1, targets_C[:, None]).squeeze(1), torch.special.entr(logp_CV.exp()).sum(dim=-1)


def _logprobs_of_part(
    weight_VH: Tensor,
    bias_V: Tensor | None,
    rule: LogitRule,
    hidden_CH: Tensor,
    targets_C: Tensor,
    part: VocabularyPart,
) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"], Float[Tensor, " C"]]:
    """Compute like `_logprobs`, by all ranks of ``part`` together; also returns the log-sum-exp of all logits.

    As Megatron-LM's vocabulary-parallel cross entropy (Shoeybi et al. 2019, arXiv:1909.08053), with the entropy.
    """
    z_CV = _logits(hidden_CH, weight_VH, bias_V, rule)
    highest_C = z_CV.amax(dim=1) if z_CV.shape[1] else z_CV.new_full((len(z_CV),), -torch.inf)
    # The maximum over all ranks, before any exponential: with different maxima, the ranks' sums would differ in scale.
    dist.all_reduce(highest_C, op=dist.ReduceOp.MAX, group=part.group)
    places_C, own_C = part.places(targets_C, z_CV.shape[1])
    # Before the weighted sum, which fills the logits in place.
    of_targets_C = z_CV.gather(1, places_C[:, None]).squeeze(1) if z_CV.shape[1] else highest_C
    e_CV = (z_CV - highest_C[:, None]).exp_()
    weighted_C = (e_CV * z_CV.masked_fill_(e_CV == 0, 0.0)).sum(dim=1)  # −inf logits contribute nothing here, too
    sums_3C = torch.stack([e_CV.sum(dim=1), weighted_C, of_targets_C.where(own_C, 0.0)])
    dist.all_reduce(sums_3C, group=part.group)
    total_C, weighted_C, of_targets_C = sums_3C.unbind()
    logsum_C = highest_C + total_C.log()
    # The entropy −Σ p·log p as log Z − Σ p·z.
    return of_targets_C - logsum_C, logsum_C - weighted_C / total_C, logsum_C


def _of_chunks(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    """Return ``function`` of a head and one chunk's tensors: as it is, or compiled once for chunks of all lengths."""
    if not compiled:
        return function

    def run(weight_VH: Tensor, bias_V: Tensor | None, *given: Any) -> Any:
        # Detached: these functions do not use `requires_grad`, and each setting would be another variant to compile.
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


def _chunk_gradient(
    weight_VH: Tensor,
    bias_V: Tensor | None,
    rule: LogitRule,
    hidden_CH: Tensor,
    targets_C: Tensor,
    grad_logp_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    entropy_C: Tensor,
    logsum_C: Tensor | None,
    part: VocabularyPart | None,
) -> tuple[Float[Tensor, "C V"], Float[Tensor, " V"] | None]:
    """Return the gradients of the output layer's result for one chunk, in its dtype, and of the bias.

    The differentiated sum is Σ grad_logp·log p_target + Σ grad_entropy·S, first with respect to the logits.
    """
    logits_CV = _logits(hidden_CH, weight_VH, bias_V, rule)
    # Before the logits of a part become log-probs in place.
    factor = _slope(logits_CV, rule)
    of_targets_C = torch.zeros_like(entropy_C) if grad_logp_C is None else grad_logp_C
    if part is None or logsum_C is None:
        logp_CV, own_C = logits_CV.log_softmax(dim=-1), None
    else:
        targets_C, own_C = part.places(targets_C, logits_CV.shape[1])
        logp_CV = logits_CV.sub_(logsum_C[:, None])
    del logits_CV  # or it would be held beside what is computed next
    p_CV = logp_CV.exp()
    if grad_entropy_C is None:
        grad_CV = p_CV
        grad_CV.mul_(of_targets_C.neg().unsqueeze(1))
    else:
        inner_CV = (logp_CV + entropy_C.unsqueeze(1)).mul_(grad_entropy_C.unsqueeze(1))
        inner_CV.add_(of_targets_C.unsqueeze(1))
        # p is 0 where log p is −inf, and 0·(−inf) is NaN
        grad_CV = inner_CV.mul_(p_CV).neg_().masked_fill_(p_CV == 0, 0.0)
    if grad_logp_C is not None:
        own_grad_C = of_targets_C if own_C is None else of_targets_C.where(own_C, 0.0)
        grad_CV.scatter_add_(1, targets_C.unsqueeze(1), own_grad_C.unsqueeze(1).to(grad_CV.dtype))
    grad_CV = grad_CV.mul_(factor)  # before the cast, or it would be rounded twice
    return grad_CV.to(hidden_CH.dtype), None if bias_V is None else grad_CV.sum(dim=0)


PROBE_SEQUENCES = 4
PROBE_PREFILL = 4
"""Number of prompt tokens of each sequence."""
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
