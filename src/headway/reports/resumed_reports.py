"""Reports of a resumed run, in its old files.

events.jsonl up to the boundary ─▶ metrics.jsonl, samples.jsonl written anew ─▶ put in place once nothing can fail

What is undone of its record leaves ``metrics.jsonl``, ``samples.jsonl`` and TensorBoard, which are made from what
survives, and its clock stands still between the boundary that it goes back to and its new start.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from headway.config.schema import Config
from headway.errors import UserError
from headway.events import RunResumed
from headway.reports.checkpoint_folders import Checkpoints
from headway.reports.live.console_view import stdout_console
from headway.reports.metrics.metrics_state import newest
from headway.reports.metrics.run_metrics import RunMetrics
from headway.reports.record.dense_events import segments_of
from headway.reports.record.events_file import JsonLines, cut_off_half_line, look_through, read_events
from headway.reports.report_manager import MetricsFile, Reports, RunClock, open_all
from headway.reports.run_directory import RunDirectory, RunLock
from headway.reports.samples.samples_file import draft_of, write_surviving


def reopen_reports(
    config: Config,
    directory: RunDirectory,
    lock: RunLock,
    version: int,
    saved: Mapping[str, int],
    console: Console | None = None,
) -> Reports:
    """Reopen a run's reports at the boundary of ``version``. They take over ``lock``, which is held, and release it.

    ``saved``: the ledger's balance as the checkpoint of that version has it. Later checkpoints are removed.

    Raises `DataError` where the record cannot be read or has no such boundary, and `UserError` where its balance
    differs from ``saved`` or the directory cannot be written. Nothing of the run has changed then.
    """
    console = console or stdout_console()
    checkpoints = Checkpoints(directory.checkpoints)
    resumed = look_through(directory.events).resumed + 1
    rows, samples = draft_of(directory.metrics), draft_of(directory.samples)
    try:
        metrics, last, boundary = _told(directory, version, rows, console)
        _surviving_samples(directory, samples, version, boundary)
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
    cut_off_half_line(directory.events)
    checkpoints.forget_above(version)  # before the record undoes them: a later resume would take them for its own
    rows.replace(directory.metrics)
    if samples.exists():
        samples.replace(directory.samples)
    directory.summary.unlink(missing_ok=True)  # it tells of an end that is none any more
    reports = open_all(config, directory, lock, metrics, console, clock=RunClock(boundary), purge_step=last + 1)
    reports.emit(RunResumed(time=boundary, version=version, times=resumed))
    return reports


def _told(directory: RunDirectory, version: int, rows: Path, console: Console) -> tuple[RunMetrics, int, float]:
    """Read the record up to the boundary of ``version``: its metrics, the last row's version, the boundary's time.

    The record's rows are written to ``rows``. Raises `DataError` and `UserError`.
    """
    rows.unlink(missing_ok=True)
    kept = _SurvivingRows(JsonLines(rows, lambda _: None))
    state = newest(directory, look_through(directory.events), version)
    if not state.line and segments_of(directory.events):
        console.print("no state of the metrics fits this version and this Headway: all events are read again")
    for row in state.rows:
        kept.on_row(row)
    metrics, boundary = state.metrics, state.time
    metrics.sinks = [kept]
    for event in read_events(directory.events, until=version, after=state.line):
        metrics.on_event(event)
        boundary = event.time
    kept.close()
    if not kept.whole:
        raise UserError(
            f"{rows} could not be written, so the run was not resumed, and nothing of it is lost; make room"
        )
    return metrics, kept.last, boundary


def _surviving_samples(directory: RunDirectory, draft: Path, version: int, boundary: float) -> None:
    """Write the samples of a run's history up to the boundary of ``version`` to ``draft``, where there are any.

    Raises `DataError` and `UserError`.
    """
    if not directory.samples.is_file():
        return
    try:
        write_surviving(directory.samples, draft, version, boundary)
    except OSError as cause:
        raise UserError(
            f"{draft} could not be written ({cause.strerror or cause}), so the run was not resumed, and nothing of it "
            "is lost; make room"
        ) from cause


class _SurvivingRows(MetricsFile):
    """Row sink for the rows of a record that survived."""

    last = -1
    """Newest version of the rows written so far; -1 before the first."""

    def on_row(self, row: dict[str, Any]) -> None:
        self.last = max(self.last, row["version"])
        super().on_row(row)
