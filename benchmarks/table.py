"""A benchmark's figures: shown as tables in Markdown, and written to ``build/bench/<name>.md`` and ``.json``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from headway.cluster.machine.worker_setup import available_cores, cpu_model

OUT = Path("build/bench")
Rows = Sequence[Mapping[str, Any]]
"""Lines of a table, with the same keys: its columns."""


class Ratio(float):
    """A number that a table shows as ``1.50×``."""

    def __str__(self) -> str:
        return f"{self:.2f}×"


class Share(float):
    """A number that a table shows as ``15.0%``."""

    def __str__(self) -> str:
        return f"{self:.1%}"


def medians(rounds: Rows) -> dict[str, Any]:
    """Return the median of each column over ``rounds``."""
    return {name: median(one[name] for one in rounds) for name in rounds[0]}


def by_model(found: Iterable[Any], parameters: Mapping[str, int]) -> dict[str, Rows]:
    """Return a table for each model: the rows of what was measured of its cells, which are one behind the other."""
    return {
        f"{size}: {parameters.get(size, 0):,} parameters": [one.row() for one in same]
        for size, same in groupby(found, lambda one: one.cell.size)
    }


def _cell(value: object) -> str:
    if value is None:
        return "—"
    if type(value) is int:
        return f"{value:,}"
    if type(value) is float:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def markdown(rows: Rows) -> str:
    """Return ``rows`` as a table; columns of text are aligned to the left. Empty without rows."""
    if not rows:
        return ""
    rule = ["---" if isinstance(value, str) else "---:" for value in rows[0].values()]
    lines = (list(rows[0]), rule, *(map(_cell, row.values()) for row in rows))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def report(name: str, tables: Mapping[str, Rows], notes: Sequence[str] = (), *, show: bool = True, **more: Any) -> str:
    """Write ``tables``, ``notes`` and, to the JSON alone, ``more``; print them where they are to be shown."""
    parts = [f"{available_cores()} cores of {cpu_model()}; load of the machine at the end: {os.getloadavg()[0]:.1f}.\n"]
    parts += [f"### {title}\n\n{markdown(rows)}" for title, rows in tables.items() if rows]
    text = "\n".join([*parts, *(f"- {note}" for note in notes)]) + "\n"
    path = write(name, {"tables": tables, "notes": list(notes), **more})
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    if show:
        print(f"{text}\nwritten to {path.with_suffix('.md')} and {path}", flush=True)
    return text


def write(name: str, content: Mapping[str, Any]) -> Path:
    """Write ``content``, and the hardware that it was measured on, to ``build/bench/<name>.json``."""
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{name}.json"
    hardware = {"cores": available_cores(), "cpu": cpu_model()}
    path.write_text(json.dumps({"name": name, "hardware": hardware, **content}, indent=2), encoding="utf-8")
    return path
