"""A run's directory: what lies where, made once, never shared by two runs, and trained in by one process at a time.

config.yaml    the resolved configuration       events.jsonl   everything that happened
events/        of a large run: what came with every answer or group, in columns
metrics.jsonl  one row per version              summary.json   the run in one object
samples.jsonl  what drawn groups said
tensorboard/   checkpoints/   logs/             model/         the exported model
trackers/      what other trackers leave here, and the ids of their entries
run.lock       held by the process that trains  initial_model/ the model that was made, where one was
control.sock   where that process is asked      profiles/      what workers computed, where that was asked for
code/          functions that were given as objects, in Python
run.alive      touched every minute by the process that trains, for machines that do not see its lock
.room          space on the disk that a run holds for its summary, and gives up for it
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, TextIO

from headway.config.loading import dump
from headway.config.schema import Config
from headway.errors import UserError

ROOM = 64 * 2**10
"""Size in bytes of the file that holds space for the summary, which needs a few thousand."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a disk that has no room left, for anybody or for this user."""


log = logging.getLogger(__name__)
BEAT_S = 60.0
"""Seconds between two signs of life of the process that trains."""
LEFTOVERS = frozenset({"run.lock", "run.alive", ".room", "tensorboard", "checkpoints", "logs"})
"""Names that a failed start may leave in a directory: they are no run, and do not prevent one."""


class Occupied(UserError):
    """The run directory is taken or not empty: no run may begin there."""


class RunLock:
    """Lock of a run's directory, held from `take` to `release`, or to the end of the process, however it ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._released = threading.Event()

    def take(self) -> None:
        """Take the lock. Raises `UserError`, naming the holder, if it is taken, and where nothing can be written.

        A file system without locks is warned of.
        """
        with _writable(self._path.parent):
            file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise UserError(
                f"{self._path.parent}: {holder} trains this run right now. Wait for it to end, or stop it first"
            ) from None
        except OSError as cause:  # a file system without locks
            log.warning(
                "run.dir=%s cannot be locked (%s): nothing keeps a second process from training there, too",
                self._path.parent,
                cause.strerror,
            )
        self._file = file
        with suppress(OSError):  # on a full disk it is held all the same, by nobody known
            file.truncate(0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            signs_of_life(self._path).touch()
        showing = (signs_of_life(self._path), self._released)  # not the lock, which ends with its last reference
        threading.Thread(target=_show_life, args=showing, name="headway-alive", daemon=True).start()

    def is_held(self) -> bool:
        """Tell whether a process holds the lock, which is only looked at. Raises `OSError` if it cannot be read."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return False
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:  # a file system without locks
                return False
        return False

    def release(self) -> None:
        if self._file is not None:
            self._released.set()
            with suppress(OSError):
                signs_of_life(self._path).unlink(missing_ok=True)
            self._file.close()
            self._file = None


def signs_of_life(lock: Path) -> Path:
    """Return the file beside a run's ``lock`` whose time of change says when its holder was last alive."""
    return lock.with_suffix(".alive")


def _show_life(path: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        with suppress(OSError):
            os.utime(path)


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths inside a run's directory."""

    path: Path
    made: bool = False
    """Whether `create` made it, and did not find it empty."""

    @classmethod
    def create(cls, path: Path, config: Config) -> RunDirectory:
        """Make the directory and write the resolved ``config`` into it.

        Raises `Occupied` when it holds anything already, and `UserError` when it cannot be written.
        """
        run = cls(path, made=not os.path.lexists(path))
        with _writable(path), _removed_on_error(run.tensorboard, run.checkpoints, run.logs, path, *path.parents):
            try:
                path.mkdir(parents=True, exist_ok=True)
                run.check_free()
                config_file = run.config.open("x", encoding="utf-8")  # of two runs at once, one gets here first
            except FileExistsError as cause:
                run.check_free()
                raise cause
            try:
                with config_file:
                    config_file.write(dump(config))
                run._hold_room()
                for folder in (run.tensorboard, run.checkpoints, run.logs):
                    folder.mkdir(exist_ok=True)
            except OSError:
                run.config.unlink(missing_ok=True)  # or the directory would pass for one that holds a run
                raise
        return run

    @classmethod
    def existing(cls, path: Path) -> RunDirectory:
        """Return the directory of an existing run. Raises `UserError` when it holds none."""
        run = cls(path)
        wanted = "expected a run's directory, the run.dir of a headway train"
        if not path.is_dir():
            raise UserError(f"RUN: got {path}, which {'is a file' if path.exists() else 'does not exist'}; {wanted}")
        if missing := [file.name for file in (run.config, run.events) if not file.is_file()]:
            raise UserError(f"RUN: got {path}, which has no {missing[0]}; {wanted}{run.hint}")
        return run

    @classmethod
    def existing_sft(cls, path: Path) -> RunDirectory:
        """Return the directory of an existing run of ``headway sft``. Raises `UserError` when it holds none."""
        run = cls(path)
        if not run.config.is_file() or run.events.exists():
            other = "a run of headway train" if run.events.exists() else "no run"
            raise UserError(f"--resume {path}: it holds {other}; expected the run.dir of a headway sft")
        return run

    @property
    def hint(self) -> str:
        """The end of a message about a directory without a record: what it is instead; empty if that is not known."""
        if self.config.is_file() and self.metrics.is_file():
            return (
                f". It is a run of headway sft: its figures are in {self.metrics.name} and the trackers, and it goes "
                "on with headway sft --resume"
            )
        newest = max(self.path.glob(f"*/{self.events.name}"), key=lambda found: found.stat().st_mtime, default=None)
        return f"; did you mean {newest.parent}?" if newest else ""

    def check_free(self) -> None:
        """Check that a run may begin here. Raises `Occupied` for a file, and for a directory that is not empty.

        Raises `UserError` where the path cannot be a directory's.
        """
        with _writable(self.path):
            if self.path.is_file():
                raise Occupied(f"run.dir={self.path} is a file; give the path of a directory, new or empty")
            try:
                there = {entry.name: entry for entry in self.path.iterdir()}
            except FileNotFoundError:
                return
            if any(file.name in there for file in (self.config, self.events, self.metrics, self.summary)):
                raise Occupied(
                    f"run.dir={self.path} already holds a run; give another run.dir, or remove that one first"
                )
            others = sorted(
                name
                for name, entry in there.items()
                if name != self.code.name
                and (name not in LEFTOVERS or (entry.is_dir() and next(entry.iterdir(), None) is not None))
            )
        if others:
            raise Occupied(
                f"run.dir={self.path} is not empty: it has {others[0]}, and holds no run; give the path of a "
                "directory, new or empty"
            )

    def discard(self) -> None:
        """Remove what a start left that came to nothing. ``code``, and what is not Headway's, stays."""
        files = (self.config, self.events, self.metrics, self.samples, self.summary, self._room)
        for file in (*files, self.lock, signs_of_life(self.lock), self.control):
            file.unlink(missing_ok=True)
        for folder in (self.tensorboard, self.checkpoints, self.logs, self.trackers, self.profiles, self.initial_model):
            if not folder.is_symlink():
                shutil.rmtree(folder, ignore_errors=True)
        if self.made:
            with suppress(OSError):  # it has what others put there
                self.path.rmdir()

    def write_config(self, config: Config) -> None:
        """Replace ``config.yaml`` in one step, for a resumed run. Raises `UserError` when it cannot be written."""
        with _writable(self.path):
            self._hold_room()
            replace_file(self.config, dump(config))

    @property
    def lock(self) -> Path:
        return self.path / "run.lock"

    @property
    def control(self) -> Path:
        return self.path / "control.sock"

    @property
    def profiles(self) -> Path:
        return self.path / "profiles"

    @property
    def initial_model(self) -> Path:
        return self.path / "initial_model"

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def code(self) -> Path:
        """Functions that were given as objects, which are there before the run begins."""
        return self.path / "code"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def trackers(self) -> Path:
        return self.path / "trackers"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replace ``summary.json`` in one step: readers see the old one or the new one, whole.

        The summary is written last, and finds room on a disk that became full meanwhile.
        """
        self._room.unlink(missing_ok=True)
        replace_file(self.summary, json.dumps(summary, indent=2) + "\n")

    @property
    def _room(self) -> Path:
        return self.path / ".room"

    def _hold_room(self) -> None:
        try:
            self._room.write_bytes(bytes(ROOM))  # written, not only made that large: a file with holes holds no room
        except OSError:
            with suppress(OSError):
                self._room.unlink(missing_ok=True)
            raise


def free_names(name: str) -> Iterator[Path]:
    """Yield directories for a run that is given none, without end: ``name`` and the time, then with a number behind.

    Runs that begin in the same second take the first that no other has.
    """
    first = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return (Path("runs") / f"{first}{suffix}" for suffix in chain([""], map("-{}".format, count(2))))


def replace_file(path: Path, text: str) -> None:
    """Replace a file by ``text`` as `whole_file` does. Raises `OSError`."""
    with whole_file(path) as file:
        file.write(text)


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Open a file to replace it atomically: readers see the old one or the new one, even after a crash.

    Where the block fails the old one stays. Raises `OSError`.
    """
    path = path.resolve()  # a link stays one
    if path.exists() and not path.is_file():  # a terminal, a pipe
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with draft.open("x", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, draft)
        draft.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        with suppress(OSError):  # not every file system has folders that can be synchronised
            os.fsync(folder)
        os.close(folder)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


@contextmanager
def _removed_on_error(*folders: Path) -> Iterator[None]:
    """Remove those of ``folders``, innermost first, that the block made and an `OSError` left empty."""
    made = [folder for folder in folders if not folder.exists()]
    try:
        yield
    except OSError:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    """Turn an `OSError` in the block into a `UserError`: ``path``, a run's directory, cannot be written."""
    try:
        yield
    except OSError as cause:
        remedy = "make room there" if cause.errno in FULL else "give a run.dir that you may write to"
        raise UserError(f"run.dir={path} cannot be written ({cause.strerror or cause}); {remedy}") from cause
