"""All reports of one run in one object, which the composition root opens, feeds and closes.

emit ─▶ events.jsonl ─▶ RunMetrics ──rows──▶ metrics.jsonl, trackers, the console's view
                           └─ summary() ──▶ summary.json, trackers
on_sample ─▶ samples.jsonl, trackers

A resumed run goes on in its old files. What is undone of its record leaves ``metrics.jsonl``, ``samples.jsonl`` and
TensorBoard, which are made from what survives, and its clock stands still between the boundary that it goes back to and
its new start.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from headway import events
from headway.config.schema import Config
from headway.errors import DataError, UserError
from headway.events import Event, Observer
from headway.reports.checkpoint_folders import Checkpoints
from headway.reports.live.console_view import ConsoleView, report_end
from headway.reports.live.live_view import Cell, LiveView
from headway.reports.live.panel import RunProgress
from headway.reports.live.plain_log import EventLog, PlainView
from headway.reports.metrics.metrics_state import LARGE, MetricsStates, newest
from headway.reports.metrics.run_metrics import RunMetrics
from headway.reports.metrics.summary import summary
from headway.reports.record.events_file import (
    DENSE,
    EventReader,
    EventsFile,
    JsonLines,
    SurvivingRecord,
    look_through,
)
from headway.reports.record.file_access import FULL, draft_of
from headway.reports.run_directory import RunDirectory, RunLock
from headway.reports.samples.samples_file import SamplesFile, Thinning, later, write_surviving
from headway.reports.terminal import stdout_console
from headway.reports.trackers.tracker_set import open_trackers
from headway.reports.trackers.tracker_thread import TrackerMessages

Lock = AbstractContextManager[Any]


@dataclass(slots=True)
class RunClock:
    """The clock of a resumed run: it continues from ``boundary``, and stands still until `RunStarted`."""

    boundary: float
    _ahead: float | None = None

    def read(self, event: Event) -> Event:
        if isinstance(event, events.RunStarted):
            self._ahead = self.boundary - event.time
        return event.later(self.boundary - event.time if self._ahead is None else self._ahead)

    @property
    def ahead(self) -> float:
        """Seconds by which the clock is ahead of that of the process, since the run was started again."""
        return self._ahead or 0.0

    def at(self, time: float) -> float:
        """Return what this clock shows at ``time`` on the event loop's."""
        return self.boundary if self._ahead is None else time + self._ahead


class Reports:
    """An observer that feeds every report. Methods may be called from any thread; always close it once."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        run_lock: RunLock,
        console: Console,
        metrics: RunMetrics | None = None,
        *,
        clock: RunClock | None = None,
        purge_step: int | None = None,
        validated: int | None = None,
    ) -> None:
        """Open every report in a run's directory, whose ``run_lock`` is held; the reports release it.

        A resumed run gives ``metrics`` up to its checkpoint, a ``clock`` of its own, and ``purge_step``, the first
        version whose figures are undone.
        """
        self.directory = directory
        self._console = console
        self._run_lock = run_lock
        self._clock = clock
        self.metrics = metrics = metrics or RunMetrics()
        """Figures of the run so far, for the thread that events come from."""
        self._lock = lock = threading.RLock()  # a signal may deliver an event in the middle of another one
        progress = RunProgress(metrics)
        self._view = view = _open_view(config, console, progress, lock)
        self._rows = JsonLines(directory.metrics, view.warn)
        say = TrackerMessages(
            warn=_locked(lock, view.warn), note=_locked(lock, view.note), phase=_locked(lock, view.phase)
        )
        self._trackers = open_trackers(config, directory, say, undone_from=purge_step)
        metrics.sinks = [self._rows, self._trackers, view]
        self._events = EventsFile(directory.events, view.warn)
        self._states = MetricsStates(directory, view.warn)
        self._samples: SamplesFile | None = None
        if config.reports.samples:
            self._samples = SamplesFile(directory.samples, Thinning.of(config), view.warn)
        self._log = EventLog(directory.path)
        # Metrics before the view, so that what is shown includes the event that caused it to be shown.
        self._dense_observers: list[Observer] = [self._events, metrics, progress]
        """Observers that get frequent events, too: few, since these events come with every answer or group."""
        self._observers = [*self._dense_observers, view, self._log]
        self.validated = validated
        """The version that a run is resumed at where its validation is told; None where it has to be made."""
        self._closed = False

    def on_event(self, event: Event) -> None:
        """Hand ``event`` to every report."""
        with self._lock:
            if self._clock is not None:
                event = self._clock.read(event)
            if isinstance(event, DENSE):
                for observer in self._dense_observers:
                    observer.on_event(event)
                return
            for observer in self._observers:
                observer.on_event(event)
            # Only where all before it is on the disk: a state must not tell of events that a reader does not find.
            large = self._events.size >= LARGE
            if isinstance(event, events.VersionReached) and large and self._events.recorded_version == event.version:
                self._states.keep(self.metrics, event, self._events.size)
            if isinstance(event, events.RunStarted):
                self._trackers.start()

    emit = on_event

    def on_sample(self, sample: dict[str, Any]) -> None:
        """Write what a drawn group or a held-out problem said, and hand it to the trackers."""
        with self._lock:
            if self._samples is None or not self._samples.takes(sample):
                return
            if self._clock is not None:
                sample = later(sample, self._clock.ahead)
            self._samples.on_sample(sample)
            self._trackers.on_sample(sample)

    def phase(self, text: str, detail: str = "") -> None:
        """Show what the run is doing before or after training, and how far it got."""
        with self._lock:
            self._view.phase(text, detail)

    def summary(self) -> dict[str, Any]:
        """Return the run so far as one object, as in ``summary.json``."""
        with self._lock:
            return summary(self.metrics)

    @property
    def resumable(self) -> int:
        """The newest version from which the run can be resumed, by its record on the disk; -1 for none."""
        return self._events.recorded_version

    def since_first(self, time: float) -> float:
        """Return the seconds from the record's first event to ``time`` on the event loop's clock: where a timeline
        made from the record has that moment.
        """
        with self._lock:
            first = self.metrics.first
            return 0.0 if first is None else (time if self._clock is None else self._clock.at(time)) - first

    def close(self, model: Path | None = None) -> None:
        """Complete and close every file, write ``summary.json``, end the trackers, give the terminal back.

        ``model``: folder of the exported model, for trackers; None where there is none.
        """
        if self._closed:
            return
        self._closed = True  # first: what interrupts the closing may call it again
        try:
            with self._lock:
                for observer in self._observers:
                    if observer is not self._view:  # closed last: others warn through it
                        observer.close()
                self._states.close()
                self._rows.close()
                if self._samples is not None:
                    self._samples.close()
        finally:  # also where Ctrl-C comes in between
            try:
                try:
                    self.directory.write_summary(self.summary())
                except OSError as cause:
                    self._view.warn(f"cannot write {self.directory.summary}: {cause.strerror or cause}")
                self._trackers.finish(self.summary(), model)
            finally:
                self._view.close()
                self._log.end()
                # Last: who waits for the lock finds all files complete.
                self._run_lock.release()

    def report_end(self, model: Path | None, *, resumable: bool = False) -> None:
        """Close the reports, then print how the run ended, where its files are and how to resume it."""
        self.close(model)
        places = self._trackers.places_after
        report_end(self._console, self.summary(), self.directory, model, resumable=resumable, trackers=places)


def open_reports(config: Config, run_dir: Path, console: Console | None = None) -> Reports:
    """Make the run's directory and open every report in it.

    Raises `UserError` when the directory already holds a run or cannot be written.
    """
    directory = RunDirectory.create(run_dir, config)
    lock = RunLock(directory.lock)
    lock.take()
    return Reports(config, directory, lock, console or stdout_console())


def _locked(lock: Lock, tell: Callable[[str], None]) -> Callable[[str], None]:
    """Return ``tell`` for other threads: views are called with the lock held."""

    def told(text: str) -> None:
        with lock:
            tell(text)

    return told


def _open_view(config: Config, console: Console, progress: RunProgress, lock: Lock) -> ConsoleView:
    wanted, shows = config.reports.live, console.is_terminal and not console.is_dumb_terminal
    if wanted == "on" and not (isinstance(console, Cell) or console.is_terminal):
        console = Console(file=console.file, force_terminal=True)
    live = isinstance(console, Cell) or wanted == "on" or (wanted == "auto" and shows)
    return LiveView(console, progress, lock) if live else PlainView(console, progress)


def reopen_reports(
    config: Config,
    directory: RunDirectory,
    lock: RunLock,
    version: int,
    saved: Mapping[str, int],
    console: Console | None = None,
    *,
    keeps_validation: bool = False,
) -> Reports:
    """Reopen a run's reports at the boundary of ``version``. They take over ``lock``, which is held, and release it.

    ``saved``: the ledger's balance as the checkpoint of that version has it. Later checkpoints are removed.
    ``keeps_validation``: the validation of that version is told again where it had ended and all answers have scores.

    Raises `DataError` where the record cannot be read or has no such boundary, and `UserError` where its balance
    differs from ``saved`` or the directory cannot be written. Nothing of the run has changed then.
    """
    console = console or stdout_console()
    checkpoints = Checkpoints(directory.checkpoints)
    record = look_through(directory.events)
    rows, samples = draft_of(directory.metrics), draft_of(directory.samples)
    if version not in record.boundaries:
        raise DataError(f"{directory.events} has no boundary of version {version}")
    try:
        validated = _validation(directory, record, version) if keeps_validation else None
        metrics, last, boundary = _told(directory, record, version, rows, console)
        _surviving_samples(directory, samples, version, boundary, validated=validated is not None)
        if (told := metrics.tally.counts()) != saved:
            raise UserError(
                f"{checkpoints.actor(version)} is not the checkpoint of which {directory.events.name} tells: it holds "
                f"the groups {dict(saved)}, the record has {told}. Remove it, to resume from the one before"
            )
        directory.write_config(config)
    except BaseException:
        rows.unlink(missing_ok=True)
        samples.unlink(missing_ok=True)
        raise
    # Before anything is appended, which would continue the half line that a kill left.
    os.truncate(directory.events, record.size)
    checkpoints.forget_above(version)  # before the record undoes them: a later resume would take them for its own
    rows.replace(directory.metrics)
    if samples.exists():
        samples.replace(directory.samples)
    directory.summary.unlink(missing_ok=True)  # it tells of an end that is none any more
    reports = Reports(
        config,
        directory,
        lock,
        console,
        metrics,
        clock=RunClock(boundary),
        purge_step=last + 1,
        validated=None if validated is None else version,
    )
    reports.emit(events.RunResumed(time=boundary, version=version, times=record.resumed + 1))
    if validated is not None:
        reports.emit(validated)
    return reports


def _told(
    directory: RunDirectory, record: SurvivingRecord, version: int, rows: Path, console: Console
) -> tuple[RunMetrics, int, float]:
    """Cut ``record`` at the boundary of ``version``, and read it: its metrics, the last row's version, the boundary's
    time. Its rows are written to the file ``rows``.

    Raises `DataError` and `UserError`.
    """
    rows.unlink(missing_ok=True)
    kept = _SurvivingRows(rows, lambda _: None)
    state = newest(directory, record, kept, version)
    if not state.offset and directory.events.stat().st_size >= LARGE:
        console.print("no state of the metrics fits this version and this Headway: all events are read again")
    metrics, boundary = state.metrics, state.time
    record.end_at(version)
    for event in EventReader(directory.events, record=record, after=state.offset).read():
        metrics.on_event(event)
        boundary = event.time
    kept.close()
    if kept.failure is not None:
        raise _not_resumed(rows, kept.failure) from kept.failure
    return metrics, kept.last, boundary


def _validation(directory: RunDirectory, record: SurvivingRecord, version: int) -> events.ValidationFinished | None:
    """Return the validation of ``version`` that ended behind its boundary, with scores; None where none did."""
    behind = EventReader(
        directory.events, record=record, after=record.boundaries[version], kinds=(events.ValidationFinished,)
    )
    for event in behind.read():
        if isinstance(event, events.ValidationFinished) and event.version == version and not event.failed:
            return event
    return None


def _surviving_samples(directory: RunDirectory, draft: Path, version: int, boundary: float, *, validated: bool) -> None:
    """Write the samples of a run's history up to the boundary of ``version`` to ``draft``, where there are any; with
    ``validated`` also those of that version's validation.

    Raises `DataError` and `UserError`.
    """
    if not directory.samples.is_file():
        return
    try:
        write_surviving(directory.samples, draft, version, boundary, validated=validated)
    except OSError as cause:
        raise _not_resumed(draft, cause) from cause


def _not_resumed(draft: Path, cause: OSError) -> UserError:
    remedy = "; make room" if cause.errno in FULL else ""
    return UserError(
        f"{draft} could not be written ({cause.strerror or cause}), so the run was not resumed, and nothing of it is "
        f"lost{remedy}"
    )


class _SurvivingRows(JsonLines):
    """Row sink for the rows of a record that survived."""

    last = -1
    """Newest version of the rows written so far; -1 before the first."""

    def on_row(self, row: dict[str, Any]) -> None:
        self.last = max(self.last, row["version"])
        super().on_row(row)
