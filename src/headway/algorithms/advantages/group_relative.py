"""Group-relative estimators: each answer is compared with the other answers to its prompt.

A group with a single answer, or with equal rewards, does not show which answer is better: its advantages are exactly 0
in every estimator of this file. verl gives the only answer of a group its raw reward instead.

`grpo_passk` and `pass_at_k` optimise the best of several answers instead of their mean; `gigpo` also compares each turn
with turns in the same state.

Shape suffixes: S trajectories of one batch, G groups, N answers of the largest group; T response tokens (padded), K
turns (padded).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from headway.algorithms.advantages.groups import Groups
from headway.algorithms.advantages.inputs import ADVANTAGES, AdvantageInputs, from_outcomes_alone, from_states
from headway.errors import ConfigError, RunError

STD_EPS = 1e-6


def above_mean(scores: Float[Tensor, " S"], groups: Groups, *, by_std: bool) -> Float[Tensor, " S"]:
    """Subtract the group's mean from each of ``scores`` [S], and divide by the group's std + 1e-6 if ``by_std``.

    Exactly 0 in a group with equal scores.
    """
    above_S = groups.centred(scores)
    if by_std:
        above_S = above_S / (groups.std(scores)[groups.index] + STD_EPS)
    # The mean of equal rewards may differ from them by rounding, but such a group has to give exactly 0.
    return above_S.masked_fill(groups.all_equal(scores), 0.0)


@ADVANTAGES.register("grpo")
@from_outcomes_alone
def grpo(inputs: AdvantageInputs, *, normalize_by_std: bool = True) -> Tensor:
    """Group-relative advantages: (r − mean) / (std + 1e-6), over each group's own rewards.

    ``std`` is unbiased (n − 1), as in verl, TRL and OpenRLHF. Without ``normalize_by_std`` this is `dr_grpo`.

    Returns:
        [S], or [S, T] where the inputs have a mask.

    Source: DeepSeekMath, Shao et al. 2024, arXiv:2402.03300, section 4.1.2.

    Raises:
        RunError: a reward is not finite.
    """
    return inputs.shared(above_mean(inputs.scores(), Groups.of(inputs.groups), by_std=normalize_by_std))


@ADVANTAGES.register("dr_grpo")
@from_outcomes_alone
def dr_grpo(inputs: AdvantageInputs) -> Tensor:
    """Advantages r − mean, over each group's rewards, without GRPO's division, which favours easy and hard prompts.

    The other half of Dr. GRPO is the aggregation: its normaliser must not depend on an answer's length.

    Returns:
        [S], or [S, T] where the inputs have a mask.

    Source: "Understanding R1-Zero-like training", Liu et al. 2025, arXiv:2503.20783.

    Raises:
        RunError: a reward is not finite.
    """
    return inputs.shared(above_mean(inputs.scores(), Groups.of(inputs.groups), by_std=False))


@ADVANTAGES.register("rloo")
@from_outcomes_alone
def rloo(inputs: AdvantageInputs) -> Tensor:
    """Leave-one-out advantages: r minus the mean of the *other* answers' rewards, equal to n/(n − 1) · (r − mean).

    The baseline does not depend on the answer itself, so the gradient is unbiased.

    Returns:
        [S], or [S, T] where the inputs have a mask.

    Source: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; for language models Ahmadian et al.
    2024, arXiv:2402.14740.

    Raises:
        RunError: a reward is not finite.
    """
    scores_S = inputs.scores()
    groups = Groups.of(inputs.groups)
    factor_G = groups.sizes / (groups.sizes - 1).clamp(min=1)  # a group of one has no others: no division by 0
    advantages_S = factor_G[groups.index] * groups.centred(scores_S)
    return inputs.shared(advantages_S.masked_fill(groups.all_equal(scores_S), 0.0))


@ADVANTAGES.register("opo")
@from_outcomes_alone
def opo(inputs: AdvantageInputs) -> Tensor:
    """Advantages r − Σ l·r / Σ l over the group, where l is the number of tokens that the policy wrote.

    The baseline with the least gradient variance is the mean of r weighted by ‖∇ log π(y)‖². OPO assumes that this
    weight is proportional to the answer's length. The derivation, and the paper's training, is exactly on policy.

    Returns:
        [S], or [S, T] where the inputs have a mask.

    Source: Hao et al. 2025, arXiv:2505.23585, the optimal reward baseline in its form for language models.

    Raises:
        RunError: a reward is not finite.
    """
    scores_S = inputs.scores()
    groups = Groups.of(inputs.groups)
    written_S = inputs.written().double()
    baseline_G = groups.sum(written_S * scores_S) / groups.sum(written_S).clamp(min=1)
    advantages_S = scores_S - baseline_G[groups.index]
    return inputs.shared(advantages_S.masked_fill(groups.all_equal(scores_S), 0.0))


@ADVANTAGES.register("maxrl")
@from_outcomes_alone
def maxrl(inputs: AdvantageInputs) -> Tensor:
    """Advantages (r − mean) / (mean + 1e-6), over each group's rewards; 0 if all answers failed, or all succeeded.

    For rewards of 0 and 1, the group's gradient (1/n)·Σ A·∇ log π is the mean of ∇ log π over the successes less that
    over all n answers. With success probability p its expectation is the gradient of −Σ_{k=1..n−1} (1 − p)^k / k, which
    tends to log p: a prompt weighs up to 1/p, while expected reward weighs it by 1. (The paper's theorem is about the
    mean over successes alone, which reaches order n; with 0 for groups without a success, the order is n − 1.)

    Returns:
        [S], or [S, T] where the inputs have a mask.

    Source: "Maximum Likelihood Reinforcement Learning", Tajwar et al. 2026, arXiv:2602.02710, algorithm 1, step 8. The
    1e-6 comes from the authors' code and SkyRL.

    Raises:
        RunError: a reward is not finite, or negative: a negative mean would reverse the gradient.
    """
    scores_S = inputs.scores()
    if (scores_S < 0).any():
        index = int((scores_S < 0).nonzero()[0])
        raise RunError(
            f"maxrl: the reward of trajectory {index} (of {len(scores_S)} in the batch) is {float(scores_S[index])}. A "
            "group's mean reward stands for its rate of success: rewards must not be negative; give 0 and 1"
        )
    groups = Groups.of(inputs.groups)
    advantages_S = groups.centred(scores_S) / (groups.mean(scores_S)[groups.index] + STD_EPS)
    return inputs.shared(advantages_S.masked_fill(groups.all_equal(scores_S), 0.0))


@ADVANTAGES.register("grpo_passk")
@from_outcomes_alone
def grpo_passk(inputs: AdvantageInputs, *, normalize_by_std: bool = True) -> Tensor:
    """Advantage (r_max − r_second) / (std + 1e-6) for a group's best answer, and 0 for all others; after a tie, all 0.

    r_max − r_second is the drop of the group's maximum without its best answer: leave-one-out for pass@n, with n the
    group's size. ``std`` is the unbiased one of the group's rewards; without ``normalize_by_std`` nothing is divided.

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
    # `roll` compares each group's lowest answer with another group's score: harmless, as it is never the best.
    lead_S = torch.where(best_S, sorted_S - sorted_S.roll(1), 0.0)
    if normalize_by_std:
        lead_S = lead_S / (groups.std(scores_S)[groups.index[order_S]] + STD_EPS)
    return inputs.shared(torch.zeros_like(scores_S).index_copy_(0, order_S, lead_S))


@ADVANTAGES.register("pass_at_k")
@from_outcomes_alone
def pass_at_k(inputs: AdvantageInputs, *, k: int = 4) -> Tensor:
    """Pass@k Training: (E[R | y in the subset] − E[R]) / (σ + 1e-6), R = best reward of k answers drawn from the group.

    E[R], σ and E[R | y in the subset] are taken over *all* subsets of size k of the group, in closed form. For rewards
    of 0 and 1, with n answers and m failures among them:

        E[R]              = 1 − C(m, k) / C(n, k)             σ² = E[R]·(1 − E[R])
        E[R | a success]  = 1                                 E[R | a failure] = 1 − C(m − 1, k − 1) / C(n − 1, k − 1)

    Other rewards are handled by their order, which includes this case. For k = 1 it is GRPO with the biased std. A
    group gets exactly 0 if the best of k is always the same, or if it has at most k answers, hence a single subset.

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
    k_S = n_S.clamp(max=k)  # a group of fewer than k answers is drawn as a whole

    is_best_S = (_log_choose(rank_S, k_S - 1) - _log_choose(n_S, k_S)).exp()
    mean_G = scores_S.new_zeros(len(groups.sizes)).index_add_(0, group_S, is_best_S * sorted_S)
    # Relative to the mean: probabilities add up to 1, so expectations of R − E[R] need no further subtraction.
    above_S = sorted_S - mean_G[group_S]
    variance_G = torch.zeros_like(mean_G).index_add_(0, group_S, is_best_S * above_S.square())

    # Given that y is drawn, R is y's own reward if the k − 1 others rank below y. Else it is the reward of a higher
    # answer j, and the k − 2 remaining answers are among the rank_j − 1 that rank below j and are not y.
    subsets_S = _log_choose(n_S - 1, k_S - 1)
    own_S = (_log_choose(rank_S, k_S - 1) - subsets_S).exp() * above_S
    other_S = (_log_choose(rank_S - 1, k_S - 2) - subsets_S).exp() * above_S
    # One column more than there are ranks: no answer is above the group's best, so its sum is 0.
    other_GN = other_S.new_zeros(len(groups.sizes), int(groups.sizes.max()) + 1 if len(n_S) else 1)
    other_GN[group_S, rank_S] = other_S
    higher_GN = other_GN.flip(1).cumsum(1).flip(1)
    advantages_S = (own_S + higher_GN[group_S, rank_S + 1]) / (variance_G.sqrt()[group_S] + STD_EPS)

    worst_best_G = torch.zeros_like(mean_G).index_add_(0, group_S, sorted_S * (rank_S == k_S - 1))
    top_G = torch.zeros_like(mean_G).index_add_(0, group_S, sorted_S * (rank_S == n_S - 1))
    # If every subset contains an answer as good as the group's best, R never varies: only rounding is left.
    advantages_S = advantages_S.masked_fill((worst_best_G == top_G)[group_S], 0.0)
    return inputs.shared(torch.zeros_like(scores_S).index_copy_(0, order_S, advantages_S))


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    """Compute log C(n, k) in float64; −inf if k < 0 or k > n."""
    n, k = n.double(), k.double()
    possible = (k >= 0) & (k <= n)
    value = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    # `value` is infinite or NaN elsewhere: lgamma has poles at 0, −1 and below.
    return torch.where(possible, value, -torch.inf)


@ADVANTAGES.register("gigpo")
@from_states
def gigpo(inputs: AdvantageInputs, *, normalize_by_std: bool = True, step_weight: float = 1.0) -> Tensor:
    """Group-in-group advantages: A^E + ``step_weight`` · A^S for each turn, shared by all its tokens.

    A^E compares episodes as `grpo` does: (r − mean) / (std + 1e-6), where r is an episode's undiscounted total reward.

    A^S compares the turns of a group that were taken in the same state: (R − mean) / (std + 1e-6), where
    R_t = Σ_{k ≥ t} γ^(k−t)·r_k over the turns k of the episode and γ = ``inputs.turn_discount``. It is exactly 0 if no
    other turn was taken in the same state, or if all R are equal.

    Without ``normalize_by_std`` neither term is divided.

    Returns:
        [S, T], 0 at tokens that do not count.

    Source: "Group-in-Group Policy Optimization for LLM Agent Training", Feng et al. 2025, arXiv:2505.10978, equations
    3, 7 and 8.

    Raises:
        ConfigError: the inputs have no ``states``; ``step_weight`` is negative.
        RunError: a reward is not finite.
    """
    if step_weight < 0:
        raise ConfigError(f"algorithm.step_weight: {step_weight} is negative; give 0 or more")
    states_ST = inputs.states_of_tokens("gigpo")
    counts_ST = inputs.counts()
    rewards_ST = inputs.rewards_of_tokens()
    turns_ST = torch.zeros_like(states_ST) if inputs.turns is None else inputs.turns
    turns = int(torch.where(counts_ST, turns_ST, 0).max()) + 1 if counts_ST.any() else 0
    # Tokens that do not count go to an additional turn, which is cut off.
    place_ST = torch.where(counts_ST, turns_ST, turns)
    rewards_SK = rewards_ST.new_zeros(len(counts_ST), turns + 1).scatter_add_(1, place_ST, rewards_ST)[:, :turns]
    states_SK = states_ST.new_zeros(len(counts_ST), turns + 1).scatter_(1, place_ST, states_ST)[:, :turns]
    taken_SK = counts_ST.new_zeros(len(counts_ST), turns + 1).scatter_(1, place_ST, True)[:, :turns]

    of_group_SK = inputs.groups[:, None].expand(states_SK.shape)
    labels_N = torch.stack([of_group_SK[taken_SK], states_SK[taken_SK]]).unique(dim=1, return_inverse=True)[1]
    returns_N = _returns(rewards_SK, inputs.turn_discount)[taken_SK]
    # With the additional turn, whose 0 goes to tokens that do not count.
    steps_SK = rewards_ST.new_zeros(len(counts_ST), turns + 1)
    steps_SK[:, :turns][taken_SK] = above_mean(returns_N, Groups.of(labels_N), by_std=normalize_by_std)

    scores_S = replace(inputs, turn_discount=1.0).scores()  # undiscounted: only returns of turns are discounted
    episodes_S = above_mean(scores_S, Groups.of(inputs.groups), by_std=normalize_by_std)
    advantages_ST = episodes_S[:, None] + step_weight * steps_SK.gather(1, place_ST)
    return torch.where(counts_ST, advantages_ST, 0.0).to(inputs.rewards.dtype)


def _returns(rewards: Float[Tensor, "S K"], discount: float) -> Float[Tensor, "S K"]:
    """Return the discounted sum of the rewards from each turn on.

    It adds turn by turn from the end: equal rewards at equal distances give equal sums, to the last bit.
    """
    returns_SK = rewards.clone()
    for turn in reversed(range(rewards.shape[1] - 1)):
        returns_SK[:, turn] += discount * returns_SK[:, turn + 1]
    return returns_SK
