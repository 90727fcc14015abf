"""The page of a comparison: the curves of all runs, one over the other, and the two tables. It needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from headway.reports.comparison.run_comparison import Comparison, ComparisonRow
from headway.reports.run_directory import whole_file
from headway.reports.timeline.curves import KINDS, ChartKind
from headway.reports.timeline.curves import to_json as curves_json
from headway.reports.timeline.html_timeline import filled, table

SCRIPTS = ("common.js", "curves.js", "compare.js")


def write_page(found: Comparison, path: Path) -> None:
    """Write the page to ``path``, which is replaced."""
    text = page(found)
    with whole_file(path) as file:
        file.write(text)


def page(found: Comparison) -> str:
    """Return the HTML text of the page."""
    names = [run.name for run in found.runs]
    return filled(
        "compare.html",
        SCRIPTS,
        title=" · ".join(names),
        data=overlaid(found),
        count=str(len(names)),
        runs="\n".join(_run(place, run.name, run.status) for place, run in enumerate(found.runs)),
        settings=_rows("setting", names, found.settings) if found.settings else "<p>They have the same settings.</p>",
        results=_rows("result", names, found.results),
    )


def _run(place: int, name: str, status: str) -> str:
    return (
        f'<li><i class="run" style="background: var(--c{place % 8})"></i>{escape(name)} '
        f'<span class="status {escape(status)}">{escape(status)}</span></li>'
    )


def _rows(head: str, names: Sequence[str], rows: Sequence[ComparisonRow]) -> str:
    return table((head, *names), [(row.name, *row.cells) for row in rows], numbers=len(names))


def overlaid(found: Comparison) -> dict[str, Any]:
    """Return charts with one curve for each run: of each kind of chart the first metric that any run has."""
    each = [curves_json(run.curves) for run in found.runs]
    tables = {f"{place}/{name}": rows for place, of in enumerate(each) for name, rows in of["tables"].items()}
    charts = [chart for kind in KINDS if (chart := _chart(kind, found, each))["curves"]]
    return {"tables": tables, "charts": charts}


def _chart(kind: ChartKind, found: Comparison, each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    none: dict[str, Any] = {"curves": []}
    drawn = [next((chart for chart in of["charts"] if chart["name"] == kind.name), none) for of in each]
    metric = next(
        (m for m, _ in kind.metrics if any(c["metric"] == m for chart in drawn for c in chart["curves"])), None
    )
    curves = [
        curve | {"name": run.name, "table": f"{place}/{curve['table']}", "ink": place}
        for place, (run, chart) in enumerate(zip(found.runs, drawn, strict=True))
        for curve in chart["curves"]
        if curve["metric"] == metric
    ]
    return {"name": kind.name, "unit": kind.unit, "left_out": 0, "curves": curves}
