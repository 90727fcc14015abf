"""Clip-Cov and KL-Cov: hold back the few tokens that cost the most entropy. Shape suffixes as in `base`.

A step lowers the policy's entropy where log π_θ and the advantage vary together, so the tokens that are selected are
those of a large (log π_θ − mean)·(A − mean), the means taken over the micro-batch's valid tokens. The selection is of
the whole micro-batch: another split into micro-batches selects other tokens, and gives another gradient.

Source: Cui et al. 2025, arXiv:2505.22617, section 4.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headway.algorithms.losses.base import (
    POLICY_LOSSES,
    LossInputs,
    PolicyLossParams,
    approx_kl,
    clean,
    cleaned_advantages,
    log_ratio,
)
from headway.algorithms.losses.clipped import clipped_surrogate
from headway.config.sections.losses import ClipCov, KlCov


@POLICY_LOSSES.register("clip_cov")
def clip_cov(inputs: LossInputs, params: PolicyLossParams[ClipCov]) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Loss of `ppo_clip`, but 0 at max(1, ⌊``clip_cov_ratio``·tokens⌋) tokens drawn from those of a high covariance.

    Drawn uniformly from the tokens that PPO did not clip and whose covariance is between ``clip_cov_lb`` and
    ``clip_cov_ub``; all of them where there are fewer. The draw is seeded by the values themselves, so that the loss is
    a function of its inputs. (verl draws from torch's global generator.)

    Aggregation: ``token-mean``.

    Metrics: ``clip_fraction`` is that of `ppo_clip`, ``cov_fraction`` is 1 at the tokens drawn, ``approx_kl`` as there.
    """
    log_ratio_NT = log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask)
    losses_NT, clipped_NT = clipped_surrogate(log_ratio_NT.exp(), cleaned_advantages(inputs, log_ratio_NT), params)
    covariance_NT = _covariance(inputs)
    candidates_NT = inputs.mask & (clipped_NT == 0)
    candidates_NT &= (covariance_NT > params.own.clip_cov_lb) & (covariance_NT < params.own.clip_cov_ub)
    drawn_NT = _draw(
        candidates_NT, _share(inputs.mask, params.own.clip_cov_ratio), seed_from=covariance_NT[inputs.mask]
    )
    metrics = {
        "clip_fraction": clipped_NT,
        "cov_fraction": drawn_NT.to(clipped_NT.dtype),
        "approx_kl": approx_kl(log_ratio_NT),
    }
    return losses_NT.masked_fill(drawn_NT, 0.0), metrics


@POLICY_LOSSES.register("kl_cov")
def kl_cov(inputs: LossInputs, params: PolicyLossParams[KlCov]) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Loss −u·A, plus ``ppo_kl_coef``·|log u| at the max(1, ⌊``kl_cov_ratio``·tokens⌋) of the largest covariance.

    u = π_θ/π_old is not clipped: the penalty alone keeps the policy near the old one.

    Aggregation: ``token-mean``.

    Metrics: ``cov_fraction`` is 1 at the tokens with the penalty, ``approx_kl`` as for `ppo_clip`.
    """
    log_ratio_NT = log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask)
    losses_NT = -log_ratio_NT.exp() * cleaned_advantages(inputs, log_ratio_NT)
    count = min(_share(inputs.mask, params.own.kl_cov_ratio), int(inputs.mask.sum()))
    ranked_NT = _covariance(inputs).masked_fill(~inputs.mask, -torch.inf)
    chosen_NT = torch.zeros_like(inputs.mask)
    chosen_NT.view(-1)[ranked_NT.flatten().topk(count).indices] = True
    losses_NT = torch.where(chosen_NT, losses_NT + params.own.ppo_kl_coef * log_ratio_NT.abs(), losses_NT)
    return losses_NT, {"cov_fraction": chosen_NT.to(losses_NT.dtype), "approx_kl": approx_kl(log_ratio_NT)}


@torch.no_grad()
def _covariance(inputs: LossInputs) -> Float[Tensor, "N T"]:
    """Compute (log π_θ − mean)·(A − mean) per token, means over valid tokens, float64, 0 where masked."""
    count = inputs.mask.sum().clamp(min=1)
    centred = []
    for values in (inputs.logprobs, inputs.advantages):
        clean_NT = clean(values, inputs.mask).double()
        centred.append((clean_NT - clean_NT[inputs.mask].sum() / count).masked_fill(~inputs.mask, 0.0))
    return centred[0] * centred[1]


def _share(mask: Bool[Tensor, "N T"], share: float) -> int:
    return max(1, int(share * int(mask.sum())))


def _draw(candidates_NT: Bool[Tensor, "N T"], count: int, *, seed_from: Float[Tensor, " M"]) -> Bool[Tensor, "N T"]:
    """Draw ``count`` of the candidates uniformly, or all where there are no more: a mask, True at those drawn."""
    places_K = candidates_NT.flatten().nonzero().squeeze(1)
    if places_K.numel() > count:
        bits = int(seed_from.sum().view(torch.int64))
        generator = torch.Generator().manual_seed(bits % 2**63)
        places_K = places_K[torch.randperm(places_K.numel(), generator=generator)[:count].to(places_K.device)]
    drawn_NT = torch.zeros_like(candidates_NT)
    drawn_NT.view(-1)[places_K] = True
    return drawn_NT
