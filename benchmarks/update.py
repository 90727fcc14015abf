"""``python -m benchmarks.update``: what an update of the weights costs, for every way in which it can be done.

Each permitted transport × schedule × encoding is a run of real training, one process that trains and one that
generates, on a thread each. Right before each run the machine's own speed is measured for as many bytes. Phase times
are medians over updates, stalls sums over the measured time. Then two questions that need runs of their own: stalls
where versions are longer, and how much of a model changes at a learning rate of 1e-6.

A run that fails is a row that says so. Everything is written to ``build/bench/update.{md,json}`` after each run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.update_figures import Figures, read_figures
from benchmarks.update_raw import Pair
from benchmarks.update_runs import (
    AT_THE_END,
    LONG,
    SIZES,
    WARM_UP,
    WORKLOAD,
    Kind,
    Model,
    RunFailed,
    Size,
    kinds,
    make,
    train,
    update_run,
)
from benchmarks.update_tables import Deltas, Long, Results, Row, write
from headway.errors import HeadwayError

VERSIONS = {"1m": 8, "25m": 6, "100m": 5}
LONG_VERSIONS = 3
DELTA_VERSIONS = 6
MADE = "25m"
"""Whose deltas are looked at, besides those of the demo's model."""
DEMO = Path("recipes/demo.yaml")
DEMO_GROUPS = 64
"""Per version, as the demo has it."""
DELTA = Kind("broadcast", "synchronous", "delta", on_update="interrupt")
SMALL_STEPS = ("actor.optim.lr=1e-6", "actor.optim.lr_warmup_steps=0", "rollout.dtype=bfloat16")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.update", description="What updates cost.")
    parser.add_argument("--models", default=",".join(SIZES), help="default: %(default)s")
    parser.add_argument("--versions", type=int, help=f"measured in each run; default: {VERSIONS}")
    parser.add_argument("--rounds", type=int, default=1, help="of all runs, interleaved; default: %(default)s")
    parser.add_argument("--only", nargs="+", default=[], metavar="TRANSPORT[:SCHEDULE[:ENCODING]]")
    chosen = parser.parse_args(arguments)
    names = chosen.models.split(",")
    if unknown := sorted(set(names) - set(SIZES)):
        parser.error(f"--models: unknown {', '.join(unknown)}; known: {', '.join(SIZES)}")
    asked = [kind for kind in kinds() if kind.is_asked_for(chosen.only)]
    if not asked:
        parser.error(f"--only: no update is like that; there are {', '.join(kind.name for kind in kinds())}")
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as scratch, Pair() as pair:
        sizes = [SIZES[name] for name in names]
        bench = Bench(Path(scratch), pair, sizes, asked, chosen.only, chosen.versions, chosen.rounds)
        bench.run()
    print(write(bench.results, show=True))


@dataclass(slots=True)
class Bench:
    scratch: Path
    pair: Pair
    sizes: Sequence[Size]
    kinds: Sequence[Kind]
    only: Sequence[str]
    versions: int | None
    rounds: int
    results: Results = field(default_factory=Results)
    _done: int = 0
    _began: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        models = {size.name: make(size, self.scratch / size.name) for size in self.sizes}
        self.results.parameters = {name: model.parameters for name, model in models.items()}
        rows = {(size.name, kind): Row(size.name, kind) for size in self.sizes for kind in self.kinds}
        self.results.rows = list(rows.values())
        for _ in range(self.rounds):
            for size in self.sizes:
                for kind in self.kinds:
                    self._measure(rows[size.name, kind], size, models[size.name])
        if LONG.is_asked_for(self.only):
            for size in self.sizes:
                self._measure_long(size, models[size.name])
        if DELTA.is_asked_for(self.only):
            self._measure_deltas(models)

    @property
    def _planned(self) -> int:
        long = len(self.sizes) * LONG.is_asked_for(self.only)
        deltas = (1 + any(size.name == MADE for size in self.sizes)) * DELTA.is_asked_for(self.only)
        return self.rounds * len(self.sizes) * len(self.kinds) + long + deltas

    def _measure(self, row: Row, size: Size, model: Model) -> None:
        versions = WARM_UP + (self.versions or VERSIONS[size.name]) + AT_THE_END

        def run(directory: Path) -> Figures:
            row.raws.append(self.pair.measure(model.nbytes))
            return read_figures(update_run(directory, model, row.kind, groups=size.groups, versions=versions))

        figures, row.failure = self._try(f"{size.name} {row.kind.name}", run, row.failure)
        if figures is not None:
            row.figures.add(figures)
        write(self.results)

    def _measure_long(self, size: Size, model: Model) -> None:
        versions = 1 + LONG_VERSIONS + AT_THE_END

        def run(directory: Path) -> Figures:
            update_run(directory, model, LONG, groups=size.long_groups, versions=versions)
            return read_figures(directory, warm_up=1)

        figures, failure = self._try(f"{size.name} {LONG.name}, {size.long_groups} groups per version", run)
        self.results.long.append(Long(size.name, size.long_groups, figures, failure))
        write(self.results)

    def _measure_deltas(self, models: dict[str, Model]) -> None:
        def demo(directory: Path) -> Figures:
            shorter = ("rollout.test_freq=-1", "data.task.val_size=16")
            warmed_up = directory.with_name(f"{directory.name}-model")
            train(DEMO, warmed_up, *shorter, f"rollout.total_rollout_steps={DEMO_GROUPS}")
            path = f"model.path={warmed_up / 'initial_model'}"
            return _deltas(
                DEMO, directory, path, *shorter, f"rollout.total_rollout_steps={DEMO_GROUPS * DELTA_VERSIONS}"
            )

        def made(directory: Path) -> Figures:
            groups = SIZES[MADE].groups
            return _deltas(
                WORKLOAD,
                directory,
                "mode=async_partial",
                f"model.path={models[MADE].folder}",
                f"actor.ppo_mini_batch_size={groups}",
                f"rollout.total_rollout_steps={4 * groups * DELTA_VERSIONS}",  # four optimizer steps per version
            )

        runs = {"the demo's, warmed up": demo, **({MADE: made} if MADE in models else {})}
        for name, run in runs.items():
            figures, failure = self._try(f"deltas at lr 1e-6: {name}", run)
            self.results.deltas.append(Deltas(name, figures, failure))
            write(self.results)

    def _try(
        self, what: str, run: Callable[[Path], Figures], failed_before: str | None = None
    ) -> tuple[Figures | None, str | None]:
        """The figures of one run, or why there are none."""
        self._done += 1
        directory = self.scratch / f"run-{self._done}"
        figures, failure = None, failed_before
        try:
            figures = run(directory)
        except (RunFailed, HeadwayError, ValueError) as error:
            failure = str(error)
        self._say(what, figures, failure)
        return figures, failure

    def _say(self, what: str, figures: Figures | None, failure: str | None) -> None:
        took = f"[{self._done} of {self._planned}, {time.monotonic() - self._began:.0f} s] {what}"
        if figures is None:
            print(f"{took}: FAILED: {failure}", file=sys.stderr, flush=True)
            return
        print(
            f"{took}: {figures.version_s:.2f} s a version; stalls: trainer {figures.trainer_share:.1%}, "
            f"rollout {figures.rollout_share:.1%}; sent {figures.sent_share:.1%}",
            file=sys.stderr,
            flush=True,
        )


def _deltas(config: Path, directory: Path, *settings: str) -> Figures:
    """All updates but the first, which is whole."""
    changed = tuple(one for one in DELTA.settings() if not one.startswith("param_update.verify"))
    return read_figures(train(config, directory, *settings, *SMALL_STEPS, *changed), warm_up=1, at_the_end=0)


if __name__ == "__main__":
    main()
