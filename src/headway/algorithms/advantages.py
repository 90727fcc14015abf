"""Advantages: from one reward per trajectory to how much better each trajectory was than expected.

Shape suffixes: S trajectories of one fetch, T response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headway.algorithms.registry import Registry

STD_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """All trajectories of one fetch, in any order. Groups may differ in size."""

    rewards: Float[Tensor, " S"]
    groups: Int[Tensor, " S"]
    """Which group each trajectory belongs to: any integers, equal within a group."""
    lengths: Int[Tensor, " S"]
    """Response tokens of each trajectory."""


AdvantageEstimator = Callable[..., Tensor]
"""``estimator(inputs, **params)``: [S], one advantage per trajectory, which all its tokens share, or [S, T], one per
token, padded to the longest trajectory. ``params`` are the estimator's own."""

ADVANTAGES: Registry[AdvantageEstimator] = Registry("advantage estimator", "algorithm.adv_estimator")


@ADVANTAGES.register("grpo")
def grpo(inputs: AdvantageInputs, *, normalize_by_std: bool = True) -> Float[Tensor, " S"]:
    """Group-relative advantages: (r − mean) / (std + 1e-6), over each group's own rewards.

    ``std`` is the unbiased one (n − 1). Without ``normalize_by_std`` the advantage is r − mean (Dr. GRPO, Liu et al.
    2025, arXiv:2503.20783). A group whose rewards are all equal says nothing about which answer is better: its
    advantages are exactly 0, and so is that of a group with a single answer.

    Source: DeepSeekMath, Shao et al. 2024, arXiv:2402.03300, section 4.1.2.
    """
    _, index_S = torch.unique(inputs.groups, return_inverse=True)
    n_groups = int(index_S.max()) + 1 if index_S.numel() else 0
    rewards_S = inputs.rewards.double()  # rewards of one group may differ by little: keep the differences exact
    size_G = torch.bincount(index_S, minlength=n_groups).double()
    mean_G = rewards_S.new_zeros(n_groups).index_add_(0, index_S, rewards_S) / size_G
    advantages_S = rewards_S - mean_G[index_S]
    if normalize_by_std:
        square_G = rewards_S.new_zeros(n_groups).index_add_(0, index_S, advantages_S.square())
        std_G = (square_G / (size_G - 1).clamp(min=1)).sqrt()
        advantages_S = advantages_S / (std_G[index_S] + STD_EPS)
    # By comparison, not by the computed deviation: the mean of equal rewards may be off by a rounding.
    low_G = rewards_S.new_full((n_groups,), torch.inf).scatter_reduce_(0, index_S, rewards_S, "amin")
    high_G = rewards_S.new_full((n_groups,), -torch.inf).scatter_reduce_(0, index_S, rewards_S, "amax")
    no_variance_S = (low_G == high_G)[index_S]
    return advantages_S.masked_fill(no_variance_S, 0.0).to(inputs.rewards.dtype)


def per_token(advantages: Tensor, lengths: Int[Tensor, " S"]) -> list[Float[Tensor, " T"]]:
    """What an estimator returned, [S] or [S, T], as one [T] tensor for each trajectory."""
    if advantages.ndim not in (1, 2) or advantages.shape[0] != lengths.shape[0]:
        raise ValueError(
            f"an advantage estimator returns [S] or [S, T] for S = {lengths.shape[0]} trajectories, "
            f"not {list(advantages.shape)}"
        )
    if advantages.ndim == 1:
        return [row.expand(length) for row, length in zip(advantages, lengths.tolist(), strict=True)]
    return [row[:length] for row, length in zip(advantages, lengths.tolist(), strict=True)]
