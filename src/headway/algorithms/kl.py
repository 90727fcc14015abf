"""Per-token estimates of KL(π_θ‖π_ref) from sampled tokens, to add to the loss or subtract from the reward."""

from __future__ import annotations

from typing import get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headway.algorithms.losses import log_ratio
from headway.algorithms.losses.base import clean
from headway.config.sections.learning import KLKind
from headway.errors import ConfigError

KINDS = get_args(KLKind)


def kl_penalty(
    logprobs: Float[Tensor, "N T"],
    ref_logprobs: Float[Tensor, "N T"],
    kind: KLKind,
    mask: Bool[Tensor, "N T"] | None = None,
    behaviour_logprobs: Float[Tensor, "N T"] | None = None,
) -> Float[Tensor, "N T"]:
    """Estimate KL(π_θ‖π_ref) per token. With d = log π_θ − log π_ref, for tokens sampled from π_θ:

    ==== ================ ================================ ============================================
    kind value            its expectation                  expectation of its gradient
    ==== ================ ================================ ============================================
    k1   d                KL(π_θ‖π_ref); high variance     0: useless in the loss, right in the reward
    k2   d²/2             not the KL; close for small d    that of KL(π_θ‖π_ref): right in the loss
    k3   exp(−d) − 1 + d  KL(π_θ‖π_ref); ≥ 0, low variance that of KL(π_ref‖π_θ): same to first order
    abs  |d|              not the KL; ≥ it                 E[sign(d)·∇log π_θ]: of no KL, but pulls back
    k1+  d                that of k1                       that of k2: right
    k3+  exp(−d) − 1 + d  that of k3                       that of k2: right
    abs+ |d|              that of abs                      that of k2: right
    ==== ================ ================================ ============================================

    An estimator's gradient need not estimate the KL's gradient: it ignores that the samples depend on π_θ. The value of
    k2 is not the KL, but its gradient is the KL's; "+" combines this gradient with another estimator's value.

    With ``behaviour_logprobs`` the value is u·k, where u = π_θ/π_behav *keeps* its gradient, for tokens sampled from
    π_behav. u then carries the samples' dependence on π_θ: k1 and k3 are unbiased in value and gradient, also on stale
    data. "+" would count the dependence twice and is refused.

    Args:
        logprobs: log π_θ, with gradient.
        ref_logprobs: log π_ref.
        kind: a row of the table.
        mask: True at valid tokens; the result is exactly 0 elsewhere, even for NaN. Without it every position counts.
        behaviour_logprobs: log π_behav, for the importance-weighted form.

    Returns:
        [N, T] in at least float32, nats. Log-ratios are clamped to ±20 and have no gradient beyond. (verl clamps k3's
        value to ±10 as well.)

    Source: Schulman 2020, "Approximating KL Divergence"; k3 in GRPO: arXiv:2402.03300, equation 4; "+" is verl's name;
    importance-weighted k3: DeepSeek-V3.2, arXiv:2512.02556, section 3.1, "Unbiased KL Estimate".

    Raises:
        ConfigError: unknown ``kind``, or "+" with ``behaviour_logprobs``.
    """
    valid = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask
    d_NT = log_ratio(logprobs, ref_logprobs, valid)
    if not kind.endswith("+"):
        penalty_NT = _value(d_NT, kind)
        if behaviour_logprobs is None:
            return penalty_NT
        return log_ratio(logprobs, behaviour_logprobs, valid).exp() * penalty_NT
    if behaviour_logprobs is not None:
        raise ConfigError(f"actor.kl_loss_type={kind}: '+' and importance weights both mend the gradient; use one")
    through_NT = _value(d_NT, "k2")
    # The second term is 0, and has the gradient of k2.
    return _value(d_NT.detach(), kind) + (through_NT - through_NT.detach())


def _value(d_NT: Float[Tensor, "N T"], kind: str) -> Float[Tensor, "N T"]:
    match kind:
        case "k1" | "k1+":
            return d_NT
        case "k2":
            return 0.5 * d_NT.square()
        case "k3" | "k3+":
            return torch.expm1(-d_NT) + d_NT  # exp(−d) − 1 would lose its digits near 0
        case "abs" | "abs+":
            return d_NT.abs()
    raise ConfigError(f"actor.kl_loss_type: unknown estimator {kind!r}; known: {', '.join(KINDS)}")


@torch.no_grad()
def kl_in_reward(
    rewards: Float[Tensor, "N T"],
    logprobs: Float[Tensor, "N T"],
    ref_logprobs: Float[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    *,
    coef: float,
    kind: KLKind = "k1",
) -> tuple[Float[Tensor, "N T"], Float[Tensor, "N T"]]:
    """Return the penalised rewards r_t − coef·k_t, and k [N, T]; both exactly 0 where masked, without gradient.

    In the reward only an estimator's value matters: k1 is unbiased there, and so is the policy gradient with it.
    ``logprobs`` are those of the penalised policy (π_prox or π_behav; verl uses π_prox). ``rewards`` are per token,
    mostly 0.

    Source: InstructGPT, Ouyang et al. 2022, arXiv:2203.02155, equation 2 (the term of KL).

    Raises:
        ConfigError: unknown ``kind``, or one with "+", which only changes the gradient.
    """
    if kind.endswith("+"):
        raise ConfigError(f"a penalty in the reward has no gradient: '+' has no effect, use {kind.removesuffix('+')!r}")
    kl_NT = kl_penalty(logprobs, ref_logprobs, kind, mask)
    return clean(rewards, mask) - coef * kl_NT, kl_NT
