"""``python -m benchmarks.modes``: the demo in every mode, from one warmed-up model: accuracy, and where the time goes.

Beside each mode's time per trained group stands what each side computes for it by itself: training (forward passes,
steps, gather) and generation (prefill, decoding, load). The larger of the two is what a mode with everything overlapped
cannot beat; on two cores the sides also slow each other down, so it is taken from the mode's own run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.demo_runs import train, warmed_up_model
from benchmarks.table import report
from headway.config.presets import PRESETS
from headway.events import FetchTaken, OptimizerStepped, ReplicaActivity, TrainerBusy, UpdatePhase
from headway.reports.record.events_file import read_events

PER = 64
"""Groups that times are given for."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.modes", description="The demo in every mode.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", default=",".join(PRESETS), help="default: %(default)s")
    parser.add_argument("--groups", type=int, default=768, help="trained groups of a run; default: %(default)s")
    chosen = parser.parse_args(arguments)
    modes = chosen.modes.split(",")
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as scratch:
        model = warmed_up_model(Path(scratch))
        found: dict[str, list[Figures]] = {mode: [] for mode in modes}
        for number in range(chosen.rounds):
            for mode in modes:
                print(f"round {number + 1}: running {mode}", file=sys.stderr)
                directory = train(
                    Path(scratch) / str(number) / mode,
                    f"mode={mode}",
                    f"model.path={model}",
                    f"rollout.total_rollout_steps={chosen.groups}",
                    f"run.seed={number}",
                )
                found[mode].append(figures(directory))
    title = f"Seconds per {PER} trained groups; medians of {chosen.rounds} runs of {chosen.groups} groups"
    report("modes", title, [_row(mode, same) for mode, same in found.items()])


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. Seconds are per `PER` groups, from the first optimizer step to the last."""

    before: float
    after: float
    """Held-out accuracy."""
    step_s: float
    train_s: float
    """Forward passes, steps and gather."""
    generate_s: float
    """Prefill, decoding and load; the mean of the replicas."""

    @property
    def bound_s(self) -> float:
        return max(self.train_s, self.generate_s)


def figures(run: Path) -> Figures:
    events = list(read_events(run / "events.jsonl"))
    steps = [event.time for event in events if isinstance(event, OptimizerStepped)]
    start, end = steps[0], steps[-1]
    groups = sum(len(event.numbers) for event in events if isinstance(event, FetchTaken) and start < event.time <= end)
    scale = PER / groups
    trained = sum(_inside(e.span, start, end) for e in events if isinstance(e, TrainerBusy) and e.what != "checkpoint")
    activity = [event for event in events if isinstance(event, ReplicaActivity)]
    replicas = len({event.replica for event in activity})
    generated = sum(_inside(span, start, end) for event in activity for span in event.busy) / replicas
    phases = [event for event in events if isinstance(event, UpdatePhase) and event.phase == "load"]
    loaded = sum(phase.seconds for phase in phases if start < phase.time <= end) / replicas
    accuracy = [entry["accuracy"] for entry in json.loads((run / "summary.json").read_text())["eval"]]
    return Figures(
        before=accuracy[0],
        after=accuracy[-1],
        step_s=(end - start) * scale,
        train_s=trained * scale,
        generate_s=(generated + loaded) * scale,
    )


def _inside(span: tuple[float, float], start: float, end: float) -> float:
    return max(0.0, min(span[1], end) - max(span[0], start))


def _row(mode: str, same: Sequence[Figures]) -> dict[str, Any]:
    return {
        "mode": mode,
        "accuracy before": median(f.before for f in same),
        "after": median(f.after for f in same),
        "least after": min(f.after for f in same),
        "step s": median(f.step_s for f in same),
        "train + gather s": median(f.train_s for f in same),
        "generate + load s": median(f.generate_s for f in same),
        "bound s": median(f.bound_s for f in same),
        "step / bound": median(f.step_s / f.bound_s for f in same),
    }


if __name__ == "__main__":
    main()
