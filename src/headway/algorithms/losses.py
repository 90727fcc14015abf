"""Policy losses: per token, before any averaging. Averaging is `aggregation`'s business.

    LossInputs ─▶ policy loss ─▶ per-token losses [N, T] ─▶ · token_weights [N, T] ─▶ sum over micro-batches and ranks

Shape suffixes: N sequences of a micro-batch, T response tokens (padded).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headway.algorithms.registry import Registry

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±this before ``exp``: e^20 squared still fits float32. Beyond it there is no gradient."""


@dataclass(slots=True)
class LossInputs:
    """What a policy loss may look at. Values at masked positions are never used and may be anything."""

    logprobs: Float[Tensor, "N T"]
    """log π_θ of the sampled tokens, in nats; the one input with a gradient (and ``entropy``)."""
    old_logprobs: Float[Tensor, "N T"]
    """log π_prox, the anchor of the trust region; π_behav's where the engine's log-probs are taken for it."""
    behaviour_logprobs: Float[Tensor, "N T"]
    """log π_behav: what the engine sampled from."""
    advantages: Float[Tensor, "N T"]
    mask: Bool[Tensor, "N T"]
    """True at tokens that the policy wrote."""
    ref_logprobs: Float[Tensor, "N T"] | None = None
    entropy: Float[Tensor, "N T"] | None = None


@dataclass(frozen=True, slots=True)
class PolicyLossParams:
    """``clip_low`` and ``clip_high`` are ε below and above: the ratio is clipped to [1 − clip_low, 1 + clip_high]."""

    clip_low: float
    clip_high: float


PolicyLoss = Callable[[LossInputs, PolicyLossParams], tuple[Tensor, dict[str, Tensor]]]
"""Per-token losses [N, T], exactly 0 where masked, and named per-token metrics [N, T] without gradient."""

POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss", "algorithm.policy_loss.loss_mode")


def log_ratio(
    logprobs: Float[Tensor, "N T"], old_logprobs: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]
) -> Float[Tensor, "N T"]:
    """log(π/π_old) in at least float32, clamped to ±`MAX_LOG_RATIO`, 0 where masked.

    Padding is filled before the subtraction: −inf − (−inf) is NaN, and ``where`` after it would still multiply a NaN
    into the gradient of what comes before.
    """
    padding = ~mask
    new = logprobs.masked_fill(padding, 0.0)
    old = old_logprobs.detach().masked_fill(padding, 0.0)
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    return (new.to(dtype) - old.to(dtype)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@POLICY_LOSSES.register("ppo_clip")
def ppo_clip(inputs: LossInputs, params: PolicyLossParams) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """−min(u·A, clip(u, 1 − clip_low, 1 + clip_high)·A) with u = π_θ/π_old.

    ``old_logprobs`` are the denominator, whichever policy they come from. ``clip_high`` > ``clip_low`` is clip-higher.

    Metrics: ``clip_fraction`` is 1 where the clipped term was the smaller one (no gradient there), ``approx_kl`` is the
    k3 estimate of KL(π_old‖π_θ).

    Source: PPO, Schulman et al. 2017, arXiv:1707.06347, equation 7; clip-higher: DAPO, Yu et al. 2025,
    arXiv:2503.14476, equation 10.
    """
    log_ratio_NT = log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask)
    ratio_NT = log_ratio_NT.exp()
    advantages_NT = inputs.advantages.detach().masked_fill(~inputs.mask, 0.0).to(ratio_NT.dtype)
    unclipped_NT = -ratio_NT * advantages_NT
    clipped_NT = -ratio_NT.clamp(1.0 - params.clip_low, 1.0 + params.clip_high) * advantages_NT
    with torch.no_grad():
        metrics = {
            "clip_fraction": (clipped_NT > unclipped_NT).to(ratio_NT.dtype),
            "approx_kl": torch.expm1(log_ratio_NT) - log_ratio_NT,
        }
    return torch.maximum(unclipped_NT, clipped_NT), metrics
