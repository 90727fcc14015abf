"""The figures of ``benchmarks.train`` as a table, in Markdown, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.train_workload import BUDGET, SIZES, Cell, Kind, Lengths, work
from headway.cluster.hardware import cpu_model
from headway.data.collate import CollatedRow

PACKED_AIM = 1.15
"""Packed ÷ padded on long-tailed lengths."""
SHARED_AIM = 0.8
"""Shared ÷ padded over what arithmetic allows."""
EXPLAINED = f"""\
Tokens per second of rows as they are, prompts with each of their answers and no padding: medians over rounds in which
the sides take turns. A step is forward, loss and backward, without the optimizer; micro-batches of {BUDGET:,} tokens,
float32. *Allowed* is padded ÷ packed (or shared) in operations, *reached* the measured ratio over it. Memory is the
most that a step holds in tensors beyond what was there before, in MB, from torch's record of every allocation.
"""
HEADINGS = (
    *("prompt:answer", "n", "plain", "padded", "packed", "shared", "packed ÷ padded", "allowed"),
    *("shared ÷ padded", "allowed", "reached", "shared ÷ plain", "MB plain", "padded", "packed", "shared", "rounds"),
)


@dataclass(slots=True)
class Measured:
    """One cell."""

    cell: Cell
    tokens: int
    """Tokens of the rows, padding excluded."""
    flops: dict[Kind, float]
    """Operations of a step by the arithmetic."""
    seconds: dict[Kind, list[float]] = field(default_factory=dict)
    """Seconds of a step, round by round."""
    cpu_seconds: dict[Kind, list[float]] = field(default_factory=dict)
    """Seconds that cores computed for a step, round by round."""
    bytes: dict[Kind, int] = field(default_factory=dict)
    """Most bytes that a step holds beyond what was there before."""

    @classmethod
    def of(cls, cell: Cell, rows: Sequence[CollatedRow]) -> Measured:
        flops = {kind: work(kind, rows).flops(SIZES[cell.size]) for kind in Kind}
        return cls(cell, sum(len(row.input_ids) for row in rows), flops)

    def add(self, kind: Kind, seconds: float, cpu_seconds: float) -> None:
        """Add one round of ``kind``."""
        self.seconds.setdefault(kind, []).append(seconds)
        self.cpu_seconds.setdefault(kind, []).append(cpu_seconds)

    @property
    def rounds(self) -> int:
        return len(self.seconds[Kind.PADDED])

    def rate(self, kind: Kind) -> float:
        """Median tokens per second."""
        return self.tokens / median(self.seconds[kind])

    def ratio(self, kind: Kind, over: Kind = Kind.PADDED) -> float:
        return self.rate(kind) / self.rate(over)

    def allowed(self, kind: Kind) -> float:
        """Operations of padded rows ÷ those of ``kind``."""
        return self.flops[Kind.PADDED] / self.flops[kind]

    def reached(self, kind: Kind) -> float:
        return self.ratio(kind) / self.allowed(kind)

    def line(self) -> str:
        """What is told while the benchmark runs."""
        rates = ", ".join(f"{kind} {self.rate(kind):,.0f}" for kind in Kind)
        shared = f"shared {self.ratio(Kind.SHARED):.2f}× padded of {self.allowed(Kind.SHARED):.2f}× allowed"
        return f"{self.cell.name}: {rates} tokens/s; {shared}"

    def cells_of_table(self) -> list[str]:
        """One line of the table, in the order of `HEADINGS`."""
        packed, shared = Kind.PACKED, Kind.SHARED
        return [
            str(self.cell.lengths),
            str(self.cell.n),
            *(f"{self.rate(kind):,.0f}" for kind in Kind),
            f"{self.ratio(packed):.2f}×",
            f"{self.allowed(packed):.2f}×",
            f"{self.ratio(shared):.2f}×",
            f"{self.allowed(shared):.2f}×",
            f"{self.reached(shared):.0%}",
            f"{self.ratio(shared, Kind.PLAIN):.2f}×",
            *(f"{self.bytes[kind] / 1e6:.0f}" for kind in Kind),
            str(self.rounds),
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.cell.size,
            "lengths": str(self.cell.lengths),
            "n": self.cell.n,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "tokens_per_s": {kind: self.rate(kind) for kind in Kind},
            "allowed": {kind: self.allowed(kind) for kind in Kind},
            "ratio": {kind: self.ratio(kind) for kind in Kind},
            "bytes": self.bytes,
        }


@dataclass(slots=True)
class Results:
    threads: int
    parameters: dict[str, int] = field(default_factory=dict)
    cells: list[Measured] = field(default_factory=list)


def markdown(results: Results) -> str:
    lines = [f"{cpu_model()}, threads: {results.threads}", "", EXPLAINED]
    for size, same in groupby(results.cells, lambda measured: measured.cell.size):
        lines += [f"**{size}**: {results.parameters[size]:,} parameters", "", "| " + " | ".join(HEADINGS) + " |"]
        lines += ["| --- |" + " ---: |" * (len(HEADINGS) - 1)]
        lines += ["| " + " | ".join(measured.cells_of_table()) + " |" for measured in same]
        lines.append("")
    return "\n".join([*lines, *aims(results.cells), busy(results), ""])


def busy(results: Results) -> str:
    """A sentence on what the machine had for the benchmark: medians in rounds with less are not to be relied on."""
    shares = [
        sum(sum(spent) for spent in measured.cpu_seconds.values())
        / sum(sum(took) for took in measured.seconds.values())
        for measured in results.cells
    ]
    return f"- cores that computed, mean over a cell: {min(shares):.2f} to {max(shares):.2f} of {results.threads}"


def aims(cells: Sequence[Measured]) -> list[str]:
    """Sentences that say how many cells reach what is aimed at."""
    tailed = [measured.ratio(Kind.PACKED) for measured in cells if measured.cell.lengths is Lengths.LONG_TAILED]
    reached = [measured.reached(Kind.SHARED) for measured in cells]
    memory = [measured.bytes[Kind.SHARED] / measured.bytes[Kind.PADDED] for measured in cells]
    said = [
        _aim(f"shared ≥ {SHARED_AIM:.0%} of what arithmetic allows", reached, least=SHARED_AIM, unit="%"),
        _aim("memory of shared ≤ that of padded", memory, most=1.0),
    ]
    if tailed:
        said.insert(0, _aim(f"packed ≥ {PACKED_AIM} × padded on long-tailed lengths", tailed, least=PACKED_AIM))
    return said


def _aim(what: str, found: Sequence[float], *, least: float = 0.0, most: float = float("inf"), unit: str = "×") -> str:
    hits = sum(least <= value <= most for value in found)
    show = (lambda value: f"{value:.0%}") if unit == "%" else (lambda value: f"{value:.2f}×")
    return f"- {what}: {hits} of {len(found)} cells, {show(min(found))} to {show(max(found))}"


def write(results: Results, folder: Path) -> str:
    """Write ``train.json`` and ``train.md`` into ``folder``; returns the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    text = markdown(results)
    content = {
        "cpu": cpu_model(),
        "threads": results.threads,
        "parameters": results.parameters,
        "cells": [measured.to_json() for measured in results.cells],
    }
    (folder / "train.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    (folder / "train.md").write_text(text, encoding="utf-8")
    return text
