"""Tokens of a sample for the terminal: text in the colours of a scale, or a table with all numbers.

Without colours a token that stands out has its number behind it, in brackets: ⟨token⟩-0.61. Where values are names, as
versions are, brackets stand where another one begins.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from headway.reports import human
from headway.reports.samples.token_scales import Color, Row, Scale, gaps, scale_of, values_of
from headway.reports.table_fitting import print_fitting

QUIET = "bright_black"


def visible(text: str) -> str:
    """Return ``text`` with its control and format characters spelled, but for ends of lines, tabs, and joiners.

    What a model says may hold any of them, and a terminal obeys some. Joiners are part of emoji and of some scripts.
    """
    if text.isprintable():
        return text
    return "".join(c if unicodedata.category(c) not in _OBEYED or c in _HARMLESS else f"<0x{ord(c):02X}>" for c in text)


_OBEYED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_HARMLESS = "\n\t\u200c\u200d"


def legend(scale: Scale, *, colors: bool) -> Text:
    """Return one line that says what the colours, or the marks, mean."""
    text = Text(f"{scale.title}: ", style=QUIET)
    for place, step in enumerate(step for step in scale.steps if colors or scale.names or step.loud):
        text.append("  " if place else "")
        text.append(f" {step.label} " if colors else step.label, step.style if colors else "")
    if not colors:
        text.append(" is marked ⟨so⟩ where it begins" if scale.names else " is marked ⟨so⟩, with its number")
    return text


def token_text(row: Row, color: Color, scale: Scale, *, colors: bool) -> Text:
    """Return a row's response as text in the colours of ``scale``; what was only read is dim."""
    text, before = Text(), _NOTHING
    values, mask = values_of(color, row), row["mask"]
    gap_at = len(row["ids"]) // 2 if row["cut"] else None
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
    columns = row["columns"]
    names = ["#", "token", "version", "engine", "trainer", "gap", "entropy", *columns]
    lines: list[tuple[list[Text], str | None]] = []
    numbers = [row["behaviour"], row["logprobs"], gaps(row), row["entropy"], *columns.values()]
    half = len(row["ids"]) // 2 if row["cut"] else len(row["ids"])
    steps = [1] * len(row["ids"])
    if row["cut"]:
        steps[half] += row["cut"]
    for place, (at, piece) in enumerate(zip(accumulate(steps), row["pieces"], strict=True)):
        read, version = not row["mask"][place], row["versions"][place]
        cells = [human.UNKNOWN if version < 0 else _number(values[place]) for values in numbers]
        shown = repr(visible(piece))[1:-1] if piece.strip() else repr(piece)
        of_version = human.UNKNOWN if version < 0 else str(version)
        texts = [Text(cell) for cell in (str(at - 1), shown, of_version, *cells)]
        lines.append((texts, QUIET if read else None))

    def table_of(numbers: Sequence[int]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for number in numbers:
            heading = visible(_HEADINGS.get(names[number], names[number]))
            justify: JustifyMethod = "left" if names[number] == "token" else "right"
            table.add_column(heading, justify=justify, no_wrap=True, style=QUIET if number == 0 else None)
        for texts, style in lines:
            table.add_row(*(texts[number] for number in numbers), style=style)
        return table

    print_fitting(console, len(names), table_of)


_HEADINGS = {
    "engine": "engine",
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
        parts.append(
            f"advantage {human.number(low)}"
            if low == high
            else f"advantage {human.number(low)} to {human.number(high)}"
        )
    return ", ".join(parts)


def common_scale(color: Color, episodes: Sequence[Row]) -> Scale | None:
    """Return one scale for all rows of ``episodes``; None where nothing of them was trained."""
    rows = [row for episode in episodes for row in episode["rows"]]
    return scale_of(color, rows) if rows else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _number(value: float | None) -> str:
    return human.UNKNOWN if value is None else f"{value:z.4f}"
