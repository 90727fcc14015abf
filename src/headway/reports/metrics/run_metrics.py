"""Metrics, from events to figures: one row per version during the run, one summary at its end.

    events ─▶ GroupTally  (where every group is, its fate)          ─┐
           ─▶ Occupancy   (who was busy when)                        ├─▶ rows: metrics.jsonl, TensorBoard, the log
           ─▶ VersionRow  (what was trained, the update after it)   └─▶ summary(): summary.json, the final report

The row of version v includes the update to v+1, which closes it, so that rows tile the run; the end of the run closes
the last row. A closed row is emitted once all of the trainer's work until then is known: an overlapped update may
finish during an optimizer step, which is reported at its end. Nothing here reads a clock: replaying a run's
``events.jsonl`` gives the same figures.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from headway import events
from headway.events import Event, Span
from headway.reports.metrics.group_tally import GroupRecord, GroupTally
from headway.reports.metrics.occupancy import Occupancy
from headway.reports.metrics.run_sums import Pace, Series, UpdateSums
from headway.reports.metrics.version_row import EventSums, Mean, VersionRow, drop_none, mean_of, validation_values

KEPT_WARNINGS = 50
MOST_VALIDATIONS = 512
"""Maximum number of validation results that are kept, and listed in the summary."""


class RowSink(Protocol):
    """Receiver of each version's complete row: flat metric names to values, ``version`` among them."""

    def on_row(self, row: dict[str, Any]) -> None: ...


@dataclass(slots=True)
class RunTotals(EventSums):
    """Counts over the whole run."""

    fetches: int = 0
    stale_trajectories: int = 0
    """Number of trained trajectories whose oldest token was sampled before the version that trained on them."""
    trained: Mean = field(default_factory=Mean)
    """Lengths in tokens of the trained groups' episodes."""
    trainable: Mean = field(default_factory=Mean)
    """Lengths of groups that have ended, trained or lost; filtered ones are left out of training on purpose."""


@dataclass(frozen=True, slots=True)
class ClosedRow:
    """A metrics row when it was closed. ``window`` is the time whose idle shares it reports; None for none."""

    values: dict[str, Any]
    window: Span | None = None


class RunMetrics:
    """Observer that accumulates a run. Complete rows go to ``sinks``."""

    def __init__(self, sinks: Sequence[RowSink] = ()) -> None:
        self.tally = GroupTally()
        self.occupancy = Occupancy()
        self.started: events.RunStarted | None = None
        """The run's start event, updated when the run is resumed; None before it."""
        self.first: float | None = None
        """Time of the first event; None before it."""
        self.finished: events.RunFinished | None = None
        self.resumed = 0
        """Number of times that the run was resumed."""
        self.trainer_restarts = 0
        """Number of times that the trainer was lost and started again."""
        self.checkpoints = {"saved": 0, "failed": 0, "snapshots": 0, "paused_s": 0.0}
        """Numbers of checkpoints and snapshots, and seconds for which training stood still to copy them."""
        self.storage: dict[str, Any] | None = None
        """Newest version whose checkpoint is in the run's storage, number of outages, and the reason of a current one;
        None if nothing was sent."""
        self.version = 0
        self.served: dict[str, int] = {}
        """Version that each replica has loaded."""
        self.lags: Counter[int] = Counter()
        """Lag → number of trained groups."""
        self.validations: Series[events.ValidationFinished] = Series(MOST_VALIDATIONS)
        """Results of validations."""
        self.left_out: dict[str, dict[str, dict[str, int]]] = {}
        """Part (training or held-out) → source → reason → number of rows left out."""
        self.warnings: list[str] = []
        self.workers: dict[str, events.WorkerDescribed] = {}
        """Descriptions of the workers, by name."""
        self.totals = RunTotals()
        self.pace = Pace()
        self.updates = UpdateSums()
        """Sums of the updates that finished after the first admission. Earlier ones cost the run nothing."""
        self.updates_before_last_step = UpdateSums()
        """Sums of those `updates` that had finished when the last optimizer step, and with it the wall time, ended."""
        self.lease_validation_s = 0.0
        """Seconds that the trainer waited for validations before it got shared devices."""
        self.sinks = sinks
        self.rows = 0
        """Number of emitted rows."""
        self._rows: dict[int, VersionRow] = {}
        self._closed: deque[ClosedRow] = deque()
        """Closed rows that were not emitted yet, in order."""
        self._closed_below = 0
        self._row_opened = 0.0
        self._rollouter_cut = 0.0
        """Time up to which emitted rows include replicas' activity."""
        self._first_admission: float | None = None
        self._last_step: float | None = None

    # ------------------------------------------------------------------------------------------ events

    def on_event(self, event: Event) -> None:
        if self.first is None:
            self.first = event.time
        # First: the code below reads the tally, and rows that close now include this event.
        group = self.tally.on_event(event)
        match event:
            case events.StageChanged():
                self.occupancy.stage_changed(event)
                self._hand_out_known()
            case events.TrajectoryFinished():
                self._row(self.version).add_finished(event)
                self.totals.add_finished(event)
            case events.GroupAdmitted() if self._first_admission is None:
                self._first_admission = self._row_opened = self._rollouter_cut = event.time
                self.pace.begin(event.time)
                self.occupancy.begin(event.time)
            case events.GroupRewarded():
                self._row(self.version).generated_rewards += event.rewards
            case events.GroupSettled() if group is not None:
                self._on_settled(event, group)
            case events.ReplicaActivity():
                self.occupancy.replica_active(event)
                self._row(self.version).add_activity(event)
                self.totals.add_activity(event)
            case events.ReplicaJoined():
                self.occupancy.join(event)
                self.served[event.replica] = event.version
            case events.ReplicaLost():
                self.occupancy.lose(event)
                self.served.pop(event.replica, None)
                self.workers.pop(event.replica, None)
            case events.EpisodeWorkerLost():
                self.workers.pop(event.worker, None)
            case events.TrainerBusy():
                self.occupancy.trainer.report(event)
                self._hand_out_known()
            case events.RanksRestarted():
                self.trainer_restarts += 1
            case events.CheckpointCopied():
                self.occupancy.saves.add(event.span)
                self.checkpoints["paused_s"] += event.span[1] - event.span[0]
            case events.CheckpointSaved():
                self.checkpoints["saved"] += 1
            case events.SnapshotKept():
                self.checkpoints["snapshots"] += 1
            case events.CheckpointFailed():
                self.checkpoints["failed"] += 1
            case events.StorageReached():
                before = self.storage or {"outages": 0, "missing": None}
                outages = before["outages"] + (event.reason is not None and before["missing"] is None)
                self.storage = {"version": event.version, "outages": outages, "missing": event.reason}
            case events.WorkerDescribed():
                self.workers[event.worker] = event
            case events.BatchTaken():
                self._on_batch(event)
            case events.OptimizerStepped():
                self._on_step(event)
            case events.CriticStepped():
                self._row(max(event.version, self._closed_below)).add_critic_step(event)
            case events.UpdatePhase():
                # A probe on shared devices may come when its update's row is closed: it then counts in the next one.
                self._row(max(event.version - 1, self._closed_below)).phases.add(event)
                if event.phase == "load" and event.where in self.served:
                    self.served[event.where] = event.version
            case events.UpdateFinished():
                self._on_update(event)
            case events.LeaseChanged():
                self.lease_validation_s += event.validation_s
                self.occupancy.handovers.add((event.asked, event.time))
            case events.ValidationFinished():
                self._on_validation(event)
            case events.RunStarted():
                self._on_started(event)
            case events.RunResumed():
                self.resumed, self.version = event.times, max(self.version, event.version)
            case events.RunFinished():
                self.finished = event
                self._end_rows(event.time)
            case events.PromptsLeftOut():
                of_source = self.left_out.setdefault(event.part, {}).setdefault(event.source, {})
                of_source[event.reason] = event.count
            case events.Note(level="warning") if len(self.warnings) < KEPT_WARNINGS:
                self.warnings.append(event.text)

    def close(self) -> None:
        """Emit the remaining rows of a run that did not reach its end."""
        self._end_rows(self._last_step)

    def _on_started(self, event: events.RunStarted) -> None:
        """Handle a first or resumed start: workers are new, and have the initial model until the first update."""
        if self.started is None:
            self.occupancy.declare(event.slots)
        else:
            self.occupancy.declare(event.slots, since=event.time)
            # Durations count from the first start, also in a run that was resumed.
            event = replace(event, time=self.started.time)
        self.started = event
        self.served = dict.fromkeys(event.slots, 0)

    def _on_settled(self, event: events.GroupSettled, group: GroupRecord) -> None:
        if event.fate != "filtered":
            for tokens in group.lengths + group.lost:
                self.totals.trainable.add(tokens)
        if event.fate != "trained":
            return
        for tokens in group.lengths:
            self.totals.trained.add(tokens)
        self.totals.stale_trajectories += group.stale_trajectories()
        if event.lag is not None:
            self.lags[event.lag] += 1
        self._row(self.version if group.taken_at is None else group.taken_at).add_trained(group, event.lag)

    def _on_batch(self, event: events.BatchTaken) -> None:
        self.occupancy.trainer_waits.add(event.waited)
        if event.numbers:
            self.totals.fetches += 1
            self.pace.took(event.time, len(event.numbers), self.started.groups_per_version if self.started else 1)

    def _on_step(self, event: events.OptimizerStepped) -> None:
        self._row(event.version).add_step(event)
        self.totals.count_step(event)
        if self._last_step is None or event.time > self._last_step:
            self._last_step = event.time
            self.updates_before_last_step = deepcopy(self.updates)  # a copy, to which later updates add nothing

    def _on_update(self, event: events.UpdateFinished) -> None:
        self.version = max(self.version, event.version)
        row = self._row(event.version - 1)
        row.update = event
        if self._first_admission is not None:
            self.updates.add(event, row.phases)
        self._close_rows(event.time, below=event.version)
        self._hand_out_known()

    def _on_validation(self, event: events.ValidationFinished) -> None:
        """Take a validation's scores. If its version's row was closed meanwhile, they become a separate row."""
        self.validations.append(event, event.accuracy)
        if event.version < self._closed_below:
            self._closed.append(ClosedRow({"version": event.version, **validation_values(event)}))
            self._hand_out_known()
        else:
            self._row(event.version).validation = event

    # ------------------------------------------------------------------------------------------ rows

    def _row(self, version: int) -> VersionRow:
        if version not in self._rows:
            self._rows[version] = VersionRow(version=version)
        return self._rows[version]

    def _close_rows(self, until: float | None, below: int | None) -> None:
        # Ascending: curves and trackers take rows in the order in which they come.
        for version in sorted(v for v in self._rows if below is None or v < below):
            row = self._rows.pop(version)
            if row.is_empty:
                continue
            values = row.values(by_source=len(self.tally.sources) > 1) | self._cumulative()
            window = None
            if until is not None and until > self._row_opened:
                covered, self._row_opened = (self._row_opened, until), until
                values |= self._rates(row, covered)
                window = covered if row.trained else None
            self._closed.append(ClosedRow(values, window))
        self._closed_below = max(self._closed_below, below or 0)

    def _hand_out_known(self) -> None:
        """Emit closed rows, in order, whose windows the trainer's events cover completely."""
        known, before = self.occupancy.trainer.known_until, len(self._closed)
        while self._closed and ((window := self._closed[0].window) is None or window[1] <= known):
            self._hand_out(self._closed.popleft())
        if len(self._closed) < before:
            self._sum_up()

    def _sum_up(self) -> None:
        """Let the occupancy sum up all time in which neither a later row nor the run's window begins or ends."""
        if self._last_step is not None:
            waiting = (row.window[0] for row in self._closed if row.window is not None)
            known = self.occupancy.trainer.known_until
            self.occupancy.sum_up(min(self._row_opened, self._rollouter_cut, self._last_step, known, *waiting))

    def _end_rows(self, until: float | None) -> None:
        """Emit all rows at the end of a run, when no further event will complete them."""
        self._close_rows(until, below=None)
        while self._closed:
            self._hand_out(self._closed.popleft())

    def _hand_out(self, closed: ClosedRow) -> None:
        self.rows += 1
        row = closed.values
        if closed.window is not None:
            row |= {"trainer/idle_ratio": self.occupancy.trainer_idle(closed.window)}
            row |= self._rollouter_rates(closed.window[1])
        for sink in self.sinks:
            sink.on_row(row)

    def _cumulative(self) -> dict[str, Any]:
        return {
            "fully_async/count/stale_samples_processed": self.stale_groups,
            "fully_async/count/stale_trajectory_processed": self.totals.stale_trajectories,
            **{f"groups/{fate}": count for fate, count in self.tally.counts().items()},
            **self._episode_fates(),
            **{f"bias/{name}": value for name, value in drop_none(self.bias()).items()},
        }

    def _episode_fates(self) -> dict[str, int]:
        """Return the counts of episodes if programs make them; else nothing."""
        if not self.totals.episodes.finished:
            return {}
        return {f"episodes/{fate}": count for fate, count in self.tally.episode_counts().items()}

    def _rates(self, row: VersionRow, window: Span) -> dict[str, Any]:
        """Figures of a row about its time: seconds, and throughputs where the version was trained on."""
        seconds = window[1] - window[0]
        values: dict[str, Any] = {"time/seconds": seconds}
        if self.started is not None:
            values["time/since_start"] = window[1] - self.started.time
        if row.trained:
            values["throughput/samples_per_s"] = sum(row.lags.values()) / seconds
            values["throughput/trajectories_per_s"] = len(row.lengths) / seconds
            values["throughput/trained_tokens_per_s"] = sum(row.lengths) / seconds
            values["throughput/generated_tokens_per_s"] = row.generated_tokens / seconds
        return values

    def _rollouter_rates(self, until: float) -> dict[str, Any]:
        """Return idle ratio and slot utilization since the last row, up to where every replica has reported."""
        known = self.occupancy.reported_until()
        if known is None or (until := min(until, known)) <= self._rollouter_cut:
            return {}
        window, self._rollouter_cut = (self._rollouter_cut, until), until
        idle, slots = self.occupancy.rollouter_idle(window), self.occupancy.slot_utilization(window)
        return drop_none({"rollouter/idle_ratio": idle, "rollouter/slot_utilization": slots})

    # ------------------------------------------------------------------------------------------ the whole run

    @property
    def window(self) -> Span | None:
        """The span from the first admission to the last optimizer step so far."""
        if self._first_admission is None or self._last_step is None or self._last_step <= self._first_admission:
            return None
        return self._first_admission, self._last_step

    def idle_so_far(self) -> tuple[float | None, float | None]:
        """Idle ratios (trainer, rollouter) so far; the second up to the replicas' last report."""
        window, known = self.window, self.occupancy.reported_until()
        if window is None:
            return None, None
        reported = (window[0], window[1] if known is None else min(window[1], known))
        return self.occupancy.trainer_idle(window), self.occupancy.rollouter_idle(reported)

    @property
    def validated(self) -> list[events.ValidationFinished]:
        """Results of validations that are kept, in order of versions."""
        return sorted(self.validations.items, key=lambda event: event.version)

    def lag_so_far(self) -> tuple[float | None, int | None]:
        """Mean and maximum lag over trained groups so far."""
        return (mean_of(self.lags), max(self.lags)) if self.lags else (None, None)

    @property
    def stale_groups(self) -> int:
        return sum(count for lag, count in self.lags.items() if lag >= 1)

    def bias(self) -> dict[str, float | None]:
        """Return the mean length of trained answers, that of all ended answers meant for training, and their ratio."""
        trained, dispatched = (
            sums.mean if sums.count else None for sums in (self.totals.trained, self.totals.trainable)
        )
        ratio = trained / dispatched if trained is not None and dispatched else None
        return {"trained_length_mean": trained, "dispatched_length_mean": dispatched, "length_ratio": ratio}
