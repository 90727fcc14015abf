"""π_prox without a forward pass: log-linear interpolation between the policy that sampled and the one that is trained.

Of the three ways to get log π_prox, recomputing it is a forward pass, and taking π_behav for it is nothing to compute.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headway.algorithms.losses.base import clean


@torch.no_grad()
def log_linear_prox(
    behaviour_logprobs: Float[Tensor, "N T"],
    logprobs: Float[Tensor, "N T"],
    versions: Int[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    *,
    prox_version: float,
    version: float,
) -> Float[Tensor, "N T"]:
    """Estimate log π_prox per token: log π_behav + α·(log π_θ − log π_behav), α = (v_prox − v_behav)/(v_θ − v_behav).

    Exact where log π moves linearly with the version. A token of v_behav = v_prox (or later) has exactly π_behav, and
    where v_θ = v_prox every older token has exactly π_θ. α is clamped to [0, 1].

    Args:
        behaviour_logprobs: log π_behav at each token's own version.
        logprobs: log π_θ of the current policy; its gradient is not followed.
        versions: v_behav, the version that sampled each token.
        mask: True at valid tokens; elsewhere the result is 0, whatever stood there.
        prox_version: v_prox, the version whose policy anchors the trust region.
        version: v_θ ≥ v_prox; may be a fraction: V + k/K after k of the K optimizer steps of version V.

    Returns:
        log π_prox [N, T] in at least float32, without gradient.

    Source: AReaL's ``loglinear`` approximation of decoupled PPO, which has v_prox = v_θ − 1.

    Raises:
        ValueError: ``version`` < ``prox_version``: the anchor would lie in the future.
    """
    if version < prox_version:
        raise ValueError(f"the current version {version:g} is before that of π_prox, {prox_version:g}")
    versions_NT = versions.double().masked_fill(~mask, prox_version)
    distance_NT = version - versions_NT
    share_NT = (prox_version - versions_NT) / torch.where(distance_NT > 0, distance_NT, 1.0)
    alpha_NT = torch.where(distance_NT > 0, share_NT, 0.0).clamp(0.0, 1.0)
    start_NT, end_NT = clean(behaviour_logprobs, mask), clean(logprobs, mask)
    dtype = torch.promote_types(start_NT.dtype, end_NT.dtype)
    # lerp is exact at both ends, which start + α·(end − start) is not at α = 1.
    return torch.lerp(start_NT.to(dtype), end_NT.to(dtype), alpha_NT.to(dtype))
