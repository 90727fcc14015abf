"""Runs the cells of ``make bench-train``: checks gradients, measures memory, then seconds round by round."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from benchmarks.gpu_checks.setting import Setting, one_rank_group
from benchmarks.table import OUT
from benchmarks.train_sides import Side, distance, give_back, peak_bytes, side_of
from benchmarks.train_tables import Measured, Results, write
from benchmarks.train_workload import BUDGET, SIZES, Cell, Kind, rows_of

FOLDER = OUT / "train"
TOLERANCE = 1e-4
"""Limit of a gradient's ‖difference‖ ÷ ‖plain loop's‖, in float32."""


@dataclass(frozen=True, slots=True)
class Bench:
    threads: int
    rounds: int
    """Most rounds of a cell."""
    cell_s: float
    """Seconds after which a cell begins no further round."""

    def run(self, wanted: Sequence[Cell]) -> str:
        """Measure the cells, write them to `FOLDER` one by one, and return the table."""
        torch.set_num_threads(self.threads)
        results = Results(self.threads)
        began, shown = time.monotonic(), ""
        with tempfile.TemporaryDirectory(prefix="headway-bench-") as made, one_rank_group(Setting("cpu", Path(made))):
            for name, same in groupby(wanted, lambda cell: cell.size):
                folder = Path(made) / name
                results.parameters[name] = SIZES[name].make(folder)
                sides = {kind: side_of(kind, folder, BUDGET) for kind in Kind}
                for cell in same:
                    results.cells.append(self.measure(cell, sides))
                    took = f"[{len(results.cells)} of {len(wanted)}, {time.monotonic() - began:.0f} s]"
                    print(f"{took} {results.cells[-1].line()}", file=sys.stderr, flush=True)
                    shown = write(results, FOLDER)
                del sides
                give_back()
        return shown

    def measure(self, cell: Cell, sides: Mapping[Kind, Side]) -> Measured:
        """Measure one cell: at least one round, and none that would take longer than is left."""
        rows = rows_of(cell)
        measured = Measured.of(cell, rows)
        check(cell, {kind: side.gradient(rows) for kind, side in sides.items()})
        measured.bytes |= {kind: peak_bytes(side, rows) for kind, side in sides.items()}
        start = time.monotonic()
        for done in range(self.rounds):
            spent = time.monotonic() - start
            if done and spent + spent / done > self.cell_s:
                break
            for kind, side in sides.items():
                started, computed = time.perf_counter(), time.process_time()
                side.step(rows)
                measured.add(kind, time.perf_counter() - started, time.process_time() - computed)
        return measured


def check(cell: Cell, gradients: Mapping[Kind, dict[str, torch.Tensor]]) -> None:
    """End the benchmark where a side does not compute the plain loop's gradient."""
    for kind, gradient in gradients.items():
        off = distance(gradient, gradients[Kind.PLAIN])
        if not off <= TOLERANCE:
            sys.exit(f"{cell.name}: the gradient of {kind} rows is off by {off:.2g} of its norm (limit {TOLERANCE:g})")
