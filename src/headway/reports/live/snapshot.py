"""A snapshot of what the live view shows, as plain values taken at one instant; drawing them is another matter."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.events import Event
from headway.reports.metrics.group_tally import Whereabouts
from headway.reports.metrics.run_metrics import RunMetrics

HISTORY = 200
"""Least number of versions whose rewards are kept; of more than twice as many every second one is, and both ends."""


@dataclass(frozen=True, slots=True)
class StageLine:
    """A stage at one instant: what it does, or whom it has been waiting for, and for how long."""

    name: str
    state: str
    waiting_for: str | None
    active: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    mode: str
    seed: int
    elapsed_s: float
    trained: int
    total: int | None
    eta_s: float | None
    validation_rewards: tuple[float, ...]
    """Mean rewards of the held-out problems, in order of versions."""
    validated_version: int | None
    problems: int | None
    rewards: tuple[float, ...]
    lag_mean: float | None
    lag_max: int | None
    lag_bound: int | None
    order: str
    trainer_idle: float | None
    rollouter_idle: float | None
    trainer_version: int
    last_version: int | None
    """The version that the run ends with, where its length is known."""
    served: tuple[tuple[str, int], ...]
    counts: dict[str, int]
    whereabouts: Whereabouts
    row: dict[str, Any]
    """The last complete version's metrics."""
    stages: tuple[StageLine, ...]
    finished: bool


class SnapshotTaker:
    """Watches a run beside its `RunMetrics` and takes snapshots. ``clock`` runs on between two events."""

    def __init__(self, metrics: RunMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._event_time = 0.0
        self._seen_at = 0.0
        self._rewards: list[float] = []
        self._row: dict[str, Any] = {}

    def on_event(self, event: Event) -> None:
        self._event_time, self._seen_at = event.time, self._clock()

    def on_row(self, row: dict[str, Any]) -> None:
        self._row = self._row | row
        if "reward/mean" in row:
            self._rewards.append(row["reward/mean"])
            if len(self._rewards) > 2 * HISTORY:
                self._rewards = [*self._rewards[:-1:2], self._rewards[-1]]

    def take(self) -> Snapshot | None:
        """Take a snapshot; None before the run has started."""
        metrics = self._metrics
        started = metrics.started
        if started is None:
            return None
        finished = metrics.finished
        now = self._event_time + self._clock() - self._seen_at if finished is None else finished.time
        trained = metrics.tally.fates["trained"]
        evaluations = list(metrics.evaluations)
        trainer_idle, rollouter_idle = metrics.idle_so_far()
        lag_mean, lag_max = metrics.lag_so_far()
        return Snapshot(
            mode=started.mode,
            seed=started.seed,
            elapsed_s=now - started.time,
            trained=trained,
            total=started.total_groups,
            eta_s=self._eta(now, trained, started.total_groups),
            validation_rewards=tuple(event.accuracy for event in evaluations[-HISTORY:]),
            validated_version=evaluations[-1].version if evaluations else None,
            problems=evaluations[-1].problems if evaluations else None,
            rewards=tuple(self._rewards),
            lag_mean=lag_mean,
            lag_max=lag_max,
            lag_bound=started.lag_bound,
            order=started.order,
            trainer_idle=trainer_idle,
            rollouter_idle=rollouter_idle,
            trainer_version=metrics.version,
            last_version=None if started.total_groups is None else started.total_groups // started.groups_per_version,
            served=tuple(sorted(metrics.served.items())),
            counts=metrics.tally.counts(),
            whereabouts=metrics.tally.whereabouts(),
            row=self._row,
            stages=tuple(
                StageLine(stage.name, stage.state, stage.waiting_for, stage.active, max(now - stage.since, 0.0))
                for stage in sorted(metrics.occupancy.stages.values(), key=lambda stage: started.place_of(stage.name))
            ),
            finished=finished is not None,
        )

    def _eta(self, now: float, trained: int, total: int | None) -> float | None:
        if total is None or trained >= total:
            return None
        return self._metrics.pace.seconds_left(now, total)
