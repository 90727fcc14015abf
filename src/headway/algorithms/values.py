"""The critic's loss. Shape suffixes: N sequences of a micro-batch, T response tokens (padded)."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headway.algorithms.losses.base import clean


def value_loss(
    values: Float[Tensor, "N T"],
    old_values: Float[Tensor, "N T"],
    returns: Float[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    *,
    cliprange: float | None,
) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Loss ½·max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²) per token, exactly 0 where masked.

    As PPO's clipped policy loss does, the larger of the two makes the update pessimistic: beyond ε of where it was, a
    value gets no gradient that would take it further. ``cliprange=None``: ½·(V − R)².

    Args:
        values: V, the critic's, with gradient.
        old_values: V_old, the critic's before the batch's first step.
        returns: R, what `advantages.gae` returns; without gradient, like ``old_values``.
        mask: True at valid tokens.
        cliprange: ε, in the rewards' unit.

    Returns:
        Losses [N, T] in at least float32, and the metric ``vf_clipfrac``: 1 where the clipped term was the larger one.

    Source: Schulman et al., OpenAI baselines' PPO2 (value clipping); Huang et al. 2022, "The 37 Implementation Details
    of Proximal Policy Optimization", detail 9. verl has the same ½.
    """
    values_NT = clean(values, mask)
    old_NT, returns_NT = clean(old_values.detach(), mask), clean(returns.detach(), mask)
    plain_NT = (values_NT - returns_NT).square()
    if cliprange is None:
        return 0.5 * plain_NT, {"vf_clipfrac": torch.zeros_like(plain_NT)}
    clipped_NT = (old_NT + (values_NT - old_NT).clamp(-cliprange, cliprange) - returns_NT).square()
    is_clipped_NT = (clipped_NT > plain_NT).to(plain_NT.dtype).detach()
    return 0.5 * torch.maximum(plain_NT, clipped_NT), {"vf_clipfrac": is_clipped_NT}
