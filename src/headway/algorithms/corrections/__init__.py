"""Corrections: what to do with π_prox/π_behav, the ratio between the trust region's anchor and what was sampled from.

    LossInputs ─▶ correction ─▶ weights w [N, T] ─▶ w · policy loss (decoupled PPO); 0 rejects a token

The normaliser of the loss stays the number of tokens before any rejection. Shape suffixes as in `losses`.

| file | what |
|---|---|
| `ratio` | ``truncate``, ``mask``, ``reject``, ``veto``, ``off_policy_sequence_mask``; several as one; one by name |
| `prox` | π_prox by log-linear interpolation between versions |
"""

from headway.algorithms.corrections.prox import log_linear_prox
from headway.algorithms.corrections.ratio import (
    CORRECTIONS,
    Action,
    Correction,
    CorrectionParams,
    Level,
    RatioCorrection,
    build_correction,
    from_params,
    off_policy_sequence_mask,
    product,
    ratio_at,
    truncate,
)

__all__ = [
    "CORRECTIONS",
    "Action",
    "Correction",
    "CorrectionParams",
    "Level",
    "RatioCorrection",
    "build_correction",
    "from_params",
    "log_linear_prox",
    "off_policy_sequence_mask",
    "product",
    "ratio_at",
    "truncate",
]
