"""Mixing of sources: the rows of an epoch, and their order.

parts ─▶ quotas ─▶ each part's draws of this epoch ─▶ one order of all N

An epoch is N draws: as many as there are rows. Without weights each row is drawn once. With weights part i has the
quota qᵢ = N·wᵢ/Σw, rounded by largest remainder to a sum of N. Its draws are a stream of *passes*, each with all of its
rows once; epoch e takes the draws e·qᵢ … (e+1)·qᵢ − 1 of that stream. So no row of a part is repeated before all its
other rows were drawn, and an epoch follows from (seed, epoch) alone, without earlier draws.

Pure functions of the run's seed also draw the groups and held-out problems that leave a sample, so that a resumed run
draws the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from headway.errors import DataError

SHUFFLE_KEY, SPLIT_KEY, PASS_KEY = 1, 2, 3
"""Keys that keep one seed's streams of random numbers separate."""


def generator(seed: int, *key: int) -> np.random.Generator:
    """Make a random generator for one use, so that an order never depends on other uses of random numbers."""
    # A key, never seed + epoch: seed 3 in epoch 1 would have the order of seed 4 in epoch 0
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


@dataclass(frozen=True, slots=True)
class SourceShare:
    """One source's part of the records, which are stored source by source."""

    name: str
    rows: int
    weight: Fraction | None = None
    """The part's share of an epoch, relative to the other parts'. None, then for all parts: every row once."""


class Draws(NamedTuple):
    """Draws of one epoch, in order; N is their number."""

    indices: NDArray[np.int64]
    """Index of each draw's record, [N]."""
    turns: NDArray[np.int64]
    """Pass of each draw, [N], counted from its source's first pass in this epoch: (index, turn) is unique."""
    first: NDArray[np.bool_]
    """True if no earlier draw of any epoch had this row, [N]."""


def quotas(parts: Sequence[SourceShare]) -> list[int]:
    """Return the number of draws of each part in one epoch. They add up to the number of rows.

    Raises:
        DataError: a part has no rows, or its weight is too small for one draw per epoch.
    """
    total = sum(part.rows for part in parts)
    for part in parts:
        if part.rows == 0:
            raise DataError(f"{part.name}: all of its rows are held out (data.val_size); lower that, or give data.val")
    weights = [part.weight for part in parts if part.weight is not None]
    if not weights:
        return [part.rows for part in parts]
    assert len(weights) == len(parts), "the schema asks for the weights of all sources or of none"
    # Fractions: with floats weights such as 0.1 and 0.2 round to another number of draws
    exact = [total * weight / sum(weights) for weight in weights]
    result = [int(share) for share in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: (int(exact[i]) - exact[i], i))
    for i in by_remainder[: total - sum(result)]:
        result[i] += 1
    for part, quota in zip(parts, result, strict=True):
        if quota == 0:
            raise DataError(
                f"{part.name}: its weight {part.weight} of {sum(weights)} gives it none of an epoch's {total} prompts; "
                "raise it, or leave the source out"
            )
    return result


class Mixture:
    """The draws of every epoch, a function of (parts, seed, shuffle, epoch).

    Shuffled, an epoch's draws are in one random order. Otherwise the parts follow each other if there are no weights,
    and are spread evenly over the epoch if there are.

    Example:
        >>> parts = [SourceShare("a", 3, Fraction(1)), SourceShare("b", 3, Fraction(2))]
        >>> mixture = Mixture(parts, seed=0, shuffle=False)
        >>> mixture.quotas
        [2, 4]
        >>> sorted(mixture.epoch(0).indices.tolist())  # b's first row comes twice
        [0, 1, 3, 3, 4, 5]
    """

    def __init__(self, parts: Sequence[SourceShare], *, seed: int, shuffle: bool) -> None:
        """Set each part's quota. Raises `DataError` for a part without rows, or with a weight too small for one
        draw.
        """
        self.parts = tuple(parts)
        self.quotas = quotas(parts)
        self.rows = sum(self.quotas)
        """Number N of draws in an epoch."""
        self._seed = seed
        self._shuffle = shuffle

    def epoch(self, epoch: int) -> Draws:
        drawn = [self._draws(number, epoch) for number in range(len(self.parts))]
        offsets = np.cumsum([0, *(part.rows for part in self.parts[:-1])])
        order = self._order(epoch)
        return Draws(
            np.concatenate([rows + offset for (rows, _), offset in zip(drawn, offsets, strict=True)])[order],
            # From this epoch's first pass on: turns are a part of `Prompt.row`, and must not grow with each epoch.
            np.concatenate([passes - passes[0] for _, passes in drawn])[order],
            np.concatenate([passes == 0 for _, passes in drawn])[order],
        )

    def _draws(self, number: int, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return a part's rows and their passes in this epoch, [q] each, in the order of its stream."""
        rows, quota = self.parts[number].rows, self.quotas[number]
        passes, within = np.divmod(np.arange(epoch * quota, (epoch + 1) * quota, dtype=np.int64), rows)
        if self._shuffle and quota % rows:  # otherwise passes are whole, in the epoch's own order
            for one in range(int(passes[0]), int(passes[-1]) + 1):
                # The part of the pass that is in this epoch: the pass may have begun in the previous one.
                at = slice(max(one * rows - epoch * quota, 0), (one + 1) * rows - epoch * quota)
                within[at] = generator(self._seed, PASS_KEY, number, one).permutation(rows)[within[at]]
        return within, passes

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self._shuffle:
            return generator(self._seed, SHUFFLE_KEY, epoch).permutation(self.rows)
        if self.parts[0].weight is None:
            return np.arange(self.rows)
        # Stable: another sort breaks ties differently, and a resumed run would read another order
        return np.argsort(np.concatenate([(np.arange(quota) + 0.5) / quota for quota in self.quotas]), kind="stable")


def share_of(samples: int, groups_per_version: int) -> float:
    """Return the share of groups to draw, in [0, 1], so that about ``samples`` of each version's groups are drawn."""
    return min(1.0, samples / groups_per_version)


def place_of_group(seed: int, number: int) -> float:
    """Return a number in [0, 1) for group ``number``, evenly distributed; the group is drawn if it is below the
    share.
    """
    return _place(f"{seed} group {number}")


def drawn_problems(seed: int, rows: Sequence[int], samples: int) -> frozenset[int]:
    """Return the indices of ``samples`` held-out problems, or of all if there are fewer, to show at each validation.

    ``rows``: the problems' row numbers in the data, which key the draw.
    """
    first = sorted(range(len(rows)), key=lambda index: (_place(f"{seed} problem {rows[index]}"), index))
    return frozenset(first[:samples])


def _place(what: str) -> float:
    # 53 bits, which a float holds exactly: with all 64 the result could be rounded up to 1.
    return (xxhash.xxh3_64_intdigest(what.encode()) >> 11) / 2**53
