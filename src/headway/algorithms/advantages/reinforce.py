"""REINFORCE with a baseline that costs no critic: whitening over the whole fetch, or the greedy answer's reward.

Shape suffixes: S trajectories of one fetch, T response tokens (padded).
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from headway.algorithms.advantages.groups import Groups
from headway.algorithms.advantages.inputs import ADVANTAGES, AdvantageInputs, from_outcomes_alone
from headway.algorithms.advantages.tokens import Closed, check_share, sums_ahead, whiten


@ADVANTAGES.register("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs, *, gamma: float = 1.0) -> Float[Tensor, "S T"]:
    """The return of each token, Σ_{u ≥ t} γ^(u − t)·r_u, whitened over all tokens of the fetch that count.

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
    closed = Closed.over(inputs.counts())
    returns_ST = closed.reopen(sums_ahead(closed.close(inputs.rewards_of_tokens()), inputs.decay(closed, gamma)))
    return whiten(returns_ST, closed.counts.double()).to(inputs.rewards.dtype)


@ADVANTAGES.register("reinforce_plus_plus_baseline")
@from_outcomes_alone
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Tensor:
    """Advantages r − mean of the group, whitened over all tokens of the fetch: an answer counts once for each token.

    So a group whose rewards are all equal ends at −mean/std of the fetch, which is 0 only where lengths do not go with
    rewards. A single answer is its own mean; verl takes 0 for its mean instead.

    Returns:
        [S], or [S, T] where the inputs have a mask.

    Source: REINFORCE++ with baseline, Hu et al. 2025, arXiv:2501.03262.

    Raises:
        RunError: a reward is not finite.
    """
    scores_S = inputs.scores()
    groups = Groups.of(inputs.groups)
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
    closed = Closed.over(inputs.counts())
    returns_ST = sums_ahead(closed.close(inputs.rewards_of_tokens()), inputs.decay(closed, 1.0))
    returns_ST = closed.reopen(returns_ST)
    return (returns_ST - greedy_S[:, None]).masked_fill(~inputs.counts(), 0.0).to(inputs.rewards.dtype)
