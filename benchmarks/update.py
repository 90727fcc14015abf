"""``python -m benchmarks.update``: what an update of the weights costs, for every way in which it can be done.

    SIZES × ways() ─▶ settings over benchmarks/update.yaml ─▶ headway train, a process ─▶ metrics.jsonl ─▶ Figures

Each permitted transport × schedule × encoding is a run of real training: one process trains and one generates, on a
thread each. Then come longer versions, and four replicas on the machine. Phases and stalls are medians over versions,
shares sums over the measured time. A run that fails is a row that says so; all is written after each run.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.runner import Failed, metrics_of, parser, say, train, words
from benchmarks.shapes import Shape
from benchmarks.table import Ratio, Rows, Share, report
from headway.config.doctor import diagnose
from headway.config.loading import load
from headway.config.transport_facts import TRANSPORTS
from headway.errors import ConfigError, HeadwayError

WORKLOAD = Path("benchmarks/update.yaml")
PHASES = ("gather", "send", "recv", "register", "load")
VERSIONS = 6
WARM_UP = 2
"""Versions at the beginning that are not measured: memory is touched for the first time, connections are new."""
AT_THE_END = 2
"""Versions that are not measured either: nothing more is admitted."""


CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz=?"
VOCABULARY = 2 + len(CHARACTERS)
SIZES = {
    shape.name: shape
    for shape in (
        Shape("1m", VOCABULARY, 128, 5, heads=4, kv_heads=4, intermediate=416, context=128),
        Shape("25m", VOCABULARY, 512, 7, heads=8, kv_heads=8, intermediate=1664, context=128),
        Shape("100m", VOCABULARY, 1024, 7, heads=16, kv_heads=16, intermediate=3328, context=128),
    )
}
GROUPS = {"1m": (16, 128), "25m": (4, 48), "100m": (4, 32)}
"""Groups of a version, and of one that is so long that an update is a small part of it."""


PLAIN, LONGER = "broadcast synchronous full", "longer versions"


def ways() -> dict[str, tuple[str, ...]]:
    """Return settings by name: every transport × schedule × encoding that the doctor permits, then variants of some.

    One process trains and one generates, unless a variant says ``inline`` (a thread each) or ``shared`` (in turns).
    """
    keys = [f"param_update.{name}" for name in ("transport", "schedule", "encoding")]
    found: dict[str, tuple[str, ...]] = {}

    def add(way: Sequence[str], variant: str = "", *settings: str) -> None:
        chosen = [f"{key}={value}" for key, value in zip(keys, way, strict=True)]
        found[" ".join((*way, variant)).strip()] = (*chosen, *settings)

    for way in product(TRANSPORTS, ("synchronous", "overlapped"), ("full", "delta")):
        add(way)
    in_turn, beside = PLAIN.split(), ["broadcast", "overlapped", "full"]
    for schedule in ("synchronous", "overlapped"):
        add(["local", schedule, "full"], "inline", "cluster.backend=inline")
        add(["broadcast", schedule, "full"], "interrupt", "async_training.on_update=interrupt")
    shared = ("cluster.placement=shared", "async_training.on_update=interrupt")
    add(["local", "synchronous", "full"], "shared interrupt", *shared)
    add(beside, "no probe", "param_update.verify=false")
    add(in_turn, "no second buffer", "rollout.enable_dual_buffer=false")
    add(in_turn, "4 replicas", "rollout.n_gpus_per_node=4")
    add(beside, LONGER)
    return {name: settings for name, settings in found.items() if is_permitted(settings)}


def is_permitted(settings: Sequence[str]) -> bool:
    common = ("model.path=anywhere", "rollout.total_rollout_steps=64", "actor.ppo_mini_batch_size=4")
    try:
        diagnose(load(WORKLOAD, [*settings, *common]))
    except ConfigError:
        return False
    return True


def is_asked_for(way: str, only: Sequence[str]) -> bool:
    """``only``: ``transport[:schedule[:encoding]]`` each; none asks for everything."""
    return not only or any(way.split()[: one.count(":") + 1] == one.split(":") for one in only)


@dataclass(slots=True)
class Row:
    """One way to update one model."""

    model: str
    way: str
    """Name of it, a key of `ways`."""
    versions: list[dict[str, Any]] = field(default_factory=list)
    """Rows of ``metrics.jsonl`` of the measured versions."""
    failure: str | None = None

    def column(self, name: str) -> list[float]:
        return [float(version[name]) for version in self.versions if version.get(name) is not None]

    @property
    def stalls(self) -> list[float]:
        """Seconds that the trainer waited after gather; a validation is none."""
        waited, validated = self.column("param_update/trainer_stall_s"), self.column("validation/stall_s")
        return [all_of_it - part for all_of_it, part in zip(waited, validated, strict=True)]

    def figures(self) -> dict[str, Any]:
        gathered, stalled = self.column("param_update/gather_s"), self.column("param_update/rollout_stall_s")
        took = [gather + stall for gather, stall in zip(gathered, self.stalls, strict=True)]
        changed = self.column("param_update/changed_ratio")
        total, sent = sum(self.column("time/seconds")), self.column("param_update/bytes")
        return {
            "version s": total / len(self.versions),
            **{f"{phase} ms": 1e3 * median(self.column(f"param_update/{phase}_s")) for phase in PHASES},
            "sent MB": sum(sent) / len(sent) / 1e6,
            "sent of full": Share(1 - sum(self.column("param_update/bytes_saved")) / len(sent)),
            "changed": Share(median(changed)) if changed else None,
            "trainer stall ms": 1e3 * median(self.stalls),
            "of the trainer": Share(sum(self.stalls) / total),
            "rollout stall ms": 1e3 * median(stalled),
            "of the rollout": Share(sum(stalled) / total),
            "gather and stall ms": 1e3 * median(took),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(
        "update",
        "What updates cost.",
        models=words(SIZES),
        versions={"type": int, "default": VERSIONS, "help": "measured in each run; default: %(default)s"},
        rounds={"type": int, "default": 1, "help": "of all runs, interleaved; default: %(default)s"},
        only={"nargs": "+", "default": [], "metavar": "TRANSPORT[:SCHEDULE[:ENCODING]]"},
    )
    chosen = options.parse_args(arguments)
    settings = ways()
    asked = [way for way in settings if is_asked_for(way, chosen.only)]
    if not asked:
        options.error(f"--only: no update is like that; there are {', '.join(settings)}")
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as scratch:
        parameters = {name: SIZES[name].make(Path(scratch) / name, characters=CHARACTERS) for name in chosen.models}
        rows = [Row(name, way) for name in chosen.models for way in asked]
        jobs, began = chosen.rounds * rows, time.monotonic()
        for number, row in enumerate(jobs, 1):
            try:
                groups = GROUPS[row.model][LONGER in row.way]
                steps = groups * (WARM_UP + chosen.versions + AT_THE_END)
                job = (f"model.path={scratch}/{row.model}", f"actor.ppo_mini_batch_size={groups}")
                run = train(
                    Path(scratch) / f"run-{number}",
                    *job,
                    f"rollout.total_rollout_steps={steps}",
                    *settings[row.way],
                    recipe=WORKLOAD,
                )
                row.versions += between(metrics_of(run))
            except (Failed, HeadwayError, ValueError) as error:
                row.failure = str(error)
            say(f"[{number} of {len(jobs)}, {time.monotonic() - began:.0f} s] {row.model} {row.way}")
            report("update", *tables_of(rows, parameters), show=number == len(jobs), runs=list(map(asdict, rows)))


def between(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows without those of the first and the last versions. Raises ValueError where none is left."""
    updated = [row for row in rows if "param_update/gather_s" in row]
    if len(updated) <= WARM_UP + AT_THE_END:
        raise ValueError(f"{len(updated)} versions were made, which leaves none between {WARM_UP} and {AT_THE_END}")
    return updated[WARM_UP:-AT_THE_END]


def tables_of(rows: Sequence[Row], parameters: Mapping[str, int]) -> tuple[dict[str, Rows], list[str]]:
    """Return the tables by their titles, and what has failed."""
    tables: dict[str, Rows] = {}
    for name, count in parameters.items():
        lines = {row.way: row.figures() for row in rows if row.model == name and row.versions and not row.failure}
        plain = lines.get(PLAIN, {}).get("gather and stall ms")
        tables[f"{name}: {count:,} parameters, {2 * count / 1e6:.1f} MB in bfloat16"] = [
            {"update": way, **found, "÷ plain": Ratio(found["gather and stall ms"] / plain) if plain else None}
            for way, found in lines.items()
        ]
    return tables, [f"{row.model} {row.way}: failed: {row.failure}" for row in rows if row.failure]


if __name__ == "__main__":
    main()
