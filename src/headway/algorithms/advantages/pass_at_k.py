"""Estimators for the best of several answers instead of their mean: two that share a name in the literature only.

Shape suffixes: S trajectories of one fetch, G groups, N answers of the largest group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.algorithms.advantages.group_relative import STD_EPS
from headway.algorithms.advantages.groups import Groups
from headway.algorithms.advantages.inputs import ADVANTAGES, AdvantageInputs, from_outcomes_alone
from headway.errors import ConfigError


@ADVANTAGES.register("grpo_passk")
@from_outcomes_alone
def grpo_passk(inputs: AdvantageInputs, *, normalize_by_std: bool = True) -> Tensor:
    """Give a group's best answer (r_max − r_second) / (std + 1e-6), all others 0; after a tie, all get 0.

    r_max − r_second is what the group's maximum would lose without that answer: leave-one-out for pass@n, n being the
    group's size. ``std`` is the unbiased one of the group's rewards; without ``normalize_by_std`` it is left out.

    A group with one answer gets 0; verl refuses such a group.

    Returns:
        [S], or [S, T] where the inputs have a mask.

    Source: Tang et al. 2025, arXiv:2503.19595 (k-sample maximum, leave-one-out); the division by std is verl's.

    Raises:
        RunError: a reward is not finite.
    """
    scores_S = inputs.scores()
    groups = Groups.of(inputs.groups)
    order_S, rank_S = groups.ascending(scores_S)
    best_S = (rank_S == groups.sizes.long()[groups.index[order_S]] - 1) & (rank_S > 0)
    sorted_S = scores_S[order_S]
    lead_S = torch.where(best_S, sorted_S - sorted_S.roll(1), 0.0)
    if normalize_by_std:
        lead_S = lead_S / (groups.std(scores_S)[groups.index[order_S]] + STD_EPS)
    return inputs.shared(torch.zeros_like(scores_S).index_copy_(0, order_S, lead_S))


@ADVANTAGES.register("pass_at_k")
@from_outcomes_alone
def pass_at_k(inputs: AdvantageInputs, *, k: int = 4) -> Tensor:
    """Pass@k Training: (E[R | y in the subset] − E[R]) / (σ + 1e-6), R = best reward of k answers drawn from the group.

    Mean, σ and the expectation given that answer y is drawn are those over *all* subsets of size k of the group, in
    closed form. For rewards of 0 and 1, n answers and m failures among them:

        E[R]              = 1 − C(m, k) / C(n, k)             σ² = E[R]·(1 − E[R])
        E[R | a success]  = 1                                 E[R | a failure] = 1 − C(m − 1, k − 1) / C(n − 1, k − 1)

    Any other rewards are taken by their order, which contains this case. For k = 1 it is GRPO with the biased std. A
    group in which the best of k is always the same gets exactly 0; so does one of no more than k answers, which has a
    single subset.

    Returns:
        [S], or [S, T] where the inputs have a mask.

    Source: Chen et al. 2025, arXiv:2508.10751, the analytical derivation; the 1e-6 is in its code.

    Raises:
        ConfigError: k < 1.
        RunError: a reward is not finite.
    """
    if k < 1:
        raise ConfigError(f"pass_at_k draws k answers from a group: k must be at least 1, not {k}")
    scores_S = inputs.scores()
    groups = Groups.of(inputs.groups)
    order_S, rank_S = groups.ascending(scores_S)
    group_S, sorted_S = groups.index[order_S], scores_S[order_S]
    n_S = groups.sizes[group_S]
    k_S = n_S.clamp(max=k)

    is_best_S = (_log_choose(rank_S, k_S - 1) - _log_choose(n_S, k_S)).exp()
    mean_G = scores_S.new_zeros(len(groups.sizes)).index_add_(0, group_S, is_best_S * sorted_S)
    # Relative to the mean: probabilities add up to 1, so expectations of R − E[R] need no further subtraction.
    above_S = sorted_S - mean_G[group_S]
    variance_G = torch.zeros_like(mean_G).index_add_(0, group_S, is_best_S * above_S.square())

    # Given that y is drawn, R is y's own reward where the k − 1 others rank below, or that of a higher one, j, where
    # the k − 2 remaining are among the rank_j − 1 that rank below j and are not y.
    subsets_S = _log_choose(n_S - 1, k_S - 1)
    own_S = (_log_choose(rank_S, k_S - 1) - subsets_S).exp() * above_S
    other_S = (_log_choose(rank_S - 1, k_S - 2) - subsets_S).exp() * above_S
    other_GN = other_S.new_zeros(len(groups.sizes), int(groups.sizes.max()) + 1 if len(n_S) else 1)
    other_GN[group_S, rank_S] = other_S
    higher_GN = other_GN.flip(1).cumsum(1).flip(1)
    advantages_S = (own_S + higher_GN[group_S, rank_S + 1]) / (variance_G.sqrt()[group_S] + STD_EPS)

    worst_best_G = torch.zeros_like(mean_G).index_add_(0, group_S, sorted_S * (rank_S == k_S - 1))
    top_G = torch.zeros_like(mean_G).index_add_(0, group_S, sorted_S * (rank_S == n_S - 1))
    advantages_S = advantages_S.masked_fill((worst_best_G == top_G)[group_S], 0.0)
    return inputs.shared(torch.zeros_like(scores_S).index_copy_(0, order_S, advantages_S))


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    """Compute log C(n, k), float64; −inf where there is no such choice (k < 0 or k > n)."""
    n, k = n.double(), k.double()
    possible = (k >= 0) & (k <= n)
    value = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    return torch.where(possible, value, -torch.inf)
