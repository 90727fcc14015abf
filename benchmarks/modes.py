"""``python -m benchmarks.modes``: the demo in every mode, from one warmed-up model: accuracy, and where the time goes.

Beside each mode's time per trained group stands what each side computes for it by itself: training (forward passes,
steps, gather) and generation (prefill, decoding, load). The larger of the two is what a mode with everything overlapped
cannot beat; on two cores the sides also slow each other down, so it is taken from the mode's own run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.runner import metrics_of, parser, say, summary_of, train, turns, warmed_up_model, words
from benchmarks.table import Rows, medians, report
from headway.config.presets import PRESETS

PER = 64
"""Number of groups that times are given for."""
Figures = dict[str, float]


def main(arguments: Sequence[str] | None = None) -> None:
    text = "The demo in every mode."
    chosen = parser("modes", text, rounds=3, groups=768, modes=words(PRESETS)).parse_args(arguments)
    found: dict[str, list[Figures]] = {mode: [] for mode in chosen.modes}
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as scratch:
        model = warmed_up_model(Path(scratch))
        for mode, same in turns(found, chosen.rounds):
            say(f"round {len(same) + 1}: running {mode}")
            run = Path(scratch) / str(len(same)) / mode
            steps = f"rollout.total_rollout_steps={chosen.groups}"
            same.append(figures(train(run, f"mode={mode}", f"model.path={model}", steps, f"run.seed={len(same)}")))
    title = f"Seconds per {PER} trained groups; medians of {chosen.rounds} runs of {chosen.groups} groups"
    report("modes", {title: table(found)})


def figures(run: Path) -> Figures:
    """Return held-out accuracy, and seconds per `PER` groups from the first version to the last."""
    rows = [row for row in metrics_of(run) if "time/seconds" in row and "groups/trained" in row]
    first, measured = rows[0], rows[1:]
    groups = rows[-1]["groups/trained"] - first["groups/trained"]

    def seconds(of: Callable[[dict[str, Any]], float]) -> float:
        return sum(map(of, measured)) * PER / groups

    step = seconds(lambda row: row["time/seconds"])
    trained = seconds(lambda row: (1 - row["trainer/idle_ratio"]) * row["time/seconds"])
    decoded = seconds(lambda row: (1 - row["rollouter/idle_ratio"]) * row["time/seconds"])
    generated = decoded + seconds(lambda row: row.get("param_update/load_s", 0.0))
    accuracy, bound = [entry["accuracy"] for entry in summary_of(run)["eval"]], max(trained, generated)
    return {
        "accuracy before": accuracy[0],
        "after": accuracy[-1],
        "step s": step,
        "train + gather s": trained,
        "generate + load s": generated,
        "step / bound": step / bound,
    }


def table(found: dict[str, list[Figures]]) -> Rows:
    return [
        {"mode": mode, **medians(same), "least after": min(one["after"] for one in same)}
        for mode, same in found.items()
    ]


if __name__ == "__main__":
    main()
