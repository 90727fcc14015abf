"""``python -m benchmarks.rollout``: tokens per second of the native engine and of its peers.

    cells ─by setting─▶ a process per engine, loaded once ─▶ rounds: native, generate, continuous, vllm, native, …
                                                                 └─▶ medians, ratios ─▶ build/bench/rollout/

Engines take turns within each round, so that a machine that slows down slows all of them down. A further round begins
only while the cell has time left, and whoever does not answer within the time-out is ended and not asked again in that
cell; the table says both. ``--update`` measures something else: for how long an update holds 64 requests in mid-flight.

Everything is written after each cell.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from benchmarks.rollout_engines import ENGINES
from benchmarks.rollout_process import TimedOut, Worker, WorkerFailed, Workers
from benchmarks.rollout_tables import Measured, Results, write
from benchmarks.rollout_update import measure_updates
from benchmarks.rollout_workload import SIZES, Cell, Kind, Setting, cells
from benchmarks.table import OUT

FOLDER = OUT / "rollout"
VLLM_PYTHON = Path(".venv-vllm/bin/python")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout", description="Generation, against its peers.")
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="one small model, one thread: two minutes")
    extent.add_argument("--full", action="store_true", help="every cell of the largest model too: hours")
    extent.add_argument("--update", action="store_true", help="for how long an update holds 64 requests, instead")
    parser.add_argument("--models", type=_list, help=f"of {','.join(SIZES)}")
    parser.add_argument("--threads", type=_numbers, help="such as 1,2")
    parser.add_argument("--concurrent", type=_numbers, help="such as 32,128")
    parser.add_argument("--tokens", type=_numbers, help="of the longest answer, such as 64,256")
    parser.add_argument("--kinds", type=_list, help=f"of {','.join(Kind)}")
    parser.add_argument("--engines", type=_list, default=list(ENGINES), help=f"of {','.join(ENGINES)}")
    parser.add_argument("--rounds", type=int, help="default: 3; 2 with --quick; 7 with --update")
    parser.add_argument("--cell-s", type=float, help="no further round after that; default: 30, 15 with --quick")
    parser.add_argument("--timeout-s", type=float, default=90.0, help="of one run; default: %(default)g")
    parser.add_argument("--vllm-python", type=Path, default=VLLM_PYTHON, help="default: %(default)s")
    chosen = parser.parse_args(arguments)
    for flag, given, known in (("models", chosen.models, SIZES), ("kinds", chosen.kinds, list(Kind))):
        if unknown := sorted(set(given or ()) - set(known)):
            parser.error(f"--{flag}: unknown {', '.join(unknown)}; known: {', '.join(known)}")
    if unknown := sorted(set(chosen.engines) - set(ENGINES)):
        parser.error(f"--engines: unknown {', '.join(unknown)}; known: {', '.join(ENGINES)}")
    rounds = chosen.rounds or (2 if chosen.quick else 3)
    cell_s = chosen.cell_s or (15.0 if chosen.quick else 30.0)
    pythons, notes = interpreters(chosen.engines, chosen.vllm_python)
    if chosen.update:
        models, threads = chosen.models or list(SIZES), chosen.threads or [1, 2]
        print(measure_updates(FOLDER, pythons, models, threads, chosen.rounds or 7))
        return
    bench = Bench(pythons, rounds, cell_s, chosen.timeout_s, Results(notes=notes))
    bench.run(planned(chosen))
    print(write(bench.results, FOLDER, show=True))


def planned(chosen: argparse.Namespace) -> list[Cell]:
    """The cells that were asked for; what was not said is all of it, or a part by ``--quick``, ``--full``, neither."""
    quick = ["1m"], [1], [32], [64]
    small = [size.name for size in SIZES.values() if size.small], [1, 2], [32, 128], [64, 256]
    large = [size.name for size in SIZES.values() if not size.small], [1, 2], [32], [64]
    parts = [quick] if chosen.quick else [small, (large[0], *small[1:]) if chosen.full else large]
    made: list[Cell] = []
    for sizes, threads, concurrent, tokens in parts:
        made += cells(
            [size for size in chosen.models or sizes if size in sizes or chosen.quick],
            chosen.threads or threads,
            chosen.concurrent or concurrent,
            chosen.tokens or tokens,
            [Kind(kind) for kind in chosen.kinds or Kind],
        )
    return made


def interpreters(engines: Sequence[str], vllm: Path) -> tuple[dict[str, Path], list[str]]:
    """By engine, and what there is to say about those that are left out."""
    pythons = {engine: vllm if engine == "vllm" else Path(sys.executable) for engine in engines}
    notes = [f"{engine}: not measured" for engine in ENGINES if engine not in engines]
    if "vllm" in pythons and not vllm.exists():
        del pythons["vllm"]
        notes.append("vllm: skipped, there is no environment for it (make test-vllm builds one; or --vllm-python)")
    return pythons, notes


@dataclass(slots=True)
class Bench:
    pythons: Mapping[str, Path]
    rounds: int
    cell_s: float
    timeout_s: float
    results: Results

    def run(self, wanted: Sequence[Cell]) -> None:
        self.results.engines = list(self.pythons)
        began, done = time.monotonic(), 0
        with tempfile.TemporaryDirectory(prefix="headway-bench-") as scratch:
            for (name, threads, slots), same in groupby(wanted, lambda c: (c.size, c.threads, c.concurrent)):
                mine = list(same)
                folder = Path(scratch) / name
                if not folder.exists():
                    self.results.parameters[name] = SIZES[name].make(folder)
                setting = Setting(name, threads, slots, max(cell.tokens for cell in mine))
                with Workers(self.pythons, folder, setting, FOLDER / "logs") as workers:
                    for cell in mine:
                        measured = self.measure(cell, workers)
                        done += 1
                        took = f"[{done} of {len(wanted)}, {time.monotonic() - began:.0f} s]"
                        print(f"{took} {measured.line()}", file=sys.stderr, flush=True)
                        write(self.results, FOLDER)

    def measure(self, cell: Cell, workers: Sequence[Worker]) -> Measured:
        """Rounds of one cell: at least one, and no further one that would take longer than is left."""
        measured = Measured(cell)
        self.results.cells.append(measured)
        start = time.monotonic()
        for done in range(self.rounds):
            spent = time.monotonic() - start
            if done and spent + spent / done > self.cell_s:
                break
            for worker in workers:
                if worker.engine in measured.failures:
                    continue
                try:
                    answer = worker.run(cell, self.timeout_s)
                except TimedOut:
                    measured.failures[worker.engine] = f"over {self.timeout_s:g} s"
                except WorkerFailed as error:
                    measured.failures[worker.engine] = str(error)
                else:
                    measured.add(worker.engine, **answer)
        return measured


def _list(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers and models go, too
    main()
