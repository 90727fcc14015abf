"""Figures in SVG that follow the reader's light or dark colours: the staleness study's, and what others draw with.

The study's has a row for each learning rate: accuracy against optimizer steps, a panel for each η, then final accuracy
against the mean lag that was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from benchmarks.study_staleness import Result

INK, PAPER, RULE = "#24292f", "#fffffe", "#d0d7de"
THEME = {"ink": (INK, "#e6edf3"), "paper": (PAPER, "#0d1117"), "rule": (RULE, "#3d444d")}
"""Name → its colour on light and on dark."""
LOOK = {
    "naive PPO": {"color": "#d55e00", "marker": "o", "linestyle": "-"},
    "decoupled PPO": {"color": "#2f81f7", "marker": "s", "linestyle": "--"},
    "truncated IS": {"color": "#009e73", "marker": "^", "linestyle": ":"},
}
COLOURED = {
    INK: ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"),
    PAPER: ("axes.facecolor", "figure.facecolor", "savefig.facecolor"),
    RULE: ("grid.color", "axes.edgecolor"),
}
STYLE = {
    "svg.fonttype": "none",
    "font.size": 9.0,
    "font.family": "sans-serif",
    "axes.titlesize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.6,
    **{name: colour for colour, names in COLOURED.items() for name in names},
}


@contextmanager
def figure(path: Path, width: float, height: float, salt: str) -> Iterator[Figure]:
    """A figure to draw in, written to ``path`` as SVG with a legend of its first panel above it."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": salt}):
        yield (drawn := Figure(figsize=(width, height), layout="constrained"))
        handles, labels = drawn.axes[0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, format="svg", metadata={"Date": None})
    path.write_text(themed(path.read_text(encoding="utf-8")), encoding="utf-8")


def themed(svg: str) -> str:
    """``svg`` with the colours of `THEME` as variables, which a dark scheme sets anew."""
    light, dark = (";".join(f"--{name}:{pair[k]}" for name, pair in THEME.items()) for k in (0, 1))
    for name, (colour, _) in THEME.items():
        svg = svg.replace(colour, f"var(--{name})")
    style = f"<style>:root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    head, opening, rest = svg.partition("<defs>")
    return f"{head}{style}\n {opening}{rest}"


def draw(results: Sequence[Result], path: Path) -> None:
    """Write the study's figure to ``path``."""
    rates, etas = sorted({r.run.lr for r in results}), sorted({r.run.eta for r in results})
    with figure(path, 2.35 * (len(etas) + 1), 2.6 * len(rates) + 0.4, "staleness-study") as drawn:
        axes = drawn.subplots(len(rates), len(etas) + 1, sharey=True, squeeze=False)
        for row, lr in zip(axes, rates, strict=True):
            of_rate = [result for result in results if result.run.lr == lr]
            for axis, eta in zip(row, etas, strict=False):
                _curves(axis, [result for result in of_rate if result.run.eta == eta], eta)
            row[0].set_ylabel(f"learning rate {lr:g}\nheld-out accuracy")
            _finals(row[-1], of_rate)


def _curves(axis: Any, results: Sequence[Result], eta: int) -> None:
    from benchmarks.study_staleness import by_cell, lag_range

    for (_, _, loss), same in by_cell(results).items():
        series = list(zip(*(result.accuracy for result in same), strict=True))
        updates, look = same[0].updates, LOOK[loss]
        axis.plot(updates, [fmean(s) for s in series], label=loss, markersize=3, linewidth=1.4, **look)
        lowest, highest = [min(s) for s in series], [max(s) for s in series]
        axis.fill_between(updates, lowest, highest, color=look["color"], alpha=0.15, linewidth=0)
    axis.set_title(f"η = {eta}: mean lag {lag_range(results)}")
    axis.set_xlabel("optimizer steps")


def _finals(axis: Any, results: Sequence[Result]) -> None:
    from benchmarks.study_staleness import by_cell

    for loss, look in LOOK.items():
        points = sorted((r.lag_mean, r.final) for r in results if r.run.loss == loss)
        axis.plot(*zip(*points, strict=True), color=look["color"], marker=look["marker"], markersize=3.5, linestyle="")
        cells = [same for (_, _, of), same in by_cell(results).items() if of == loss]
        means = [(fmean(r.lag_mean for r in same), fmean(r.final for r in same)) for same in cells]
        axis.plot(*zip(*means, strict=True), color=look["color"], linestyle=look["linestyle"], linewidth=1.4)
    axis.set_title("after the last step")
    axis.set_xlabel("measured mean lag, versions")
