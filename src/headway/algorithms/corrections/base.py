"""Parts that all corrections share: parameters, the callable's type, the registry. Shape suffixes as in `losses`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from headway.algorithms.losses import LossInputs
from headway.algorithms.losses.base import per_token_results
from headway.algorithms.registry import Registry

Level = Literal["token", "sequence", "geometric"]
"""The ratio that a bound is for: each token's own; the product over the answer; its geometric mean over the answer."""


@dataclass(frozen=True, slots=True)
class CorrectionParams:
    """The parameters of a correction. All bounds are on π_prox/π_behav, never on its inverse."""

    bound: float | None = None
    """Largest ratio that counts (in full, for ``truncate``; at all, for ``mask``, ``reject`` and ``veto``)."""
    lower: float | None = None
    """Smallest ratio that counts; None: no lower bound."""
    level: Level = "token"
    veto: float | None = None
    """The bound of a veto, beside any other action: an answer with a token whose ratio is below this is rejected
    whole."""
    delta: float | None = None
    """Largest mean of log(π_behav/π_θ) of an answer, in nats per token, for ``off_policy_sequence_mask``."""


Correction = Callable[[LossInputs, CorrectionParams], tuple[Tensor, dict[str, Tensor]]]
"""Function that returns weights [N, T] ≥ 0 and metrics [N, T] by name, without gradient. Masked values do not count."""

CORRECTIONS: Registry[Correction] = Registry(
    "correction",
    "algorithm.rollout_correction.name",
    expected="the weight of each token, shaped [N, T] as inputs.logprobs, and a dictionary of metrics like that",
    fits=per_token_results,
)
