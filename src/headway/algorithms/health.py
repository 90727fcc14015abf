"""How far the policy that is trained has moved from the one that sampled: importance ratios w = π_θ/π_behav, as sums.

Sums add up over micro-batches and ranks; what `MAX_REDUCED` names is reduced by its maximum instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headway.algorithms.losses import log_ratio

MAX_REDUCED = frozenset({"ratio_max"})


@torch.no_grad()
def ratio_sums(
    logprobs: Float[Tensor, "N T"], behaviour_logprobs: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]
) -> dict[str, Float[Tensor, ""]]:
    """Σw, Σw², number of valid tokens, Σ of k3 estimates of KL(π_behav‖π_θ), and the largest w; float64 scalars.

    Float64, because w² spans 17 orders of magnitude within the clamp of ±20.
    """
    log_ratio_NT = log_ratio(logprobs, behaviour_logprobs, mask).double()
    valid_NT = mask.double()
    ratio_NT = log_ratio_NT.exp() * valid_NT
    return {
        "count": valid_NT.sum(),
        "ratio": ratio_NT.sum(),
        "ratio_squared": ratio_NT.square().sum(),
        "kl": (torch.expm1(log_ratio_NT) - log_ratio_NT).sum(),
        "ratio_max": ratio_NT.max() if ratio_NT.numel() else ratio_NT.new_zeros(()),
    }


def merge_sums(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The sums of several micro-batches as one."""
    merged: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            else:
                merged[name] = torch.maximum(merged[name], value) if name in MAX_REDUCED else merged[name] + value
    return merged


def health(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Metrics from `ratio_sums`, reduced; empty when there was no valid token.

    - ``offpolicy/ess``: effective sample size as a share of the tokens, (Σw)²/(N·Σw²), in (0, 1]; 1 is on policy
      (Kong 1992).
    - ``offpolicy/kl``: mean per-token KL(π_behav‖π_θ), nats, k3 estimate.
    - ``offpolicy/ratio_max``: the largest w.
    """
    count = float(sums["count"])
    if count == 0:
        return {}
    return {
        "offpolicy/ess": float(sums["ratio"]) ** 2 / (count * float(sums["ratio_squared"])),
        "offpolicy/kl": float(sums["kl"]) / count,
        "offpolicy/ratio_max": float(sums["ratio_max"]),
    }
