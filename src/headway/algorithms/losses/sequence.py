"""Losses whose ratio belongs to a whole answer: GSPO and GMPO. Shape suffixes as in `base`.

Both are given per token: in value, each token has its answer's loss; in gradient, its own part of it. With
``seq-mean-token-mean`` (which both papers use) value and gradient are the paper's, to the last token; other
aggregations weigh long answers more. The token form also takes advantages that differ within an answer, and corrections
that weigh tokens.

An answer is an episode: where one has several rows, the mean runs over the trained tokens of all of them.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from headway.algorithms.losses.base import (
    POLICY_LOSSES,
    LossInputs,
    PolicyLossParams,
    approx_kl,
    cleaned_advantages,
    log_ratio,
    sequence_mean,
)
from headway.algorithms.losses.clipped import clipped_surrogate
from headway.config.sections.losses import Gmpo, Gspo


@POLICY_LOSSES.register("gspo")
def gspo(inputs: LossInputs, params: PolicyLossParams[Gspo]) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Loss −min(s·A, clip(s, 1 − clip_low, 1 + clip_high)·A), s the geometric mean of the answer's ratios π_θ/π_old.

    s_i = exp(1/|y_i| · Σ_t log u_t), and per token s_t = sg[s_i] · π_θ/sg[π_θ], where sg stops the gradient. |y_i|
    counts valid tokens. A geometric mean moves little: clip ranges are of the order of 3e-4.

    Aggregation: ``seq-mean-token-mean``, then the loss is −1/G Σ_i min(s_i·A_i, clip(s_i)·A_i).

    Metrics: ``clip_fraction`` is 1 at all tokens of a clipped answer, ``approx_kl`` is per token as for `ppo_clip`.

    Source: GSPO, Zheng et al. 2025, arXiv:2507.18071, equations 5, 7 and, per token, 13 and 14. verl also clamps
    log s_t to at most 10; here each token's log-ratio is clamped to ±20.
    """
    log_ratio_NT = log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask)
    advantages_NT = cleaned_advantages(inputs, log_ratio_NT)
    ratio_NT = _shared(log_ratio_NT, sequence_mean(log_ratio_NT, inputs.mask, inputs.episodes)).exp()
    losses_NT, clipped_NT = clipped_surrogate(ratio_NT, advantages_NT, params)
    return losses_NT, {"clip_fraction": clipped_NT, "approx_kl": approx_kl(log_ratio_NT)}


@POLICY_LOSSES.register("gmpo")
def gmpo(inputs: LossInputs, params: PolicyLossParams[Gmpo]) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Loss −R·A, R the geometric mean of the answer's ratios, each clipped before: R_i = exp(1/|y_i| · Σ_t c_t).

    c_t is log(π_θ/π_old), at most ``clip_high`` where A > 0 and at least −``clip_low`` where A < 0: the clip range is
    of the *log*-ratio (the paper has 0.4 on both sides). A clipped token has no gradient, the answer's other tokens
    keep theirs.

    Aggregation: ``seq-mean-token-mean``, then the loss is −1/G Σ_i R_i·A_i.

    Metrics: ``clip_fraction`` is 1 where c_t was bounded, ``approx_kl`` as for `ppo_clip`.

    Source: GMPO, Zhao et al. 2025, arXiv:2507.20673, section 3. verl's ``geo_mean`` also means the advantages of a row
    and divides by all rows, those without a valid token too.
    """
    log_ratio_NT = log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask)
    advantages_NT = cleaned_advantages(inputs, log_ratio_NT)
    bounded_NT = torch.where(
        advantages_NT > 0, log_ratio_NT.clamp(max=params.clip_high), log_ratio_NT.clamp(min=-params.clip_low)
    )
    ratio_NT = _shared(bounded_NT, sequence_mean(bounded_NT, inputs.mask, inputs.episodes)).exp()
    clipped_NT = (bounded_NT != log_ratio_NT) & (advantages_NT != 0)
    metrics = {"clip_fraction": clipped_NT.to(ratio_NT.dtype), "approx_kl": approx_kl(log_ratio_NT)}
    return -ratio_NT * advantages_NT, metrics


def _shared(token_NT: Float[Tensor, "N T"], mean_N1: Float[Tensor, "N 1"]) -> Float[Tensor, "N T"]:
    """Give each token its answer's mean as its value, but its own gradient."""
    return mean_N1.detach() + (token_NT - token_NT.detach())
