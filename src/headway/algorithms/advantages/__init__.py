"""Advantage estimators: how much better each trajectory or token was than expected.

    inputs           what an estimator gets and returns; the registry
    groups           sums within groups, along tokens, over a batch
    group_relative   grpo, dr_grpo, rloo, opo, maxrl, grpo_passk, pass_at_k, gigpo
    reinforce        reinforce_plus_plus, reinforce_plus_plus_baseline, remax, gae

Importing the package registers all of them in `ADVANTAGES`.
"""

from headway.algorithms.advantages.group_relative import (
    STD_EPS,
    dr_grpo,
    gigpo,
    grpo,
    grpo_passk,
    maxrl,
    opo,
    pass_at_k,
    rloo,
)
from headway.algorithms.advantages.inputs import (
    ADVANTAGES,
    AdvantageEstimator,
    AdvantageInputs,
    Advantages,
    from_outcomes_alone,
    from_states,
    looks_at_states,
    looks_at_tokens,
    per_token,
)
from headway.algorithms.advantages.reinforce import gae, reinforce_plus_plus, reinforce_plus_plus_baseline, remax

__all__ = [
    "ADVANTAGES",
    "STD_EPS",
    "AdvantageEstimator",
    "AdvantageInputs",
    "Advantages",
    "dr_grpo",
    "from_outcomes_alone",
    "from_states",
    "gae",
    "gigpo",
    "grpo",
    "grpo_passk",
    "looks_at_states",
    "looks_at_tokens",
    "maxrl",
    "opo",
    "pass_at_k",
    "per_token",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
]
