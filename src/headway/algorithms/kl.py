"""Per-token estimates of KL(π_θ‖π_ref) from samples of π_θ, to be added to the loss."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headway.algorithms.losses import log_ratio
from headway.errors import ConfigError

KLKind = Literal["k1", "k2", "k3"]


def kl_penalty(
    logprobs: Float[Tensor, "N T"],
    ref_logprobs: Float[Tensor, "N T"],
    kind: KLKind,
    mask: Bool[Tensor, "N T"] | None = None,
) -> Float[Tensor, "N T"]:
    """Estimate KL(π_θ‖π_ref) per token. With d = log π_θ − log π_ref:

    ==== ================ ================================ ============================================
    kind value            as an estimate (on policy)       gradient, in expectation (on policy)
    ==== ================ ================================ ============================================
    k1   d                unbiased, high variance          0: useless as a loss, right inside a reward
    k2   d²/2             biased, low variance             that of KL(π_θ‖π_ref)
    k3   exp(−d) − 1 + d  unbiased, low variance, ≥ 0      that of KL(π_ref‖π_θ): equal to first order
    ==== ================ ================================ ============================================

    ``mask`` makes padding exactly 0 whatever it holds; without it every position counts. Log-ratios are clamped to ±20.

    Source: Schulman 2020, "Approximating KL Divergence"; k3 in GRPO: arXiv:2402.03300, equation 4.

    Raises:
        ConfigError: unknown ``kind``.
    """
    d_NT = log_ratio(logprobs, ref_logprobs, torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask)
    match kind:
        case "k1":
            return d_NT
        case "k2":
            return 0.5 * d_NT.square()
        case "k3":
            return torch.expm1(-d_NT) + d_NT
        case _:
            raise ConfigError(f"actor.kl_loss_type: unknown estimator {kind!r}; known: k1, k2, k3")
