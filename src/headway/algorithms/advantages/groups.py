"""Sums, means and ranks within groups of any sizes, and what is measured with them, without a loop over groups.

Shape suffixes: S trajectories of one fetch, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of trajectories that belong together."""

    index: Int[Tensor, " S"]
    """Index of each trajectory's group, 0 … G − 1."""
    sizes: Float[Tensor, " G"]
    """Number of trajectories of each group, float64."""

    @classmethod
    def of(cls, labels: Int[Tensor, " S"]) -> Groups:
        """Make groups from any integers, equal within a group."""
        _, index_S, size_G = torch.unique(labels, return_inverse=True, return_counts=True)
        return cls(index_S, size_G.double())

    def sum(self, values: Float[Tensor, " S"]) -> Float[Tensor, " G"]:
        return values.new_zeros(len(self.sizes)).index_add_(0, self.index, values)

    def mean(self, values: Float[Tensor, " S"]) -> Float[Tensor, " G"]:
        return self.sum(values) / self.sizes

    def centred(self, values: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
        """Subtract from ``values`` [S] the mean of each one's group."""
        return values - self.mean(values)[self.index]

    def std(self, values: Float[Tensor, " S"]) -> Float[Tensor, " G"]:
        """The unbiased standard deviation (n − 1) of ``values`` in each group; 0 for a group of one."""
        return (self.sum(self.centred(values).square()) / (self.sizes - 1).clamp(min=1)).sqrt()

    def all_equal(self, values: Float[Tensor, " S"]) -> Bool[Tensor, " S"]:
        """Tell for each trajectory whether its whole group has one value.

        By comparison, not by a computed deviation: the mean of equal values may be off by a rounding.
        """
        low_G = values.new_full((len(self.sizes),), torch.inf).scatter_reduce_(0, self.index, values, "amin")
        high_G = values.new_full((len(self.sizes),), -torch.inf).scatter_reduce_(0, self.index, values, "amax")
        return (low_G == high_G)[self.index]

    def ascending(self, values: Float[Tensor, " S"]) -> tuple[Int[Tensor, " S"], Int[Tensor, " S"]]:
        """Trajectories in order of (group, value), and the rank within its group, from 0, of each in that order."""
        by_value_S = values.argsort(stable=True)
        order_S = by_value_S[self.index[by_value_S].argsort(stable=True)]
        size_G = self.sizes.long()
        start_G = size_G.cumsum(0) - size_G
        return order_S, torch.arange(len(values), device=values.device) - start_G[self.index[order_S]]
