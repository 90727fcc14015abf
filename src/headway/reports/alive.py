"""Whether somebody trains a run right now, without touching its lock."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

LOCKS = Path("/proc/locks")


def is_trained(lock: Path, locks: Path = LOCKS) -> bool | None:
    """Tell whether a process holds the run's ``lock``; None where that cannot be known.

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
        return None  # on another machine, whose locks this one may not see
    try:
        return _listed(found, locks.read_text(encoding="ascii"))
    except OSError:
        return _tried(lock)


def only_starts(lock: Path, record: Path) -> bool:
    """Tell whether whoever holds the run's ``lock`` has written nothing to its ``record`` yet. Raises `OSError`.

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
