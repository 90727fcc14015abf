"""Sums, means and ranks within groups of any sizes, without a loop over groups; operations along response tokens.

Shape suffixes: S trajectories of one batch, G groups, T response tokens (padded).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headway.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Groups:
    """Partition of a batch's trajectories into groups."""

    index: Int[Tensor, " S"]
    """Index of each trajectory's group, 0 … G − 1."""
    sizes: Float[Tensor, " G"]
    """Number of trajectories of each group, float64."""

    @classmethod
    def of(cls, labels: Int[Tensor, " S"]) -> Groups:
        """Make groups from ``labels``: any integers, equal within a group."""
        _, index_S, size_G = torch.unique(labels, return_inverse=True, return_counts=True)
        return cls(index_S, size_G.double())

    def sum(self, values: Float[Tensor, " S"]) -> Float[Tensor, " G"]:
        return values.new_zeros(len(self.sizes)).index_add_(0, self.index, values)

    def mean(self, values: Float[Tensor, " S"]) -> Float[Tensor, " G"]:
        return self.sum(values) / self.sizes

    def centred(self, values: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
        """Subtract the group's mean from each of ``values`` [S]."""
        return values - self.mean(values)[self.index]

    def std(self, values: Float[Tensor, " S"]) -> Float[Tensor, " G"]:
        """Return the unbiased standard deviation (n − 1) of ``values`` in each group; 0 for a group of one."""
        return (self.sum(self.centred(values).square()) / (self.sizes - 1).clamp(min=1)).sqrt()

    def all_equal(self, values: Float[Tensor, " S"]) -> Bool[Tensor, " S"]:
        """Tell for each trajectory whether all values of its group are equal.

        Values are compared directly: the deviation of equal values may be above 0 by rounding.
        """
        low_G = values.new_full((len(self.sizes),), torch.inf).scatter_reduce_(0, self.index, values, "amin")
        high_G = values.new_full((len(self.sizes),), -torch.inf).scatter_reduce_(0, self.index, values, "amax")
        return (low_G == high_G)[self.index]

    def ascending(self, values: Float[Tensor, " S"]) -> tuple[Int[Tensor, " S"], Int[Tensor, " S"]]:
        """Return the trajectories sorted by (group, value), and in this order their ranks, from 0, in their groups."""
        by_value_S = values.argsort(stable=True)
        # Stable: within a group the order by value stays.
        order_S = by_value_S[self.index[by_value_S].argsort(stable=True)]
        size_G = self.sizes.long()
        start_G = size_G.cumsum(0) - size_G
        return order_S, torch.arange(len(values), device=values.device) - start_G[self.index[order_S]]


WHITEN_EPS = 1e-8


@dataclass(frozen=True, slots=True)
class Compaction:
    """Compaction of rows: the tokens that count move to the front, in order; zeros fill the rest."""

    counts: Bool[Tensor, "S T"]
    slots: Int[Tensor, "S T"]
    """Index to which each token that counts moves."""

    @classmethod
    def over(cls, counts: Bool[Tensor, "S T"]) -> Compaction:
        # Tokens that do not count share the slot of a token that counts: `compact` adds zeros there.
        return cls(counts, (counts.cumsum(dim=1) - 1).clamp(min=0))

    def compact(self, values: Float[Tensor, "S T"]) -> Float[Tensor, "S T"]:
        """Move the values of tokens that count to the front of their rows. All other values have to be 0."""
        return torch.zeros_like(values).scatter_add_(1, self.slots, values)

    def expand(self, values: Float[Tensor, "S T"]) -> Float[Tensor, "S T"]:
        """Move values back to the tokens that count: the inverse of `compact`. All other tokens get 0."""
        return torch.where(self.counts, values.gather(1, self.slots), 0.0)


def sums_ahead(values: Float[Tensor, "S T"], decay: float | Float[Tensor, "S T"]) -> Float[Tensor, "S T"]:
    """Compute Σ_{i ≥ 0} decay^i · values[t + i] for every t: the recursion y_t = x_t + decay · y_{t+1}.

    ``decay`` may be one number, or one for each t. It takes ⌈log2 T⌉ vectorised passes: after the pass with stride s,
    y_t holds the terms i < 2s. Nothing is divided by powers of the decay, so for decay in [0, 1] nothing overflows,
    however long the row.
    """
    result_ST = values.clone()
    stride = 1
    if isinstance(decay, Tensor):
        product_ST = decay.clone()
        """Product of the decays over ``stride`` tokens, from each t on."""
        while stride < values.shape[1]:
            result_ST[:, :-stride] += product_ST[:, :-stride] * result_ST[:, stride:]
            # Not in place: both sides overlap in memory.
            product_ST[:, :-stride] = product_ST[:, :-stride] * product_ST[:, stride:]
            stride *= 2
        return result_ST
    while stride < values.shape[1]:
        # The product is a new tensor, made before the sum is written: both sides of this line overlap in memory.
        result_ST[:, :-stride] += decay**stride * result_ST[:, stride:]
        stride *= 2
    return result_ST


def whiten(values: Float[Tensor, " *dims"], weights: Float[Tensor, " *dims"]) -> Float[Tensor, " *dims"]:
    """Whiten all values together: (x − mean) / sqrt(var + 1e-8), where a value of weight w counts w times.

    ``var`` is unbiased: Σ w·(x − mean)²/(Σw − 1). Values of weight 0 become 0. All values become 0 if Σw < 2, or if
    they are all equal.
    """
    values = torch.where(weights > 0, values, 0.0)  # a NaN at weight 0 would survive the products below
    total = weights.sum()
    counted = values[weights > 0]
    # `total` first: `min` of no values raises. The std of equal values is a rounding error: it must not divide them.
    if total < 2 or counted.min() == counted.max():
        return torch.zeros_like(values)
    mean = (weights * values).sum() / total
    variance = (weights * (values - mean).square()).sum() / (total - 1)
    return torch.where(weights > 0, (values - mean) * torch.rsqrt(variance + WHITEN_EPS), 0.0)


def check_share(name: str, value: float) -> None:
    """Check the value of the option ``name``. Raises `ConfigError` unless ``value`` is in [0, 1]."""
    if not 0 <= value <= 1:
        raise ConfigError(f"algorithm.{name}: {value} is not in [0, 1]")
