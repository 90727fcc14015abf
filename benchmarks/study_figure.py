"""The staleness study's figure, an SVG that follows the reader's light or dark colours.

A row for each learning rate: accuracy against optimizer steps, a panel for each η, then final accuracy against the mean
lag that was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.study_runs import LOSSES, Result
from benchmarks.study_tables import by_cell, lag_range

INK, PAPER, RULE = "#24292f", "#fffffe", "#d0d7de"
THEME = MappingProxyType({"ink": (INK, "#e6edf3"), "paper": (PAPER, "#0d1117"), "rule": (RULE, "#3d444d")})
"""Name → its colour on light and on dark."""
LOOK = MappingProxyType(
    {
        "naive": {"color": "#d55e00", "marker": "o", "linestyle": "-"},
        "decoupled": {"color": "#2f81f7", "marker": "s", "linestyle": "--"},
        "truncated_is": {"color": "#009e73", "marker": "^", "linestyle": ":"},
    }
)
STYLE = MappingProxyType(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "staleness-study",
        "font.size": 9.0,
        "font.family": "sans-serif",
        "axes.titlesize": 9.0,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": RULE,
        "grid.linewidth": 0.6,
        "axes.edgecolor": RULE,
        "axes.facecolor": PAPER,
        "figure.facecolor": PAPER,
        "savefig.facecolor": PAPER,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.titlecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
    }
)


def draw(results: Sequence[Result], path: Path) -> None:
    """Write the figure to ``path``, as SVG."""
    rates = sorted({result.run.lr for result in results})
    etas = sorted({result.run.eta for result in results})
    with mpl.rc_context(dict(STYLE)):
        figure = Figure(figsize=(2.35 * (len(etas) + 1), 2.6 * len(rates) + 0.4), layout="constrained")
        axes = figure.subplots(len(rates), len(etas) + 1, sharey=True, squeeze=False)
        for row, lr in zip(axes, rates, strict=True):
            of_rate = [result for result in results if result.run.lr == lr]
            for place, (axis, eta) in enumerate(zip(row, etas, strict=False)):
                _curves(axis, [result for result in of_rate if result.run.eta == eta], eta)
                if place == 0:
                    axis.set_ylabel(f"learning rate {lr:g}\nheld-out accuracy")
            _finals(row[-1], of_rate)
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(LOSSES), frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})
    path.write_text(themed(path.read_text(encoding="utf-8")), encoding="utf-8")


def _curves(axis: Any, results: Sequence[Result], eta: int) -> None:
    for (_, _, loss), same in by_cell(results).items():
        series = list(zip(*(result.accuracy for result in same), strict=True))
        updates, look = same[0].updates, LOOK[loss]
        axis.plot(updates, [fmean(s) for s in series], label=LOSSES[loss].title, markersize=3, linewidth=1.4, **look)
        lowest, highest = [min(s) for s in series], [max(s) for s in series]
        axis.fill_between(updates, lowest, highest, color=look["color"], alpha=0.15, linewidth=0)
    axis.set_title(f"η = {eta}: mean lag {lag_range(results)}")
    axis.set_xlabel("optimizer steps")


def _finals(axis: Any, results: Sequence[Result]) -> None:
    for loss, look in LOOK.items():
        points = sorted((r.lag_mean, r.final) for r in results if r.run.loss == loss)
        axis.plot(*zip(*points, strict=True), color=look["color"], marker=look["marker"], markersize=3.5, linestyle="")
        means = [
            (fmean(r.lag_mean for r in same), fmean(r.final for r in same))
            for (_, _, of), same in by_cell(results).items()
            if of == loss
        ]
        axis.plot(*zip(*means, strict=True), color=look["color"], linestyle=look["linestyle"], linewidth=1.4)
    axis.set_title("after the last step")
    axis.set_xlabel("measured mean lag, versions")


def themed(svg: str) -> str:
    """``svg`` with the colours of `THEME` as variables, which a dark scheme sets anew."""
    light, dark = (";".join(f"--{name}:{pair[k]}" for name, pair in THEME.items()) for k in (0, 1))
    for name, (colour, _) in THEME.items():
        svg = svg.replace(colour, f"var(--{name})")
    style = f"<style>:root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    head, opening, rest = svg.partition("<defs>")
    return f"{head}{style}\n {opening}{rest}"
