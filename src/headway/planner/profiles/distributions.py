"""Distributions of numbers in a profile, other than lengths of answers: turns, seconds of a step, tokens that it adds.

kind        keys                  a draw
constant    value                 is the value
lognormal   mean, sigma, max      is exp(normal), cut at ``max``: heavy-tailed
recorded    values                is that of one recorded episode, and the same one wherever the episode asks
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist, fmean
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from headway.config.sections.section import Section

_normal = NormalDist()


class ConstantNumber(Section):
    kind: Literal["constant"]
    value: float = Field(ge=0)


class LognormalNumber(Section):
    """Log-normal numbers, cut at ``max``. Each draw is independent of all others."""

    kind: Literal["lognormal"]
    mean: float = Field(gt=0)
    """Mean of the distribution before the cut."""
    sigma: float = Field(ge=0, le=4)
    """Standard deviation of the logarithm."""
    max: float = Field(gt=0)


class RecordedNumber(Section):
    """Measured numbers, one for each recorded episode, as means over its turns where it had several.

    A simulated episode takes all of its recorded numbers from the same recorded episode.
    """

    kind: Literal["recorded"]
    values: list[Annotated[float, Field(ge=0)]] = Field(min_length=1)


def _kind_of(value: Any) -> Any:
    return value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)


NumberProfile = Annotated[
    Annotated[ConstantNumber, Tag("constant")]
    | Annotated[LognormalNumber, Tag("lognormal")]
    | Annotated[RecordedNumber, Tag("recorded")],
    Discriminator(_kind_of),
]


def draw(number: NumberProfile, *, episode: float, own: float) -> float:
    """Return the number that two uniform numbers in (0, 1) decide: the episode's, and that of this very draw."""
    match number:
        case ConstantNumber():
            return number.value
        case LognormalNumber():
            mu = math.log(number.mean) - number.sigma**2 / 2
            return min(math.exp(mu + number.sigma * _normal.inv_cdf(own)), number.max)
        case RecordedNumber():
            return number.values[int(episode * len(number.values))]


def mean_of(number: NumberProfile) -> float:
    """Return the mean of the draws."""
    match number:
        case ConstantNumber():
            return number.value
        case LognormalNumber():
            return mean_of_cut_lognormal(number.mean, number.sigma, number.max)
        case RecordedNumber():
            return fmean(number.values)


def largest_of(number: NumberProfile) -> float:
    """Return the upper bound of the draws."""
    match number:
        case ConstantNumber():
            return number.value
        case LognormalNumber():
            return number.max
        case RecordedNumber():
            return max(number.values)


def mean_of_cut_lognormal(mean: float, sigma: float, most: float) -> float:
    """Return E[min(X, most)] of a log-normal X with this mean and standard deviation of its logarithm."""
    if sigma == 0:
        return min(mean, most)
    mu = math.log(mean) - sigma**2 / 2
    cut = (math.log(most) - mu) / sigma
    return mean * _normal.cdf(cut - sigma) + most * (1 - _normal.cdf(cut))
