"""Status of a run, and whether a process is training it, without touching its lock."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headway.events import RunFinished, RunStarted
from headway.reports.run_directory import BEAT_S, signs_of_life

LOCKS = Path("/proc/locks")
SILENT_S = 10 * BEAT_S
"""Seconds without a sign of life after which a process on another machine counts as gone; clocks may differ by less."""


def is_trained(lock: Path, locks: Path = LOCKS, now: Callable[[], float] = time.time) -> bool | None:
    """Tell whether a process holds the run's ``lock``; None where that cannot be known.

    A process on another machine holds it no more when it has shown no sign of life for `SILENT_S`.

    The kernel's list is read where there is one: to try the lock would refuse a run that takes it at that instant.
    """
    try:
        found = lock.stat()
        holder = lock.read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    except (OSError, UnicodeDecodeError):
        return None
    if holder and not holder.rstrip().endswith(f" on {socket.gethostname()}"):
        last = found.st_mtime  # on another machine, whose locks this one may not see
        with suppress(OSError):
            last = signs_of_life(lock).stat().st_mtime
        return None if now() - last < SILENT_S else False
    try:
        return _listed(found, locks.read_text(encoding="ascii"))
    except OSError:
        return _tried(lock)


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run's status: that of its end, or ``running``, ``not begun`` or ``killed``; ``reason``: why."""

    status: str
    reason: str | None
    trained: bool | None
    """Whether somebody trains it; None where that cannot be known."""

    @property
    def goes_on(self) -> bool:
        """True where somebody trains the run, or may."""
        return self.trained is True or self.status == "running"


def standing(started: RunStarted | None, finished: RunFinished | None, lock: Path) -> RunStatus:
    """Say how a run stands, by what its record has of its start and end, and by who holds its ``lock``."""
    trained = is_trained(lock)
    if finished is not None:
        return RunStatus(finished.status, finished.reason, trained)
    if trained is not False:
        return RunStatus("running", None, trained)
    if started is None:
        return RunStatus("not begun", "nobody trains in this directory, and nothing was trained", trained)
    return RunStatus("killed", "nobody trains this run any more, and it did not say how it ended", trained)


def only_starts(lock: Path, record: Path) -> bool:
    """Tell whether the holder of the run's ``lock`` has yet to write to its ``record``. Raises `OSError`.

    The lock's file is written when it is taken.
    """
    try:
        return record.stat().st_mtime_ns < lock.stat().st_mtime_ns
    except FileNotFoundError:
        return True


def _listed(found: os.stat_result, locks: str) -> bool:
    """Tell whether the kernel lists a lock of the file ``found``.

    By its inode alone where the device differs: some file systems show another one than their locks have.
    """
    held = [line.split() for line in locks.splitlines() if " FLOCK " in line and " -> " not in line]
    return any(fields[5].rpartition(":")[2] == str(found.st_ino) for fields in held if len(fields) > 5)


def _tried(lock: Path) -> bool | None:
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False
