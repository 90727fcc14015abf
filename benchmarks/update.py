"""``python -m benchmarks.update``: what an update of the weights costs, for every way in which it can be done.

    SIZES × ways() ─▶ settings over benchmarks/update.yaml ─▶ headway train, a process ─▶ metrics.jsonl ─▶ figures

Each permitted transport × schedule × encoding is a run of real training: one process trains and one generates, on a
thread each. Then come longer versions, and four replicas on the machine. Phases and stalls are medians over versions,
shares sums over the measured time. A run that fails is a note that says so; all is written after each run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.runner import Failed, metrics_of, parser, say, train, turns, words
from benchmarks.shapes import Shape
from benchmarks.table import Ratio, Rows, Share, report
from headway.config.doctor import diagnose
from headway.config.loading import load
from headway.config.transport_facts import TRANSPORTS
from headway.errors import ConfigError, HeadwayError

WORKLOAD = Path("benchmarks/update.yaml")
PHASES = ("gather", "send", "recv", "register", "load")
WARM_UP = 2
"""Versions at the beginning that are not measured: memory is touched for the first time, connections are new."""
AT_THE_END = 2
"""Versions that are not measured either: nothing more is admitted."""
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz=?"
VOCABULARY = 2 + len(CHARACTERS)
SIZES = {
    "1m": Shape("1m", VOCABULARY, 128, 5, heads=4, kv_heads=4, intermediate=416, context=128),
    "100m": Shape("100m", VOCABULARY, 1024, 7, heads=16, kv_heads=16, intermediate=3328, context=128),
}
GROUPS = {"1m": (16, 128), "100m": (4, 32)}
"""Groups of a version, and of one that is so long that an update is a small part of it."""
KEYS = ("param_update.transport", "param_update.schedule", "param_update.encoding")
PLAIN, LONGER = "broadcast synchronous full", "longer versions"
VARIANTS = {
    "local synchronous full inline": ("cluster.backend=inline",),
    "local overlapped full inline": ("cluster.backend=inline",),
    "local synchronous full shared interrupt": ("cluster.placement=shared", "async_training.on_update=interrupt"),
    f"{PLAIN} no second buffer": ("rollout.enable_dual_buffer=false",),
    f"{PLAIN} 4 replicas": ("rollout.n_gpus_per_node=4",),
    f"broadcast overlapped full {LONGER}": (),
}
"""Further settings of some ways. ``inline``: a thread each; ``shared``: in turns."""


def ways() -> dict[str, tuple[str, ...]]:
    """Return settings by name: every transport × schedule × encoding that the doctor permits, then the variants."""
    plain = map(" ".join, product(TRANSPORTS, ("synchronous", "overlapped"), ("full", "delta")))
    found = {
        name: (*(f"{key}={value}" for key, value in zip(KEYS, name.split(), strict=False)), *more)
        for name, more in {**dict.fromkeys(plain, ()), **VARIANTS}.items()
    }
    return {name: settings for name, settings in found.items() if is_permitted(settings)}


def is_permitted(settings: Sequence[str]) -> bool:
    common = ("model.path=anywhere", "rollout.total_rollout_steps=64", "actor.ppo_mini_batch_size=4")
    try:
        diagnose(load(WORKLOAD, [*settings, *common]))
    except ConfigError:
        return False
    return True


def figures(versions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the columns of a way, from the rows of ``metrics.jsonl`` of the measured versions."""

    def column(name: str) -> list[float]:
        return [float(version[name]) for version in versions if version.get(name) is not None]

    # What the trainer waited after gather; a validation is none of it.
    waited = zip(column("param_update/trainer_stall_s"), column("validation/stall_s"), strict=True)
    stalls, stalled = [all_of_it - part for all_of_it, part in waited], column("param_update/rollout_stall_s")
    took = [gather + stall for gather, stall in zip(column("param_update/gather_s"), stalls, strict=True)]
    total, sent, changed = (
        sum(column("time/seconds")),
        column("param_update/bytes"),
        column("param_update/changed_ratio"),
    )
    return {
        "version s": total / len(versions),
        **{f"{phase} ms": 1e3 * median(column(f"param_update/{phase}_s")) for phase in PHASES},
        "sent MB": sum(sent) / len(sent) / 1e6,
        "sent of full": Share(1 - sum(column("param_update/bytes_saved")) / len(sent)),
        "changed": Share(median(changed)) if changed else None,
        "trainer stall ms": 1e3 * median(stalls),
        "of the trainer": Share(sum(stalls) / total),
        "rollout stall ms": 1e3 * median(stalled),
        "of the rollout": Share(sum(stalled) / total),
        "gather and stall ms": 1e3 * median(took),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parser(
        "update",
        "What updates cost.",
        models=words(SIZES),
        versions={"type": int, "default": 6, "help": "measured in each run; default: %(default)s"},
        rounds={"type": int, "default": 1, "help": "of all runs, interleaved; default: %(default)s"},
        only={"default": "", "help": "beginning of the wanted updates' names, such as 'broadcast overlapped'"},
    ).parse_args(arguments)
    wanted = [(size, way) for size in chosen.models for way in ways() if way.startswith(chosen.only)]
    measured: dict[tuple[str, str], list[dict[str, Any]]] = {one: [] for one in wanted}
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as scratch:
        parameters = {name: SIZES[name].make(Path(scratch) / name, characters=CHARACTERS) for name in chosen.models}
        runs = len(wanted) * chosen.rounds
        for number, ((size, way), versions) in enumerate(turns(measured, chosen.rounds), 1):
            say(f"[{number} of {runs}] {size} {way}")
            groups = GROUPS[size][LONGER in way]
            steps = groups * (WARM_UP + chosen.versions + AT_THE_END)
            job = (f"model.path={scratch}/{size}", f"actor.ppo_mini_batch_size={groups}", *ways()[way])
            try:
                settings = (*job, f"rollout.total_rollout_steps={steps}")
                versions.extend(between(metrics_of(train(Path(scratch) / f"run-{number}", *settings, recipe=WORKLOAD))))
            except (Failed, HeadwayError, ValueError) as error:
                failures.append(f"{size} {way}: failed: {error}")
            tables = {
                f"{name}: {count:,} parameters, {2 * count / 1e6:.1f} MB in bfloat16": table(
                    {way: found for (size, way), found in measured.items() if size == name}
                )
                for name, count in parameters.items()
            }
            raw = [{"model": size, "update": way, "versions": found} for (size, way), found in measured.items()]
            report("update", tables, failures, show=number == runs, runs=raw)


def between(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows without those of the first and the last versions. Raises ValueError where none is left."""
    updated = [row for row in rows if "param_update/gather_s" in row]
    if len(updated) <= WARM_UP + AT_THE_END:
        raise ValueError(f"{len(updated)} versions were made, which leaves none between {WARM_UP} and {AT_THE_END}")
    return updated[WARM_UP:-AT_THE_END]


def table(measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> Rows:
    """Return a line for each way that was measured, and its time over that of the plain one."""
    lines = {way: figures(versions) for way, versions in measured.items() if versions}
    plain = lines.get(PLAIN, {}).get("gather and stall ms")
    return [
        {"update": way, **found, "÷ plain": Ratio(found["gather and stall ms"] / plain) if plain else None}
        for way, found in lines.items()
    ]


if __name__ == "__main__":
    main()
