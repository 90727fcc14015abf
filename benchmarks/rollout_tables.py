"""The figures of ``benchmarks.rollout`` as tables, in Markdown, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.rollout_workload import Cell, Kind
from headway.cluster.hardware import available_cores, cpu_model

NATIVE = "native"
NONE = "—"
TITLES = {"native": "native", "generate": "generate", "continuous": "continuous batching", "vllm": "vLLM"}
EXPLAINED = """\
Tokens per second of the answers; where prefill alone is measured, of the prompts. Medians over rounds in which the
engines take turns; the ratio is native ÷ the best other. Everything is float32, temperature 1, no filters; the native
engine also returns each token's log-prob, the others are not asked for it. `generate` decodes a static batch until its
longest answer is written; only tokens that were wanted count.
"""


@dataclass(slots=True)
class Measured:
    """One cell."""

    cell: Cell
    rates: dict[str, list[float]] = field(default_factory=dict)
    """Tokens per second, by engine, round by round."""
    busy: dict[str, list[float]] = field(default_factory=dict)
    """Cores that computed for it, likewise."""
    failures: dict[str, str] = field(default_factory=dict)
    """Why an engine has no further rounds."""

    def add(self, engine: str, *, tokens: float, seconds: float, cpu_seconds: float) -> None:
        """One round."""
        self.rates.setdefault(engine, []).append(tokens / seconds)
        self.busy.setdefault(engine, []).append(cpu_seconds / seconds)

    def rate(self, engine: str) -> float | None:
        """Median; None where there is no whole measurement."""
        return median(self.rates[engine]) if engine in self.rates and engine not in self.failures else None

    @property
    def best_other(self) -> tuple[str, float] | None:
        """Of those that were measured."""
        rates = ((engine, self.rate(engine)) for engine in self.rates if engine != NATIVE)
        known = [(engine, rate) for engine, rate in rates if rate is not None]
        return max(known, key=lambda pair: pair[1], default=None)

    @property
    def ratio(self) -> float | None:
        """Native ÷ the best other."""
        native, best = self.rate(NATIVE), self.best_other
        return None if native is None or best is None else native / best[1]

    @property
    def hit(self) -> bool | None:
        """Whether the aim was reached; None where there is none, or no ratio."""
        return None if self.ratio is None or self.cell.aim is None else self.ratio >= self.cell.aim

    @property
    def rounds(self) -> int:
        return max(map(len, self.rates.values()), default=0)

    def line(self) -> str:
        rates = ", ".join(f"{engine} {median(rates):.0f}" for engine, rates in self.rates.items())
        failed = "".join(f"; {engine}: {why}" for engine, why in self.failures.items())
        return f"{self.cell.name}: {rates} tokens/s; ratio {times(self.ratio)}{failed}"

    def to_json(self) -> dict[str, Any]:
        best = self.best_other
        return {
            **self.cell.to_json(),
            "rates": self.rates,
            "busy": self.busy,
            "medians": {engine: self.rate(engine) for engine in self.rates},
            "best_other": None if best is None else best[0],
            "ratio": self.ratio,
            "aim": self.cell.aim,
            "failures": self.failures,
        }


@dataclass(slots=True)
class Results:
    engines: list[str] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    cells: list[Measured] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """About what was left out."""


def write(results: Results, folder: Path, *, show: bool = False) -> str:
    """Into ``folder``; the tables where they are to be shown, else nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    text = markdown(results)
    (folder / "rates.md").write_text(text)
    found = {
        "cores": available_cores(),
        "cpu": cpu_model(),
        "engines": results.engines,
        "parameters": results.parameters,
        "notes": results.notes,
        "cells": [measured.to_json() for measured in results.cells],
    }
    (folder / "rates.json").write_text(json.dumps(found, indent=1))
    return f"{text}\nwritten to {folder / 'rates.md'} and {folder / 'rates.json'}" if show else ""


def markdown(results: Results) -> str:
    parts = [f"{available_cores()} cores of {cpu_model()}.\n\n{EXPLAINED}"]
    for size, same in groupby(results.cells, lambda measured: measured.cell.size):
        parts.append(f"### {size}: {results.parameters.get(size, 0):,} parameters\n")
        parts.append(_rates(list(same), results.engines))
    parts += ["### Aims\n", _aims(results.cells)] if results.cells else []
    if alone := [share for one in results.cells if one.cell.threads == 1 for share in one.busy.get(NATIVE, ())]:
        parts.append(
            f"With one thread the native engine had a core for {median(alone):.0%} of its time (median of rounds); far "
            "below 100% the machine had other things to do.\n"
        )
    failures = [
        f"- {TITLES[engine]}, {measured.cell.name}: {why}"
        for measured in results.cells
        for engine, why in measured.failures.items()
    ]
    if left_out := [f"- {note}" for note in results.notes] + failures:
        parts += ["### Not measured\n", *left_out, ""]
    return "\n".join(parts)


def _rates(same: Sequence[Measured], engines: Sequence[str]) -> str:
    titles = [TITLES[engine] for engine in engines]
    header = ["requests", "threads", "concurrent", "tokens", *titles, "ratio", "aim", "rounds"]
    rows = [
        [
            str(one.cell.kind),
            str(one.cell.threads),
            str(one.cell.concurrent),
            str(one.cell.tokens),
            *(_rate(one, engine) for engine in engines),
            times(one.ratio),
            times(one.cell.aim),
            str(one.rounds),
        ]
        for one in same
    ]
    return table(header, rows)


def _rate(measured: Measured, engine: str) -> str:
    if why := measured.failures.get(engine):
        return why if why.startswith("over ") else "failed"
    rate = measured.rate(engine)
    return NONE if rate is None else f"{rate:,.0f}"


def _aims(cells: Iterable[Measured]) -> str:
    """By model and kind: geometric mean of the ratios, the least of them, and how many cells reached the aim."""
    by_kind: dict[tuple[str, Kind], list[Measured]] = {}
    for measured in cells:
        if measured.ratio is not None:
            by_kind.setdefault((measured.cell.size, measured.cell.kind), []).append(measured)
    rows = []
    for (size, kind), same in by_kind.items():
        ratios = [one.ratio for one in same if one.ratio is not None]
        hits = [one.hit for one in same if one.hit is not None]
        reached = f"{sum(hits)} of {len(hits)}" if hits else NONE
        mean = exp(fmean(map(log, ratios)))
        rows.append([size, str(kind), times(same[0].cell.aim), times(mean), times(min(ratios)), reached])
    return table(["model", "requests", "aim", "mean ratio", "least", "cells that reach it"], rows)


def times(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.2f}×"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, rule, *rows))
