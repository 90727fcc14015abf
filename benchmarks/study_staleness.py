"""``python -m benchmarks.study_staleness``: what stale data costs, and how much of it three losses make good.

    LOSSES × η × learning rate × seeds ─▶ settings over recipes/demo.yaml ─▶ headway train, a process ─▶ Result (JSON)

The demo's warmed-up model, trained by naive PPO, decoupled PPO and truncated importance sampling at several η, by
several seeds, one run after the other with nothing beside them. Each run's result is kept in ``build/study/``: a study
that was stopped goes on where it was, and one that is complete only draws again. It writes the figure to
``docs/images/staleness-study.svg`` and the tables into ``docs/staleness-study.md``. Without ``build/study`` it begins
anew.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.runner import metrics_of, parser, say, summary_of, train, warmed_up_model
from benchmarks.table import Rows, Share, markdown
from headway.cluster.machine.worker_setup import available_cores, cpu_model

OUT = Path("build/study")
PAGE = Path("docs/staleness-study.md")
FIGURE = Path("docs/images/staleness-study.svg")
ETAS = (0, 1, 4, 8)
RATES = [2e-4]
"""The demo's."""
SEEDS = (0, 1, 2)
STEPS = 4
"""Optimizer steps of one version: from the second one on π_θ is not π_prox, and the three losses differ."""
MINI_BATCH = 4
"""Groups of one optimizer step."""
START = ("model.make=null", "model.warmup=null")
"""From the given model instead of the recipe's own, which is made and warmed up in each run."""
BASE = (
    "mode=async_partial",
    "async_training.trigger_parameter_sync_step=1",
    f"async_training.require_batches={STEPS}",
    "async_training.order=fifo",
    "async_training.window=null",
    f"actor.ppo_mini_batch_size={MINI_BATCH}",
    "algorithm.filter_groups.enable=false",
    "rollout.max_concurrent=64",
    "rollout.threads=1",
    "trainer.threads=1",
    "cluster.backend=inline",
    "cluster.device=cpu",
    "reports.live=off",
    "reports.trackers=[]",
)
"""One process, one torch thread for training and one for generation, which is fast enough to stay as far ahead as η
permits. No group is filtered: where a policy has collapsed nearly all would be, the trainer would wait for generation,
and the lag would vanish with the policy that it ruined."""
TRUNCATED = (
    "algorithm.policy_loss.loss_mode=truncated_is",
    "algorithm.policy_loss.rollout_is_threshold=2",
    "actor.clip_ratio_low=null",
    "actor.clip_ratio_high=null",
)
LOSSES: Mapping[str, tuple[str, ...]] = {
    "naive PPO": ("async_training.use_rollout_log_probs=true",),
    "decoupled PPO": (
        "async_training.use_rollout_log_probs=false",
        "algorithm.rollout_correction.name=truncate",
        "algorithm.rollout_correction.bound=2",
    ),
    "truncated IS": TRUNCATED,
}


@dataclass(frozen=True, slots=True)
class Run:
    loss: str
    """Key of `LOSSES`."""
    eta: int
    lr: float
    seed: int
    versions: int = 32
    val_size: int = 256
    """Held-out problems of each validation."""

    @property
    def name(self) -> str:
        return f"lr{self.lr:g}-eta{self.eta}-{self.loss.replace(' ', '_')}-seed{self.seed}"

    def settings(self) -> tuple[str, ...]:
        # With η = 0 nothing runs ahead, and a queue to fill first would be a setting without effect.
        ahead = ("async_training.fill_queue=true",) if self.eta else ()
        return (
            *BASE,
            *LOSSES[self.loss],
            f"async_training.staleness_threshold={self.eta}",
            *ahead,
            f"actor.optim.lr={self.lr:g}",
            f"rollout.total_rollout_steps={self.versions * MINI_BATCH * STEPS}",
            "rollout.test_freq=4",
            f"data.task.val_size={self.val_size}",
            f"run.seed={self.seed}",
        )


def runs(etas: Iterable[int], rates: Iterable[float], seeds: Iterable[int], **more: int) -> Iterator[Run]:
    """Rate by rate and seed by seed, so that a study that was stopped has whole ones."""
    for lr, seed, eta, loss in product(rates, seeds, etas, LOSSES):
        yield Run(loss, eta, lr, seed, **more)


FULL = tuple(runs(ETAS, RATES, SEEDS))
QUICK = tuple(runs((0, 4), RATES, (0,), versions=8, val_size=64))
"""Whether everything works, in about two minutes."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(
        "study_staleness",
        "What stale data costs.",
        quick={"action": "store_true", "help": f"{len(QUICK)} short runs, nothing into docs/"},
        rates={"type": float, "nargs": "+", "default": RATES, "metavar": "LR", "help": "learning rates"},
    ).parse_args(arguments)
    wanted = QUICK if options.quick else tuple(runs(ETAS, options.rates, SEEDS))
    results = conduct(wanted, model(), OUT / "quick" if options.quick else OUT)
    figure = OUT / "quick.svg" if options.quick else FIGURE
    draw(results, figure)
    blocks = {
        "accuracy": markdown(accuracy_table(results)),
        "health": markdown(health_table(results)),
        "seconds": time_table(results, f"{available_cores()} cores, {cpu_model()}."),
    }
    if not options.quick:
        write_into(PAGE, blocks)
    print("\n".join(blocks.values()))
    print(f"figure: {figure}")


def model() -> Path:
    """The demo's model after warm-up, made once for all runs of all studies."""
    folder = OUT / "model"
    if not folder.is_dir():
        OUT.mkdir(parents=True, exist_ok=True)
        say("making and warming up the model")
        with tempfile.TemporaryDirectory(dir=OUT) as scratch:
            warmed_up_model(Path(scratch)).rename(folder)
    return folder


# ------------------------------------------------------------------------------------------ results


@dataclass(frozen=True, slots=True)
class Result:
    """Figures that are kept of a run."""

    run: Run
    updates: list[int]
    """Optimizer steps before each validation."""
    accuracy: list[float]
    """Held-out, greedy; one for each of ``updates``."""
    lag_mean: float
    """Over the trained groups, each with its oldest token's; in versions."""
    lag_max: int
    ess_mean: float
    """Effective sample size of an optimizer step as a share of its tokens, mean over versions …"""
    ess_min: float
    """… and of the version where it was least."""
    kl_mean: float
    """KL(π_behav‖π_θ), nats per token, mean over versions …"""
    kl_max: float
    clip_fraction: float
    """Of the tokens: without gradient for the clip's sake, or truncated; mean over versions."""
    skipped_steps: int
    seconds: float
    """The process from start to end."""

    @property
    def final(self) -> float:
        return self.accuracy[-1]

    @property
    def half(self) -> float:
        """Accuracy at the last validation in the first half of the updates."""
        middle = self.updates[-1] / 2
        return [a for u, a in zip(self.updates, self.accuracy, strict=True) if u <= middle][-1]

    @property
    def area(self) -> float:
        """Mean accuracy over the updates, linear between validations."""
        points = list(zip(self.updates, self.accuracy, strict=True))
        return sum((u1 - u0) * (a0 + a1) / 2 for (u0, a0), (u1, a1) in pairwise(points)) / points[-1][0]


def conduct(wanted: Sequence[Run], model: Path, kept: Path) -> list[Result]:
    """Results of all runs. One that is kept in ``kept`` counts if it is of the same settings and the same model."""
    digest = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()[:16]
    kept.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for number, run in enumerate(wanted, 1):
        path, of = kept / f"{run.name}.json", {"model": digest, "settings": list(run.settings())}
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"of": None}
        if found["of"] == of:
            results.append(Result(**{**found["result"], "run": run}))
            continue
        results.append(result := execute(run, model))
        # Renamed when complete: a study that is stopped while it writes leaves no half of a result.
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"of": of, "result": asdict(result)}, indent=2) + "\n", encoding="utf-8")
        part.replace(path)
        lag = f"mean lag {result.lag_mean:.2f}  {result.seconds:.1f} s"
        say(f"{number}/{len(wanted)}  {run.name}  accuracy {result.final:.3f}  {lag}")
    return results


def execute(run: Run, model: Path) -> Result:
    """Train, in a process of its own, to the end."""
    with tempfile.TemporaryDirectory(prefix="headway-study-") as scratch:
        began = time.perf_counter()
        directory = train(Path(scratch) / "run", f"model.path={model}", *START, *run.settings())
        return read(run, directory, time.perf_counter() - began)


def read(run: Run, directory: Path, seconds: float) -> Result:
    """From the run's ``summary.json`` and ``metrics.jsonl``."""
    summary, rows = summary_of(directory), metrics_of(directory)

    def series(name: str) -> list[float]:
        return [row[name] for row in rows if name in row]

    ess, kl = series("offpolicy/ess"), series("offpolicy/kl")
    return Result(
        run=run,
        updates=[entry["version"] * STEPS for entry in summary["eval"]],
        accuracy=[entry["accuracy"] for entry in summary["eval"]],
        lag_mean=summary["lag"]["mean"],
        lag_max=summary["lag"]["max"],
        ess_mean=fmean(ess),
        ess_min=min(ess),
        kl_mean=fmean(kl),
        kl_max=max(kl),
        clip_fraction=fmean(series("actor/clip_fraction")),
        skipped_steps=summary["skipped_steps"],
        seconds=seconds,
    )


# ------------------------------------------------------------------------------------------ tables, and the page


def by_cell(results: Iterable[Result]) -> dict[tuple[float, int, str], list[Result]]:
    """Results by learning rate, η and loss, in this order; the seeds of each in theirs."""
    order = list(LOSSES)
    cells: dict[tuple[float, int, str], list[Result]] = {}
    for result in sorted(results, key=lambda r: (r.run.lr, r.run.eta, order.index(r.run.loss), r.run.seed)):
        cells.setdefault((result.run.lr, result.run.eta, result.run.loss), []).append(result)
    return cells


def lag_range(results: Iterable[Result]) -> str:
    """Range of the mean lags: ``3.71`` or ``3.71–3.74``."""
    lags = [result.lag_mean for result in results]
    return "–".join(dict.fromkeys(f"{lag:.2f}" for lag in (min(lags), max(lags))))


def accuracy_table(results: Sequence[Result]) -> Rows:
    return [
        {
            **_labels(*cell),
            "mean lag": lag_range(same),
            "max lag": max(r.lag_max for r in same),
            "final, by seed": " ".join(f"{r.final:.3f}" for r in same),
            "final": f"**{fmean(r.final for r in same):.3f}**",
            "at half": f"{fmean(r.half for r in same):.3f}",
            "area": f"{fmean(r.area for r in same):.3f}",
        }
        for cell, same in by_cell(results).items()
    ]


def health_table(results: Sequence[Result]) -> Rows:
    return [
        {
            **_labels(*cell),
            "ESS, mean": f"{fmean(r.ess_mean for r in same):.3f}",
            "ESS, least": f"{min(r.ess_min for r in same):.3f}",
            "KL, mean": f"{fmean(r.kl_mean for r in same):.4f}",
            "KL, most": f"{max(r.kl_max for r in same):.3f}",
            "clipped": Share(fmean(r.clip_fraction for r in same)),
            "steps skipped": sum(r.skipped_steps for r in same),
        }
        for cell, same in by_cell(results).items()
    ]


def time_table(results: Sequence[Result], machine: str) -> str:
    """Seconds of each run of the first seed, of its runs together, and of everything."""
    seed = min(result.run.seed for result in results)
    one = by_cell(result for result in results if result.run.seed == seed)
    etas = sorted({eta for _, eta, _ in one})
    rows = [
        {"lr": lr, "loss": loss, **{f"η = {eta}": f"{one[lr, eta, loss][0].seconds:.1f}" for eta in etas}}
        for lr, loss in product(sorted({lr for lr, _, _ in one}), LOSSES)
    ]
    seconds, of_one = [r.seconds for r in results], sum(r.seconds for same in one.values() for r in same)
    return (
        f"{markdown(rows)}\nSeconds of each run of seed {seed}, start-up and validation included. Together "
        f"{of_one / 60:.1f} minutes for one seed and {sum(seconds) / 60:.1f} for all {len(seconds)} runs; the longest "
        f"run took {max(seconds):.1f} s.\n\n{machine}\n"
    )


def _labels(lr: float, eta: int, loss: str) -> dict[str, Any]:
    return {"lr": lr, "η": eta, "loss": loss}


def write_into(page: Path, blocks: Mapping[str, str]) -> None:
    """Replace what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; the rest is written by hand.

    Raises ValueError, and leaves the page as it is, when it lacks a block's marks.
    """
    text = page.read_text(encoding="utf-8")
    for name, block in blocks.items():
        marks = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        text, found = marks.subn(lambda match, block=block: f"{match[1]}\n{block.rstrip()}\n\n{match[2]}", text)
        if found != 1:
            raise ValueError(f"{page}: expected <!-- begin {name} --> … <!-- end {name} --> once, not {found} times")
    page.write_text(text, encoding="utf-8")


# ---------------------------------------------------------------------------------------- the figure


INK, PAPER, RULE = "#24292f", "#fffffe", "#d0d7de"
THEME = {"ink": (INK, "#e6edf3"), "paper": (PAPER, "#0d1117"), "rule": (RULE, "#3d444d")}
"""Name → its colour on light and on dark."""
LOOK = {
    "naive PPO": {"color": "#d55e00", "marker": "o", "linestyle": "-"},
    "decoupled PPO": {"color": "#2f81f7", "marker": "s", "linestyle": "--"},
    "truncated IS": {"color": "#009e73", "marker": "^", "linestyle": ":"},
}
COLOURED = {
    INK: ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"),
    PAPER: ("axes.facecolor", "figure.facecolor", "savefig.facecolor"),
    RULE: ("grid.color", "axes.edgecolor"),
}
STYLE = {
    "svg.fonttype": "none",
    "font.size": 9.0,
    "font.family": "sans-serif",
    "axes.titlesize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.6,
    **{name: colour for colour, names in COLOURED.items() for name in names},
}


@contextmanager
def figure(path: Path, width: float, height: float, salt: str) -> Iterator[Figure]:
    """A figure to draw in, written to ``path`` as SVG with a legend of its first panel above it."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": salt}):
        yield (drawn := Figure(figsize=(width, height), layout="constrained"))
        handles, labels = drawn.axes[0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, format="svg", metadata={"Date": None})
    path.write_text(themed(path.read_text(encoding="utf-8")), encoding="utf-8")


def themed(svg: str) -> str:
    """``svg`` with the colours of `THEME` as variables, which a dark scheme sets anew."""
    light, dark = (";".join(f"--{name}:{pair[k]}" for name, pair in THEME.items()) for k in (0, 1))
    for name, (colour, _) in THEME.items():
        svg = svg.replace(colour, f"var(--{name})")
    style = f"<style>:root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    head, opening, rest = svg.partition("<defs>")
    return f"{head}{style}\n {opening}{rest}"


def draw(results: Sequence[Result], path: Path) -> None:
    """Write the study's figure to ``path``."""
    rates, etas = sorted({r.run.lr for r in results}), sorted({r.run.eta for r in results})
    with figure(path, 2.35 * (len(etas) + 1), 2.6 * len(rates) + 0.4, "staleness-study") as drawn:
        axes = drawn.subplots(len(rates), len(etas) + 1, sharey=True, squeeze=False)
        for row, lr in zip(axes, rates, strict=True):
            of_rate = [result for result in results if result.run.lr == lr]
            for axis, eta in zip(row, etas, strict=False):
                _curves(axis, [result for result in of_rate if result.run.eta == eta], eta)
            row[0].set_ylabel(f"learning rate {lr:g}\nheld-out accuracy")
            _finals(row[-1], of_rate)


def _curves(axis: Any, results: Sequence[Result], eta: int) -> None:
    for (_, _, loss), same in by_cell(results).items():
        series = list(zip(*(result.accuracy for result in same), strict=True))
        updates, look = same[0].updates, LOOK[loss]
        axis.plot(updates, [fmean(s) for s in series], label=loss, markersize=3, linewidth=1.4, **look)
        lowest, highest = [min(s) for s in series], [max(s) for s in series]
        axis.fill_between(updates, lowest, highest, color=look["color"], alpha=0.15, linewidth=0)
    axis.set_title(f"η = {eta}: mean lag {lag_range(results)}")
    axis.set_xlabel("optimizer steps")


def _finals(axis: Any, results: Sequence[Result]) -> None:
    for loss, look in LOOK.items():
        points = sorted((r.lag_mean, r.final) for r in results if r.run.loss == loss)
        axis.plot(*zip(*points, strict=True), color=look["color"], marker=look["marker"], markersize=3.5, linestyle="")
        cells = [same for (_, _, of), same in by_cell(results).items() if of == loss]
        means = [(fmean(r.lag_mean for r in same), fmean(r.final for r in same)) for same in cells]
        axis.plot(*zip(*means, strict=True), color=look["color"], linestyle=look["linestyle"], linewidth=1.4)
    axis.set_title("after the last step")
    axis.set_xlabel("measured mean lag, versions")


if __name__ == "__main__":
    main()
