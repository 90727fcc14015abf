"""Tokens of a sample for the terminal: text in the colours of a scale, or a table with all numbers.

A scale maps each token's number, or name, to one of a few steps. Steps have fixed bounds if the unit has a meaning, so
that two pictures can be compared. Each step has a colour. Without colours a token in a `loud` step is followed by its
number: ⟨token⟩-0.61. If values are names, such as versions, brackets mark where the name changes.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.table import Column
from rich.text import Text

from headway.reports import human
from headway.reports.terminal import print_fitting, visible

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
    """True if a token of this step is marked when there are no colours."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Steps for the values of tokens. ``names``: True if values are names, not numbers."""

    title: str
    bounds: tuple[float, ...]
    """Ascending; step i has the values from bound i − 1 up to, and without, bound i."""
    steps: tuple[ScaleStep, ...]
    names: tuple[Any, ...] = ()

    def step(self, value: Any) -> ScaleStep | None:
        """Return the step of ``value``; None if it is missing or not finite."""
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return None
        if self.names:
            return self.steps[self.names.index(value)]
        return self.steps[bisect_right(self.bounds, value)]


def values_of(color: Color, row: Row) -> list[Any]:
    """Return the value by which each of a row's T tokens is coloured; None for a token without such a value.

    A token that the policy did not sample has no value, except in the mask.
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
    match color:
        case Color.ADVANTAGE:
            sizes = [abs(v) for row in rows for v in values_of(color, row) if v is not None and math.isfinite(v)]
            if not (third := max(sizes, default=0.0) / 3):
                return Scale("advantage", (), (ScaleStep("0", ""),))
            return _diverging("advantage", (-2 * third, -third, -third / 1e6, third / 1e6, third, 2 * third))
        case Color.VERSION:
            versions = sorted({version for row in rows for version in row["versions"] if version >= 0})
            labels = [f"version {version}" for version in versions]
            return Scale("version that sampled the token", (), _steps(labels, itertools.cycle(VERSIONS)), (*versions,))
    return _FIXED[color]


def _steps(labels: Sequence[str], styles: Iterable[str], *loud: int) -> tuple[ScaleStep, ...]:
    each = enumerate(zip(labels, styles, strict=False))
    return tuple(ScaleStep(label, style, place in loud) for place, (label, style) in each)


def _diverging(title: str, bounds: tuple[float, ...]) -> Scale:
    low, high = f"<{human.number(bounds[0])}", f">{human.number(bounds[-1])}"
    ends = [human.number(0.0 if abs(bound) < 1e-3 * bounds[-1] else bound) for bound in bounds]
    middle = [a if a == b else f"{a}..{b}" for a, b in itertools.pairwise(ends)]
    styles = (*BLUES, "", *REDS)
    return Scale(title, bounds, _steps((low, *middle, high), styles, 0, len(styles) - 1))


_FIXED = {
    Color.GAP: _diverging("gap: trainer − engine, nats", (-0.5, -0.1, -0.02, 0.02, 0.1, 0.5)),
    Color.LOGPROB: Scale(
        "log-prob of the trainer",
        tuple(math.log(p) for p in (0.01, 0.1, 0.5, 0.9)),
        _steps(("p<1%", "1..10%", "10..50%", "50..90%", ">90%"), PURPLES, 0),
    ),
    Color.ENTROPY: Scale(
        "entropy of the trainer, nats",
        (0.1, 0.5, 1.0, 2.0),
        _steps(("<0.1", "0.1..0.5", "0.5..1", "1..2", ">2"), YELLOWS, 4),
    ),
    Color.MASK: Scale(
        "what is trained", (), _steps(("only read, or left out", "trained"), ("", VERSIONS[0])), (False, True)
    ),
}


QUIET = "bright_black"


def legend(scale: Scale, *, colors: bool) -> Text:
    """Return one line that explains the colours or marks."""
    text = Text(f"{scale.title}: ", style=QUIET)
    for place, step in enumerate(step for step in scale.steps if colors or scale.names or step.loud):
        text.append("  " if place else "")
        text.append(f" {step.label} " if colors else step.label, step.style if colors else "")
    if not colors:
        text.append(" is marked ⟨so⟩ where it begins" if scale.names else " is marked ⟨so⟩, with its number")
    return text


def token_text(row: Row, color: Color, scale: Scale, *, colors: bool) -> Text:
    """Return a row's response as text in the colours of ``scale``; tokens that were only read are dim."""
    text, before = Text(), _NOTHING
    values, mask = values_of(color, row), row["mask"]
    gap_at = len(row["ids"]) // 2 if row["cut"] else None  # what was left out is from the middle
    for place, (piece, value) in enumerate(zip(row["pieces"], values, strict=True)):
        if place == gap_at:
            text.append(f" […{human.count(row['cut'])} tokens left out…] ", QUIET)
        step = scale.step(value)
        shown = visible(piece).replace("\n", "↵\n")
        if colors:
            text.append(shown, step.style if step is not None and step.style else ("" if mask[place] else QUIET))
        elif scale.names and step is not None and value != before:
            text.append(f"⟨{step.label}: {shown}⟩")
        elif step is not None and step.loud:
            text.append(f"⟨{shown}⟩{value:.2f}")
        else:
            text.append(shown)
        before = value
    return text


_NOTHING = object()


def print_token_table(row: Row, console: Console) -> None:
    """Print a table with a line for each token of a row, and all its numbers."""
    numbers = {"engine": row["behaviour"], "trainer": row["logprobs"], "gap": gaps(row), "entropy": row["entropy"]}
    numbers |= row["columns"]
    lines: list[list[Text]] = []
    styles: list[str | None] = []
    for place, (piece, version) in enumerate(zip(row["pieces"], row["versions"], strict=True)):
        at = place + (row["cut"] if place >= len(row["ids"]) // 2 else 0)  # what was left out is from the middle
        shown = repr(visible(piece))[1:-1] if piece.strip() else repr(piece)
        cells = [str(version), *(_number(values[place]) for values in numbers.values())]
        cells = [human.UNKNOWN] * len(cells) if version < 0 else cells
        lines.append([Text(cell) for cell in (str(at), shown, *cells)])
        styles.append(None if row["mask"][place] else QUIET)

    headings = [
        Column(
            visible(_HEADINGS.get(name, name)),
            justify="left" if name == "token" else "right",
            no_wrap=True,
            style=QUIET if name == "#" else "",
        )
        for name in ("#", "token", "version", *numbers)
    ]
    print_fitting(console, headings, lines, styles=styles)


_HEADINGS = {
    "advantages": "advantage",
    "prox_logprobs": "π_prox",
    "ref_logprobs": "reference",
    "values": "value",
    "returns": "return",
}


def figures(row: Row) -> str:
    """Return a row's figures over its trained tokens in one line."""
    mask = row["mask"]

    def of(values: Sequence[Any]) -> list[float]:
        return [value for value, counts in zip(values, mask, strict=True) if counts and value is not None]

    gap, entropy = of(gaps(row)), of(row["entropy"])
    if not gap:
        return "nothing of it is trained"
    parts = [
        f"gap {human.number(_mean(gap))} on average, {human.number(max(gap, key=abs))} at most",
        f"entropy {human.number(_mean(entropy))}",
    ]
    if advantages := of(row["columns"].get("advantages") or [None] * len(mask)):
        low, high = min(advantages), max(advantages)
        parts.append(f"advantage {human.number(low)}" + ("" if low == high else f" to {human.number(high)}"))
    return ", ".join(parts)


def common_scale(color: Color, episodes: Sequence[Row]) -> Scale | None:
    """Return one scale for all rows of ``episodes``; None if none of them was trained on."""
    rows = [row for episode in episodes for row in episode["rows"]]
    return scale_of(color, rows) if rows else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _number(value: float | None) -> str:
    return human.UNKNOWN if value is None else f"{value:z.4f}"  # z: no -0.0000
