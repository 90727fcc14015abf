"""Measurement of one row of a plan: simulates its setting until the time of a version is known precisely.

    version   0 … fill-1 │ fill … fill+n-1                 step time = (end of the last − end of the fill) / n
              filling    │ measured, window of all shares  stops at n ≥ 4 and known within 2%, or n = 30
              pipeline   │

A version ends with its last optimizer step. The error is estimated by batch means (`mean_of_times`), as times of
consecutive versions are not independent: with η > 0 a quick version leaves little behind for the next, so short and
long ones alternate, and a batch is an even number of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from statistics import fmean, stdev

from headway import events
from headway.config.schema import Config
from headway.data.types import TrajectoryId
from headway.events import Event
from headway.planner.grid import PlanSetting
from headway.planner.profiles.costs import decode_cost, train_cost
from headway.planner.profiles.job_profile import Profile
from headway.planner.profiles.lengths import lengths_of
from headway.planner.simulation.simulated_run import Simulation, config_for
from headway.reports.metrics.occupancy import Occupancy

PRECISION = 0.02
"""Half-width of the 95% confidence interval, as a share of the mean, at which a row's step time is known."""
FEWEST_VERSIONS, MOST_VERSIONS = 4, 30
REPORTS_PER_VERSION = 4
"""Number of reports of each replica's activity in the time of one version, roughly."""
DRAWS = 64
"""Number of sampled answers from which the time of a version is guessed."""
MOST_BATCHES = 15
T_QUANTILES = (21.205, 5.643, 3.896, 3.298, 3.003, 2.829, 2.715, 2.634, 2.574, 2.527, 2.491, 2.461, 2.436, 2.415)
"""Quantiles of Student's t, two-sided 97%, for 1 … 14 degrees of freedom. The effective level is 95%, since the
interval is tested after each version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Measurements of one row at steady state. Shares refer to the measured window."""

    step_s: float
    """Seconds per version, B trained groups."""
    half_width: float
    """Half the width of the 95% confidence interval of ``step_s``, in seconds."""
    versions: int
    """Number of measured versions."""
    trainer_idle_ratio: float
    rollouter_idle_ratio: float
    slot_utilization: float
    trainer_waited_s: float
    """Seconds per version in which the trainer waited for groups: generation is the bottleneck."""
    update_stall_s: float
    """Seconds per version in which the trainer waited for a parameter update."""
    lag_mean: float
    lag_max: int
    lag_bound: int | None
    partial_ratio: float
    """Share of trajectories whose tokens carry more than one version."""
    trajectories: int
    """Number of trajectories that were simulated, those of the fill included."""


def fill_versions(eta: Fraction) -> int:
    """Return the number of versions to leave out: until the pipeline is full, and a little longer.

    With η = 0 the first version is the only one that no update precedes.
    """
    return 1 if eta == 0 else 2 + ceil(eta)


@dataclass(slots=True, kw_only=True)
class StepMeter:
    """Observer that measures a row while it is simulated, from its fill on. Keeps counters and spans, no events."""

    eta: Fraction
    steps_per_version: int
    stop: Callable[[], None]
    """Function that is called once, at the end of a version."""
    out_of_time: Callable[[int], bool]
    """Function that is asked at the end of a version, given the number of versions that were measured."""
    _occupancy: Occupancy = field(default_factory=Occupancy)
    _steps: int = 0
    _ends: list[float] = field(default_factory=list)
    """Times at which the last version of the fill ended, and each measured one."""
    _lags: list[int] = field(default_factory=list)
    _lag_bound: int | None = None
    _trajectories: int = 0
    _counted: int = 0
    _partial: int = 0
    _trainer_waited_s: float = 0.0
    _update_stall_s: float = 0.0
    _stopped: bool = False

    @property
    def _multiple(self) -> int:
        return 1 if self.eta == 0 else 2

    def on_event(self, event: Event) -> None:
        # Before the event counts: the step that ends the fill is not part of the window.
        measuring = bool(self._ends) and not self._stopped
        match event:
            case events.RunStarted():
                self._occupancy.declare(event.slots)
                self._lag_bound = event.lag_bound
            case events.TrainerBusy():
                self._occupancy.trainer.report(event)
            case events.ReplicaActivity():
                self._occupancy.replica_active(event)
            case events.TrajectoryFinished():
                self._trajectories += 1
                self._counted += measuring
                self._partial += measuring and len(event.version_spans) > 1
            case events.BatchTaken(waited=(start, end)) if measuring:
                self._trainer_waited_s += end - start
            case events.UpdateFinished() if measuring:
                self._update_stall_s += event.trainer_stall_s
            case events.OptimizerStepped() if not self._stopped:
                self._lags += event.lags if measuring else ()
                self._steps += 1
                if self._steps % self.steps_per_version == 0:
                    self._version_ended(event.time)

    def close(self) -> None: ...

    def measurement(self) -> Measurement | None:
        """The measurement so far; None before two versions were measured."""
        times = self._times()
        if len(times) < 2:
            return None
        window = (self._ends[0], self._ends[-1])
        mean, half_width = mean_of_times(times, self._multiple)
        per_version = mean / (window[1] - window[0])
        return Measurement(
            step_s=mean,
            half_width=half_width,
            versions=len(times),
            trainer_idle_ratio=self._occupancy.trainer_idle(window) or 0.0,
            rollouter_idle_ratio=self._occupancy.rollouter_idle(window) or 0.0,
            slot_utilization=self._occupancy.slot_utilization(window) or 0.0,
            trainer_waited_s=self._trainer_waited_s * per_version,
            update_stall_s=self._update_stall_s * per_version,
            lag_mean=fmean(self._lags),
            lag_max=max(self._lags),
            lag_bound=self._lag_bound,
            partial_ratio=self._partial / max(self._counted, 1),
            trajectories=self._trajectories,
        )

    def _times(self) -> list[float]:
        return [end - start for start, end in zip(self._ends, self._ends[1:], strict=False)]

    def _version_ended(self, time: float) -> None:
        if self._steps // self.steps_per_version >= fill_versions(self.eta):
            self._ends.append(time)
        times = self._times()
        if self.out_of_time(len(times)) or len(times) >= MOST_VERSIONS or self._known(times):
            self._stopped = True
            self.stop()

    def _known(self, times: list[float]) -> bool:
        # Whole pairs: short and long versions alternate where groups run ahead.
        if len(times) < FEWEST_VERSIONS or len(times) % self._multiple:
            return False
        mean, half_width = mean_of_times(times, self._multiple)
        return half_width <= PRECISION * mean


def mean_of_times(times: Sequence[float], multiple: int = 1) -> tuple[float, float]:
    """Return the mean of the times of consecutive versions, and half the width of its 95% confidence interval, which is
    infinite for fewer than two batches. ``multiple`` divides the size of a batch.
    """
    size = multiple * ceil(len(times) / (multiple * MOST_BATCHES))
    count = len(times) // size
    recent = times[len(times) - count * size :]  # versions that do not fill a batch are left out
    means = [fmean(recent[i : i + size]) for i in range(0, len(recent), size)]
    # `count` batches have one degree of freedom less, and the table begins with one.
    error = T_QUANTILES[count - 2] * stdev(means) / math.sqrt(count) if count > 1 else math.inf
    return fmean(times), error


def config_of(profile: Profile, setting: PlanSetting, versions: int) -> Config:
    """The configuration that simulates ``versions`` versions of ``setting``."""
    return config_for(
        profile,
        setting.preset,
        train_devices=setting.split.train_devices,
        replicas=setting.split.replicas,
        versions=versions,
        eta=setting.eta,
        trigger=setting.trigger,
        # A report's slot time is spread over it, so reports that straddle the window's edges should be short.
        activity_interval_s=_least_step_s(profile, setting) / REPORTS_PER_VERSION,
    )


def _least_step_s(profile: Profile, setting: PlanSetting) -> float:
    """Return the least seconds of a version, by a few draws: of training on it, or of decoding it with full slots."""
    batch, slots = profile.batch, profile.rollout.slots
    length = lengths_of(profile.response, 0)
    tokens = fmean(length(TrajectoryId(0, row, 0, 0)) for row in range(DRAWS))
    if profile.program is not None:
        places = [(index + 0.5) / DRAWS for index in range(DRAWS)]
        tokens *= fmean(profile.program.turns.draw(episode=place, own=place) for place in places)
    answers = batch.groups_per_version * batch.n
    train, curve = train_cost(profile.train, setting.split.train_devices), decode_cost(profile.rollout).curve
    training = batch.ppo_epochs * (batch.mini_batches * train.step_s + train.token_s * answers * tokens)
    return max(training, tokens * curve[1], tokens * answers / (setting.split.replicas * slots) * curve[slots])


def measure(
    profile: Profile,
    setting: PlanSetting,
    *,
    out_of_time: Callable[[int], bool] = lambda versions: False,
    seed: int = 0,
) -> Measurement | None:
    """Simulate ``setting`` until its step time is known or time is out. Returns None if that is too early for a
    result.
    """
    batch = profile.batch
    # More versions than are measured: towards its end a run admits fewer groups, and is not at steady state.
    config = config_of(profile, setting, fill_versions(setting.eta) + MOST_VERSIONS + 1 + ceil(setting.eta))
    meter = StepMeter(
        eta=setting.eta,
        steps_per_version=batch.ppo_epochs * batch.mini_batches,
        stop=lambda: simulation.pipeline.request_stop(),  # noqa: PLW0108 - bound below: the meter observes it
        out_of_time=out_of_time,
    )
    simulation = Simulation(profile, config, seed=seed, observers=(meter,))
    simulation.run()
    return meter.measurement()
