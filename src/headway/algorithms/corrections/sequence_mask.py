"""Off-policy sequence masking: bad answers that the policy has already left are not pushed away further."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from headway.algorithms.corrections.base import CORRECTIONS, CorrectionParams
from headway.algorithms.losses import LossInputs, log_ratio
from headway.algorithms.losses.base import cleaned_advantages, sequence_mean
from headway.errors import ConfigError


@CORRECTIONS.register("off_policy_sequence_mask")
@torch.no_grad()
def off_policy_sequence_mask(
    inputs: LossInputs, params: CorrectionParams
) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
    """Mask answers: w = 0 where A < 0 and the mean over the answer of log(π_behav/π_θ) is above ``delta``, else 1.

    The mean is the k1 estimate of KL(π_behav‖π_θ), over the answer's valid tokens, in nats per token, and uses the
    *current* policy: it is computed anew at every step. A good answer is kept however old it is. An answer is an
    episode, with all its rows.

    Metrics: ``correction/weight`` is w, ``correction/rejected`` is 1 where it is 0.

    Source: DeepSeek-V3.2, DeepSeek-AI 2025, arXiv:2512.02556, section 3.1, "Off-Policy Sequence Masking". The paper
    gives no value of δ; TRL suggests to begin with 0.5.

    Raises:
        ConfigError: no ``delta``, or one that is not a positive number.
    """
    delta = check_delta(params.delta)
    drift_NT = -log_ratio(inputs.logprobs.detach(), inputs.behaviour_logprobs, inputs.mask)
    negative_NT = cleaned_advantages(inputs, drift_NT) < 0
    rejected_NT = negative_NT & (sequence_mean(drift_NT, inputs.mask, inputs.episodes) > delta)
    weights_NT = torch.ones_like(drift_NT).masked_fill(rejected_NT, 0.0)
    return weights_NT, {"correction/weight": weights_NT, "correction/rejected": rejected_NT.to(weights_NT.dtype)}


def check_delta(delta: float | None) -> float:
    """Return ``delta``. Raises `ConfigError` where it is no positive finite number."""
    if delta is None or not (math.isfinite(delta) and delta > 0):
        raise ConfigError(f"correction off_policy_sequence_mask needs a positive delta, not {delta} (try 0.5)")
    return delta
