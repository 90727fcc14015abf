"""An advantage of one's own: answers are compared by rank, so the size of rewards does not matter.

headway train recipes/demo.yaml algorithm.adv_estimator=examples/advantage.py:by_rank
"""

from torch import Tensor

from headway.algorithms.advantages import AdvantageInputs, from_outcomes_alone


@from_outcomes_alone
def by_rank(inputs: AdvantageInputs) -> Tensor:
    """[S] in [−1, 1]: how many answers of its group it beats, less how many beat it, as a share of the others."""
    same_group = inputs.groups[:, None] == inputs.groups
    difference = inputs.rewards[:, None] - inputs.rewards
    others = (same_group.sum(1) - 1).clamp(min=1)
    return (difference.sign() * same_group).sum(1) / others
