"""A correction of one's own: the weight fades with distance, on both sides, instead of being cut off.

headway train recipes/algorithms/decoupled-ppo.yaml algorithm.rollout_correction.name=examples/correction.py:fading
"""

import math

from torch import Tensor

from headway.algorithms.corrections import CorrectionParams
from headway.algorithms.losses import LossInputs, log_ratio


def fading(inputs: LossInputs, params: CorrectionParams) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights [N, T] on π_prox/π_behav, and what is to be reported per token. ``bound`` is where half is left."""
    distance = log_ratio(inputs.old_logprobs, inputs.behaviour_logprobs, inputs.mask).detach()
    weights = 1 / (1 + (distance / math.log(params.bound or 2.0)).square())
    return weights, {"correction/weight": weights}
