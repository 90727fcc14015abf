"""Operations along the response tokens: closing holes, discounted sums, whitening over a whole fetch.

Shape suffixes: S trajectories of one fetch, T response tokens (padded).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headway.errors import ConfigError

WHITEN_EPS = 1e-8


@dataclass(frozen=True, slots=True)
class Closed:
    """Rows with their holes closed: the tokens that count moved to the front, in order, zeros behind."""

    counts: Bool[Tensor, "S T"]
    slots: Int[Tensor, "S T"]
    """The place to which each token that counts has moved."""

    @classmethod
    def over(cls, counts: Bool[Tensor, "S T"]) -> Closed:
        return cls(counts, (counts.cumsum(dim=1) - 1).clamp(min=0))

    def close(self, values: Float[Tensor, "S T"]) -> Float[Tensor, "S T"]:
        """Move the values of tokens that count to the front of their rows; all others have to be 0."""
        return torch.zeros_like(values).scatter_add_(1, self.slots, values)

    def reopen(self, values: Float[Tensor, "S T"]) -> Float[Tensor, "S T"]:
        """Move values back to the tokens that count: the inverse of `close`. All others get 0."""
        return torch.where(self.counts, values.gather(1, self.slots), 0.0)


def sums_ahead(values: Float[Tensor, "S T"], decay: float | Float[Tensor, "S T"]) -> Float[Tensor, "S T"]:
    """Sum Σ_{i ≥ 0} decay^i · values[t + i] for every t: what the recursion y_t = x_t + decay · y_{t+1} gives.

    ``decay`` may be one number, or one for each t. By doubling, in ⌈log2 T⌉ vectorised passes: after the pass with
    stride s, y_t holds the terms i < 2s. For decay in [0, 1] no term is ever divided by a power of it, so nothing
    overflows, however long the row.
    """
    result_ST = values.clone()
    stride = 1
    if isinstance(decay, Tensor):
        product_ST = decay.clone()
        """Product of the decays over ``stride`` tokens, from each t on."""
        while stride < values.shape[1]:
            result_ST[:, :-stride] += product_ST[:, :-stride] * result_ST[:, stride:]
            product_ST[:, :-stride] = product_ST[:, :-stride] * product_ST[:, stride:]
            stride *= 2
        return result_ST
    while stride < values.shape[1]:
        # The product is a new tensor, made before the sum is written: both sides of this line overlap in memory.
        result_ST[:, :-stride] += decay**stride * result_ST[:, stride:]
        stride *= 2
    return result_ST


def whiten(values: Float[Tensor, " *dims"], weights: Float[Tensor, " *dims"]) -> Float[Tensor, " *dims"]:
    """Whiten all values at once: (x − mean) / sqrt(var + 1e-8), each counted as often as its weight says.

    ``var`` is the unbiased one, Σ w·(x − mean)²/(Σw − 1). Values of weight 0 become 0. So do all where there is nothing
    to compare: where Σw < 2, or all values are equal.
    """
    values = torch.where(weights > 0, values, 0.0)
    total = weights.sum()
    counted = values[weights > 0]
    if total < 2 or counted.min() == counted.max():
        return torch.zeros_like(values)
    mean = (weights * values).sum() / total
    variance = (weights * (values - mean).square()).sum() / (total - 1)
    return torch.where(weights > 0, (values - mean) * torch.rsqrt(variance + WHITEN_EPS), 0.0)


def check_share(name: str, value: float) -> None:
    """Check an option's value. Raises `ConfigError` unless ``value`` is in [0, 1]."""
    if not 0 <= value <= 1:
        raise ConfigError(f"algorithm.{name}: {value} is not in [0, 1]")
