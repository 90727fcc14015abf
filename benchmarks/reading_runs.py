"""``python -m benchmarks.reading_runs``: one good run and three sick ones, as docs/reading-a-run.md reads them.

    the demo's warmed-up model ─▶ headway train, four times ─▶ metrics.jsonl ─▶ docs/images/reading-NAME.svg
                                                                            └─▶ figures of the page, printed

Each picture has the sick run over the good one. The runs lie in ``build/reading/NAME``, for ``headway report``,
``show``, ``compare`` and ``watch``; one that is there already is not made again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.runner import train, warmed_up_model
from benchmarks.study_figure import STYLE, themed

OUT = Path("build/reading")
IMAGES = Path("docs/images")
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


def _paid_by(reward: str) -> str:
    """Setting that pays for ``reward``; whether problems are solved is measured beside it, and counts for nothing."""
    return f"reward.functions=[{{function: benchmarks/reading_reward.py:{reward}}}, {{function: task, weight: 0}}]"


@dataclass(frozen=True, slots=True)
class Patient:
    """A run of the page."""

    title: str
    settings: tuple[str, ...] = ()


PATIENTS: Mapping[str, Patient] = MappingProxyType(
    {
        GOOD: Patient("the demo as it is"),
        "entropy": Patient(
            "collapsed entropy",
            (
                "mode=on_policy",
                _paid_by("agreement"),
                "algorithm.filter_groups.enable=false",
                "actor.optim.lr=5e-4",
                "actor.ppo_epochs=3",
            ),
        ),
        "stale": Patient(
            "stale data",
            (
                "async_training.trigger_parameter_sync_step=1",
                "async_training.staleness_threshold=8",
                "async_training.order=fifo",
                "async_training.window=null",
                "async_training.fill_queue=true",
                "rollout.max_concurrent=64",
                "algorithm.filter_groups.enable=false",
                "algorithm.policy_loss.loss_mode=truncated_is",
                "algorithm.policy_loss.rollout_is_threshold=2",
                "actor.clip_ratio_low=null",
                "actor.clip_ratio_high=null",
                "actor.optim.lr=5e-4",
            ),
        ),
        "reward": Patient(
            "a broken reward",
            (_paid_by("letters"), "algorithm.filter_groups.enable=false"),
        ),
    }
)
SOLVED = "reward/task/mean"
PANELS = (
    ("reward/generated_mean", "reward of all answers"),
    (SOLVED, "share of answers that are right"),
    ("response_length/mean", "tokens of an answer"),
    ("actor/entropy", "entropy, nats"),
    ("offpolicy/ess", "effective sample size"),
    ("lag/mean", "lag, versions"),
)
"""Metric and title of each panel."""
COLOUR, BESIDE = "#d55e00", "#2f81f7"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reading_runs", description="Runs to read, made.")
    parser.add_argument("--only", choices=list(PATIENTS), help="this run alone, and the good one")
    chosen = parser.parse_args(arguments)
    wanted = [name for name in PATIENTS if chosen.only in (None, name) or name == GOOD]
    if missing := [name for name in wanted if not (OUT / name / "summary.json").is_file()]:
        with tempfile.TemporaryDirectory(prefix="headway-reading-") as scratch:
            model = warmed_up_model(Path(scratch), "cluster.backend=inline", "reports.live=off")
            start = (f"model.path={model}", "model.make=null", "model.warmup=null")
            for name in missing:
                print(f"training {name}: {PATIENTS[name].title}", flush=True)
                train(OUT / name, *start, *BASE, *PATIENTS[name].settings)
    rows = {name: _rows(OUT / name) for name in wanted}
    for name in wanted:
        draw(rows[name], rows[GOOD], PATIENTS[name].title, IMAGES / f"reading-{name}.svg")
        print(f"{name:8} {_said(rows[name])}")


def _rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def _series(rows: Sequence[Mapping[str, Any]], metric: str) -> tuple[list[int], list[float]]:
    """Groups trained until a version's end, and the metric's value in it."""
    if metric == SOLVED and not any(metric in row for row in rows):  # it is what the run is paid for
        metric = "reward/generated_mean"
    found = [(row["groups/trained"], row[metric]) for row in rows if metric in row]
    return [groups for groups, _ in found], [value for _, value in found]


def _said(rows: Sequence[Mapping[str, Any]]) -> str:
    """First and last value of each panel's metric."""
    ends = ((metric, _series(rows, metric)[1]) for metric, _ in PANELS)
    said = [f"{metric} {values[0]:.3g} -> {values[-1]:.3g}" for metric, values in ends if values]
    return "; ".join([*said, f"groups filtered {rows[-1]['groups/filtered']}, trained {rows[-1]['groups/trained']}"])


def draw(rows: Sequence[Mapping[str, Any]], good: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Write the picture of a run, over the good one, to ``path``, as SVG."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": path.stem}):
        figure = Figure(figsize=(8.6, 4.2), layout="constrained")
        axes = figure.subplots(2, 3)
        for axis, (metric, words) in zip(axes.flat, PANELS, strict=True):
            if rows is not good:
                axis.plot(*_series(good, metric), color=BESIDE, linewidth=1.1, linestyle="--", label="the good run")
            axis.plot(*_series(rows, metric), color=COLOUR, linewidth=1.6, marker="o", markersize=2, label=title)
            axis.set_title(words)
            axis.set_ylim(bottom=0)
            axis.margins(y=0.1)
        for axis in axes[1]:
            axis.set_xlabel("groups trained")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})
    path.write_text(themed(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
