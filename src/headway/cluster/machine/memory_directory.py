"""Directory in memory for one run, which must not outlive the run: its files take memory until they are removed.

made ─▶ locked ─▶ named headway-run-… ─▶ … ─▶ removed at the end
                                         └─ killed: the lock ends with the process, and the next run removes it
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

PREFIX = "headway-run-"
SHARED_MEMORY = Path("/dev/shm")
"""Directory on Linux whose files are in memory."""


@contextmanager
def directory_in_memory(parent: Path) -> Iterator[Path]:
    """Make a directory in ``parent`` until the block ends. Directories of runs that were killed are removed first."""
    remove_abandoned(parent)
    made = Path(mkdtemp(prefix=f".{PREFIX}", dir=parent))
    lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    path = made
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = made.rename(made.with_name(made.name.removeprefix(".")))  # locked before others can find it
        yield path
    finally:
        rmtree(path, ignore_errors=True)
        os.close(lock)


def held_directory(path: Path) -> None:
    """Make the directory ``path``, if it is not there, and hold it until this process ends: no other run removes it.

    Directories of runs that were killed are removed from its parent first.
    """
    remove_abandoned(path.parent, but=path)
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(held, fcntl.LOCK_SH)
        if path.is_dir() and os.path.samestat(os.fstat(held), path.stat()):
            return
        os.close(held)  # another run took it for abandoned before it was held


def remove_abandoned(parent: Path, *, but: Path | None = None) -> None:
    """Remove the directories of this user's ended or killed runs, except ``but``."""
    for path in parent.glob(f"{PREFIX}*"):
        if path == but:
            continue
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # another user's, or gone meanwhile
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
