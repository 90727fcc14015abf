"""One command's work: follow a run, serve its page, until Ctrl-C."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from html import escape
from pathlib import Path

from headway.errors import ConfigError, DataError
from headway.reports.run_directory import LEFTOVERS, RunDirectory
from headway.reports.watch.follower import Follower
from headway.reports.watch.watch_server import WatchServer

log = logging.getLogger(__name__)
WAIT_S = 60.0
"""Seconds that a run which has not begun is waited for."""
LOOK_S = 0.2
"""Seconds between two looks for it."""
FIRST_LOOK_S = 1.0
"""Seconds that the address waits for the record, which may be damaged; a large one is read behind it."""


def serve(
    run: Path, port: int, tell: Callable[[str], None], open_page: bool, note: Callable[[str], None] = log.info
) -> None:
    """Serve the page of the run in directory ``run`` until an interrupt. ``tell`` is called with its address.

    A run that has not begun is waited for, of which ``note`` is told.

    Raises `UserError` where ``run`` is no run's directory, its record is damaged, or the port cannot be had.
    """
    directory = _directory(run, note)
    follower = Follower(directory)
    server = WatchServer(follower, run.resolve().name, port)
    follower.start()
    thread = threading.Thread(target=server.serve_forever, name="watch", daemon=True)
    thread.start()
    hint: Path | None = None
    try:
        if follower.first_look(FIRST_LOOK_S):
            tell(server.url)
            if open_page:
                hint = _opened(server.url)
        with suppress(KeyboardInterrupt):  # the way to end it
            try:
                follower.join()
            except DataError as cause:
                raise ConfigError(f"RUN: got {run}, whose record cannot be read: {cause}") from cause
    finally:
        if hint is not None:
            hint.unlink(missing_ok=True)
        server.shutdown()
        server.server_close()
        follower.close()


def _directory(run: Path, note: Callable[[str], None]) -> RunDirectory:
    """Return the directory of a run, which may still be starting: it has a configuration.

    Where nothing is there yet a run is waited for. Raises `ConfigError`.
    """
    until = time.monotonic() + WAIT_S
    if (to_come := _to_come(run)) and WAIT_S:
        note(f"{run}: no run has begun there yet; waiting {WAIT_S:g} s for one")
    while to_come and time.monotonic() < until:
        time.sleep(LOOK_S)
        to_come = _to_come(run)
    wanted = "expected a run's directory, the run.dir of a headway train"
    if not run.is_dir():
        raise ConfigError(f"RUN: got {run}, which {'is a file' if run.exists() else 'does not exist'}; {wanted}")
    directory = RunDirectory(run)
    if not directory.config.is_file() and not directory.events.is_file():
        raise ConfigError(f"RUN: got {run}, which has no {directory.config.name}; {wanted}")
    return directory


def _to_come(run: Path) -> bool:
    """Tell whether a run may begin in this directory: it is not there, or has only what a start makes first."""
    try:
        return all(entry.name in LEFTOVERS for entry in run.iterdir())
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _opened(url: str) -> Path:
    """Open ``url`` in a browser by way of a file that only this user may read; return the file.

    Other users see the arguments of a browser's process: the address itself must not be among them.
    """
    descriptor, name = tempfile.mkstemp(prefix="headway-", suffix=".html")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(url)}">\n')
    webbrowser.open(Path(name).as_uri())
    return Path(name)
