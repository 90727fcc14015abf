"""``python -m benchmarks.reading_runs``: one good run and three sick ones, as docs/reading-a-run.md reads them.

    the demo's warmed-up model ─▶ headway train, four times ─▶ metrics.jsonl ─▶ docs/images/reading-NAME.svg
                                                                            └─▶ figures of the page, printed

Each picture has the sick run over the good one. The runs lie in ``build/reading/NAME``, for ``headway report``,
``show``, ``compare`` and ``watch``; one that is there already is not made again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.runner import metrics_of, parser, train, warmed_up_model
from benchmarks.study_staleness import START, TRUNCATED, figure

OUT, IMAGES = Path("build/reading"), Path("docs/images")
GOOD = "good"
BASE = (
    "cluster.backend=inline",
    "cluster.device=cpu",
    "trainer.threads=1",
    "rollout.threads=1",
    "rollout.total_rollout_steps=640",
    "rollout.test_freq=4",
    "reports.live=off",
)
UNFILTERED = "algorithm.filter_groups.enable=false"


def _paid_by(reward: str) -> str:
    """Setting that pays for ``reward``; whether problems are solved is measured beside it, and counts for nothing."""
    return f"reward.functions=[{{function: benchmarks/user_code.py:{reward}}}, {{function: task, weight: 0}}]"


PATIENTS: Mapping[str, tuple[str, ...]] = {
    GOOD: (),
    "entropy": ("mode=on_policy", _paid_by("agreement"), UNFILTERED, "actor.optim.lr=5e-4", "actor.ppo_epochs=3"),
    "stale": (
        "async_training.trigger_parameter_sync_step=1",
        "async_training.staleness_threshold=8",
        "async_training.order=fifo",
        "async_training.window=null",
        "async_training.fill_queue=true",
        "rollout.max_concurrent=64",
        UNFILTERED,
        *TRUNCATED,
        "actor.optim.lr=5e-4",
    ),
    "reward": (_paid_by("letters"), UNFILTERED),
}
TITLES = {GOOD: "the demo as it is", "entropy": "collapsed entropy", "stale": "stale data", "reward": "a broken reward"}
SOLVED = "reward/task/mean"
PANELS = {
    "reward/generated_mean": "reward of all answers",
    SOLVED: "share of answers that are right",
    "response_length/mean": "tokens of an answer",
    "actor/entropy": "entropy, nats",
    "offpolicy/ess": "effective sample size",
    "lag/mean": "lag, versions",
}
"""Metric and title of each panel."""
Metrics = Sequence[Mapping[str, Any]]


def main(arguments: Sequence[str] | None = None) -> None:
    only = {"choices": list(PATIENTS), "help": "this run alone, and the good one"}
    chosen = parser("reading_runs", "Runs to read, made.", only=only).parse_args(arguments)
    wanted = [name for name in PATIENTS if chosen.only in (None, name) or name == GOOD]
    if missing := [name for name in wanted if not (OUT / name / "summary.json").is_file()]:
        with tempfile.TemporaryDirectory(prefix="headway-reading-") as scratch:
            model = warmed_up_model(Path(scratch), "cluster.backend=inline", "reports.live=off")
            for name in missing:
                print(f"training {name}: {TITLES[name]}", flush=True)
                train(OUT / name, f"model.path={model}", *START, *BASE, *PATIENTS[name])
    rows = {name: metrics_of(OUT / name) for name in wanted}
    for name in wanted:
        draw(rows[name], rows[GOOD], TITLES[name], IMAGES / f"reading-{name}.svg")
        print(f"{name:8} {_said(rows[name])}")


def _series(rows: Metrics, metric: str) -> tuple[list[int], list[float]]:
    """Groups trained until a version's end, and the metric's value in it."""
    if metric == SOLVED and not any(metric in row for row in rows):  # it is what the run is paid for
        metric = "reward/generated_mean"
    found = [(row["groups/trained"], row[metric]) for row in rows if metric in row]
    return [groups for groups, _ in found], [value for _, value in found]


def _said(rows: Metrics) -> str:
    """First and last value of each panel's metric."""
    ends = ((metric, _series(rows, metric)[1]) for metric in PANELS)
    said = [f"{metric} {values[0]:.3g} -> {values[-1]:.3g}" for metric, values in ends if values]
    return "; ".join([*said, f"groups filtered {rows[-1]['groups/filtered']}, trained {rows[-1]['groups/trained']}"])


def draw(rows: Metrics, good: Metrics, title: str, path: Path) -> None:
    """Write the picture of a run, over the good one, to ``path``."""
    with figure(path, 8.6, 4.2, path.stem) as drawn:
        axes = drawn.subplots(2, 3)
        for axis, (metric, words) in zip(axes.flat, PANELS.items(), strict=True):
            if rows is not good:
                axis.plot(*_series(good, metric), color="#2f81f7", linewidth=1.1, linestyle="--", label="the good run")
            axis.plot(*_series(rows, metric), color="#d55e00", linewidth=1.6, marker="o", markersize=2, label=title)
            axis.set(title=words)
            axis.set_ylim(bottom=0)
            axis.margins(y=0.1)
        for axis in axes[1]:
            axis.set_xlabel("groups trained")


if __name__ == "__main__":
    main()
