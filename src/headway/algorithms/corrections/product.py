"""The product of several corrections, as one correction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from headway.algorithms.corrections.base import Correction, CorrectionParams
from headway.algorithms.corrections.ratio import RatioCorrection, mask, truncate
from headway.algorithms.losses import LossInputs
from headway.errors import ConfigError


def product(corrections: Sequence[tuple[Correction, CorrectionParams]]) -> Correction:
    """Combine corrections by the product of their weights: a token that one of them rejects is rejected.

    Metrics of the same name are 1 where any of them is; ``correction/weight`` is the product.

    Raises:
        ConfigError: fewer than two corrections, or more than one that supplies the ratio itself (truncate, mask).
    """
    if len(corrections) < 2:
        raise ConfigError(f"a product of corrections takes at least two, not {len(corrections)}")
    if sum(map(_weighs, (correction for correction, _ in corrections))) > 1:
        raise ConfigError("two corrections that weigh by the ratio (truncate, mask) would square it; keep one of them")

    def combined(inputs: LossInputs, params: CorrectionParams) -> tuple[Float[Tensor, "N T"], dict[str, Tensor]]:
        weights, metrics = corrections[0][0](inputs, corrections[0][1])
        for correction, own in corrections[1:]:
            more_weights, more = correction(inputs, own)
            weights = weights * more_weights
            metrics = metrics | {n: torch.maximum(metrics[n], v) if n in metrics else v for n, v in more.items()}
        return weights, metrics | {"correction/weight": weights}

    return combined


def _weighs(correction: Correction) -> bool:
    if isinstance(correction, RatioCorrection):
        return correction.action in ("truncate", "mask")
    return correction in (truncate, mask)
