"""``python -m benchmarks.train``: training steps with rows padded, packed, and packed behind shared prompts.

    cells ─by model─▶ all sides loaded ─▶ gradients compared, memory ─▶ rounds: plain, padded, packed, shared, plain, …
                                                                            └─▶ medians, ratios ─▶ build/bench/train/

A plain loop over transformers is beside them. All sides compute the same loss of the same rows with the same budget of
a micro-batch, in float32; one whose gradient is not the plain loop's ends the benchmark. They take turns within each
round, so that a machine that slows down slows all of them. A further round begins only while the cell has time left.

Everything is written after each cell.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from benchmarks.train_workload import SIZES, Lengths, cells
from headway.cluster.hardware import available_cores
from headway.cluster.machine.worker_setup import math_environment

ROUNDS = 5
CELL_S = 20.0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description="Training, by the layout of rows.")
    parser.add_argument("--models", type=_list, default=list(SIZES), help=f"of {','.join(SIZES)}")
    parser.add_argument("--lengths", type=_list, default=list(Lengths), help=f"of {','.join(Lengths)}")
    parser.add_argument("--n", type=_numbers, default=[8, 16], help="answers to a prompt; default: 8,16")
    parser.add_argument("--threads", type=int, default=available_cores(), help="default: every core, %(default)s")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument(
        "--cell-s", type=float, default=CELL_S, help="no further round after that; default: %(default)g"
    )
    chosen = parser.parse_args(arguments)
    for flag, given, known in (("models", chosen.models, SIZES), ("lengths", chosen.lengths, list(Lengths))):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"--{flag}: unknown {', '.join(unknown)}; known: {', '.join(known)}")
    # Read once, when torch is loaded, so that it may not be imported before: threads that spin while they wait made a
    # step many times slower on cores that others use too.
    os.environ.update(math_environment(chosen.threads), KINETO_LOG_LEVEL="99")
    from benchmarks.train_bench import Bench

    wanted = cells(chosen.models, [Lengths(one) for one in chosen.lengths], chosen.n)
    print(Bench(chosen.threads, chosen.rounds, chosen.cell_s).run(wanted))


def _list(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


if __name__ == "__main__":
    main()
