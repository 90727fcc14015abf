"""``python -m benchmarks.modes``: the demo in every mode, from one warmed-up model: accuracy, and where the time goes.

Beside each mode's time per trained group stands what each side computes for it by itself: training (forward passes,
steps, gather) and generation (prefill, decoding, load). The larger of the two is what a mode with everything overlapped
cannot beat; on two cores the sides also slow each other down, so it is taken from the mode's own run.

``--predict``: what the simulator says of the demo, against what the demo takes. Each round runs one mode, profiles that
run, predicts every other mode of the same split from the profile, and runs those modes, too. A neighbour that slows one
round slows all of it, the profile included; the figures are medians over rounds, the error the median of the rounds'
own. All modes train B groups a version. The pipeline's filling and the run's end are left out of both sides, by the
planner's own meter.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.runner import DEMO, parser, say, summary_of, train, turns, warmed_up_model, words
from benchmarks.table import Rows, Share, medians, report
from headway.config.doctor import diagnose
from headway.config.loading import load
from headway.config.presets import PRESETS
from headway.config.sections.section import exact_fraction
from headway.errors import ConfigError
from headway.events import BatchTaken, Event, OptimizerStepped, ReplicaActivity, TrainerBusy, UpdatePhase
from headway.planner.grid import DeviceSplit, PlanSetting
from headway.planner.measure import Measurement, StepMeter, measure
from headway.planner.profile_fitting.run_profiler import profile_run
from headway.reports.record.events_file import read_events

MINI_BATCH, MINI_BATCHES = 16, 4
B = MINI_BATCH * MINI_BATCHES
"""Number of groups that times are given for."""
SPLIT = DeviceSplit(train_devices=1, rollout_devices=1, replicas=1, shared=False)
"""The recipe's: one process trains, one generates."""
PREDICTED = (
    f"actor.ppo_mini_batch_size={MINI_BATCH}",
    "algorithm.filter_groups.enable=false",  # the share that is filtered changes as the policy learns
    "rollout.test_freq=-1",
    "data.task.val_size=16",
    "cluster.start_timeout_s=300",
)
FIGURES = {"s": "step_s", "train idle": "trainer_idle_ratio", "rollout idle": "rollouter_idle_ratio", "lag": "lag_mean"}
"""Columns of the predictions, and the figures of a measurement."""
Pair = tuple[Measurement, Measurement]
"""What was measured of a mode in a round, and what was predicted."""


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parser(
        "modes",
        "The demo in every mode.",
        rounds=3,
        groups={"type": int, "help": "of each run; default: 768, with --predict 1024"},
        modes=words(PRESETS),
        predict={"action": "store_true", "help": "compare the modes of the demo's split with what is simulated"},
        profiled={"default": "on_policy", "help": "with --predict the mode that is profiled; default: %(default)s"},
    ).parse_args(arguments)
    if chosen.predict:
        predict([mode for mode in trainable_modes(first=chosen.profiled) if mode.name in chosen.modes], chosen)
    else:
        compare(chosen)


def in_turns(modes: dict[str, Any], rounds: int, *settings: str) -> Iterator[tuple[str, int, Path]]:
    """Train the demo in each of ``modes`` once a round; yields a mode, the round and the run.

    The values of ``modes`` are settings of their own. All begin with the same warmed-up model.
    """
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as scratch:
        model = warmed_up_model(Path(scratch), *settings)
        for number, (name, own) in enumerate(turns(modes, rounds)):
            round_ = number // len(modes)
            say(f"round {round_ + 1}: running {name}")
            directory = Path(scratch) / str(round_) / name
            given = (f"mode={name}", f"model.path={model}", *settings, *own)
            yield name, round_, train(directory, *given, f"run.seed={round_}")


# ------------------------------------------------------------------------------------------ every mode


def compare(chosen: Any) -> None:
    groups = chosen.groups or 768
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in chosen.modes}
    steps = f"rollout.total_rollout_steps={groups}"
    for mode, _, run in in_turns(dict.fromkeys(found, (steps,)), chosen.rounds):
        found[mode].append(figures(run))
    rows = [
        {"mode": mode, **medians(same), "least after": min(one["after"] for one in same)}
        for mode, same in found.items()
    ]
    report("modes", {f"Seconds per {B} trained groups; medians of {chosen.rounds} runs of {groups} groups": rows})


def figures(run: Path) -> dict[str, float]:
    """Return held-out accuracy, and seconds per `B` groups from the first optimizer step to the last."""
    events = list(read_events(run / "events.jsonl"))
    steps = [event.time for event in events if isinstance(event, OptimizerStepped)]
    start, end = steps[0], steps[-1]
    groups = sum(len(event.numbers) for event in events if isinstance(event, BatchTaken) and start < event.time <= end)

    def inside(span: tuple[float, float]) -> float:
        return max(0.0, min(span[1], end) - max(span[0], start)) * B / groups

    trained = sum(inside(e.span) for e in events if isinstance(e, TrainerBusy) and e.what != "checkpoint")
    activity = [event for event in events if isinstance(event, ReplicaActivity)]
    decoded = sum(inside(span) for event in activity for span in event.busy)
    loads = [event for event in events if isinstance(event, UpdatePhase) and event.phase == "load"]
    loaded = sum(load.seconds for load in loads if start < load.time <= end) * B / groups
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


# ------------------------------------------------------------------------------------------ predictions


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode on the demo's split, with B groups a version."""

    name: str
    eta: Fraction
    trigger: int

    @classmethod
    def of(cls, name: str) -> Mode:
        values, prefix = PRESETS[name], "async_training"
        eta = exact_fraction(values[f"{prefix}.staleness_threshold"])
        return cls(name, eta, values[f"{prefix}.trigger_parameter_sync_step"])

    @property
    def setting(self) -> PlanSetting:
        return PlanSetting(self.name, SPLIT, self.eta, self.trigger, require_batches=MINI_BATCHES // self.trigger)

    @property
    def settings(self) -> tuple[str, ...]:
        return (
            f"mode={self.name}",
            f"async_training.trigger_parameter_sync_step={self.trigger}",
            f"async_training.require_batches={MINI_BATCHES // self.trigger}",
            *PREDICTED,
        )

    def passes(self) -> bool:
        """Return whether the doctor permits it."""
        try:
            diagnose(load(DEMO, [*self.settings, f"rollout.total_rollout_steps={B}"]))
        except ConfigError:
            return False
        return True

    def metered(self, events: Iterable[Event], versions: int) -> Measurement | None:
        """The planner's meter on the events of a run of so many versions."""
        meter = StepMeter(eta=self.eta, steps_per_version=MINI_BATCHES, stop=lambda: None, out_of_time=lambda _: False)
        # At its end a run admits less and less.
        steps, most = 0, (versions - 1 - ceil(self.eta)) * MINI_BATCHES
        for event in events:
            steps += isinstance(event, OptimizerStepped)
            if not isinstance(event, OptimizerStepped) or steps <= most:
                meter.on_event(event)
        return meter.measurement()


def trainable_modes(*, first: str) -> list[Mode]:
    """Presets that train on devices of their own, as the doctor sees it.

    Raises:
        SystemExit: ``first`` is none of them.
    """
    split = (Mode.of(name) for name, values in PRESETS.items() if values["cluster.placement"] == "split")
    trainable = [mode for mode in split if mode.passes()]
    if first not in (names := [mode.name for mode in trainable]):
        sys.exit(f"{first} cannot be profiled here; choose one of {', '.join(names)}")
    return sorted(trainable, key=lambda mode: mode.name != first)


def predict(modes: Sequence[Mode], chosen: Any) -> None:
    groups, found = chosen.groups or 16 * B, {mode.name: list[Pair]() for mode in modes}
    steps, by_name = f"rollout.total_rollout_steps={groups}", {mode.name: mode for mode in modes}
    own = {mode.name: (*mode.settings, steps) for mode in modes}
    for name, _, run in in_turns(own, chosen.rounds, *PREDICTED):
        if name == modes[0].name:
            profile = profile_run(run)
        measured = by_name[name].metered(read_events(run / "events.jsonl"), groups // B)
        predicted = measure(profile, by_name[name].setting)
        if measured is None or predicted is None:
            sys.exit(f"{name}: {groups} groups are too few to measure; give more (--groups)")
        found[name].append((measured, predicted))
    title = f"Seconds per B = {B} groups, predicted from {modes[0].name}; medians of {chosen.rounds} rounds"
    report("predict", {title: table(found)})


def table(found: dict[str, list[Pair]]) -> Rows:
    rows = []
    for name, same in found.items():
        errors = [Share(predicted.step_s / measured.step_s - 1) for measured, predicted in same]
        sides = dict(zip(("measured", "predicted"), zip(*same, strict=True), strict=True))
        both = {
            f"{title} {side}": median(getattr(one, figure) for one in ones)
            for title, figure in FIGURES.items()
            for side, ones in sides.items()
        }
        error = {"error": Share(median(errors)), "least error": min(errors), "largest error": max(errors)}
        rows.append({"mode": name, **both, **error})
    return rows


if __name__ == "__main__":
    main()
