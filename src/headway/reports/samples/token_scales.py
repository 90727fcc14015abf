"""Scales by which tokens are coloured: a number, or a name, for each token becomes one of a few steps.

Steps have fixed bounds where the unit has a meaning, so that two pictures can be compared. A step is told by its colour
or, where there is none, by the number behind each token that is in a `loud` one.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headway.reports import human

Row = Mapping[str, Any]
"""A row of an episode in a sample."""

BLUES = ("black on #3d86f5", "black on #8fbcff", "black on #d6e6ff")
REDS = ("black on #ffd9cc", "black on #ff9f80", "black on #f0522e")
YELLOWS = ("", "black on #fff3c4", "black on #ffd866", "black on #f5a623", "black on #e07000")
PURPLES = ("black on #a97bff", "black on #c5a5ff", "black on #decdff", "black on #f1e9ff", "")
VERSIONS = ("black on #cfe8cf", "black on #cfe0f5", "black on #f5dccf", "black on #e6d3f0", "black on #f3efc2")


class Color(StrEnum):
    """Property by which tokens are coloured."""

    GAP = "gap"
    LOGPROB = "logprob"
    ADVANTAGE = "advantage"
    ENTROPY = "entropy"
    VERSION = "version"
    MASK = "mask"


@dataclass(frozen=True, slots=True)
class ScaleStep:
    """One step of a scale."""

    label: str
    style: str
    loud: bool = False
    """True where a token of this step is marked if there are no colours."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The steps that the values of tokens are in. ``names``: where values are names, not numbers."""

    title: str
    bounds: tuple[float, ...]
    """Ascending; step i has the values from bound i − 1 up to, and without, bound i."""
    steps: tuple[ScaleStep, ...]
    names: tuple[Any, ...] = ()

    def step(self, value: Any) -> ScaleStep | None:
        """Return the step of ``value``; None for a value that is missing or not finite."""
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return None
        if self.names:
            return self.steps[self.names.index(value)]
        return self.steps[bisect_right(self.bounds, value)]


def values_of(color: Color, row: Row) -> list[Any]:
    """Return what each of a row's tokens is coloured by, T of them; None where it has no such number.

    A token that the policy did not sample has none, but for its place in the mask.
    """
    if color is Color.MASK:
        return [bool(one) for one in row["mask"]]
    if color is Color.VERSION:
        return [version if version >= 0 else None for version in row["versions"]]
    if color is Color.GAP:
        numbers: Sequence[float | None] = gaps(row)
    elif color is Color.ADVANTAGE:
        numbers = row["columns"].get("advantages") or [None] * len(row["ids"])
    else:
        numbers = row["logprobs" if color is Color.LOGPROB else "entropy"]
    return [number if counts else None for number, counts in zip(numbers, row["mask"], strict=True)]


def gaps(row: Row) -> list[float | None]:
    """Return log-prob of the trainer minus that of the engine for each token of a row, in nats."""
    pairs = zip(row["logprobs"], row["behaviour"], strict=True)
    return [None if now is None or then is None else now - then for now, then in pairs]


def scale_of(color: Color, rows: Sequence[Row]) -> Scale:
    """Return the scale for ``rows``, which are shown together."""
    return _SCALES[color](rows)


def _gap(rows: Sequence[Row]) -> Scale:
    bounds = (-0.5, -0.1, -0.02, 0.02, 0.1, 0.5)
    return _diverging("gap: trainer − engine, nats", bounds)


def _advantage(rows: Sequence[Row]) -> Scale:
    sizes = [abs(v) for row in rows for v in values_of(Color.ADVANTAGE, row) if v is not None and math.isfinite(v)]
    third = max(sizes, default=0.0) / 3
    if not third:
        return Scale("advantage", (), (ScaleStep("0", ""),))
    return _diverging("advantage", (-2 * third, -third, -third / 1e6, third / 1e6, third, 2 * third))


def _diverging(title: str, bounds: tuple[float, ...]) -> Scale:
    low, high = f"<{human.number(bounds[0])}", f">{human.number(bounds[-1])}"
    ends = [human.number(0.0 if abs(bound) < 1e-3 * bounds[-1] else bound) for bound in bounds]
    middle = [a if a == b else f"{a}..{b}" for a, b in itertools.pairwise(ends)]
    styles = (*BLUES, "", *REDS)
    labels = (low, *middle, high)
    loud = {0, len(styles) - 1}
    return Scale(title, bounds, tuple(ScaleStep(labels[i], styles[i], i in loud) for i in range(len(styles))))


def _logprob(rows: Sequence[Row]) -> Scale:
    labels = ("p<1%", "1..10%", "10..50%", "50..90%", ">90%")
    bounds = tuple(math.log(p) for p in (0.01, 0.1, 0.5, 0.9))
    steps = tuple(
        ScaleStep(label, style, place == 0) for place, (label, style) in enumerate(zip(labels, PURPLES, strict=True))
    )
    return Scale("log-prob of the trainer", bounds, steps)


def _entropy(rows: Sequence[Row]) -> Scale:
    labels = ("<0.1", "0.1..0.5", "0.5..1", "1..2", ">2")
    steps = tuple(
        ScaleStep(label, style, place == 4) for place, (label, style) in enumerate(zip(labels, YELLOWS, strict=True))
    )
    return Scale("entropy of the trainer, nats", (0.1, 0.5, 1.0, 2.0), steps)


def _version(rows: Sequence[Row]) -> Scale:
    versions = sorted({version for row in rows for version in row["versions"] if version >= 0})
    steps = tuple(ScaleStep(f"version {v}", VERSIONS[place % len(VERSIONS)]) for place, v in enumerate(versions))
    return Scale("version that sampled the token", (), steps, tuple(versions))


def _mask(rows: Sequence[Row]) -> Scale:
    steps = (ScaleStep("only read, or left out", ""), ScaleStep("trained", VERSIONS[0]))
    return Scale("what is trained", (), steps, (False, True))


_SCALES: dict[Color, Callable[[Sequence[Row]], Scale]] = {
    Color.GAP: _gap,
    Color.LOGPROB: _logprob,
    Color.ADVANTAGE: _advantage,
    Color.ENTROPY: _entropy,
    Color.VERSION: _version,
    Color.MASK: _mask,
}
