"""``python -m benchmarks.study_staleness``: what stale data costs, and how much of it three losses make good.

The demo's warmed-up model, trained by naive PPO, decoupled PPO and truncated importance sampling at several η, by
several seeds, one run after the other with nothing beside them. Each run's result is kept in ``build/study/``: a study
that was stopped goes on where it was, and one that is complete only draws again. It writes the figure to
``docs/images/staleness-study.svg`` and the tables into ``docs/staleness-study.md``. Without ``build/study`` it begins
anew.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.runner import warmed_up_model
from benchmarks.study_figure import draw
from benchmarks.study_runs import Kept, Result, Run, digest, execute, runs
from benchmarks.study_tables import accuracy_table, health_table, time_table, write_into
from headway.cluster.hardware import available_cores, cpu_model

OUT = Path("build/study")
PAGE = Path("docs/staleness-study.md")
FIGURE = Path("docs/images/staleness-study.svg")

ETAS = (0, 1, 4, 8)
RATES = (2e-4,)
"""The demo's."""
SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Study:
    runs: tuple[Run, ...]
    kept: Path
    """Folder of the results."""
    figure: Path
    page: Path | None
    """Where the tables go; None: they are printed."""


def full(rates: Sequence[float]) -> Study:
    return Study(tuple(runs(ETAS, rates, SEEDS)), OUT, FIGURE, PAGE)


FULL = full(RATES)
QUICK = Study(tuple(runs((0, 4), RATES[:1], (0,), versions=8, val_size=64)), OUT / "quick", OUT / "quick.svg", None)
"""Whether everything works, in about two minutes."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study_staleness", description="What stale data costs.")
    parser.add_argument("--quick", action="store_true", help=f"{len(QUICK.runs)} short runs, nothing into docs/")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, metavar="LR", help="learning rates")
    options = parser.parse_args(arguments)
    study = QUICK if options.quick else FULL if options.rates == RATES else full(options.rates)
    results = conduct(study, model())
    draw(results, study.figure)
    blocks = {
        "accuracy": accuracy_table(results),
        "health": health_table(results),
        "seconds": time_table(results, f"{available_cores()} cores, {cpu_model()}."),
    }
    if study.page is not None:
        write_into(study.page, blocks)
    print("\n".join(blocks.values()))
    print(f"figure: {study.figure}")


def model() -> Path:
    """The demo's model after warm-up, made once for all runs of all studies."""
    folder = OUT / "model"
    if not folder.is_dir():
        OUT.mkdir(parents=True, exist_ok=True)
        print("making and warming up the model", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=OUT) as scratch:
            warmed_up_model(Path(scratch)).rename(folder)
    return folder


def conduct(study: Study, model: Path) -> list[Result]:
    """Results of all runs; those that are not kept yet are made."""
    kept = Kept(study.kept, digest(model))
    results: list[Result] = []
    for number, run in enumerate(study.runs, 1):
        result = kept.get(run)
        if result is None:
            with tempfile.TemporaryDirectory(prefix="headway-study-") as scratch:
                result = execute(run, model, Path(scratch) / "run")
            kept.put(result)
            print(
                f"{number}/{len(study.runs)}  {run.name}  accuracy {result.final:.3f}  mean lag {result.lag_mean:.2f}  "
                f"{result.seconds:.1f} s",
                file=sys.stderr,
            )
        results.append(result)
    return results


if __name__ == "__main__":
    main()
