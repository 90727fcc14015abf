"""REINFORCE with a baseline that costs no critic (whitening, the greedy answer's reward), and GAE, which has one.

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
    """The return of each token, Σ_{u ≥ t} γ^(u − t)·r_u, whitened over all tokens of the batch that count.

    At the step from one turn to the next γ is γ·``inputs.turn_discount``.

    Groups play no part: one answer per prompt is enough. A KL penalty per token, which the paper subtracts from the
    reward, goes into ``token_rewards``. Whitening divides by sqrt(var + 1e-8) with the unbiased variance, as in verl.

    The exponent counts the tokens that count: a hole is stepped over, as in GAE. Libraries differ here. OpenRLHF decays
    within a hole, too; verl cuts the return off at one, and text before a tool's output gets none of the final reward.

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
    """Advantages r − mean of the group, whitened over all tokens of the batch: an answer counts once for each token.

    So a group whose rewards are all equal ends at −mean/std of the batch, which is 0 only where lengths do not go with
    rewards. A single answer is its own mean; verl takes 0 for its mean instead.

    Returns:
        [S], or [S, T] where the inputs have a mask.

    Source: REINFORCE++ with baseline, Hu et al. 2025, arXiv:2501.03262.

    Raises:
        RunError: a reward is not finite.
    """
    scores_S = inputs.scores()
    groups = Groups.of(inputs.groups)
    # Before whitening, which could make advantages of size 1 out of the rounding of equal rewards.
    centred_S = groups.centred(scores_S).masked_fill(groups.all_equal(scores_S), 0.0)
    return inputs.shared(whiten(centred_S, inputs.written().double()))


@ADVANTAGES.register("remax")
@from_outcomes_alone
def remax(inputs: AdvantageInputs) -> Tensor:
    """Advantages r − r_greedy, of the policy's own greedy answer; with rewards of tokens, Σ_{u ≥ t} r_u − r_greedy,
    r_u discounted by the turns between t and u.

    Returns:
        [S, T] where there are rewards of tokens or a mask, [S] otherwise.

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

    At the step from one turn to the next γ is γ·``inputs.turn_discount``, both here and there.

    t counts tokens that count: a hole is stepped over, and V_{t+1} is that of the next token which the policy wrote.
    After the last one V is 0 where the answer is ``finished``. Where it was cut off, the value of the state that was
    reached is not known, and the last known one, V of the last token, stands for it.

    With ``whitened``, advantages (never returns) are whitened over all tokens of the batch, as in verl and TRL:
    (A − mean) / sqrt(var + 1e-8), the unbiased variance. verl knows no ``finished``: there, everything is.

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
        # An answer that was cut off has a future: its last value stands for the next. A finished one has none.
        next_ST[cut_S, last_S] = values_ST[cut_S, last_S]
    # Behind the last token rewards and values are 0, and so is what is summed there.
    errors_ST = rewards_ST + inputs.decay(compaction, gamma) * next_ST - values_ST
    advantages_ST = sums_ahead(errors_ST, inputs.decay(compaction, gamma * lam))
    returns_ST = compaction.expand(advantages_ST + values_ST)
    advantages_ST = compaction.expand(advantages_ST)
    if whitened:
        advantages_ST = whiten(advantages_ST, compaction.counts.double())
    return Advantages(advantages_ST.to(inputs.rewards.dtype), returns_ST.to(inputs.rewards.dtype))
