"""``python -m benchmarks.update``: what an update of the weights costs, for every way in which it can be done.

Each permitted transport × schedule × encoding is a run of real training, one process that trains and one that
generates, on a thread each. Right before each run the machine's own speed is measured for as many bytes. Phase times
are medians over updates, stalls sums over the measured time. Then two questions that need runs of their own: stalls
where versions are longer, and how much of a model changes at a learning rate of 1e-6.

A run that fails is a row that says so. Everything is written to ``build/bench/update.{md,json}`` after each run.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.runner import DEMO, Failed, parser, say, train, words
from benchmarks.table import Ratio, Rows, Share, report
from benchmarks.update_figures import PHASES, Figures, read_figures
from benchmarks.update_raw import Pair, Raw
from benchmarks.update_runs import AT_THE_END, LONG, SIZES, WARM_UP, WORKLOAD, Kind, Model, kinds, make, update_run
from headway.errors import HeadwayError

VERSIONS = {"1m": 8, "25m": 6, "100m": 5}
LONG_VERSIONS = 3
DELTA_VERSIONS = 6
MADE = "25m"
"""Whose deltas are looked at, besides those of the demo's model."""
DEMO_GROUPS = 64
"""Groups of a version, as the demo has it."""
DELTA = Kind("broadcast", "synchronous", "delta", on_update="interrupt")
SMALL_STEPS = ("actor.optim.lr=1e-6", "actor.optim.lr_warmup_steps=0", "rollout.dtype=bfloat16")
SEND_AIM, ROLLOUT_AIM, TRAINER_AIM, DELTA_AIM = 0.70, 0.01, 0.05, 0.15
SEND_AIM_BYTES = 40e6
"""Bytes from which on the aim for send holds: from 25 M parameters up."""


@dataclass(slots=True)
class Row:
    """One way to update one model."""

    model: str
    kind: Kind
    groups: int = 0
    """Groups of a version."""
    raws: list[Raw] = field(default_factory=list)
    """What the machine itself could do before each run."""
    figures: Figures = field(default_factory=Figures)
    failure: str | None = None

    @property
    def measured(self) -> bool:
        return self.figures.versions > 0

    @property
    def send_share(self) -> float | None:
        """Bytes per second of send ÷ of the raw broadcast; None where it is not the same bytes that are sent."""
        rate = self.figures.send_bytes_per_s
        if rate is None or self.kind.encoding == "delta":
            return None
        return rate / median(raw.nbytes / raw.broadcast_s for raw in self.raws)

    def raw(self) -> dict[str, Any]:
        """Content of the row in the JSON."""
        measured = {**self.figures, "window_s": self.figures.window_s, "versions": self.figures.versions}
        machine = [asdict(raw) for raw in self.raws]
        return {"model": self.model, **asdict(self.kind), "machine": machine, **measured, "failure": self.failure}


@dataclass(slots=True)
class Results:
    parameters: dict[str, int]
    rows: list[Row]
    long: list[Row] = field(default_factory=list)
    """Where versions are longer."""
    deltas: list[Row] = field(default_factory=list)
    """At a small learning rate."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(
        "update",
        "What updates cost.",
        models=words(SIZES),
        versions={"type": int, "help": f"measured in each run; default: {VERSIONS}"},
        rounds={"type": int, "default": 1, "help": "of all runs, interleaved; default: %(default)s"},
        only={"nargs": "+", "default": [], "metavar": "TRANSPORT[:SCHEDULE[:ENCODING]]"},
    )
    chosen = options.parse_args(arguments)
    asked = [kind for kind in kinds() if kind.is_asked_for(chosen.only)]
    if not asked:
        options.error(f"--only: no update is like that; there are {', '.join(kind.name for kind in kinds())}")
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as scratch, closing(Pair()) as pair:
        models = {name: make(SIZES[name], Path(scratch) / name) for name in chosen.models}
        rows = [Row(name, kind, SIZES[name].groups) for name in models for kind in asked]
        results = Results({name: model.parameters for name, model in models.items()}, rows)
        jobs = chosen.rounds * [(row, partial(_updates, row, models[row.model], pair, chosen.versions)) for row in rows]
        if LONG.is_asked_for(chosen.only):
            results.long = [Row(name, LONG, SIZES[name].long_groups) for name in models]
            jobs += [(row, partial(_longer, row, models[row.model])) for row in results.long]
        if DELTA.is_asked_for(chosen.only):
            runs = {"the demo's, warmed up": _demo, **({MADE: partial(_made, models[MADE])} if MADE in models else {})}
            results.deltas = [Row(name, DELTA) for name in runs]
            jobs += [(row, runs[row.model]) for row in results.deltas]
        began = time.monotonic()
        for number, (row, job) in enumerate(jobs, 1):
            what = f"{row.model} {row.kind.name}"
            try:
                found = job(Path(scratch) / f"run-{number}")
                row.figures.extend(found)
                what += f": {found.version_s:.2f} s a version; stalls: trainer {found.trainer_share:.1%}, rollout "
                what += f"{found.rollout_share:.1%}; sent {found.sent_share:.1%}"
            except (Failed, HeadwayError, ValueError) as error:
                row.failure = str(error)
                what += f": FAILED: {error}"
            say(f"[{number} of {len(jobs)}, {time.monotonic() - began:.0f} s] {what}")
            tables, notes = tables_of(results)
            raw = [row.raw() for row in (*results.rows, *results.long, *results.deltas)]
            report("update", tables, notes, show=number == len(jobs), runs=raw)


def _updates(row: Row, model: Model, pair: Pair, versions: int | None, directory: Path) -> Figures:
    row.raws.append(pair.measure(model.nbytes))
    every = WARM_UP + (versions or VERSIONS[row.model]) + AT_THE_END
    return read_figures(update_run(directory, model, row.kind, groups=row.groups, versions=every))


def _longer(row: Row, model: Model, directory: Path) -> Figures:
    every = 1 + LONG_VERSIONS + AT_THE_END
    return read_figures(update_run(directory, model, LONG, groups=row.groups, versions=every), warm_up=1)


def _demo(directory: Path) -> Figures:
    shorter = ("rollout.test_freq=-1", "data.task.val_size=16")
    warmed_up = directory.with_name(f"{directory.name}-model")
    train(warmed_up, *shorter, f"rollout.total_rollout_steps={DEMO_GROUPS}")
    path, groups = f"model.path={warmed_up / 'initial_model'}", DEMO_GROUPS * DELTA_VERSIONS
    return _deltas(DEMO, directory, path, *shorter, f"rollout.total_rollout_steps={groups}")


def _made(model: Model, directory: Path) -> Figures:
    groups = SIZES[MADE].groups
    return _deltas(
        WORKLOAD,
        directory,
        "mode=async_partial",
        f"model.path={model.folder}",
        f"actor.ppo_mini_batch_size={groups}",
        f"rollout.total_rollout_steps={4 * groups * DELTA_VERSIONS}",  # four optimizer steps per version
    )


def _deltas(config: Path, directory: Path, *settings: str) -> Figures:
    """All updates but the first, which is whole."""
    changed = tuple(one for one in DELTA.settings() if not one.startswith("param_update.verify"))
    run = train(directory, *settings, *SMALL_STEPS, *changed, recipe=config)
    return read_figures(run, warm_up=1, at_the_end=0)


# ------------------------------------------------------------------------------------------ tables


def tables_of(results: Results) -> tuple[dict[str, Rows], list[str]]:
    """Every table by its title, and what has failed."""
    tables: dict[str, Rows] = {}
    for name, parameters in results.parameters.items():
        rows = [row for row in results.rows if row.model == name and (row.raws or row.failure)]
        usual = [
            s
            for row in rows
            if row.kind.schedule == "synchronous" and not row.kind.variant
            for s in row.figures["steps"]
        ]
        tables[f"{name}: {parameters:,} parameters, {2 * parameters / 1e6:.1f} MB in bfloat16"] = _lines(rows, _phases)
        tables[f"{name}: stalls"] = _lines(rows, partial(_stalls, _middle(usual)))
    by_hand = [row for row in results.rows if row.measured and _is_broadcast(row.kind) and row.kind.verify]
    again = [row for row in by_hand if row.kind.dual_buffer]
    tables |= {
        "The machine itself": _machine(results.rows),
        "Prefilled again after `interrupt`": [_prefilled_again(row) for row in again],
        f"Longer versions: {LONG.name}, keep": [_long(row) for row in results.long if row.measured],
        "Deltas at a learning rate of 1e-6 (the first update, which is whole, left out)": [
            _changed(row) for row in results.deltas if row.measured
        ],
        "Aims": list(_aims(results)),
    }
    every = [*results.rows, *results.long, *results.deltas]
    return tables, [f"{row.model} {row.kind.name}: {row.failure}" for row in every if row.failure]


def _lines(rows: Sequence[Row], cells: Callable[[Row], dict[str, Any]]) -> Rows:
    """A line for each row; one that failed says so."""
    measured = {row.kind.name: cells(row) for row in rows if row.measured}
    columns = list(next(iter(measured.values()), {"": None}))
    failed = {**dict.fromkeys(columns), columns[0]: "failed"}
    return [{"update": row.kind.name, **measured.get(row.kind.name, failed)} for row in rows]


def _phases(row: Row) -> dict[str, Any]:
    figures, rate = row.figures, row.figures.send_bytes_per_s
    return {
        **{f"{phase} ms": _ms(figures, phase) for phase in PHASES},
        "sent MB": fmean(figures["sent"]) / 1e6,
        "changed": _share(figures.middle("changed")),
        "send GB/s": None if rate is None else rate / 1e9,
        "of raw broadcast": _share(row.send_share),
    }


def _stalls(usual: float | None, row: Row) -> dict[str, Any]:
    figures, slower = row.figures, row.figures.decode_slowdown
    return {
        "version s": figures.version_s,
        "trainer stall ms": _ms(figures, "trainer_stall"),
        "of the trainer": Share(figures.trainer_share),
        "rollout stall ms": _ms(figures, "rollout_stall"),
        "of the rollout": Share(figures.rollout_share),
        "decode step during transfer": None if slower is None else Ratio(slower),
        "train step": Ratio(median(figures["steps"]) / usual) if figures["steps"] and usual else None,
    }


def _machine(rows: Sequence[Row]) -> Rows:
    lines: list[dict[str, Any]] = []
    for model in dict.fromkeys(row.model for row in rows if row.raws):
        raws = [raw for row in rows if row.model == model for raw in row.raws]
        took = {
            name: median(getattr(raw, f"{name}_s") for raw in raws) for name in ("broadcast", "transport", "memcpy")
        }
        speeds = {name: f"{1e3 * s:.3g} ms, {raws[0].nbytes / s / 1e9:.2f} GB/s" for name, s in took.items()}
        share = Share(took["broadcast"] / took["transport"])
        lines.append({"model": model, "MB": raws[0].nbytes / 1e6, **speeds, "transport of broadcast": share})
    return lines


def _prefilled_again(row: Row) -> dict[str, Any]:
    figures = row.figures
    return {
        "model": row.model,
        "update": f"{row.kind.schedule} {row.kind.on_update}",
        "cut per update": fmean(figures["interrupted"]),
        "tokens prefilled again": _middle([tokens for tokens, _ in figures["again"]]) or 0,
        "ms": 1e3 * (_middle([seconds for _, seconds in figures["again"]]) or 0),
        "rollout stall ms": _ms(figures, "rollout_stall"),
    }


def _long(row: Row) -> dict[str, Any]:
    figures = row.figures
    return {
        "model": row.model,
        "groups per version": row.groups,
        "version s": figures.version_s,
        "gather ms": _ms(figures, "gather"),
        "trainer stall ms": _ms(figures, "trainer_stall"),
        "gather and stall, of gather": Ratio(_taken(figures)),
        "rollout stall ms": _ms(figures, "rollout_stall"),
        "of the rollout": Share(figures.rollout_share),
    }


def _changed(row: Row) -> dict[str, Any]:
    figures = row.figures
    return {
        "model": row.model,
        "updates": len(figures["sent"]),
        "changed": Share(median(figures["changed"])),
        "most changed": Share(max(figures["changed"])),
        "sent of full": Share(figures.sent_share),
        "most sent": Share(max(figures["sent"]) / max(figures["full"])),
    }


def _aims(results: Results) -> Iterable[Mapping[str, Any]]:
    def aim(what: str, where: str, measured: float | None, *, least: float = 0.0, most: float = 1e9) -> dict[str, Any]:
        hit = measured is not None and least <= measured <= most
        return {"aim": what, "where": where, "measured": _share(measured), "": "hit" if hit else "**miss**"}

    for row in results.rows:
        plain = _is_broadcast(row.kind) and not row.kind.variant
        if plain and row.measured and row.raws[0].nbytes >= SEND_AIM_BYTES:
            where = f"{row.model}, {row.kind.schedule}"
            alone = median(raw.broadcast_s / raw.transport_s for raw in row.raws)
            yield aim("send of `broadcast` ≥ 70% of the raw broadcast", where, row.send_share, least=SEND_AIM)
            yield aim("the same without decoding and training beside it", where, alone, least=SEND_AIM)
    for row in (row for row in results.long if row.measured):
        where, figures = f"{row.model}, {row.figures.version_s:.3g} s a version", row.figures
        yield aim("overlapped, keep: rollout stall ≤ 1%", where, figures.rollout_share, most=ROLLOUT_AIM)
        yield aim("… trainer waits beyond gather ≤ 5% of its time", where, figures.trainer_share, most=TRAINER_AIM)
        yield aim("… the same ≤ 5% of gather", where, _taken(figures) - 1, most=TRAINER_AIM)
    for row in (row for row in results.deltas if row.measured):
        yield aim("delta ≤ 15% of the full bytes", row.model, row.figures.sent_share, most=DELTA_AIM)


def _is_broadcast(kind: Kind) -> bool:
    return kind.transport == "broadcast" and kind.encoding == "full"


def _taken(figures: Figures) -> float:
    """Time for which updates held the trainer ÷ their gathers'."""
    gather = sum(figures["gather"])
    return (gather + sum(figures["trainer_stall"])) / gather


def _middle(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _ms(figures: Figures, name: str) -> float | None:
    return 1e3 * median(figures[name]) if figures[name] else None


def _share(value: float | None) -> Share | None:
    return None if value is None else Share(value)


if __name__ == "__main__":
    main()
