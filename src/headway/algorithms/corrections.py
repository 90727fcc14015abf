"""Corrections: what to do with π_prox/π_behav, the ratio between the trust region's anchor and what was sampled from.

    LossInputs ─▶ correction ─▶ weights w [N, T] ─▶ w · policy loss (decoupled PPO); 0 rejects a token

The normaliser of the loss stays the number of tokens before any rejection. Shape suffixes as in `losses`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from headway.algorithms.losses import LossInputs, log_ratio
from headway.algorithms.registry import Registry


@dataclass(frozen=True, slots=True)
class CorrectionParams:
    """``bound`` is the largest π_prox/π_behav that counts in full; always of this ratio, never of its inverse."""

    bound: float


Correction = Callable[[LossInputs, CorrectionParams], tuple[Tensor, dict[str, Tensor]]]
"""Weights [N, T] ≥ 0 without gradient, and named per-token metrics [N, T]. Values at masked positions do not count."""

CORRECTIONS: Registry[Correction] = Registry("correction", "algorithm.rollout_correction.name")


@CORRECTIONS.register("truncate")
@torch.no_grad()
def truncate(inputs: LossInputs, params: CorrectionParams) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Truncated importance sampling, per token: w = min(π_prox/π_behav, bound).

    Metrics: ``correction/weight`` is w, ``correction/truncated`` is 1 where the bound was the smaller one.

    Source: truncation, Ionides 2008 (Journal of Computational and Graphical Statistics 17.2), equation 3; as the weight
    of decoupled PPO, Hilton et al. 2021, arXiv:2110.00641, and AReaL, Fu et al. 2025, arXiv:2505.24298, equation 5.
    """
    ratio_NT = log_ratio(inputs.old_logprobs, inputs.behaviour_logprobs, inputs.mask).exp()
    weights_NT = ratio_NT.clamp(max=params.bound)
    truncated_NT = (ratio_NT > params.bound).to(ratio_NT.dtype)
    return weights_NT, {"correction/weight": weights_NT, "correction/truncated": truncated_NT}
