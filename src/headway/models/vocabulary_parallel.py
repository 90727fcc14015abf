"""Log-probs and entropy where each rank has some rows of the output layer: no rank has a whole row of logits.

    hidden states ─▶ logits of this rank's tokens ─▶ max, Σ exp, Σ exp · logit, the target's logit ─▶ summed over ranks

As Megatron-LM's vocabulary-parallel cross entropy (Shoeybi et al. 2019, arXiv:1909.08053), with the entropy beside it.
In chunks, whose logits the backward pass computes again.

Shape suffixes: M tokens, C tokens of a chunk, H hidden size, V tokens of this rank's part of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from headway.models.logits import LogitRule
from headway.models.logprobs import Normalised, accumulation_dtype, head_gradients, scaled_logits


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The part of the vocabulary whose rows of the output layer a rank has."""

    group: ProcessGroup
    """The ranks that divide the vocabulary. All compute log-probs of the same tokens."""
    first: int
    """Id of the part's first token."""

    def places(self, targets_C: Int[Tensor, " C"], size: int) -> tuple[Int[Tensor, " C"], Tensor]:
        """Index of each target among the part's ``size`` tokens, 0 for another rank's; and which are this one's."""
        places_C = targets_C - self.first
        own_C = (places_C >= 0) & (places_C < size)
        return places_C.where(own_C, 0), own_C


class DividedLogProbs(torch.autograd.Function):
    """`headway.models.logprobs` with this rank's z alone: ∂log p_t/∂z = 1_t − p, ∂S/∂z = −p·(log p + S).

    The gradient of the hidden states is summed over the ranks, each of which knows its logits' part.
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
        part: VocabularyPart,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        dtype = accumulation_dtype(hidden_MH)
        logprobs_M = torch.empty(len(targets_M), dtype=dtype, device=hidden_MH.device)
        entropy_M, logsum_M = torch.empty_like(logprobs_M), torch.empty_like(logprobs_M)
        for start in range(0, len(targets_M), chunk):
            of = slice(start, start + chunk)
            z_CV = scaled_logits(hidden_MH[of], weight_VH, bias_V, rule, temperature)
            highest_C = z_CV.amax(dim=1) if z_CV.shape[1] else z_CV.new_full((len(z_CV),), -torch.inf)
            # Of all ranks, before any exponential: with its own maximum each rank's sums would be in another scale.
            dist.all_reduce(highest_C, op=dist.ReduceOp.MAX, group=part.group)
            places_C, own_C = part.places(targets_M[of], z_CV.shape[1])
            targets_C = z_CV.gather(1, places_C[:, None]).squeeze(1) if z_CV.shape[1] else highest_C
            e_CV = (z_CV - highest_C[:, None]).exp_()
            # −inf logits (a masked vocabulary entry) have e = 0 and contribute nothing
            weighted_C = (e_CV * z_CV.masked_fill_(e_CV == 0, 0.0)).sum(dim=1)
            sums_3C = torch.stack([e_CV.sum(dim=1), weighted_C, targets_C.where(own_C, 0.0)])
            dist.all_reduce(sums_3C, group=part.group)
            total_C, weighted_C, targets_C = sums_3C.unbind()
            logsum_M[of] = highest_C + total_C.log()
            logprobs_M[of] = targets_C - logsum_M[of]
            entropy_M[of] = logsum_M[of] - weighted_C / total_C
        ctx.save_for_backward(hidden_MH, weight_VH, bias_V, targets_M, entropy_M, logsum_M)
        ctx.temperature, ctx.rule, ctx.chunk, ctx.part = temperature, rule, chunk, part
        return logprobs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        targets_M, logsum_M = ctx.saved_tensors[3], ctx.saved_tensors[5]
        grad_hidden_MH, *others = head_gradients(
            ctx, grads, _normalised, lambda of: (ctx.part, targets_M[of], logsum_M[of])
        )
        if grad_hidden_MH is not None:
            dist.all_reduce(grad_hidden_MH, group=ctx.part.group)
        return grad_hidden_MH, *others, None, None, None, None, None


def _normalised(logits_CV: Tensor, part: VocabularyPart, targets_C: Tensor, logsum_C: Tensor) -> Normalised:
    places_C, own_C = part.places(targets_C, logits_CV.shape[1])
    return logits_CV.sub_(logsum_C[:, None]), places_C, own_C


def divided_logprobs(
    hidden: Float[Tensor, "M H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, " V"] | None,
    targets: Int[Tensor, " M"],
    temperature: float,
    rule: LogitRule,
    chunk: int,
    part: VocabularyPart,
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
    """Log-prob (nats) of ``targets`` and entropy, as `chunked_logprobs`, where ``weight`` is a part of all rows."""
    logprobs_M, entropy_M = DividedLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperature, rule, chunk, part
    )
    return logprobs_M, entropy_M
