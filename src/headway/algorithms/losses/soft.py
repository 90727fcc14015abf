"""SAPO: a smooth gate where others clip. Shape suffixes as in `base`."""

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
)
from headway.config.sections.losses import Sapo


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
