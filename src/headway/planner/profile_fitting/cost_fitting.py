"""Fits of costs to measurements: a few numbers that reproduce the total time of many steps.

A fit must get sums right, not single steps: what a simulation adds up is thousands of them. So every fit here keeps the
total of the measurements that it uses, and outliers (a machine that was busy with something else) are left out first.

`Overlap` computes the cost of work without the slowdown by the other side (training or generation):

    cost of a step = cost alone · (1 + (slowdown − 1) · share of its time in which the other side computed)

Both shares must occur in a run for its slowdown to be known: a synchronous run, in which sides take turns, measures
costs alone, and one in which both always compute measures costs that contain the slowdown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.events import PrefillSteps, ReplicaActivity
from headway.planner.profile_fitting.recording import Recording, TrainerWork
from headway.planner.profiles.costs import DecodeCost
from headway.reports.metrics.intervals import IntervalUnion

OUTLIER = 3.0
"""Multiple of the median (of its kind, per unit of work) above which a measurement is left out."""
SIGNIFICANT = 2.0
"""Number of standard errors by which a slope must differ from zero; a smaller one counts as noise."""
LEAST_SPREAD = 1e-3
"""Standard deviation of sizes, in tokens, below which they are all the same."""
LEAST_SPREAD_OF_SHARES = 0.15
"""Standard deviation of shares below which slowed and unslowed samples cannot be told apart."""
FEWEST_FOR_SLOWDOWN = 10
DIGITS = 4
MAX_KNOTS = 16
KNOT_TOLERANCE = 0.01
"""Relative error up to which a knot of a curve is left out."""

T = TypeVar("T")
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A cost in seconds that is linear in the size of the work: ``fixed_s + unit_s · size``."""

    fixed_s: float
    unit_s: float
    separated: bool
    """True when the sizes differ enough to tell fixed and unit cost apart; if not, all is proportional to size."""


def fit_line(sizes: ArrayLike, seconds: ArrayLike, weights: ArrayLike | None = None) -> LinearCost:
    """Fit the non-negative line that is nearest to the measurements by least squares and keeps their total.

    ``sizes`` are positive; single ``seconds`` may be negative where they are differences. Where the sizes hardly
    differ, or the slope drowns in noise, the line goes through the origin. ``weights``: how many measurements each of
    them is the mean of; default: 1.
    """
    x, y = np.asarray(sizes, float), np.asarray(seconds, float)
    w = np.ones_like(x) if weights is None else np.asarray(weights, float)
    total, size = float((w * y).sum()), float((w * x).sum())
    if total <= 0:
        return LinearCost(0.0, 0.0, separated=False)
    slope, error = _slope(x, y, w)
    # By the total, not by the means of the fit: a simulation adds up thousands of steps.
    fixed = (total - slope * size) / float(w.sum())
    separated = slope > SIGNIFICANT * error
    if separated and fixed >= 0:
        return LinearCost(fixed, slope, separated)
    return LinearCost(0.0, total / size, separated)


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """Decode steps with ``active`` sequences in one stretch of time: their mean seconds, and mean tokens cached."""

    active: int
    steps: int
    step_s: float
    cached: float


def fit_decode(samples: Iterable[DecodeSample]) -> tuple[list[tuple[int, float]], float]:
    """Fit one step's seconds as a curve of the active sequences plus a price per cached token.

    Returns points (active sequences, seconds of a step), whose seconds do not fall, and the price in seconds.

    The price is fitted to differences between samples of *equal* activity, so that it is separate from the curve.
    """
    rows = np.array([(s.active, s.steps, s.step_s, s.cached) for s in samples], float)
    counts, alike = np.unique(rows[:, 0], return_inverse=True)
    limits = OUTLIER * np.array([np.median(rows[alike == index, 2]) for index in range(len(counts))])
    usual = rows[:, 2] <= limits[alike]
    (_, steps, seconds, cached), alike = rows[usual].T, alike[usual]
    weights = np.bincount(alike, steps)

    def means(values: Array) -> Array:
        """Means over the steps of each number of active sequences."""
        return np.bincount(alike, steps * values) / weights

    of_cache, of_step = means(cached), means(seconds)
    # A mean was taken out for each number of active sequences: so many degrees of freedom less.
    slope, error = _slope(cached - of_cache[alike], seconds - of_step[alike], steps, means_removed=len(counts))
    kv_token_s = slope if slope > SIGNIFICANT * error else 0.0
    if (of_step - kv_token_s * of_cache).min() <= 0:  # nothing would be left for the step itself: it is an accident
        kv_token_s = 0.0
    curve = not_falling((of_step - kv_token_s * of_cache).tolist(), weights.tolist())
    return few_knots(list(zip(map(int, counts), curve, strict=True))), kv_token_s


def fit_prefill(merged: Iterable[PrefillSteps], decode: DecodeCost) -> LinearCost:
    """Fit the cost of prefilling tokens: the seconds by which a step that prefilled some took longer than one in which
    as many decoded.
    """
    rows = np.array(list(merged), float).reshape(-1, 5)
    steps, (active, tokens, seconds, cached) = rows[:, 0], (rows[:, 1:] / rows[:, :1]).T
    curve = np.interp(active, range(len(decode.curve)), decode.curve)
    longer = seconds - curve - decode.kv_token_s * cached
    line = fit_line(tokens, longer, steps)
    # Prompts differ so much in length that outliers are found per length.
    usual = seconds <= OUTLIER * (seconds - longer + line.fixed_s + line.unit_s * tokens)
    return fit_line(tokens[usual], longer[usual], steps[usual])


def without_outliers(measured: Iterable[T], cost: Callable[[T], float]) -> list[T]:
    """The points that cost at most `OUTLIER` times the median."""
    items = list(measured)
    limit = OUTLIER * median(map(cost, items)) if items else 0.0
    return [item for item in items if cost(item) <= limit]


OverlapSample = tuple[float, float, float, float]
"""Work of one kind: the share of its seconds in which the other side computed, the seconds, its size in tokens, and its
weight."""


def fit_slowdown(measured: Iterable[OverlapSample]) -> float | None:
    """Fit the factor by which work takes longer while the other side computes: at least 1, and 1 if it is within noise.
    None where the shares are too much alike to tell.

    The fit is weighted least squares of seconds on share and size together, since large work may have other shares.
    """
    usual = without_outliers(measured, lambda sample: sample[1])
    shares, seconds, sizes, weights = np.array(usual, float).reshape(-1, 4).T
    if len(usual) < FEWEST_FOR_SLOWDOWN or shares.std() < LEAST_SPREAD_OF_SHARES:
        return None
    weights = np.sqrt(weights)  # on both sides of equations whose squares are summed
    # Equal sizes would be a column of zeros, which tells nothing and takes a degree of freedom.
    columns = np.column_stack([np.ones_like(shares), shares, sizes - sizes.mean()][: 3 if sizes.std() > 0 else 2])
    weighted = columns * weights[:, None]
    inverse = np.linalg.pinv(weighted.T @ weighted)
    solution = inverse @ weighted.T @ (seconds * weights)
    residual = (seconds - columns @ solution) * weights
    variance = float(residual @ residual) / (len(usual) - columns.shape[1])
    alone, slope = float(solution[0]), float(solution[1])
    significant = slope > SIGNIFICANT * float(np.sqrt(variance * inverse[1, 1]))
    return 1 + slope / alone if significant and alone > 0 else 1.0


def usual_mean(seconds: Iterable[float]) -> float:
    """The mean of ``seconds`` without outliers; 0 if there are none."""
    usual = without_outliers(seconds, lambda value: value)
    return fmean(usual) if usual else 0.0


def not_falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest sequence that does not fall, by weighted least squares (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        block = (float(value), float(weight), 1)
        while blocks and blocks[-1][0] >= block[0]:
            mean, mass, size = blocks.pop()
            total = mass + block[1]
            block = ((mean * mass + block[0] * block[1]) / total, total, size + block[2])
        blocks.append(block)
    return [mean for mean, _, size in blocks for _ in range(size)]


def few_knots(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Choose at most `MAX_KNOTS` of the points, between which the others lie on straight lines as nearly as can be."""
    x, y = np.array([count for count, _ in points], float), np.array([seconds for _, seconds in points])
    kept = sorted({0, len(points) - 1})
    while len(kept) < min(MAX_KNOTS, len(points)):
        off = np.abs(np.interp(x, x[kept], y[kept]) - y) / y
        worst = int(off.argmax())
        if off[worst] <= KNOT_TOLERANCE:
            break
        kept = sorted({*kept, worst})
    return [points[index] for index in kept]


def service_seconds(arrivals_and_ends: Iterable[tuple[float, float]], workers: int) -> list[float]:
    """Seconds that each item took at one of ``workers`` servers, which take items in order, without waiting."""
    # In order of ends: a server is free for an item when the one ``workers`` places before it ends.
    items = sorted(arrivals_and_ends, key=lambda item: item[1])
    return [
        end - max(arrival, items[index - workers][1] if index >= workers else arrival)
        for index, (arrival, end) in enumerate(items)
    ]


def rounded(value: float) -> float:
    """Round ``value`` to `DIGITS` significant digits, about as many as a measurement is worth."""
    return float(f"{value:.{DIGITS}g}")


def evenly(count: int, limit: int) -> list[int]:
    """Choose at most ``limit`` of the indices below ``count``, spread evenly."""
    return list(range(count)) if count <= limit else [index * count // limit for index in range(limit)]


def _slope(x: Array, y: Array, weights: Array, *, means_removed: int = 1) -> tuple[float, float]:
    """Fit a slope by weighted least squares; return it and its standard error (infinite where ``x`` does not vary)."""
    x, y = x - np.average(x, weights=weights), y - np.average(y, weights=weights)
    spread = float((weights * x * x).sum())
    freedom = len(x) - means_removed - 1
    if freedom < 1 or spread < LEAST_SPREAD**2 * float(weights.sum()):
        return 0.0, float("inf")
    slope = float((weights * x * y).sum() / spread)
    residual = y - slope * x
    return slope, float(np.sqrt((weights * residual * residual).sum() / freedom / spread))


class Overlap:
    """A recording's measurements, as if each side had computed alone, where that is known."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._trainer = IntervalUnion()
        for work in (*recording.training.steps, *recording.training.forwards):
            self._trainer.add((work.began, work.began + work.seconds))
        steps = [step for step in recording.warm(recording.training.steps) if step.tokens]
        self.training = fit_slowdown((self._beside_generation(step), step.seconds, step.tokens, 1.0) for step in steps)
        """Factor by which training takes longer while a replica computes; None if it cannot be determined."""
        self.generation = self._generation_slowdown()
        """Factor by which generation takes longer while the trainer computes; None if it cannot be determined."""

    def share(self) -> float:
        """The share of the time that replicas computed in which the trainer did so, too."""
        busy = [span for report in self._recording.activity for span in report.busy]
        return self._share_of(busy)

    def decode_samples(self) -> list[DecodeSample]:
        """Decode samples: one for each report of a replica and number of active sequences."""
        return [replace(sample, step_s=sample.step_s / self._slowed(report)) for report, sample in self._samples()]

    def prefill_steps(self) -> list[PrefillSteps]:
        """Prefill steps: one for each report of a replica and size of prefills."""
        return [
            (steps, active, tokens, seconds / self._slowed(report), cached)
            for report in self._recording.warm_activity("prefill_steps")
            for steps, active, tokens, seconds, cached in report.prefill_steps.values()
        ]

    def _samples(self) -> Iterable[tuple[ReplicaActivity, DecodeSample]]:
        for report in self._recording.warm_activity("decode_steps"):
            for active, (steps, seconds, cached) in report.decode_steps.items():
                yield report, DecodeSample(active, steps, seconds / steps, cached / steps)

    def alone(self, works: Iterable[TrainerWork]) -> list[TrainerWork]:
        """The recording's optimizer steps or forward passes after the warm-up, as if the trainer had computed alone."""
        slowdown = self.training or 1.0
        return [
            replace(work, seconds=work.seconds / (1 + (slowdown - 1) * self._beside_generation(work)))
            for work in self._recording.warm(works)
        ]

    def _slowed(self, report: ReplicaActivity) -> float:
        return 1 + ((self.generation or 1.0) - 1) * self._share_of(report.busy)

    def _generation_slowdown(self) -> float | None:
        """Fit generation's slowdown to steps with one number of active sequences, the one that most reports have."""
        samples = list(self._samples())
        counts = Counter(sample.active for _, sample in samples)
        most = max(counts, key=lambda active: (counts[active], active), default=0)
        return fit_slowdown(
            (self._share_of(report.busy), sample.step_s, sample.cached, sample.steps)
            for report, sample in samples
            if sample.active == most
        )

    def _beside_generation(self, work: TrainerWork) -> float:
        """Share of the work's time during which the busiest replica computed."""
        window = (work.began, work.began + work.seconds)
        busy = (spans.within(window) for spans in self._recording.busy.values())
        return max(busy, default=0.0) / work.seconds if work.seconds > 0 else 0.0

    def _share_of(self, busy: Iterable[tuple[float, float]]) -> float:
        """The share of the time in the spans ``busy`` during which the trainer computed."""
        spans = list(busy)
        seconds = sum(end - start for start, end in spans)
        return sum(map(self._trainer.within, spans)) / seconds if seconds > 0 else 0.0
