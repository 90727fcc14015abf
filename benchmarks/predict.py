"""``python -m benchmarks.predict``: what the simulator says of the demo, against what the demo takes.

Each round runs one mode for real (the synchronous one, unless told otherwise), profiles that run, predicts every other
mode of the same split from the profile, and runs those modes, too. A neighbour that slows one round slows all of it,
the profile included; the figures are medians over rounds, the error the median of the rounds' own.

All modes train B groups a version, and start from the same warmed-up model. The pipeline's filling and the run's end
are left out of both sides, by the planner's own meter.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.runner import DEMO, train, warmed_up_model
from benchmarks.table import report
from headway.config.doctor.doctor import diagnose
from headway.config.loading import load
from headway.config.presets import PRESETS
from headway.config.sections.section import exact_fraction
from headway.errors import ConfigError
from headway.events import Event, OptimizerStepped
from headway.planner.grid import DeviceSplit, PlanSetting
from headway.planner.measure import Measurement, StepMeter, fill_versions, measure
from headway.planner.measurement.run_profiler import profile_run
from headway.reports.record.events_file import read_events

PROFILED = "on_policy"
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


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode on the demo's split, with B groups a version."""

    setting: PlanSetting

    @property
    def name(self) -> str:
        return self.setting.preset

    @property
    def settings(self) -> tuple[str, ...]:
        return (
            f"mode={self.name}",
            f"async_training.trigger_parameter_sync_step={self.setting.trigger}",
            f"async_training.require_batches={self.setting.require_batches}",
            *COMMON,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predict", description="Predicted against measured.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--versions", type=int, default=16, help=f"of each run; a version is {B} groups")
    parser.add_argument("--profiled", default=PROFILED, help="the mode whose run is profiled; default: %(default)s")
    chosen = parser.parse_args(arguments)
    modes = trainable_modes(first=chosen.profiled)
    if chosen.versions < (fewest := max(map(_fewest_versions, modes))):
        parser.error(f"--versions: got {chosen.versions}, expected at least {fewest}, so that two can be measured")
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as scratch:
        model = warmed_up_model(Path(scratch), *COMMON)
        rounds = [
            _Round(Path(scratch) / str(number), model, chosen.versions, modes).run() for number in range(chosen.rounds)
        ]
    title = f"Seconds per B = {B} groups, predicted from {chosen.profiled}; medians of {chosen.rounds} rounds"
    report("predict", {title: _rows(rounds)})


@dataclass(frozen=True, slots=True)
class Compared:
    """One mode in one round."""

    mode: str
    measured: Measurement
    predicted: Measurement

    @property
    def error(self) -> float:
        return self.predicted.step_s / self.measured.step_s - 1


@dataclass(frozen=True, slots=True)
class _Round:
    directory: Path
    model: Path
    versions: int
    modes: Sequence[Mode]

    def run(self) -> list[Compared]:
        """The first mode is profiled."""
        first, *others = self.modes
        profile = profile_run(self._run(first))
        compared = []
        for mode in (first, *others):
            directory = self._directory(mode) if mode is first else self._run(mode)
            measured = _metered(read_events(directory / "events.jsonl"), mode.setting, self.versions)
            predicted = measure(profile, mode.setting)
            if measured is None or predicted is None:
                sys.exit(f"{mode.name}: {self.versions} versions are too few to measure; give more (--versions)")
            compared.append(Compared(mode.name, measured, predicted))
        return compared

    def _directory(self, mode: Mode) -> Path:
        return self.directory / mode.name

    def _run(self, mode: Mode) -> Path:
        print(f"running {mode.name}", file=sys.stderr)
        settings = (*mode.settings, f"model.path={self.model}", f"rollout.total_rollout_steps={self.versions * B}")
        return train(self._directory(mode), *settings)


def trainable_modes(*, first: str) -> list[Mode]:
    """Presets that train on devices of their own, as the doctor sees it.

    Raises:
        SystemExit: ``first`` is none of them.
    """
    split = (name for name, values in PRESETS.items() if values["placement.kind"] == "split")
    trainable = [mode for mode in map(_mode, split) if _passes(mode)]
    if first not in (names := [mode.name for mode in trainable]):
        sys.exit(f"{first} cannot be profiled here; choose one of {', '.join(names)}")
    return sorted(trainable, key=lambda mode: mode.name != first)


def _mode(name: str) -> Mode:
    values = PRESETS[name]
    trigger = values["async_training.trigger_parameter_sync_step"]
    eta = exact_fraction(values["async_training.staleness_threshold"])
    return Mode(PlanSetting(name, SPLIT, eta, trigger, require_batches=MINI_BATCHES // trigger))


def _passes(mode: Mode) -> bool:
    try:
        diagnose(load(DEMO, [*mode.settings, f"rollout.total_rollout_steps={B}"]))
    except ConfigError:
        return False
    return True


def _metered(events: Iterable[Event], setting: PlanSetting, versions: int) -> Measurement | None:
    """The planner's meter on a run's events. At its end a run admits less and less: the last versions are left out."""
    last = versions - _at_the_end(setting)
    meter = StepMeter(
        eta=setting.eta, steps_per_version=MINI_BATCHES, stop=lambda: None, out_of_time=lambda versions: False
    )
    for event in _until_version(events, last):
        meter.on_event(event)
    return meter.measurement()


def _at_the_end(setting: PlanSetting) -> int:
    return 1 + ceil(setting.eta)


def _fewest_versions(mode: Mode) -> int:
    return fill_versions(mode.setting.eta) + 2 + _at_the_end(mode.setting)


def _until_version(events: Iterable[Event], version: int) -> Iterator[Event]:
    steps = 0
    for event in events:
        if isinstance(event, OptimizerStepped):
            steps += 1
            if steps > version * MINI_BATCHES:
                continue
        yield event


def _rows(rounds: Sequence[Sequence[Compared]]) -> list[dict[str, Any]]:
    rows = []
    for same in zip(*rounds, strict=True):

        def middle(value: Callable[[Compared], float], same: Sequence[Compared] = same) -> float:
            return median(map(value, same))

        rows.append(
            {
                "mode": same[0].mode,
                "measured s": middle(lambda c: c.measured.step_s),
                "predicted s": middle(lambda c: c.predicted.step_s),
                "error": middle(lambda c: c.error),
                "least error": min(c.error for c in same),
                "largest error": max(c.error for c in same),
                "train idle": middle(lambda c: c.measured.trainer_idle),
                "predicted": middle(lambda c: c.predicted.trainer_idle),
                "rollout idle": middle(lambda c: c.measured.rollouter_idle),
                "predicted ": middle(lambda c: c.predicted.rollouter_idle),
                "lag": middle(lambda c: c.measured.lag_mean),
                "predicted  ": middle(lambda c: c.predicted.lag_mean),
            }
        )
    return rows


if __name__ == "__main__":
    main()
