"""``python -m benchmarks.train``: training steps with rows padded, packed, and packed behind shared prompts.

    cells ─by model─▶ all sides loaded ─▶ gradients compared, memory ─▶ rounds: plain, padded, packed, shared, plain, …
                                                                            └─▶ medians ─▶ build/bench/train.{md,json}

A plain loop over transformers is beside them. All sides compute the same loss of the same rows with the same budget of
a micro-batch, in float32; one whose gradient is not the plain loop's ends the benchmark. A further round begins only
while the cell has time left. Everything is written after each cell.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.runner import numbers, parser, say, turns, words
from benchmarks.table import Ratio, Rows, Share, report
from benchmarks.train_workload import BUDGET, SIZES, Cell, Kind, Lengths, cells, rows_of, work
from headway.cluster.machine.worker_setup import available_cores, math_environment
from headway.data.packing import CollatedRow

if TYPE_CHECKING:
    import torch

TOLERANCE = 1e-4
"""Limit of a gradient's ‖difference‖ ÷ ‖plain loop's‖, in float32."""
PACKED_AIM = 1.15
"""Packed ÷ padded on long-tailed lengths."""
SHARED_AIM = 0.8
"""Shared ÷ padded over what arithmetic allows."""
EXPLAINED = (
    "Tokens per second of rows as they are, prompts with each of their answers and no padding: medians over rounds in "
    "which the sides take turns. A step is forward, loss and backward, without the optimizer; micro-batches of "
    f"{BUDGET:,} tokens, float32. *Allowed* is padded ÷ packed (or shared) in operations, *reached* the measured ratio "
    "over it. Memory is the most that a step holds in tensors beyond what was there before, in MB, from torch's record "
    "of every allocation."
)


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parser(
        "train",
        "Training, by the layout of rows.",
        models=words(SIZES),
        lengths=words(Lengths),
        n={"type": numbers, "default": [8, 16], "help": "answers to a prompt; default: 8,16"},
        threads={"type": int, "default": available_cores(), "help": "default: every core, %(default)s"},
        rounds={"type": int, "default": 5, "help": "default: %(default)s"},
        cell_s={"type": float, "default": 20.0, "help": "no further round after that; default: %(default)g"},
    ).parse_args(arguments)
    # Read once, when torch is loaded, so that it may not be imported before: threads that spin while they wait made a
    # step many times slower on cores that others use too.
    os.environ.update(math_environment(chosen.threads), KINETO_LOG_LEVEL="99")
    wanted = cells(chosen.models, [Lengths(one) for one in chosen.lengths], chosen.n)
    run(wanted, chosen.threads, chosen.rounds, chosen.cell_s)


def run(wanted: Sequence[Cell], threads: int, rounds: int, cell_s: float) -> None:
    """Measure the cells, and write them one by one."""
    import torch

    from benchmarks.gpu_checks.setting import Setting, one_rank_group
    from benchmarks.train_sides import give_back, peak_bytes, side_of

    torch.set_num_threads(threads)
    found: list[Measured] = []
    parameters: dict[str, int] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as made, one_rank_group(Setting("cpu", Path(made))):
        for name, same in groupby(wanted, lambda cell: cell.size):
            folder = Path(made) / name
            parameters[name] = SIZES[name].make(folder)
            sides = {kind: side_of(kind, folder, BUDGET) for kind in Kind}
            for cell in same:
                rows = rows_of(cell)
                found.append(measured := Measured.of(cell, rows))
                check(cell, {kind: side.gradient(rows) for kind, side in sides.items()})
                measured.bytes |= {kind: peak_bytes(side, rows) for kind, side in sides.items()}
                for kind, side in turns(sides, rounds, cell_s):
                    started, computed = time.perf_counter(), time.process_time()
                    side.step(rows)
                    measured.add(kind, time.perf_counter() - started, time.process_time() - computed)
                say(f"[{len(found)} of {len(wanted)}, {time.monotonic() - began:.0f} s] {measured.line()}")
                told(found, parameters, threads, show=len(found) == len(wanted))
            del sides, side
            give_back()


def check(cell: Cell, gradients: Mapping[Kind, dict[str, torch.Tensor]]) -> None:
    """End the benchmark where a side does not compute the plain loop's gradient."""
    from benchmarks.train_sides import distance

    for kind, gradient in gradients.items():
        off = distance(gradient, gradients[Kind.PLAIN])
        if not off <= TOLERANCE:
            sys.exit(f"{cell.name}: the gradient of {kind} rows is off by {off:.2g} of its norm (limit {TOLERANCE:g})")


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

    def rate(self, kind: Kind) -> float:
        """Median tokens per second."""
        return self.tokens / median(self.seconds[kind])

    def ratio(self, kind: Kind, over: Kind = Kind.PADDED) -> Ratio:
        return Ratio(self.rate(kind) / self.rate(over))

    def allowed(self, kind: Kind) -> Ratio:
        """Operations of padded rows ÷ those of ``kind``."""
        return Ratio(self.flops[Kind.PADDED] / self.flops[kind])

    def reached(self, kind: Kind) -> Share:
        return Share(self.ratio(kind) / self.allowed(kind))

    @property
    def cores(self) -> float:
        """Cores that computed, in the mean."""
        return sum(map(sum, self.cpu_seconds.values())) / sum(map(sum, self.seconds.values()))

    def line(self) -> str:
        """Line that is printed while the benchmark runs."""
        rates = ", ".join(f"{kind} {self.rate(kind):,.0f}" for kind in Kind)
        shared = f"shared {self.ratio(Kind.SHARED)} padded of {self.allowed(Kind.SHARED)} allowed"
        return f"{self.cell.name}: {rates} tokens/s; {shared}"

    def row(self) -> dict[str, Any]:
        """One line of the table."""
        packed, shared = Kind.PACKED, Kind.SHARED
        return {
            "prompt:answer": str(self.cell.lengths),
            "n": self.cell.n,
            **{str(kind): self.rate(kind) for kind in Kind},
            "packed ÷ padded": self.ratio(packed),
            "packed allowed": self.allowed(packed),
            "shared ÷ padded": self.ratio(shared),
            "shared allowed": self.allowed(shared),
            "reached": self.reached(shared),
            "shared ÷ plain": self.ratio(shared, Kind.PLAIN),
            **{f"MB {kind}": round(self.bytes[kind] / 1e6) for kind in Kind},
            "rounds": len(self.seconds[Kind.PADDED]),
        }


def told(found: Sequence[Measured], parameters: Mapping[str, int], threads: int, *, show: bool) -> str:
    """Write all tables; print them where they are to be shown."""
    tables: dict[str, Rows] = {
        f"{size}: {parameters[size]:,} parameters": [one.row() for one in same]
        for size, same in groupby(found, lambda one: one.cell.size)
    }
    # Medians in rounds with less than all cores are not to be relied on.
    cores = [one.cores for one in found]
    busy = f"cores that computed, mean over a cell: {min(cores):.2f} to {max(cores):.2f} of {threads}"
    raw = [{"cell": one.cell.name, "seconds": one.seconds, "cpu_seconds": one.cpu_seconds} for one in found]
    return report("train", tables, [EXPLAINED, *aims(found), busy], show=show, threads=threads, rounds=raw)


def aims(found: Sequence[Measured]) -> list[str]:
    """Sentences that say how many cells reach what is aimed at."""
    tailed = [one.ratio(Kind.PACKED) for one in found if one.cell.lengths is Lengths.LONG_TAILED]
    reached = [one.reached(Kind.SHARED) for one in found]
    memory = [Ratio(one.bytes[Kind.SHARED] / one.bytes[Kind.PADDED]) for one in found]
    return [
        *([_aim(f"packed ≥ {PACKED_AIM} × padded on long-tailed lengths", tailed, least=PACKED_AIM)] if tailed else []),
        _aim(f"shared ≥ {SHARED_AIM:.0%} of what arithmetic allows", reached, least=SHARED_AIM),
        _aim("memory of shared ≤ that of padded", memory, most=1.0),
    ]


def _aim(what: str, found: Sequence[float], *, least: float = 0.0, most: float = float("inf")) -> str:
    hits = sum(least <= value <= most for value in found)
    return f"{what}: {hits} of {len(found)} cells, {min(found)!s} to {max(found)!s}"


if __name__ == "__main__":
    main()
