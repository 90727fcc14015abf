"""``python -m benchmarks.modes``: the demo in every mode, from one warmed-up model: accuracy, and where the time goes.

Beside each mode's time per trained group stands what each side computes for it by itself: training (forward passes,
steps, gather) and generation (prefill, decoding, load). The larger of the two is what a mode with everything overlapped
cannot beat; on two cores the sides also slow each other down, so it is taken from the mode's own run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.runner import parser, say, summary_of, train, turns, warmed_up_model, words
from benchmarks.table import Rows, medians, report
from headway.config.presets import PRESETS
from headway.events import BatchTaken, OptimizerStepped, ReplicaActivity, TrainerBusy, UpdatePhase
from headway.reports.record.events_file import read_events

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
    """Return held-out accuracy, and seconds per `PER` groups from the first optimizer step to the last."""
    events = list(read_events(run / "events.jsonl"))
    steps = [event.time for event in events if isinstance(event, OptimizerStepped)]
    start, end = steps[0], steps[-1]
    groups = sum(len(event.numbers) for event in events if isinstance(event, BatchTaken) and start < event.time <= end)

    def inside(span: tuple[float, float]) -> float:
        return max(0.0, min(span[1], end) - max(span[0], start)) * PER / groups

    trained = sum(inside(e.span) for e in events if isinstance(e, TrainerBusy) and e.what != "checkpoint")
    activity = [event for event in events if isinstance(event, ReplicaActivity)]
    decoded = sum(inside(span) for event in activity for span in event.busy)
    loads = [event for event in events if isinstance(event, UpdatePhase) and event.phase == "load"]
    loaded = sum(load.seconds for load in loads if start < load.time <= end) * PER / groups
    generated = (decoded + loaded) / len({event.replica for event in activity})
    accuracy = [entry["accuracy"] for entry in summary_of(run)["eval"]]
    step, bound = inside((start, end)), max(trained, generated)
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
