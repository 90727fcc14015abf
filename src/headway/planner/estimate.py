"""The mean of a row's step times, and how well it is known: batch means, adjusted by what is known of the answers.

    times of versions ───▶ batch means ─────────────────────────────▶ mean ± half-width
                                │                                        the narrowest
    control of versions ─▶ batch means ─▶ regression at its known mean ─▶ mean ± half-width

A version that happens to get long answers takes long. How long answers are on average is known exactly, so the part of
the error that they explain can be taken out again: control variates, their coefficients estimated from the row itself
(Lavenberg and Welch, "A perspective on the use of control variables to increase the efficiency of Monte Carlo
simulations", Management Science 27, 1981).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean, stdev

import numpy as np

MOST_BATCHES = 15
FEWEST_FREE = 5
"""Least degrees of freedom that are left for the error where coefficients are estimated."""
T_QUANTILES = (21.205, 5.643, 3.896, 3.298, 3.003, 2.829, 2.715, 2.634, 2.574, 2.527, 2.491, 2.461, 2.436, 2.415)
"""Quantiles of Student's t, two-sided 97%, for 1 … 14 degrees of freedom. 95% are left of them: looking after each
version whether it is enough, and taking the narrowest interval, cost the rest."""


@dataclass(frozen=True, slots=True)
class StepTimeEstimate:
    mean: float
    half_width: float
    """Half the width of the 95% confidence interval; infinite for fewer than two batches."""


@dataclass(frozen=True, slots=True)
class ControlVariate:
    """A control variate: a quantity that varies along with the times, by version, and what it is on average."""

    values: Sequence[float]
    expected: float


def estimate(times: Sequence[float], controls: Sequence[ControlVariate] = (), *, multiple: int = 1) -> StepTimeEstimate:
    """Estimate the mean of the times of consecutive versions, at least one.

    ``multiple`` divides the size of a batch. ``controls``, the most useful first, have a value for each time; as many
    of them are used as make the interval narrowest.
    """
    means = _batch_means(times, multiple)
    used = [(_batch_means(each.values, multiple), each.expected) for each in controls]
    adjusted = [_adjusted(means, used[:count]) for count in range(1, len(used) + 1)]
    count = len(means)
    error = T_QUANTILES[count - 2] * stdev(means) / math.sqrt(count) if count > 1 else math.inf
    candidates = [StepTimeEstimate(fmean(times), error), *(each for each in adjusted if each is not None)]
    return min(candidates, key=lambda each: each.half_width)


def _adjusted(means: Sequence[float], controls: Sequence[tuple[Sequence[float], float]]) -> StepTimeEstimate | None:
    """Estimate the mean if ``controls``, (means of batches, expected), were as expected; None if that is not known."""
    free = len(means) - len(controls) - 1
    if free < FEWEST_FREE:
        return None
    columns = [np.asarray(values) / expected - 1 for values, expected in controls]
    design = np.column_stack([np.ones(len(means)), *columns])
    coefficients, _, rank, _ = np.linalg.lstsq(design, np.asarray(means), rcond=None)
    if rank < len(controls) + 1:
        return None
    residuals = means - design @ coefficients
    variance = float(residuals @ residuals) / free * float(np.linalg.inv(design.T @ design)[0, 0])
    return StepTimeEstimate(float(coefficients[0]), T_QUANTILES[free - 1] * math.sqrt(variance))


def _batch_means(values: Sequence[float], multiple: int) -> list[float]:
    """Means of at most `MOST_BATCHES` batches of equal size, of the last values: what is too little for another batch
    is left out.
    """
    size = multiple * ceil(len(values) / (multiple * MOST_BATCHES))
    count = len(values) // size
    recent = values[len(values) - count * size :]
    return [fmean(recent[i : i + size]) for i in range(0, len(recent), size)]
