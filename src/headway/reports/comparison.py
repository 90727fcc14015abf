"""``headway compare``: differences between runs in settings, and in results at equal cost.

RUN, RUN, … ─▶ `read_runs`: settings, curves, figures ─▶ `compared` ─▶ tables for the terminal, and one page of curves

Runs are compared at the groups, the seconds and the tokens that the shortest run reached. The page has the overlaid
curves of all runs and the two tables. It needs no other file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column
from rich.text import Text

from headway.config.layers import overlay, read_file
from headway.errors import ConfigError
from headway.reports import human
from headway.reports.metrics.summary import summary
from headway.reports.record.file_access import replace_file
from headway.reports.report import metrics_of
from headway.reports.run_directory import RunDirectory, status_of
from headway.reports.terminal import UNBOUNDED, print_fitting, visible
from headway.reports.timeline.html_timeline import filled
from headway.reports.timeline.run_history import ACCURACY, KINDS, ChartKind, CurveLog, CurvePoint, point_at
from headway.reports.timeline.run_history import to_json as curves_json

REWARD, ESS = "reward/mean", "offpolicy/ess"
AVERAGED = 10
"""Number of versions over which training reward is averaged: one version's reward is noisy."""
WIDEST = 28
"""Maximum characters of a run's column in a terminal. In a pipe there is no limit."""
NARROWEST = 12
"""Minimum characters of a run's column of settings, which is narrowed so that all runs fit into one table."""
HEAD, GAP = 38, 2
"""Maximum characters of a table's first column, and the number of characters between two columns."""
NOT_COMPARED = frozenset({"run.dir"})
AXES: dict[str, Callable[[float], str]] = {
    "groups": lambda value: human.count(round(value)),
    "seconds": human.number,
    "tokens": human.number,
}
"""Field of `CurvePoint` at which runs are compared → the format of its values."""


@dataclass(frozen=True, slots=True)
class RunRead:
    """One run: its ``settings`` by dotted key, its curves, and its ``figures`` as in ``summary.json``."""

    name: str
    settings: dict[str, Any]
    curves: CurveLog
    figures: dict[str, Any]
    status: str


ComparisonRow = tuple[str, ...]
"""A row of a table: its name, and one text for each run."""


@dataclass(frozen=True, slots=True)
class Comparison:
    runs: tuple[RunRead, ...]
    settings: tuple[ComparisonRow, ...]
    """The settings that differ, by key."""
    results: tuple[ComparisonRow, ...]


def read_runs(paths: Sequence[Path]) -> list[RunRead]:
    """Read the runs in the directories ``paths``. Their names are the directories', as long as needed to differ.

    Raises `ConfigError` if two paths are one run, or if a path is not a run's directory or cannot be read.
    """
    seen: dict[Path, Path] = {}
    for path in paths:
        first = seen.setdefault(path.resolve(), path)
        if first is not path:
            raise ConfigError(f"RUN: got {first} and {path}, which are one run; give different ones")
    return [_read(path, name) for path, name in zip(paths, names(paths), strict=True)]


def names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each path: its last part, and as many before it as make all names differ."""
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-count:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    return [str(path) for path in paths]


def _read(path: Path, name: str) -> RunRead:
    curves = CurveLog()
    metrics = metrics_of(path, curves)
    figures = summary(metrics)
    metrics.close()  # after the figures: it hands out rows of versions that are not over
    status = status_of(metrics.started, metrics.finished, RunDirectory(path).lock).status
    return RunRead(name, _settings(path), curves, figures, status)


def _settings(path: Path) -> dict[str, Any]:
    config = RunDirectory(path).config
    try:
        layers = read_file(config)
    except ConfigError as cause:
        said = " ".join(str(cause).split())  # YAML's own is a small picture
        raise ConfigError(f"RUN: got {path}, whose settings cannot be read: {said}") from cause
    return reduce(overlay, (layer.values for layer in layers), {})


def compared(runs: Sequence[RunRead]) -> Comparison:
    """Compare runs that were read."""
    return Comparison(tuple(runs), tuple(_differing(runs)), tuple(_results(runs)))


def _differing(runs: Sequence[RunRead]) -> list[ComparisonRow]:
    """Return the settings that differ between runs. A dash stands for a setting that a file lacks: its default."""
    missing = object()  # None is a value that a setting may have
    keys = list(dict.fromkeys(key for run in runs for key in run.settings if key not in NOT_COMPARED))
    rows: list[ComparisonRow] = []
    for key in keys:
        values = [run.settings.get(key, missing) for run in runs]
        if any(value != values[0] for value in values):
            rows.append((key, *(human.UNKNOWN if value is missing else _value(value) for value in values)))
    return rows


def _value(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


FIGURES: tuple[tuple[str, Callable[[Any], str], Callable[[dict[str, Any]], Any]], ...] = (
    ("generated tokens/s", human.number, lambda of: of["throughput"]["generated_tokens_per_s"]),
    ("trained tokens/s", human.number, lambda of: of["throughput"]["trained_tokens_per_s"]),
    ("trainer idle", human.share, lambda of: of["trainer/idle_ratio"]),
    ("replicas idle", human.share, lambda of: of["rollouter/idle_ratio"]),
    ("lag, mean", human.number, lambda of: of["lag"]["mean"]),
    ("lag, most", human.number, lambda of: of["lag"]["max"]),
    ("groups filtered", human.count, lambda of: of["groups"]["filtered"]),
    ("groups dropped", human.count, lambda of: of["groups"]["dropped"]),
    ("groups failed", human.count, lambda of: of["groups"]["failed"]),
    ("groups in flight", human.count, lambda of: of["groups"]["in_flight"]),
)
"""Rows of figures of ``summary.json``: name, how a value is written, and where it is."""


def _results(runs: Sequence[RunRead]) -> list[ComparisonRow]:
    figures = [run.figures for run in runs]
    ends = [_end(run.curves) for run in runs]
    return [
        ("status", *(run.status for run in runs)),
        ("versions", *(human.count(of["version"]) for of in figures)),
        ("groups trained", *(human.count(of["groups"]["trained"]) for of in figures)),
        ("seconds", *(human.number(end.seconds) for end in ends)),
        ("tokens trained", *(human.number(of["tokens"]["trained"]) for of in figures)),
        *at_equal("validation reward", [run.curves.points(ACCURACY) for run in runs], versions=True),
        *at_equal("training reward", [_smooth(run.curves.points(REWARD)) for run in runs]),
        ("ESS, mean", *(human.number(_mean(run.curves.points(ESS))) for run in runs)),
        *((name, *(write(read(of)) for of in figures)) for name, write, read in FIGURES),
    ]


def at_equal(
    name: str, points: Sequence[Sequence[tuple[CurvePoint, float]]], *, versions: bool = False
) -> list[ComparisonRow]:
    """Return rows of a metric at the groups, seconds and tokens that all runs with values of it have reached.

    ``points``: values of each run, by version. A run without values has dashes. ``versions``: also name the version.
    """
    known = [run for run in points if run]
    if not known:
        return []
    rows: list[ComparisonRow] = []
    for axis, write in AXES.items():
        at = min(getattr(run[-1][0], axis) for run in known)
        cells = (_point(point_at(run, axis, at), versions) for run in points)
        rows.append((f"{name} at {write(at)} {axis}", *cells))
    return [*rows, (f"{name}, best", *(human.score(max((v for _, v in run), default=None)) for run in points))]


def _point(point: tuple[CurvePoint, float] | None, versions: bool) -> str:
    if point is None:
        return human.UNKNOWN
    return human.score(point[1]) + (f" v{point[0].version}" if versions else "")


def _smooth(points: Sequence[tuple[CurvePoint, float]]) -> list[tuple[CurvePoint, float]]:
    """Means over the last `AVERAGED` values, or as many as there are."""
    values = [value for _, value in points]
    return [
        (place, sum(values[max(i + 1 - AVERAGED, 0) : i + 1]) / min(i + 1, AVERAGED))
        for i, (place, _) in enumerate(points)
    ]


def _mean(points: Sequence[tuple[CurvePoint, float]]) -> float | None:
    return sum(value for _, value in points) / len(points) if points else None


def _end(curves: CurveLog) -> CurvePoint:
    places = curves.places()
    return places[-1] if places else CurvePoint(0, 0.0, 0.0, 0.0)


# ------------------------------------------------------------------------------------------------ terminal


def print_comparison(found: Comparison, console: Console) -> None:
    """Print the differing settings, and the table of results."""
    if found.settings:
        _print_table("settings that differ", found, found.settings, console, whole=False)
    else:
        console.print("The settings are the same, but for the directory.")
    console.print()
    _print_table("results", found, found.results, console, whole=True)


def _print_table(
    title: str, found: Comparison, rows: Sequence[ComparisonRow], console: Console, *, whole: bool
) -> None:
    """Print a table. ``whole``: values stay on one line, and runs that do not fit are in a further table below."""
    widest = WIDEST if console.width < UNBOUNDED else UNBOUNDED
    if not whole:  # a path or two is broken rather than a table made for each run
        head = min(max(len(text) for text in (title, *(name for name, *_ in rows))), HEAD)
        widest = min(max((console.width - head) // len(found.runs) - GAP, NARROWEST), widest)

    columns = [
        Column(_as_it_is(run.name, widest), overflow="fold", justify="right", max_width=widest, no_wrap=whole)
        for run in found.runs
    ]
    cells = [[_as_it_is(name), *(_as_it_is(cell, widest, words=not whole) for cell in row)] for name, *row in rows]
    first = Column(title, overflow="fold", max_width=HEAD, no_wrap=whole)
    print_fitting(console, [first, *columns], cells, padding=(0, GAP, 0, 0))


def _as_it_is(text: str, width: int | None = None, *, words: bool = False) -> Text:
    """Return text of a file for a terminal: brackets are not markup, and control characters are spelled out.

    ``width``: maximum characters of a line, or with ``words`` of a word; None: no maximum.
    """
    shown = visible(text)
    if width is not None:
        part = r"\S" if words else r"."
        shown = re.sub(rf"{part}{{{width}}}(?={part})", r"\g<0>\n", shown)
    return Text(shown)


SCRIPTS = ("common.js", "curves.js", "compare.js")


def write_page(found: Comparison, path: Path) -> None:
    """Write the page to ``path``, which is replaced."""
    replace_file(path, page(found))


def page(found: Comparison) -> str:
    """Return the HTML text of the page."""
    names = [run.name for run in found.runs]
    settings = _table(("setting", *names), found.settings)
    return filled(
        "compare.html",
        SCRIPTS,
        title=" · ".join(names),
        data=overlaid(found),
        count=str(len(names)),
        runs="\n".join(_run(place, run.name, run.status) for place, run in enumerate(found.runs)),
        settings=settings if found.settings else "<p>They have the same settings.</p>",
        results=_table(("result", *names), found.results),
    )


def _run(place: int, name: str, status: str) -> str:
    return (
        f'<li><i class="run" style="background: var(--c{place % 8})"></i>{escape(name)} '
        f'<span class="status {escape(status)}">{escape(status)}</span></li>'
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table. All columns but the first hold numbers."""

    def cells(name: str, row: Sequence[str]) -> str:
        first, *others = map(_breakable, row)
        return f"<{name}>{first}</{name}>" + "".join(f"<{name} class=number>{cell}</{name}>" for cell in others)

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table>\n<thead><tr>{cells('th', head)}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _breakable(text: str) -> str:
    """Return ``text`` as HTML that a narrow column breaks behind the dots, slashes and underscores of names."""
    return re.sub(r"([._/])(?=[^\W\d]\w)", r"\1<wbr>", escape(text))


def overlaid(found: Comparison) -> dict[str, Any]:
    """Return charts with one curve per run: for each kind of chart, the first metric that any run has."""
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
