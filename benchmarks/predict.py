"""``python -m benchmarks.predict``: what the simulator says of the demo, against what the demo takes.

Each round runs one mode for real (the synchronous one, unless told otherwise), profiles that run, predicts every other
mode of the same split from the profile, and runs those modes, too. A neighbour that slows one round slows all of it,
the profile included; the figures are medians over rounds, the error the median of the rounds' own.

All modes train B groups a version, and start from the same warmed-up model. The pipeline's filling and the run's end
are left out of both sides, by the planner's own meter.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path
from statistics import median

from benchmarks.runner import DEMO, parser, say, train, warmed_up_model
from benchmarks.table import Rows, Share, report
from headway.config.doctor import diagnose
from headway.config.loading import load
from headway.config.presets import PRESETS
from headway.config.sections.section import exact_fraction
from headway.errors import ConfigError
from headway.events import Event, OptimizerStepped
from headway.planner.grid import DeviceSplit, PlanSetting
from headway.planner.measure import Measurement, StepMeter, fill_versions, measure
from headway.planner.measurement.run_profiler import profile_run
from headway.reports.record.events_file import read_events

MINI_BATCH, MINI_BATCHES = 16, 4
B = MINI_BATCH * MINI_BATCHES
SPLIT = DeviceSplit(train_devices=1, rollout_devices=1, replicas=1, shared=False)
"""The recipe's: one process trains, one generates."""
COMMON = (
    f"actor.ppo_mini_batch_size={MINI_BATCH}",
    "algorithm.filter_groups.enable=false",  # the share that is filtered changes as the policy learns
    "rollout.test_freq=-1",
    "data.task.val_size=16",
    "cluster.start_timeout_s=300",
)
Pair = tuple[Measurement, Measurement]
"""What was measured of a mode in a round, and what was predicted."""


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
            *COMMON,
        )

    @property
    def at_the_end(self) -> int:
        """Versions that are left out: at its end a run admits less and less."""
        return 1 + ceil(self.eta)

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
        steps = 0
        for event in events:
            steps += isinstance(event, OptimizerStepped)
            if not isinstance(event, OptimizerStepped) or steps <= (versions - self.at_the_end) * MINI_BATCHES:
                meter.on_event(event)
        return meter.measurement()


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(
        "predict",
        "Predicted against measured.",
        rounds=3,
        versions={"type": int, "default": 16, "help": f"of each run; a version is {B} groups"},
        profiled={"default": "on_policy", "help": "the mode whose run is profiled; default: %(default)s"},
    )
    chosen = options.parse_args(arguments)
    modes = trainable_modes(first=chosen.profiled)
    fewest = max(fill_versions(mode.eta) + 2 + mode.at_the_end for mode in modes)
    if chosen.versions < fewest:
        options.error(f"--versions: got {chosen.versions}, expected at least {fewest}, so that two can be measured")
    found: dict[str, list[Pair]] = {mode.name: [] for mode in modes}
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as scratch:
        model = warmed_up_model(Path(scratch), *COMMON)
        for number in range(chosen.rounds):
            profile = None
            for mode in modes:
                say(f"round {number + 1}: running {mode.name}")
                settings = (*mode.settings, f"model.path={model}", f"rollout.total_rollout_steps={chosen.versions * B}")
                run = train(Path(scratch) / str(number) / mode.name, *settings)
                profile = profile or profile_run(run)
                measured = mode.metered(read_events(run / "events.jsonl"), chosen.versions)
                predicted = measure(profile, mode.setting)
                if measured is None or predicted is None:
                    sys.exit(f"{mode.name}: {chosen.versions} versions are too few to measure; give more (--versions)")
                found[mode.name].append((measured, predicted))
    title = f"Seconds per B = {B} groups, predicted from {chosen.profiled}; medians of {chosen.rounds} rounds"
    report("predict", {title: table(found)})


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


def table(found: dict[str, list[Pair]]) -> Rows:
    rows = []
    for name, same in found.items():
        errors = [Share(predicted.step_s / measured.step_s - 1) for measured, predicted in same]
        row = {"mode": name}
        for title, figure in (
            ("s", "step_s"),
            ("train idle", "trainer_idle_ratio"),
            ("rollout idle", "rollouter_idle_ratio"),
        ):
            row |= _both(title, figure, same)
        row |= {"error": Share(median(errors)), "least error": min(errors), "largest error": max(errors)}
        rows.append(row | _both("lag", "lag_mean", same))
    return rows


def _both(title: str, figure: str, same: Sequence[Pair]) -> dict[str, float]:
    sides = zip(("measured", "predicted"), zip(*same, strict=True), strict=True)
    return {f"{title} {side}": median(getattr(one, figure) for one in ones) for side, ones in sides}


if __name__ == "__main__":
    main()
