"""Layouts: how many ways a model is split over devices, and which part of it each place of the split holds.

A model is the unit square. Pipeline parallelism cuts its layers, tensor parallelism cuts the sharded dimension of every
tensor, here called columns; data parallelism copies. Areas are exact fractions of the model.

    columns 0        ½        1
    layers 0 ┌────────┬────────┐
             │ stage 0│ stage 0│       pp = 2, tp = 2
           ½ ├────────┼────────┤
             │ stage 1│ stage 1│
           1 └────────┴────────┘
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from headway.errors import ConfigError


class Interval(NamedTuple):
    """The half-open interval [start, stop) of a dimension of length 1."""

    start: Fraction
    stop: Fraction

    @classmethod
    def piece(cls, index: int, pieces: int) -> Interval:
        """Return piece number ``index`` of the whole dimension, cut into ``pieces`` equal ones."""
        return cls(Fraction(index, pieces), Fraction(index + 1, pieces))

    @property
    def length(self) -> Fraction:
        """Length of the interval, stop − start; 0 when it is empty."""
        return max(self.stop - self.start, Fraction(0))

    def overlap(self, other: Interval) -> Interval:
        """Return the span that this interval shares with ``other``; it has length 0 when they share nothing."""
        return Interval(max(self.start, other.start), min(self.stop, other.stop))


class Rectangle(NamedTuple):
    """A rectangle of the model: an interval of its layers × an interval of its columns."""

    layers: Interval
    columns: Interval

    @property
    def size(self) -> Fraction:
        """Share of the model's bytes in the rectangle, all layers and all columns being equally large."""
        return self.layers.length * self.columns.length

    def overlap(self, other: Rectangle) -> Rectangle:
        """Return the rectangle that this one shares with ``other``; it has size 0 when they share nothing."""
        return Rectangle(self.layers.overlap(other.layers), self.columns.overlap(other.columns))

    def covers(self, other: Rectangle) -> bool:
        """Tell whether this rectangle contains ``other``."""
        return self.overlap(other).size == other.size


class Coordinates(NamedTuple):
    """A place in a layout: which pipeline stage, which data-parallel replica, which tensor-parallel shard."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout of pp × tp × dp devices: stages of the pipeline, shards of each tensor, replicas of the whole.

    Raises `ConfigError` for a degree below 1.
    """

    pp: int
    tp: int
    dp: int

    def __post_init__(self) -> None:
        if min(self.pp, self.tp, self.dp) < 1:
            raise ConfigError(f"the layout {self} has a degree below 1; pp, tp and dp must each be at least 1")

    def __str__(self) -> str:
        return f"pp={self.pp} tp={self.tp} dp={self.dp}"

    @property
    def world(self) -> int:
        """Number of devices in the layout."""
        return self.pp * self.tp * self.dp

    @property
    def shards(self) -> int:
        """Number of devices that hold one copy of the model between them."""
        return self.pp * self.tp

    def coordinates(self, rank: int) -> Coordinates:
        """The place of ``rank`` in Megatron's order: tp varies fastest, then dp, then pp.

        A tensor group is therefore consecutive ranks (one node, where it fits), and the stages of a pipeline are
        furthest apart. Raises `ValueError` for a rank that is not in 0 … world − 1.
        """
        if not 0 <= rank < self.world:
            raise ValueError(f"rank is {rank}; the layout {self} has the ranks 0 to {self.world - 1}")
        rest, tp = divmod(rank, self.tp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(pp=pp, dp=dp, tp=tp)

    def part(self, place: Coordinates) -> Rectangle:
        """The part of the model that the device at ``place`` holds; the same for every replica."""
        return Rectangle(Interval.piece(place.pp, self.pp), Interval.piece(place.tp, self.tp))
