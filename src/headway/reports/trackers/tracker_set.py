"""All trackers of one run: opened with its reports, fed with its rows and samples, ended with it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.config.loading import written_values
from headway.config.schema import Config
from headway.config.sizing.timeouts import upload_s
from headway.errors import DataError, writable
from headway.reports.run_directory import RunDirectory
from headway.reports.trackers.tracker import TrackerSetting, trimmed
from headway.reports.trackers.tracker_thread import TrackerMessages, TrackerState, TrackerThread, memory_file
from headway.reports.trackers.tracker_tools import ADDRESSES, KEPT

LIMIT_S = 10.0
"""Seconds that the end of a run waits for its trackers' last rows, beside the upload of a model."""
QUIET_S = 0.5
"""Seconds that the end of a run waits for its trackers without a word."""


class Trackers:
    """Row sink that hands everything to each tracker. No method but `finish` takes longer than to enqueue it."""

    def __init__(self, threads: Sequence[TrackerThread], say: TrackerMessages, *, log_model: bool = False) -> None:
        """Take over the trackers. ``log_model``: whether they get the model."""
        self._threads = list(threads)
        self._say = say
        self._log_model = log_model

    def start(self) -> None:
        """Begin to send: training begins, and the run is worth an entry."""
        for tracker in self._threads:
            tracker.start()

    def on_row(self, row: dict[str, Any]) -> None:
        for tracker in self._threads:
            tracker.on_row()

    def on_sample(self, sample: dict[str, Any]) -> None:
        """Hand on a sample as a line of ``samples.jsonl`` has it. Trackers get its texts, not its tokens."""
        if self._threads:
            short = trimmed(sample)
            for tracker in self._threads:
                tracker.on_sample(short)

    def close(self) -> None:
        """Do nothing: trackers get the summary first, and end with `finish`."""

    @property
    def names(self) -> list[str]:
        """Names of the trackers."""
        return [tracker.name for tracker in self._threads]

    @property
    def places_after(self) -> list[tuple[str, str]]:
        """Names of trackers, and where each shows the run once it is over, for those that have said it."""
        return [(tracker.name, tracker.where) for tracker in self._threads if tracker.where and tracker.name in KEPT]

    def finish(self, summary: dict[str, Any], model: Path | None = None, *, limit_s: float | None = None) -> None:
        """End all entries, and wait for them for `LIMIT_S` or ``limit_s``, longer where they get the model.

        An interrupt ends the waiting, and nothing else. What a tracker lacks then is said.
        """
        given = model if self._log_model else None
        limit_s = LIMIT_S if limit_s is None else limit_s
        if given is not None:
            limit_s += upload_s(sum(path.stat().st_size for path in given.rglob("*") if path.is_file()))
        try:
            for tracker in self._threads:
                tracker.end(summary, given)
            self._wait(limit_s)
            silent = f"it did not answer within {limit_s:.0f} s"
        except KeyboardInterrupt:
            silent = "the wait for it was interrupted"
        finally:
            for tracker in self._threads:
                tracker.give_up()
        for tracker in self._threads:
            if lacks := tracker.missing(silent + _where(tracker.name)):
                self._say.warn(lacks)

    def _wait(self, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        for tracker in self._threads:
            tracker.join(min(QUIET_S, limit_s))
        if waiting := ", ".join(tracker.name for tracker in self._threads if not tracker.join(0.0)):
            self._say.phase(f"waiting for {waiting}, up to {limit_s:.0f} s")
        for tracker in self._threads:
            tracker.join(max(end - time.monotonic(), 0.0))


def _where(name: str) -> str:
    """Name the variable that says where a tracker is, which may be wrong; "" where none is set."""
    given = next((key for key in ADDRESSES.get(name, ()) if os.environ.get(key)), None)
    if given is None:
        return ""
    without_password = re.sub(r"//[^/@]*@", "//", os.environ[given])
    return f"; it is looked for at {given}={writable(without_password)}"


def open_trackers(
    config: Config, directory: RunDirectory, say: TrackerMessages, *, undone_from: int | None = None
) -> Trackers:
    """Make the trackers of ``config.reports``, which wait for `Trackers.start`.

    ``undone_from``: the version from which on a resumed run begins anew; None for a new run.
    """
    setting = replace(_setting(config, directory), undone_from=undone_from)
    threads = []
    for name in config.reports.trackers:
        try:
            state = TrackerState.read(memory_file(directory.trackers, name))
        except DataError as cause:
            say.warn(f"{name}: {cause}; the run begins another entry")
            state = TrackerState()
        threads.append(TrackerThread(name, setting, directory, say, state))
    return Trackers(threads, say, log_model=config.reports.log_model)


def open_lacking(config: Config, directory: RunDirectory, say: TrackerMessages) -> Trackers:
    """Make those trackers of a run that is over which lack something of it. `Trackers.names` says which they are.

    Raises `DataError` where it cannot be read what they have, or what they are to get.
    """
    setting = _setting(config, directory)
    lacking: list[TrackerThread] = []
    for name in (name for name in config.reports.trackers if name in KEPT):
        try:
            state = TrackerState.read(memory_file(directory.trackers, name))
        except DataError as cause:
            raise DataError(
                f"{cause}, so that it is not known what {name} has of the run; take the file from a copy, or remove "
                "it, to send the run to a new entry"
            ) from cause
        if not state.whole:
            lacking.append(TrackerThread(name, setting, directory, say, state, goes_on=""))
    if lacking:
        try:
            directory.metrics.open("rb").close()
        except OSError as cause:
            raise DataError(
                f"{directory.metrics} cannot be read ({cause.strerror or cause}), from which trackers get the run's "
                "rows; take it from a copy of the run"
            ) from cause
    return Trackers(lacking, say, log_model=config.reports.log_model)


def _setting(config: Config, directory: RunDirectory) -> TrackerSetting:
    return TrackerSetting(
        project=config.reports.project,
        name=directory.path.resolve().name,
        folder=directory.trackers,
        config=written_values(config),
        prometheus_host=config.reports.prometheus_host,
        prometheus_port=config.reports.prometheus_port,
    )
