"""The staleness study's figures as Markdown, and their place in the page."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.study_runs import LOSSES, Result

Cell = tuple[float, int, str]
"""Learning rate, η, loss: what seeds have in common."""


def by_cell(results: Iterable[Result]) -> dict[Cell, list[Result]]:
    """By learning rate, η, and in the order of the losses; the seeds of each in theirs."""
    order = list(LOSSES)
    cells: dict[Cell, list[Result]] = defaultdict(list)
    for result in sorted(results, key=lambda r: (r.run.lr, r.run.eta, order.index(r.run.loss), r.run.seed)):
        cells[result.run.lr, result.run.eta, result.run.loss].append(result)
    return dict(cells)


def lag_range(results: Iterable[Result]) -> str:
    """Of the mean lags: ``3.71`` or ``3.71–3.74``."""
    lags = [result.lag_mean for result in results]
    lowest, highest = f"{min(lags):.2f}", f"{max(lags):.2f}"
    return lowest if lowest == highest else f"{lowest}–{highest}"


def accuracy_table(results: Sequence[Result]) -> str:
    header = ["lr", "η", "loss", "mean lag", "max lag", "final, by seed", "final", "at half", "area"]
    return _table(
        header,
        [
            [
                *_labels(cell),
                lag_range(same),
                str(max(r.lag_max for r in same)),
                " ".join(f"{r.final:.3f}" for r in same),
                f"**{fmean(r.final for r in same):.3f}**",
                f"{fmean(r.half for r in same):.3f}",
                f"{fmean(r.area for r in same):.3f}",
            ]
            for cell, same in by_cell(results).items()
        ],
    )


def health_table(results: Sequence[Result]) -> str:
    header = ["lr", "η", "loss", "ESS, mean", "ESS, least", "KL, mean", "KL, most", "clipped", "steps skipped"]
    return _table(
        header,
        [
            [
                *_labels(cell),
                f"{fmean(r.ess_mean for r in same):.3f}",
                f"{min(r.ess_min for r in same):.3f}",
                f"{fmean(r.kl_mean for r in same):.4f}",
                f"{max(r.kl_max for r in same):.3f}",
                f"{fmean(r.clip_fraction for r in same):.1%}",
                str(sum(r.skipped_steps for r in same)),
            ]
            for cell, same in by_cell(results).items()
        ],
    )


def time_table(results: Sequence[Result], machine: str) -> str:
    """Seconds of each run of the first seed, of its runs together, and of everything."""
    seed = min(result.run.seed for result in results)
    one = by_cell(result for result in results if result.run.seed == seed)
    etas = sorted({eta for _, eta, _ in one})
    rows = [
        [f"{lr:g}", LOSSES[loss].title, *(f"{one[lr, eta, loss][0].seconds:.1f}" for eta in etas)]
        for lr in sorted({lr for lr, _, _ in one})
        for loss in LOSSES
    ]
    table = _table(["lr", "loss", *(f"η = {eta}" for eta in etas)], rows)
    seconds = [r.seconds for r in results]
    of_one = sum(r.seconds for same in one.values() for r in same)
    return (
        f"{table}\nSeconds of each run of seed {seed}, start-up and validation included. Together {of_one / 60:.1f} "
        f"minutes for one seed and {sum(seconds) / 60:.1f} for all {len(seconds)} runs; the longest run took "
        f"{max(seconds):.1f} s.\n\n{machine}\n"
    )


def _labels(cell: Cell) -> list[str]:
    lr, eta, loss = cell
    return [f"{lr:g}", str(eta), LOSSES[loss].title]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---" if name == "loss" else "---:" for name in header]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, rule, *rows))


def write_into(page: Path, blocks: Mapping[str, str]) -> None:
    """Replace what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; the rest is written by hand.

    Raises ValueError, and leaves the page as it is, when it lacks a block's marks.
    """
    text = page.read_text(encoding="utf-8")
    for name, block in blocks.items():
        marks = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        text, found = marks.subn(lambda match, block=block: f"{match[1]}\n{block.rstrip()}\n\n{match[2]}", text)
        if found != 1:
            raise ValueError(
                f"{page}: expected <!-- begin {name} --> … <!-- end {name} --> once, found it {found} times"
            )
    page.write_text(text, encoding="utf-8")
