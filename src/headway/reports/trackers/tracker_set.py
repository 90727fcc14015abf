"""All trackers of one run: checked before it starts; opened, fed and closed with its reports."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.config.loading import written_values
from headway.config.schema import Config
from headway.config.sizing.timeouts import upload_s
from headway.errors import ConfigError, DataError, writable
from headway.reports.run_directory import RunDirectory
from headway.reports.trackers.tracker import TrackerSetting, trimmed
from headway.reports.trackers.tracker_thread import TrackerMessages, TrackerState, TrackerThread, memory_file
from headway.reports.trackers.tracker_tools import ADDRESSES, KEPT, PACKAGES

LIMIT_S = 10.0
"""Seconds that the end of a run waits for its trackers' last rows, beside the upload of a model."""
QUIET_S = 0.5
"""Seconds that the end of a run waits for its trackers before it prints that it waits."""
ASK_S = 20.0
"""Seconds for W&B to say whether it has a login."""
ASK = "import sys, wandb; sys.exit(0 if wandb.login(verify=False) else 3)"
NO_LOGIN = ("offline", "dryrun", "disabled")
"""Values of ``WANDB_MODE`` with which W&B needs no login."""


class Trackers:
    """Row sink that passes everything to each tracker. All methods except `finish` only enqueue."""

    def __init__(self, threads: Sequence[TrackerThread], say: TrackerMessages, *, log_model: bool = False) -> None:
        """Create the set. ``log_model``: True if trackers get the model."""
        self._threads = list(threads)
        self._say = say
        self._log_model = log_model

    def start(self) -> None:
        """Begin to send, when training begins: only then the run gets an entry."""
        for tracker in self._threads:
            tracker.start()

    def on_row(self, row: dict[str, Any]) -> None:
        for tracker in self._threads:
            tracker.on_row()

    def on_sample(self, sample: dict[str, Any]) -> None:
        """Hand on a sample as a line of ``samples.jsonl`` has it. Trackers get its texts, not its tokens."""
        if self._threads and sample["episodes"]:
            short = trimmed(sample)
            for tracker in self._threads:
                tracker.on_sample(short)

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

        An interrupt ends only the waiting. In the end the user is told what each tracker lacks.
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
    """Return a text with the environment variable of a tracker's address, which may be wrong; "" if none is set."""
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
    """Make the trackers of a finished run that lack some of its data. `Trackers.names` lists them.

    Raises `DataError` if the trackers' state or the run's data cannot be read.
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


def check_trackers(config: Config, among: Collection[str] = tuple(PACKAGES)) -> None:
    """Check that the trackers of ``reports.trackers`` that are ``among`` these names can work here.

    Raises:
        ConfigError: a package is missing, W&B has no login, or the port for Prometheus is taken.
    """
    check_packages(config, among)
    chosen = [name for name in config.reports.trackers if name in among]
    if "wandb" in chosen and not _wandb_may_log():
        raise ConfigError(
            "reports.trackers names wandb, and W&B has no login here; run wandb login, set WANDB_API_KEY, or set "
            "WANDB_MODE=offline to keep the run on this machine"
        )
    if "prometheus" in chosen:
        _check_port(config.reports.prometheus_host, config.reports.prometheus_port)


def check_packages(config: Config, among: Collection[str] = tuple(PACKAGES)) -> None:
    """Raise `ConfigError` where a package of a tracker that is ``among`` these names is missing."""
    chosen = [name for name in config.reports.trackers if name in PACKAGES and name in among]
    if missing := [name for name in chosen if not _is_installed(PACKAGES[name])]:
        packages = ", ".join(PACKAGES[name] for name in missing)
        is_not, it = ("is not", "it") if len(missing) == 1 else ("are not", "them")
        raise ConfigError(
            f"reports.trackers names {', '.join(missing)}, and {packages} {is_not} installed here; install {it} "
            f"with pip install 'headway[{','.join(missing)}]', or take {it} out of reports.trackers"
        )


def _is_installed(package: str) -> bool:
    """Tell whether ``package`` can be imported. A mere folder is none: W&B makes a ``wandb`` where it runs."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def _wandb_may_log() -> bool:
    """Return True if W&B needs no login or has one, which a separate process checks.

    Without an answer the run begins, and the tracker reports the problem.
    """
    if os.environ.get("WANDB_MODE") in NO_LOGIN or os.environ.get("WANDB_API_KEY"):
        return True
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK], stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return True
    return done.returncode == 0


def _check_port(host: str, port: int) -> None:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as listening:
            # Otherwise the port of a run that has just ended would be refused.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
    except OSError as cause:
        if isinstance(cause, socket.gaierror) or cause.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"reports.prometheus_host={host}: it is no address of this machine ({cause.strerror or cause}); give "
                "127.0.0.1, for this machine alone, or 0.0.0.0, for others too"
            ) from cause
        raise ConfigError(
            f"reports.prometheus_port={port}: nothing can listen there on {host} ({cause.strerror or cause}); another "
            "run may; give another port, or 0 for a free one"
        ) from cause
