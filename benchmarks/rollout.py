"""``python -m benchmarks.rollout``: tokens per second of the native engine and of its peers.

    cells ─by setting─▶ a process per engine, loaded once ─▶ rounds: native, generate, continuous, vllm, native, …
                                                                 └─▶ medians, ratios ─▶ build/bench/rollout.{md,json}

A further round begins only while the cell has time left. An engine that does not answer within the time-out is ended
and not asked again in that cell; the table says so. ``--update`` measures something else: for how long an update holds
64 requests in mid-flight. Everything is written after each cell.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import groupby, product
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.rollout_engines import ENGINES, KINDS, REQUESTS, TOKENS, UPDATE, VLLM_ENVIRONMENT, Cell, Update
from benchmarks.runner import Failed, Worker, numbers, parser, say, turns, words
from benchmarks.shapes import SIZES
from benchmarks.table import OUT, Ratio, Rows, by_model, medians, report
from headway.cluster.machine.worker_setup import math_environment

MODELS = ("1m", "3m", "100m")
NATIVE = "native"
VLLM_PYTHON = Path(".venv-vllm/bin/python")
CELL_S = 30.0
"""Seconds of a cell after which no further round begins."""
TIMEOUT_S, UPDATES_S = 90.0, 600.0
"""Most seconds of one run of an engine, and of all its updates."""
EXPLAINED = (
    "Tokens per second of the answers; where prefill alone is measured, of the prompts. Medians over rounds in which "
    "the engines take turns; the ratio is native ÷ the best other. Everything is float32, temperature 1, no filters; "
    "the native engine also returns each token's log-prob, the others are not asked for it. `generate` decodes a "
    "static batch until its longest answer is written; only tokens that were wanted count."
)


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parser(
        "rollout",
        "Generation, against its peers.",
        models=words(MODELS),
        threads={"type": numbers, "default": [1, 2], "help": "default: 1,2"},
        kinds=words(KINDS),
        engines=words(ENGINES),
        rounds={"type": int, "help": "default: 3; 7 with --update"},
        quick={"action": "store_true", "help": "one small model, one thread: two minutes"},
        update={"action": "store_true", "help": "for how long an update holds 64 requests, instead"},
    ).parse_args(arguments)
    pythons, notes = interpreters(chosen.engines)
    if chosen.update:
        measure_updates(chosen.models, chosen.threads, chosen.rounds or 7, pythons)
        return
    wanted: list[Cell] = []
    for size in chosen.models[:1] if chosen.quick else chosen.models:
        few = chosen.quick or size == "100m"
        slots, tokens = ([32], [64]) if few else ([32, 128], [64, 256])
        wanted += cells(size, [1] if chosen.quick else chosen.threads, slots, tokens, chosen.kinds)
    run(wanted, pythons, notes, chosen.rounds or 3)


def cells(
    size: str, threads: Sequence[int], concurrent: Sequence[int], tokens: Sequence[int], kinds: Sequence[str] = KINDS
) -> list[Cell]:
    """Return all of them; those of one engine one behind the other. Prefill is measured at the fewest concurrent."""
    made = []
    for setting in product([size], threads, concurrent):
        if "prefill" in kinds and setting[2] == min(concurrent):
            made.append(Cell(*setting, "prefill", 1))
        made += [Cell(*setting, kind, most) for most, kind in product(tokens, kinds) if kind != "prefill"]
    return made


def interpreters(engines: Sequence[str]) -> tuple[dict[str, Path], list[str]]:
    """Return interpreters by engine, and notes about engines that are left out."""
    pythons = {engine: VLLM_PYTHON if engine == "vllm" else Path(sys.executable) for engine in engines}
    notes = [f"{engine}: not measured" for engine in ENGINES if engine not in engines]
    if "vllm" in pythons and not VLLM_PYTHON.exists():
        del pythons["vllm"]
        notes.append("vllm: skipped, there is no environment for it (make test-vllm builds one)")
    return pythons, notes


def worker(python: Path, engine: str, folder: Path, cell: Cell) -> Worker:
    """Return a process that loads ``engine`` for ``cell``. Mathematics is set up alike, as in Headway's own workers."""
    extra = VLLM_ENVIRONMENT if engine == "vllm" else {}
    environment = {**math_environment(cell.threads), **extra, "PYTHONPATH": os.pathsep.join(["src", "."])}
    command = [str(python), "-m", "benchmarks.rollout_engines", engine, str(folder), json.dumps(asdict(cell))]
    return Worker(command, OUT / "rollout" / f"{engine}.log", environment)


@dataclass(slots=True)
class Measured:
    """One cell."""

    cell: Cell
    rates: dict[str, list[float]]
    """Tokens per second of each engine, round by round."""
    failures: dict[str, str] = field(default_factory=dict)
    """Why an engine has no further rounds."""

    def rate(self, engine: str) -> float | None:
        """Median; None where there is no whole measurement."""
        rates = self.rates.get(engine)
        return median(rates) if rates and engine not in self.failures else None

    @property
    def ratio(self) -> Ratio | None:
        """Native ÷ the best other."""
        others = [rate for engine in self.rates if engine != NATIVE and (rate := self.rate(engine)) is not None]
        native = self.rate(NATIVE)
        return None if native is None or not others else Ratio(native / max(others))

    @property
    def aim(self) -> Ratio | None:
        small = self.cell.size != "100m"
        aims = {"prefill": None, "uniform": Ratio(1.4 if small else 1.2)}
        return aims.get(self.cell.kind, Ratio(3.0 if small else 2.0))

    def row(self) -> dict[str, Any]:
        cell, failed = self.cell, {e: why if why.startswith("over ") else "failed" for e, why in self.failures.items()}
        what = {"requests": cell.kind, "threads": cell.threads, "concurrent": cell.concurrent, "tokens": cell.tokens}
        rates = {engine: failed.get(engine) or self.rate(engine) for engine in self.rates}
        rounds = max(map(len, self.rates.values()), default=0)
        return {**what, **rates, "ratio": self.ratio, "aim": self.aim, "rounds": rounds}


def run(wanted: Sequence[Cell], pythons: Mapping[str, Path], notes: Sequence[str], rounds: int) -> None:
    """Measure all cells, those that share engines one behind the other."""
    found: list[Measured] = []
    parameters: dict[str, int] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as scratch:
        for (name, *_), same in groupby(wanted, lambda c: (c.size, c.threads, c.concurrent)):
            mine, folder = list(same), Path(scratch) / name
            if not folder.exists():
                parameters[name] = SIZES[name].make(folder)
            longest = max(mine, key=lambda cell: cell.context)
            with ExitStack() as stack:
                workers = {engine: worker(python, engine, folder, longest) for engine, python in pythons.items()}
                for engine, one in workers.items():
                    stack.callback(one.stop)
                    try:
                        one.start()
                    except Failed as error:
                        say(f"{engine}: {error}")
                for cell in mine:
                    found.append(measured := measure(cell, workers, rounds))
                    said = f"ratio {measured.ratio}{measured.failures or ''}"
                    say(f"[{len(found)} of {len(wanted)}, {time.monotonic() - began:.0f} s] {cell.name}: {said}")
                    told(found, parameters, notes, show=len(found) == len(wanted))


def measure(cell: Cell, workers: Mapping[str, Worker], rounds: int, cell_s: float = CELL_S) -> Measured:
    """Rounds of one cell: at least one, and no further one that would take longer than is left."""
    measured = Measured(cell, {engine: [] for engine in workers})
    for engine, one in turns(workers, rounds, cell_s):
        if engine not in measured.failures:
            try:
                took = one.ask(asdict(cell), TIMEOUT_S)
            except Failed as error:
                measured.failures[engine] = str(error)
            else:
                measured.rates[engine].append(took["tokens"] / took["seconds"])
    return measured


def measure_updates(models: Sequence[str], threads: Sequence[int], rounds: int, pythons: Mapping[str, Path]) -> None:
    """Measure updates of each model, by number of threads and engine, and report."""
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as scratch:
        for name in models:
            SIZES[name].make(folder := Path(scratch) / name)
            for count, engine in product(threads, (one for one in pythons if one in (NATIVE, "vllm"))):
                say(f"{name}, threads {count}, {engine}: {rounds} updates")
                one = worker(pythons[engine], engine, folder, Cell(name, count, REQUESTS, UPDATE, TOKENS))
                try:
                    of_row = {"model": name, "threads": count, "engine": engine}
                    rows.append({**of_row, **stall(one.ask(rounds, UPDATES_S))})
                except Failed as error:
                    failures.append(f"{name}, threads {count}, {engine}: {error}")
                finally:
                    one.stop()
    title = f"Updates with {REQUESTS} requests in mid-flight, on_update interrupt; medians of {rounds}"
    report("rollout-update", {title: rows}, ["The prefill of all contexts is in resume.", *failures])


def stall(updates: Sequence[Update]) -> dict[str, float]:
    """Return medians in milliseconds. Staging beside decoding is no part of the stall."""
    stalls = [{**update, "stall": sum(update.values()) - update["stage"]} for update in updates]
    return {f"{name} ms": 1e3 * seconds for name, seconds in medians(stalls).items()}


def told(found: Sequence[Measured], parameters: Mapping[str, int], notes: Sequence[str], *, show: bool) -> str:
    """Write all tables; print them where they are to be shown."""
    failures = [f"{engine}, {m.cell.name}: {why}" for m in found for engine, why in m.failures.items()]
    raw = [{**asdict(one), "ratio": one.ratio, "aim": one.aim} for one in found]
    tables = {**by_model(found, parameters), "Aims": _aims(found)}
    return report("rollout", tables, [EXPLAINED, *notes, *failures], show=show, cells=raw)


def _aims(found: Sequence[Measured]) -> Rows:
    """Geometric mean of the ratios, the least, and how many cells reach the aim, by model and kind."""
    cells_of: dict[tuple[str, str], list[Measured]] = {}
    for one in found:
        if one.ratio is not None:
            cells_of.setdefault((one.cell.size, one.cell.kind), []).append(one)
    rows: list[dict[str, Any]] = []
    for (size, kind), same in cells_of.items():
        ratios, aim = [one.ratio or Ratio(0) for one in same], same[0].aim
        what = {"model": size, "requests": kind, "aim": aim, "mean ratio": Ratio(exp(fmean(map(log, ratios))))}
        reached = None if aim is None else f"{sum(ratio >= aim for ratio in ratios)} of {len(ratios)}"
        rows.append({**what, "least": min(ratios), "cells that reach it": reached})
    return rows


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers and models go, too
    main()
