"""Losses of the form −weight·A·log π_θ, the weight without gradient. Shape suffixes as in `base`.

Their gradient is a policy gradient; their value holds log π_θ itself and says nothing about progress.
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
from headway.config.sections.losses import Cispo, DppoKl, DppoTv, Gpg, TruncatedIs

PROBABILITY_FLOOR = 1e-8
"""Number added to 1 − π: float32 log-probs cannot tell a probability of 1 − 3e-8 from 1."""


@POLICY_LOSSES.register("gpg")
def gpg(inputs: LossInputs, params: PolicyLossParams[Gpg]) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Loss −A·log π_θ: no ratio and no trust region. Right on policy; with stale data, biased.

    Aggregation: ``token-mean``.

    Metrics: ``approx_kl`` as for `ppo_clip`.

    Source: GPG, Chu et al. 2025, arXiv:2504.02546, section 3; REINFORCE, Williams 1992.
    """
    log_ratio_NT = log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask)
    logprobs_NT = clean(inputs.logprobs, inputs.mask)
    return -cleaned_advantages(inputs, logprobs_NT) * logprobs_NT, {"approx_kl": approx_kl(log_ratio_NT)}


@POLICY_LOSSES.register("cispo")
def cispo(inputs: LossInputs, params: PolicyLossParams[Cispo]) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Loss −sg[clip(u, 1 − clip_low, 1 + clip_high)]·A·log π_θ with u = π_θ/π_old.

    The weight is clipped, not the update: every token keeps a gradient. A ``clip_low`` of 1 or more leaves the lower
    side open, as the paper does.

    Aggregation: ``token-mean``.

    Metrics: ``clip_fraction`` is 1 where the weight was clipped, ``approx_kl`` as for `ppo_clip`.

    Source: CISPO, MiniMax-M1 2025, arXiv:2506.13585, equations 4 and 5.
    """
    log_ratio_NT = log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask)
    ratio_NT = log_ratio_NT.detach().exp()
    weights_NT = ratio_NT.clamp(max(0.0, 1.0 - params.clip_low), 1.0 + params.clip_high)
    return _weighted(inputs, weights_NT, log_ratio_NT, clipped=weights_NT != ratio_NT)


@POLICY_LOSSES.register("truncated_is")
def truncated_is(
    inputs: LossInputs, params: PolicyLossParams[TruncatedIs]
) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Loss −sg[min(π_θ/π_behav, ρ)]·A·log π_θ, ρ = ``rollout_is_threshold``: truncated importance sampling.

    One ratio spans from the sampling to the trained policy. So π_prox is not used; a correction would count it twice.

    Aggregation: ``seq-mean-token-sum`` (both papers sum over an answer's tokens); ``token-mean`` is common, too.

    Metrics: ``clip_fraction`` is 1 where ρ was the smaller one, ``approx_kl`` is the k3 estimate of KL(π_behav‖π_θ).

    Source: AIPO, LlamaRL, Wu et al. 2025, arXiv:2505.24034; PipelineRL, Piché et al. 2025, arXiv:2509.19128.
    """
    log_ratio_NT = log_ratio(inputs.logprobs, inputs.behaviour_logprobs, inputs.mask)
    ratio_NT = log_ratio_NT.detach().exp()
    weights_NT = ratio_NT.clamp(max=params.own.rollout_is_threshold)
    return _weighted(inputs, weights_NT, log_ratio_NT, clipped=weights_NT != ratio_NT)


@POLICY_LOSSES.register("dppo_tv")
def dppo_tv(inputs: LossInputs, params: PolicyLossParams[DppoTv]) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Loss −M·sg[min(u, c)]·A·log π_θ: M = 0 where the token's *probability* has moved too far in A's direction.

    M = 0 if π_θ − π_old > ``clip_high`` where A > 0, or π_old − π_θ > ``clip_low`` elsewhere. |π_θ − π_old| is the
    total variation between both policies over (this token, any other token). The ratio of a rare token may change a
    lot, that of a common one only a little. c is ``clip_ratio_c``.

    Aggregation: ``token-mean``.

    Metrics: ``clip_fraction`` is 1 where M is 0, ``clip_fraction_lower`` where c bounded a weight that counts,
    ``approx_kl`` as for `ppo_clip`.

    Source: DPPO (Binary-TV), Qi et al. 2026, arXiv:2602.04879; truncation: its section 5.4.
    """
    old_NT, new_NT = _probabilities(inputs)
    return _divergence_masked(
        inputs, params, too_high=new_NT - old_NT > params.clip_high, too_low=old_NT - new_NT > params.clip_low
    )


@POLICY_LOSSES.register("dppo_kl")
def dppo_kl(inputs: LossInputs, params: PolicyLossParams[DppoKl]) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Loss of `dppo_tv` with KL(π_old‖π_θ) over (this token, any other token) instead of the total variation.

    The KL is p·log(p/q) + (1 − p)·log((1 − p)/(1 − q)), with p = π_old and q = π_θ, in nats. M = 0 if it is above
    ``clip_high`` and q > p where A > 0, or above ``clip_low`` and q < p elsewhere.

    Source: DPPO (Binary-KL), Qi et al. 2026, arXiv:2602.04879.
    """
    old_NT, new_NT = _probabilities(inputs)
    log_odds_NT = torch.log1p(PROBABILITY_FLOOR - old_NT) - torch.log1p(PROBABILITY_FLOOR - new_NT)
    moved_NT = log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask).detach().double()
    kl_NT = -old_NT * moved_NT + (1.0 - old_NT) * log_odds_NT
    return _divergence_masked(
        inputs,
        params,
        too_high=(kl_NT > params.clip_high) & (new_NT > old_NT),
        too_low=(kl_NT > params.clip_low) & (new_NT < old_NT),
    )


def _probabilities(inputs: LossInputs) -> tuple[Float[Tensor, "N T"], Float[Tensor, "N T"]]:
    """Return π_old and π_θ of the sampled tokens, in float64: their difference, and that to 1, may be small."""
    old_NT, new_NT = (
        clean(logprobs.detach(), inputs.mask).double().exp() for logprobs in (inputs.old_logprobs, inputs.logprobs)
    )
    return old_NT, new_NT


def _divergence_masked(
    inputs: LossInputs,
    params: PolicyLossParams[DppoTv | DppoKl],
    *,
    too_high: Bool[Tensor, "N T"],
    too_low: Bool[Tensor, "N T"],
) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    c = params.own.clip_ratio_c
    log_ratio_NT = log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask)
    ratio_NT = log_ratio_NT.detach().exp()
    dropped_NT = torch.where(cleaned_advantages(inputs, ratio_NT) > 0, too_high, too_low)
    weights_NT = ratio_NT.clamp(max=c).masked_fill(dropped_NT, 0.0)
    losses_NT, metrics = _weighted(inputs, weights_NT, log_ratio_NT, clipped=dropped_NT)
    return losses_NT, metrics | {"clip_fraction_lower": ((ratio_NT > c) & ~dropped_NT).to(ratio_NT.dtype)}


def _weighted(
    inputs: LossInputs,
    weights_NT: Float[Tensor, "N T"],
    log_ratio_NT: Float[Tensor, "N T"],
    *,
    clipped: Bool[Tensor, "N T"],
) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    advantages_NT = cleaned_advantages(inputs, weights_NT)
    # Only log π_θ has a gradient: a weight with a gradient would count the token twice.
    losses_NT = -weights_NT * advantages_NT * clean(inputs.logprobs, inputs.mask)
    clipped_NT = (clipped & inputs.mask).to(weights_NT.dtype)
    return losses_NT, {"clip_fraction": clipped_NT, "approx_kl": approx_kl(log_ratio_NT)}
