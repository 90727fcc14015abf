"""PPO's clipped loss and what is built on it (clip-higher, dual clip, truncated PPO), and SAPO's smooth gate.

Shape suffixes as in `base`.
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
    cleaned_advantages,
    dense_labels,
    log_ratio,
)
from headway.config.sections.losses import DualClip, PolicyLossConfig, Sapo, TPpo
from headway.errors import ConfigError


@POLICY_LOSSES.register("ppo_clip")
def ppo_clip(
    inputs: LossInputs, params: PolicyLossParams[PolicyLossConfig]
) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Loss −min(u·A, clip(u, 1 − clip_low, 1 + clip_high)·A) with u = π_θ/π_old.

    ``old_logprobs`` are the denominator, whichever policy they come from. ``clip_high`` > ``clip_low`` is clip-higher.
    Decoupled PPO is this loss with π_prox for π_old, times the weight that a correction supplies.

    Metrics: ``clip_fraction`` is 1 where the clipped term was the smaller one (no gradient there), ``approx_kl`` is the
    k3 estimate of KL(π_old‖π_θ).

    Source: PPO, Schulman et al. 2017, arXiv:1707.06347, equation 7; clip-higher: DAPO, Yu et al. 2025,
    arXiv:2503.14476, equation 10; decoupled: Hilton et al. 2021, arXiv:2110.00641.
    """
    log_ratio_NT = log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask)
    losses_NT, clipped_NT = clipped_surrogate(log_ratio_NT.exp(), cleaned_advantages(inputs, log_ratio_NT), params)
    return losses_NT, {"clip_fraction": clipped_NT, "approx_kl": approx_kl(log_ratio_NT)}


@POLICY_LOSSES.register("dual_clip")
def dual_clip(inputs: LossInputs, params: PolicyLossParams[DualClip]) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Loss of `ppo_clip`, but where A < 0 at most −c·A: −max(min(u·A, clip(u)·A), c·A), c = ``clip_ratio_c``.

    Without it a token of a bad answer that has become much more likely (u ≫ 1) has an unbounded loss.

    Metrics: those of `ppo_clip`, and ``clip_fraction_lower``, 1 where c was what bounded the loss (no gradient there).

    Source: Ye et al. 2020, arXiv:1912.09729, section "Dual-clip PPO". verl's ``vanilla`` loss is this one.

    Raises:
        ConfigError: c ≤ 1 + clip_high, so that it would cut inside the clip range.
    """
    c = params.own.clip_ratio_c
    if c <= 1.0 + params.clip_high:
        raise ConfigError(f"clip_ratio_c={c:g} must be above 1 + clip_high = {1.0 + params.clip_high:g} (usual: 3)")
    losses_NT, metrics = ppo_clip(inputs, params)
    advantages_NT = cleaned_advantages(inputs, losses_NT)
    ceiling_NT = torch.where(advantages_NT < 0, -c * advantages_NT, torch.inf)
    lower_NT = (losses_NT > ceiling_NT).to(losses_NT.dtype)
    return torch.minimum(losses_NT, ceiling_NT), metrics | {"clip_fraction_lower": lower_NT.detach()}


@POLICY_LOSSES.register("t_ppo")
def t_ppo(inputs: LossInputs, params: PolicyLossParams[TPpo]) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Loss of `ppo_clip` on answers of which some are unfinished, without the last ``ignore_last`` tokens of those.

    The rest of truncated PPO is other parts' business: the advantages come from extended GAE, which takes V(s_l+1) =
    V(s_l) where an answer was cut; ``mask`` holds the tokens of the present window alone, so that none is trained on
    twice; the value model learns from finished answers only. The advantage of a cut answer's last tokens is mostly that
    assumption, hence ``ignore_last``. Dropped tokens still count in the normaliser, as rejected ones do.

    Metrics: those of `ppo_clip`, and ``window_dropped``, 1 at the tokens left out.

    Source: truncated PPO, Fan et al. 2025, arXiv:2506.15050, section 3.
    """
    losses_NT, metrics = ppo_clip(inputs, params)
    dropped_NT = _last_of_unfinished(inputs, params.own.ignore_last)
    losses_NT = losses_NT.masked_fill(dropped_NT, 0.0)
    metrics["clip_fraction"] = metrics["clip_fraction"].masked_fill(dropped_NT, 0.0)
    return losses_NT, metrics | {"window_dropped": dropped_NT.to(losses_NT.dtype)}


def clipped_surrogate(
    ratio_NT: Float[Tensor, "N T"], advantages_NT: Float[Tensor, "N T"], params: PolicyLossParams[PolicyLossConfig]
) -> tuple[Float[Tensor, "N T"], Float[Tensor, "N T"]]:
    """Compute −min(u·A, clip(u)·A), and 1 where the clipped term was the smaller one."""
    unclipped_NT = -ratio_NT * advantages_NT
    clipped_NT = -ratio_NT.clamp(1.0 - params.clip_low, 1.0 + params.clip_high) * advantages_NT
    return torch.maximum(unclipped_NT, clipped_NT), (clipped_NT > unclipped_NT).to(ratio_NT.dtype).detach()


def _last_of_unfinished(inputs: LossInputs, count: int) -> Bool[Tensor, "N T"]:
    if inputs.finished is None or count <= 0:
        return torch.zeros_like(inputs.mask)
    row_N = torch.arange(len(inputs.mask), device=inputs.mask.device)
    label_N = row_N if inputs.episodes is None else dense_labels(inputs.episodes)
    number_NT = inputs.mask.flatten().cumsum(0).view_as(inputs.mask)  # of valid tokens: holes take no place
    last_N = torch.zeros_like(label_N).scatter_reduce(0, label_N, number_NT[:, -1], "amax")[label_N]
    return inputs.mask & (last_N[:, None] - number_NT < count) & ~inputs.finished[:, None]


@POLICY_LOSSES.register("sapo")
def sapo(inputs: LossInputs, params: PolicyLossParams[Sapo]) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Loss −(4/τ)·σ(τ·(u − 1))·A with u = π_θ/π_old, τ = ``tau_pos`` where A > 0 and ``tau_neg`` elsewhere.

    The gate's slope is 1 at u = 1 and fades on both sides: the gradient is that of PPO near the old policy, and never
    jumps. Constant 2A/τ in the value at u = 1.

    Aggregation: ``seq-mean-token-mean``.

    Metrics: ``gate`` is the slope 4·σ·(1 − σ), the share of the unclipped gradient that is left; ``approx_kl`` as for
    `ppo_clip`.

    Source: SAPO, Gao et al. 2025, arXiv:2511.20347, section 3.
    """
    log_ratio_NT = log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask)
    advantages_NT = cleaned_advantages(inputs, log_ratio_NT)
    tau_NT = torch.full_like(advantages_NT, params.own.tau_neg).masked_fill(advantages_NT > 0, params.own.tau_pos)
    gate_NT = torch.sigmoid(tau_NT * (log_ratio_NT.exp() - 1.0))
    slope_NT = (4.0 * gate_NT * (1.0 - gate_NT)).detach().masked_fill(~inputs.mask, 0.0)
    return -(4.0 / tau_NT) * gate_NT * advantages_NT, {"gate": slope_NT, "approx_kl": approx_kl(log_ratio_NT)}
