"""A policy loss of one's own: PPO with a penalty on the square of the log-ratio instead of a clip.

headway train recipes/demo.yaml algorithm.policy_loss.loss_mode=examples/loss.py:soft_trust_region
"""

from torch import Tensor

from headway.algorithms.losses import LossInputs, PolicyLossParams, log_ratio

STRENGTH = 2.0


def soft_trust_region(inputs: LossInputs, params: PolicyLossParams) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token losses [N, T], 0 where masked, and what is to be reported per token."""
    log_u = log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask)
    advantages = inputs.advantages.masked_fill(~inputs.mask, 0.0)
    penalty = STRENGTH * log_u.square()
    return -log_u.exp() * advantages + penalty, {"penalty": penalty.detach()}
