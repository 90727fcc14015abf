"""Generalised advantage estimation, with a critic.

Shape suffixes: S trajectories of one fetch, T response tokens (padded).
"""

from __future__ import annotations

import torch

from headway.algorithms.advantages.inputs import ADVANTAGES, AdvantageInputs, Advantages
from headway.algorithms.advantages.tokens import Closed, check_share, sums_ahead, whiten


@ADVANTAGES.register("gae")
def gae(inputs: AdvantageInputs, *, gamma: float = 1.0, lam: float = 1.0, whitened: bool = True) -> Advantages:
    """Estimate A_t = Σ_i (γλ)^i · δ_{t+i} with δ_t = r_t + γ·V_{t+1} − V_t, and the critic's targets A_t + V_t.

    At the step from one turn to the next γ is γ·``inputs.turn_discount``, both here and there.

    t counts tokens that count: a hole is stepped over, and V_{t+1} is that of the next token which the policy wrote.
    After the last one V is 0 where the answer is ``finished``. Where it was cut off, the value of the state that was
    reached is not known, and the last known one, V of the last token, stands for it.

    With ``whitened``, advantages (never returns) are whitened over all tokens of the fetch, as in verl and TRL:
    (A − mean) / sqrt(var + 1e-8), the unbiased variance. verl knows no ``finished``: there, everything is.

    Source: Schulman et al. 2016, arXiv:1506.02438, equation 16; unfinished answers: "extended GAE" of truncated PPO,
    Fan et al. 2025, arXiv:2506.15050.

    Raises:
        ConfigError: the inputs have no ``values``; γ or λ is not in [0, 1].
        RunError: a reward or a value is not finite.
    """
    check_share("gamma", gamma)
    check_share("lam", lam)
    closed = Closed.over(inputs.counts())
    values_ST = closed.close(inputs.values_of_tokens("gae"))
    rewards_ST = closed.close(inputs.rewards_of_tokens())

    next_ST = torch.zeros_like(values_ST)
    next_ST[:, :-1] = values_ST[:, 1:]
    if inputs.finished is not None:
        written_S = closed.counts.sum(dim=1)
        cut_S = (~inputs.finished & (written_S > 0)).nonzero().squeeze(1)
        last_S = written_S[cut_S] - 1
        next_ST[cut_S, last_S] = values_ST[cut_S, last_S]
    # Behind the last token rewards and values are 0, and so is what is summed there.
    errors_ST = rewards_ST + inputs.decay(closed, gamma) * next_ST - values_ST
    advantages_ST = sums_ahead(errors_ST, inputs.decay(closed, gamma * lam))
    returns_ST = closed.reopen(advantages_ST + values_ST)
    advantages_ST = closed.reopen(advantages_ST)
    if whitened:
        advantages_ST = whiten(advantages_ST, closed.counts.double())
    return Advantages(advantages_ST.to(inputs.rewards.dtype), returns_ST.to(inputs.rewards.dtype))
