"""A run's directory: its files. It belongs to one run, and one process trains in it at a time.

config.yaml    the resolved configuration       events.jsonl   everything that happened
events/        of a large run: sums at its newest versions, from which reports begin
metrics.jsonl  one row per version              summary.json   the run in one object
samples.jsonl  what drawn groups said
tensorboard/   checkpoints/   logs/             model/         the exported model
trackers/      what other trackers leave here, and the ids of their entries
run.lock       held by the process that trains  initial_model/ the model that was made, where one was
profile.json   a profile that was asked for     profiles/      what workers computed, where that was asked for
journal/       what was finished since the checkpoints, for a resumed run
code/          functions that were given as objects, in Python
run.alive      touched every minute by the process that trains, for machines that do not see its lock
.room          space on the disk that a run holds for its summary, and gives up for it
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, TextIO, TypeVar

from headway.config.loading import dump
from headway.config.schema import Config
from headway.errors import ConfigError, UserError
from headway.events import RunFinished, RunStarted
from headway.reports.record.earlier_records import is_earlier, upgrade
from headway.reports.record.file_access import FULL, replace_file

T = TypeVar("T")
ROOM = 64 * 2**10
"""Size in bytes of the file that holds space for the summary, which needs a few thousand."""


log = logging.getLogger(__name__)
BEAT_S = 60.0
"""Seconds between two signs of life of the process that trains."""
SILENT_S = 10 * BEAT_S
"""Seconds without a sign of life after which a process on another machine counts as gone; clocks may differ by less."""
RUN_EXPECTED = "expected a run's directory, the run.dir of a headway train"
"""What is expected for RUN, in messages."""
LEFTOVERS = frozenset({"run.lock", "run.alive", ".room", "tensorboard", "checkpoints", "logs", "journal"})
"""Names that a failed start may leave in a directory: they are no run, and do not prevent one."""


class Occupied(UserError):
    """Raised for a run directory that is in use or not empty."""


class RunLock:
    """Lock of a run's directory, held from `take` until `release` or the end of the process, however it ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._released = threading.Event()

    def take(self) -> None:
        """Take the lock. Raises `UserError`, naming the holder, if it is taken, and where nothing can be written.

        A file system without locks is warned of.
        """
        with _writable(self._path.parent):
            # Not "w": the name of the holder must be there for the one who is refused.
            file = self._path.open("a+", encoding="utf-8")
        try:
            _lock(file)
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

    def release(self) -> None:
        if self._file is not None:
            self._released.set()
            with suppress(OSError):
                signs_of_life(self._path).unlink(missing_ok=True)
            # The file stays: a new one under its name could be locked while the old one still is.
            self._file.close()
            self._file = None


def _lock(file: TextIO) -> None:
    """Lock a file, a few times, as `is_trained` holds it for a moment. Raises `OSError`."""
    for _ in range(10):
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.03)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the last time, which may raise


def signs_of_life(lock: Path) -> Path:
    """Return the file beside a run's ``lock`` whose modification time is its holder's last sign of life."""
    return lock.with_suffix(".alive")


def _show_life(path: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        with suppress(OSError):
            os.utime(path)


class _Inside:
    """Path of a file or a folder inside a run's directory, by its name there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDirectory, owner: type) -> Path:
        return run.path / self._name


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths inside a run's directory."""

    path: Path
    made: bool = False
    """True where `create` made the directory, and did not find it empty."""
    lock = _Inside("run.lock")
    profile_request = _Inside("profile.json")
    profiles = _Inside("profiles")
    initial_model = _Inside("initial_model")
    config = _Inside("config.yaml")
    code = _Inside("code")
    """Functions that were given as objects, which are there before the run begins."""
    events = _Inside("events.jsonl")
    states = _Inside("events")
    """States of a large run's metrics."""
    metrics = _Inside("metrics.jsonl")
    samples = _Inside("samples.jsonl")
    summary = _Inside("summary.json")
    tensorboard = _Inside("tensorboard")
    trackers = _Inside("trackers")
    checkpoints = _Inside("checkpoints")
    logs = _Inside("logs")
    journal = _Inside("journal")
    storage = _Inside(".storage.json")
    """Which state of its storage the directory has."""
    model = _Inside("model")
    _room = _Inside(".room")

    @property
    def own(self) -> list[Path]:
        """Paths of the files and folders that a run makes here, whether they exist or not."""
        names = [name for name, found in vars(RunDirectory).items() if isinstance(found, _Inside)]
        return [getattr(self, name) for name in names if name != "code"]

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
    def existing(cls, path: Path, *needed: str) -> RunDirectory:
        """Return the directory of an existing run. Raises `ConfigError` where ``path`` is none.

        ``needed``: names of the files that it must have; by default the configuration and the record.
        """
        run = cls(path)
        if not path.is_dir():
            raise ConfigError(
                f"RUN: got {path}, which {'is a file' if path.exists() else 'does not exist'}; {RUN_EXPECTED}"
            )
        for name in needed or (run.config.name, run.events.name):
            if not (path / name).is_file():
                raise ConfigError(f"RUN: got {path}, which has no {name}; {RUN_EXPECTED}{run.hint}")
        # Only where it is certain that no process appends to the record, which `upgrade` replaces.
        if is_earlier(run.events) and is_trained(run.lock) is False:
            upgrade(run.events)
        return run

    @classmethod
    def existing_sft(cls, path: Path) -> RunDirectory:
        """Return the directory of an existing run of ``headway sft``. Raises `UserError` when it holds none."""
        run = cls(path)
        trains = run.events.exists() or run.journal.exists()
        if not run.config.is_file() or trains:
            other = "a run of headway train" if trains else "no run"
            raise UserError(f"--resume {path}: it holds {other}; expected the run.dir of a headway sft")
        return run

    @property
    def hint(self) -> str:
        """The end of a message about a directory without a record: what it is instead; empty if that is not known."""
        if self.journal.exists():
            return ". By its journal it is a run of headway train: bring that file back, or give the run's storage"
        if self.config.is_file() and self.metrics.is_file():
            return (
                f". It is a run of headway sft: its figures are in {self.metrics.name} and the trackers, and it goes "
                "on with headway sft --resume"
            )
        if ((above := self.path.absolute().parent) / self.events.name).is_file():
            return f"; did you mean {above}?"
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
                command = "train" if self.events.name in there else "sft"
                raise Occupied(
                    f"run.dir={self.path} already holds a run; give another run.dir, or go on with that run from its "
                    f"checkpoint: headway {command} --resume {self.path}"
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
        """Remove the files of a failed start. ``code``, and files that are not Headway's, stay."""
        for path in (*self.own, signs_of_life(self.lock)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif not path.is_symlink():
                path.unlink(missing_ok=True)
        if self.made:
            with suppress(OSError):  # it has what others put there
                self.path.rmdir()

    def write_config(self, config: Config) -> None:
        """Replace ``config.yaml`` in one step, for a resumed run. Raises `UserError` when it cannot be written."""
        with _writable(self.path):
            self._hold_room()
            replace_file(self.config, dump(config))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replace ``summary.json`` in one step: readers see the old one or the new one, whole.

        The summary is written last, and finds room on a disk that became full meanwhile.
        """
        self._room.unlink(missing_ok=True)
        replace_file(self.summary, json.dumps(summary, indent=2) + "\n")

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


def in_free_directory(given: Path | None, name: str, begin: Callable[[Path], T]) -> T:
    """Return what ``begin`` makes of ``given``, or without that of the first of `free_names` that it finds free.

    It raises `Occupied` for a directory that is not.
    """
    if given is not None:
        return begin(given)
    for path in free_names(name):
        with suppress(Occupied):
            return begin(path)
    raise AssertionError("unreachable: there is always another number")


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


# ------------------------------------------------------------------------------------------------ does it live


def is_trained(lock: Path, now: Callable[[], float] = time.time) -> bool | None:
    """Tell whether a process holds the run's ``lock``; None where that cannot be known.

    A process on another machine holds it no more when it has shown no sign of life for `SILENT_S`.
    """
    try:
        last = lock.stat().st_mtime
        holder = lock.read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    except (OSError, UnicodeDecodeError):
        return None
    if holder and not holder.rstrip().endswith(f" on {socket.gethostname()}"):
        with suppress(OSError):  # on another machine, whose locks this one may not see
            last = signs_of_life(lock).stat().st_mtime
        return None if now() - last < SILENT_S else False
    try:
        with lock.open("rb") as file:
            # Shared: two that look at the same time must not take each other for the trainer.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run's status: that of its end, or ``running``, ``not begun`` or ``killed``; and the ``reason``."""

    status: str
    reason: str | None
    trained: bool | None
    """True while a process trains the run; None where that cannot be known."""

    @property
    def goes_on(self) -> bool:
        """True where a process trains the run, or may."""
        return self.trained is True or self.status == "running"


def status_of(started: RunStarted | None, finished: RunFinished | None, lock: Path) -> RunStatus:
    """Return a run's status, by the start and end in its record, and by its ``lock``."""
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
