"""REINFORCE with a baseline that needs no critic (whitening, the greedy answer's reward), and GAE, which needs one.

Shape suffixes: S trajectories of one batch, T response tokens (padded).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from headway.algorithms.advantages.groups import Compaction, Groups, check_share, sums_ahead, whiten
from headway.algorithms.advantages.inputs import ADVANTAGES, AdvantageInputs, Advantages, from_outcomes_alone


@ADVANTAGES.register("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs, *, gamma: float = 1.0) -> Float[Tensor, "S T"]:
    """Return of each token, Σ_{u ≥ t} γ^(u − t)·r_u, whitened over all tokens of the batch that count.

    From one turn to the next, γ·``inputs.turn_discount`` replaces γ.

    Groups are not used: one answer per prompt is enough. A KL penalty per token, which the paper subtracts from the
    reward, goes into ``token_rewards``. Whitening divides by sqrt(var + 1e-8) with the unbiased variance, as in verl.

    Only tokens that count enter the exponent: holes are skipped, as in GAE. Libraries differ here. OpenRLHF also decays
    within a hole. verl ends the return at a hole, so text before a tool's output gets none of the final reward.

    Source: REINFORCE++, Hu et al. 2025, arXiv:2501.03262, global advantage normalization.

    Raises:
        ConfigError: γ is not in [0, 1].
        RunError: a reward is not finite.
    """
    check_share("gamma", gamma)
    compaction = Compaction.over(inputs.counts())
    returns_ST = sums_ahead(compaction.compact(inputs.rewards_of_tokens()), inputs.decay(compaction, gamma))
    returns_ST = compaction.expand(returns_ST)
    return whiten(returns_ST, compaction.counts.double()).to(inputs.rewards.dtype)


@ADVANTAGES.register("reinforce_plus_plus_baseline")
@from_outcomes_alone
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Tensor:
    """Advantages r − mean of the group, whitened over all tokens of the batch: an answer counts once per token.

    So a group with equal rewards gets −mean/std of the batch, which is 0 only if lengths and rewards are uncorrelated.
    The mean for a single answer is its own reward; in verl it is 0.

    Returns:
        [S], or [S, T] where the inputs have a mask.

    Source: REINFORCE++ with baseline, Hu et al. 2025, arXiv:2501.03262.

    Raises:
        RunError: a reward is not finite.
    """
    scores_S = inputs.scores()
    groups = Groups.of(inputs.groups)
    # Before whitening, which could blow up the rounding errors of equal rewards to advantages of size 1.
    centred_S = groups.centred(scores_S).masked_fill(groups.all_equal(scores_S), 0.0)
    return inputs.shared(whiten(centred_S, inputs.written().double()))


@ADVANTAGES.register("remax")
@from_outcomes_alone
def remax(inputs: AdvantageInputs) -> Tensor:
    """Advantages r − r_greedy, where r_greedy is the reward of the policy's greedy answer.

    With rewards of tokens: Σ_{u ≥ t} r_u − r_greedy, with r_u discounted by the turns between t and u.

    Returns:
        [S, T] if there are rewards of tokens or a mask, else [S].

    Source: ReMax, Li et al. 2024, arXiv:2310.10505.

    Raises:
        ConfigError: the inputs have no ``baselines``.
        RunError: a reward is not finite.
    """
    greedy_S = inputs.greedy_rewards("remax")
    if inputs.token_rewards is None:
        return inputs.shared(inputs.scores() - greedy_S)
    compaction = Compaction.over(inputs.counts())
    returns_ST = sums_ahead(compaction.compact(inputs.rewards_of_tokens()), inputs.decay(compaction, 1.0))
    returns_ST = compaction.expand(returns_ST)
    return (returns_ST - greedy_S[:, None]).masked_fill(~inputs.counts(), 0.0).to(inputs.rewards.dtype)


@ADVANTAGES.register("gae")
def gae(inputs: AdvantageInputs, *, gamma: float = 1.0, lam: float = 1.0, whitened: bool = True) -> Advantages:
    """Estimate A_t = Σ_i (γλ)^i · δ_{t+i} with δ_t = r_t + γ·V_{t+1} − V_t, and the critic's targets A_t + V_t.

    From one turn to the next, γ·``inputs.turn_discount`` replaces γ in both formulas.

    t numbers the tokens that count: holes are skipped, and V_{t+1} is the value at the policy's next token.
    After the last token, V is 0 if the answer is ``finished``. If it was cut off, the value of the state reached is
    unknown, and V of the last token is used instead.

    With ``whitened``, advantages (never returns) are whitened over all tokens of the batch, as in verl and TRL:
    (A − mean) / sqrt(var + 1e-8), with the unbiased variance. verl has no ``finished``: it treats all answers as such.

    Source: Schulman et al. 2016, arXiv:1506.02438, equation 16; unfinished answers: "extended GAE" of truncated PPO,
    Fan et al. 2025, arXiv:2506.15050.

    Raises:
        ConfigError: the inputs have no ``values``; γ or λ is not in [0, 1].
        RunError: a reward or a value is not finite.
    """
    check_share("gamma", gamma)
    check_share("lam", lam)
    compaction = Compaction.over(inputs.counts())
    values_ST = compaction.compact(inputs.values_of_tokens("gae"))
    rewards_ST = compaction.compact(inputs.rewards_of_tokens())

    next_ST = torch.zeros_like(values_ST)
    next_ST[:, :-1] = values_ST[:, 1:]
    if inputs.finished is not None:
        written_S = compaction.counts.sum(dim=1)
        cut_S = (~inputs.finished & (written_S > 0)).nonzero().squeeze(1)
        last_S = written_S[cut_S] - 1
        # An answer that was cut off would go on: its last value is used as the next one. A finished one would not.
        next_ST[cut_S, last_S] = values_ST[cut_S, last_S]
    # After the last token rewards and values are 0, and so are the terms of the sum.
    errors_ST = rewards_ST + inputs.decay(compaction, gamma) * next_ST - values_ST
    advantages_ST = sums_ahead(errors_ST, inputs.decay(compaction, gamma * lam))
    returns_ST = compaction.expand(advantages_ST + values_ST)
    advantages_ST = compaction.expand(advantages_ST)
    if whitened:
        advantages_ST = whiten(advantages_ST, compaction.counts.double())
    return Advantages(advantages_ST.to(inputs.rewards.dtype), returns_ST.to(inputs.rewards.dtype))
