"""``python -m benchmarks.rollout``: tokens per second of the native engine and of its peers.

    cells ─by setting─▶ a process per engine, loaded once ─▶ rounds: native, generate, continuous, vllm, native, …
                                                                 └─▶ medians, ratios ─▶ build/bench/rollout.{md,json}

A further round begins only while the cell has time left, and whoever does not answer within the time-out is ended and
not asked again in that cell; the table says both. ``--update`` measures something else: for how long an update holds 64
requests in mid-flight. Everything is written after each cell.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import groupby
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.rollout_engines import ENGINES, VLLM_ENVIRONMENT
from benchmarks.rollout_update import measure_updates
from benchmarks.rollout_workload import SIZES, Cell, Kind, Setting, cells
from benchmarks.runner import Failed, Worker, numbers, parser, say, turns, words
from benchmarks.table import OUT, Ratio, Rows, report
from headway.cluster.machine.worker_setup import math_environment

LOGS = OUT / "rollout"
NATIVE = "native"
TITLES = {"native": "native", "generate": "generate", "continuous": "continuous batching", "vllm": "vLLM"}
EXPLAINED = (
    "Tokens per second of the answers; where prefill alone is measured, of the prompts. Medians over rounds in which "
    "the engines take turns; the ratio is native ÷ the best other. Everything is float32, temperature 1, no filters; "
    "the native engine also returns each token's log-prob, the others are not asked for it. `generate` decodes a "
    "static batch until its longest answer is written; only tokens that were wanted count."
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(
        "rollout",
        "Generation, against its peers.",
        models={**words(SIZES), "default": None},
        threads={"type": numbers, "help": "such as 1,2"},
        concurrent={"type": numbers, "help": "such as 32,128"},
        tokens={"type": numbers, "help": "of the longest answer, such as 64,256"},
        kinds=words(Kind),
        engines=words(ENGINES),
        rounds={"type": int, "help": "default: 3; 2 with --quick; 7 with --update"},
        cell_s={"type": float, "help": "no further round after that; default: 30, 15 with --quick"},
        timeout_s={"type": float, "default": 90.0, "help": "of one run; default: %(default)g"},
        vllm_python={"type": Path, "default": Path(".venv-vllm/bin/python"), "help": "default: %(default)s"},
    )
    extent = options.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="one small model, one thread: two minutes")
    extent.add_argument("--full", action="store_true", help="every cell of the largest model too: hours")
    extent.add_argument("--update", action="store_true", help="for how long an update holds 64 requests, instead")
    chosen = options.parse_args(arguments)
    pythons, notes = interpreters(chosen.engines, chosen.vllm_python)
    if chosen.update:
        models, threads = chosen.models or list(SIZES), chosen.threads or [1, 2]
        measure_updates(models, threads, chosen.rounds or 7, lambda *what: worker(pythons, *what), list(pythons))
        return
    rounds = chosen.rounds or (2 if chosen.quick else 3)
    run(planned(chosen), pythons, notes, rounds, chosen.cell_s or (15.0 if chosen.quick else 30.0), chosen.timeout_s)


def planned(chosen: argparse.Namespace) -> list[Cell]:
    """The cells that were asked for; what was not said is all of it, or a part by ``--quick``, ``--full``, neither."""
    quick = ["1m"], [1], [32], [64]
    small = [size.name for size in SIZES.values() if size.small], [1, 2], [32, 128], [64, 256]
    large = [size.name for size in SIZES.values() if not size.small], [1, 2], [32], [64]
    parts = [quick] if chosen.quick else [small, (large[0], *small[1:]) if chosen.full else large]
    made: list[Cell] = []
    for sizes, threads, concurrent, tokens in parts:
        models = [size for size in chosen.models or sizes if size in sizes or chosen.quick]
        extent = chosen.threads or threads, chosen.concurrent or concurrent, chosen.tokens or tokens
        made += cells(models, *extent, [Kind(kind) for kind in chosen.kinds])
    return made


def interpreters(engines: Sequence[str], vllm: Path) -> tuple[dict[str, Path], list[str]]:
    """Interpreters by engine, and notes about engines that are left out."""
    pythons = {engine: vllm if engine == "vllm" else Path(sys.executable) for engine in engines}
    notes = [f"{engine}: not measured" for engine in ENGINES if engine not in engines]
    if "vllm" in pythons and not vllm.exists():
        del pythons["vllm"]
        notes.append("vllm: skipped, there is no environment for it (make test-vllm builds one; or --vllm-python)")
    return pythons, notes


def worker(pythons: Mapping[str, Path], engine: str, threads: int, module: str, *arguments: str) -> Worker:
    """A process of ``engine``. Every engine's mathematics is set up alike, as Headway's own workers have it."""
    extra = VLLM_ENVIRONMENT if engine == "vllm" else {}
    environment = {**math_environment(threads), **extra, "PYTHONPATH": os.pathsep.join(["src", "."])}
    command = [str(pythons[engine]), "-m", module, engine, *arguments]
    return Worker(command, LOGS / f"{module.rpartition('.')[2]}-{engine}.log", environment)


# ------------------------------------------------------------------------------------------ measuring


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
        """Add one round."""
        self.rates.setdefault(engine, []).append(tokens / seconds)
        self.busy.setdefault(engine, []).append(cpu_seconds / seconds)

    def rate(self, engine: str) -> float | None:
        """Median; None where there is no whole measurement."""
        return median(self.rates[engine]) if engine in self.rates and engine not in self.failures else None

    @property
    def best_other(self) -> float | None:
        """Median tokens per second of the quickest other engine."""
        rates = (self.rate(engine) for engine in self.rates if engine != NATIVE)
        return max((rate for rate in rates if rate is not None), default=None)

    @property
    def ratio(self) -> Ratio | None:
        """Native ÷ the best other."""
        native, best = self.rate(NATIVE), self.best_other
        return None if native is None or best is None else Ratio(native / best)

    @property
    def rounds(self) -> int:
        return max(map(len, self.rates.values()), default=0)

    def line(self) -> str:
        rates = ", ".join(f"{engine} {median(rates):.0f}" for engine, rates in self.rates.items())
        failed = "".join(f"; {engine}: {why}" for engine, why in self.failures.items())
        return f"{self.cell.name}: {rates} tokens/s; ratio {self.ratio}{failed}"


def run(
    wanted: Sequence[Cell],
    pythons: Mapping[str, Path],
    notes: Sequence[str],
    rounds: int,
    cell_s: float,
    timeout_s: float,
) -> None:
    """Measure all cells, those that share engines one behind the other."""
    found: list[Measured] = []
    parameters: dict[str, int] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as scratch:
        for (name, threads, slots), same in groupby(wanted, lambda c: (c.size, c.threads, c.concurrent)):
            mine, folder = list(same), Path(scratch) / name
            if not folder.exists():
                parameters[name] = SIZES[name].make(folder)
            setting = json.dumps(asdict(Setting(name, threads, slots, max(cell.tokens for cell in mine))))
            with ExitStack() as stack:
                workers = {
                    engine: worker(pythons, engine, threads, "benchmarks.rollout_engines", str(folder), setting)
                    for engine in pythons
                }
                for engine, one in workers.items():
                    stack.callback(one.stop)
                    start = time.monotonic()
                    try:
                        one.start()
                        say(f"{engine}: loaded in {time.monotonic() - start:.1f} s")
                    except Failed as error:
                        say(f"{engine}: {error}")
                for cell in mine:
                    found.append(measure(cell, workers, rounds, cell_s, timeout_s))
                    say(f"[{len(found)} of {len(wanted)}, {time.monotonic() - began:.0f} s] {found[-1].line()}")
                    told(found, list(pythons), parameters, notes, show=len(found) == len(wanted))


def measure(cell: Cell, workers: Mapping[str, Worker], rounds: int, cell_s: float, timeout_s: float) -> Measured:
    """Rounds of one cell: at least one, and no further one that would take longer than is left."""
    measured = Measured(cell)
    for engine, one in turns(workers, rounds, cell_s):
        if engine not in measured.failures:
            try:
                measured.add(engine, **one.ask(asdict(cell), timeout_s))
            except Failed as error:
                measured.failures[engine] = str(error)
    return measured


# ------------------------------------------------------------------------------------------ tables


def told(
    found: Sequence[Measured],
    engines: Sequence[str],
    parameters: Mapping[str, int],
    notes: Sequence[str],
    *,
    show: bool,
) -> str:
    """Write all tables; print them where they are to be shown."""
    tables = {
        f"{size}: {parameters.get(size, 0):,} parameters": [_row(one, engines) for one in same]
        for size, same in groupby(found, lambda one: one.cell.size)
    }
    failures = [f"{TITLES[engine]}, {m.cell.name}: {why}" for m in found for engine, why in m.failures.items()]
    alone = [share for one in found if one.cell.threads == 1 for share in one.busy.get(NATIVE, ())]
    had = f"With one thread the native engine had a core for {median(alone or [0]):.0%} of its time (median of rounds)"
    raw = [{**asdict(one), "ratio": one.ratio, "aim": one.cell.aim} for one in found]
    said = [EXPLAINED, *([f"{had}; far below 100% the machine had other things to do."] if alone else [])]
    return report("rollout", {**tables, "Aims": _aims(found)}, [*said, *notes, *failures], show=show, cells=raw)


def _row(one: Measured, engines: Sequence[str]) -> dict[str, Any]:
    cell = one.cell
    what = {"requests": cell.kind, "threads": cell.threads, "concurrent": cell.concurrent, "tokens": cell.tokens}
    rates = {TITLES[engine]: _rate(one, engine) for engine in engines}
    return {**what, **rates, "ratio": one.ratio, "aim": cell.aim, "rounds": one.rounds}


def _rate(measured: Measured, engine: str) -> float | str | None:
    if why := measured.failures.get(engine):
        return why if why.startswith("over ") else "failed"
    return measured.rate(engine)


def _aims(found: Sequence[Measured]) -> Rows:
    """Geometric mean of the ratios, the least, and how many cells reach the aim, by model and kind."""
    ratios: dict[tuple[str, str], list[tuple[Ratio, Ratio | None]]] = {}
    for one in found:
        if one.ratio is not None:
            ratios.setdefault((one.cell.size, one.cell.kind), []).append((one.ratio, one.cell.aim))
    rows: list[dict[str, Any]] = []
    for (size, kind), same in ratios.items():
        mean, aim = Ratio(exp(fmean(log(ratio) for ratio, _ in same))), same[0][1]
        reached = None if aim is None else f"{sum(ratio >= aim for ratio, _ in same)} of {len(same)}"
        what = {"model": size, "requests": kind, "aim": aim, "mean ratio": mean}
        rows.append({**what, "least": min(ratio for ratio, _ in same), "cells that reach it": reached})
    return rows


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers and models go, too
    main()
