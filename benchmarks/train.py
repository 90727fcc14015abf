"""``python -m benchmarks.train``: training steps with rows padded, packed, and packed behind shared prompts.

    cells ─by model─▶ all sides loaded ─▶ gradients compared, memory ─▶ rounds: plain, padded, packed, shared, plain, …
                                                                            └─▶ medians ─▶ build/bench/train.{md,json}

All sides compute the same loss of the same rows with the same budget of a micro-batch, in float32; one whose gradient
is not the plain loop's ends the benchmark. A step here is forward, loss and backward over all micro-batches, and the
gradient's norm: the optimizer's step is the same for all sides, and large beside so short ones.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby, product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.runner import numbers, parser, say, timed, turns, words
from benchmarks.shapes import SIZES, group_rows, long_tailed, work
from benchmarks.table import Ratio, Share, by_model, report
from headway.cluster.machine.worker_setup import available_cores, math_environment
from headway.data.packing import CollatedRow

if TYPE_CHECKING:
    import torch

SIDES = ("plain", "padded", "packed", "shared")
"""A loop over transformers, which pads; then the values of ``model.packing``, the plainest first."""
LENGTHS = ("1:4", "1:1", "8:1", "long-tailed")
"""Prompt tokens to answer tokens."""
LENGTH = 128
"""Tokens of a row where all are equally long."""
LONGEST_PROMPT, LONGEST_ANSWER, SHORTEST = 128, 512, 4
"""Tokens where lengths are long-tailed."""
BUDGET = 4096
"""Tokens of a micro-batch: six of the longest rows."""
ROWS = {"1m": 128, "10m": 32, "100m": 16}
"""Rows of a step by model, so that a step takes a second or a few."""
TOLERANCE = 1e-4
"""Limit of a gradient's ‖difference‖ ÷ ‖plain loop's‖, in float32."""
EXPLAINED = (
    "Tokens per second of rows as they are, prompts with each of their answers and no padding: medians over rounds in "
    f"which sides take turns; micro-batches of {BUDGET:,} tokens, float32. *Allowed* is padded ÷ packed, or shared, "
    "in operations, *reached* the measured ratio over it. Memory is the most that a step holds in tensors beyond what "
    "was there before, in MB, from torch's record of every allocation."
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement."""

    size: str
    lengths: str
    n: int
    """Answers to each prompt."""

    @property
    def name(self) -> str:
        return f"{self.size}, {self.lengths}, n = {self.n}"

    def rows(self) -> list[CollatedRow]:
        """Return the rows of one step: a function of the cell alone, so that every side computes the same loss."""
        count = ROWS[self.size]
        if self.lengths == "long-tailed":
            order = random.Random(self.name)
            prompts = long_tailed(count // self.n, SHORTEST, LONGEST_PROMPT)
            answers = long_tailed(count, SHORTEST, LONGEST_ANSWER)
            order.shuffle(prompts)
            order.shuffle(answers)
        else:
            prompt, answer = map(int, self.lengths.split(":"))
            tokens = round(LENGTH * prompt / (prompt + answer))
            prompts, answers = [tokens] * (count // self.n), [LENGTH - tokens] * count
        return group_rows(prompts, answers, SIZES[self.size].vocabulary)


def cells(sizes: Sequence[str], lengths: Sequence[str], ns: Sequence[int]) -> list[Cell]:
    """Return every combination; long-tailed lengths with the fewest answers to a prompt alone."""
    every = [Cell(*parts) for parts in product(sizes, lengths, ns)]
    return [cell for cell in every if cell.lengths != "long-tailed" or cell.n == min(ns)]


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parser(
        "train",
        "Training, by the layout of rows.",
        models=words(ROWS),
        lengths=words(LENGTHS),
        n={"type": numbers, "default": [8, 16], "help": "answers to a prompt; default: 8,16"},
        threads=available_cores(),
        rounds=5,
        cell_s={"type": float, "default": 20.0, "help": "no further round after that; default: %(default)g"},
    ).parse_args(arguments)
    # Read once, when torch is loaded, so that it may not be imported before: threads that spin while they wait made a
    # step many times slower on cores that others use too.
    os.environ.update(math_environment(chosen.threads), KINETO_LOG_LEVEL="99")
    run(cells(chosen.models, chosen.lengths, chosen.n), chosen.threads, chosen.rounds, chosen.cell_s)


def run(wanted: Sequence[Cell], threads: int, rounds: int, cell_s: float) -> None:
    """Measure the cells, and write them one by one."""
    import torch

    from benchmarks.gpu_checks.setting import Setting, one_rank_group
    from benchmarks.train_sides import Plain, Side, give_back, peak_bytes

    torch.set_num_threads(threads)
    found: list[Measured] = []
    parameters: dict[str, int] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as made, one_rank_group(Setting("cpu", Path(made))):
        for name, same in groupby(wanted, lambda cell: cell.size):
            parameters[name] = SIZES[name].make(folder := Path(made) / name)
            sides = {side: Plain(folder, BUDGET) if side == "plain" else Side(folder, BUDGET, side) for side in SIDES}
            for cell in same:
                rows = cell.rows()
                found.append(measured := Measured(cell, rows))
                check(cell, {name: side.gradient(rows) for name, side in sides.items()})
                measured.bytes |= {name: peak_bytes(side, rows) for name, side in sides.items()}
                for side_name, side in turns(sides, rounds, cell_s):
                    measured.seconds[side_name].append(timed(partial(side.step, rows)))
                say(f"[{len(found)} of {len(wanted)}, {time.monotonic() - began:.0f} s] {cell.name}")
                told(found, parameters, threads, show=len(found) == len(wanted))
            del sides, side
            give_back()


def check(cell: Cell, gradients: Mapping[str, dict[str, torch.Tensor]]) -> None:
    """End the benchmark where a side does not compute the plain loop's gradient."""
    from benchmarks.train_sides import distance

    for side, gradient in gradients.items():
        off = distance(gradient, gradients["plain"])
        if not off <= TOLERANCE:
            sys.exit(f"{cell.name}: the gradient of {side} rows is off by {off:.2g} of its norm (limit {TOLERANCE:g})")


@dataclass(slots=True)
class Measured:
    """One cell."""

    cell: Cell
    rows: Sequence[CollatedRow]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    """Seconds of a step by side, round by round."""
    bytes: dict[str, int] = field(default_factory=dict)
    """Most bytes that a step holds beyond what was there before."""

    def ratio(self, side: str, over: str = "padded") -> Ratio:
        return Ratio(median(self.seconds[over]) / median(self.seconds[side]))

    def allowed(self, side: str) -> Ratio:
        """Operations of padded rows ÷ those of ``side``."""
        padded, own = (work(one, self.rows, BUDGET).flops(SIZES[self.cell.size]) for one in ("padded", side))
        return Ratio(padded / own)

    def row(self) -> dict[str, Any]:
        """One line of the table."""
        tokens = sum(len(row.input_ids) for row in self.rows)
        return {
            "prompt:answer": self.cell.lengths,
            "n": self.cell.n,
            **{side: tokens / median(self.seconds[side]) for side in SIDES},
            "packed ÷ padded": self.ratio("packed"),
            "packed allowed": self.allowed("packed"),
            "shared ÷ padded": self.ratio("shared"),
            "shared allowed": self.allowed("shared"),
            "reached": Share(self.ratio("shared") / self.allowed("shared")),
            "shared ÷ plain": self.ratio("shared", "plain"),
            **{f"MB {side}": round(self.bytes[side] / 1e6) for side in SIDES},
            "rounds": len(self.seconds["padded"]),
        }


def told(found: Sequence[Measured], parameters: Mapping[str, int], threads: int, *, show: bool) -> str:
    """Write all tables; print them where they are to be shown."""
    raw = [{"cell": asdict(one.cell), "seconds": one.seconds} for one in found]
    return report("train", by_model(found, parameters), [EXPLAINED], show=show, threads=threads, rounds=raw)


if __name__ == "__main__":
    main()
