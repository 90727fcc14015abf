"""A correction of one's own: the weight fades with distance, on both sides, instead of being cut off.

headway train recipes/algorithms/decoupled-ppo.yaml algorithm.rollout_correction.name=examples/correction.py:fading
"""

from torch import Tensor

from headway.algorithms.corrections import CorrectionParams
from headway.algorithms.losses import LossInputs, log_ratio


def fading(inputs: LossInputs, params: CorrectionParams) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights [N, T] on π_prox/π_behav, and what is to be reported per token. ``bound`` is where half is left."""
    distance = log_ratio(inputs.old_logprobs, inputs.behaviour_logprobs, inputs.mask).detach() / (params.bound or 2.0)
    weights = 1 / (1 + distance.square())
    return weights, {"correction/weight": weights}
