"""Progress of a worker: its current work, and the time of its last step. It shows whether the worker is alive.

    engine ── advance("micro-batch 3 of 8") ──▶ Progress ── heartbeat() ──▶ Heartbeat ──▶ the driver

A worker's thread may compute for hours before it returns. So the steps in between (a micro-batch, a layer, a bucket of
weights, bytes in a file) count as progress, and another thread answers heartbeats.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Protocol

LOOK_S = 1.0
"""Seconds between two checks of the size of a folder that is being written."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Answer of a worker to a heartbeat. Durations are by its own clock, since machines' clocks may differ."""

    doing: str
    """Description of the open calls, with durations and steps; empty for an idle worker."""
    quiet_s: float = math.inf
    """Seconds since the last step, or the beginning, of the worker's work; infinite without work."""
    file_nbytes: int | None = None
    """Bytes so far of the files being written or read, for which there is a separate limit; None without files."""


class Living(Protocol):
    """Worker that answers heartbeats even while it computes."""

    name: str

    async def heartbeat(self) -> Heartbeat:
        """Return the worker's heartbeat at once, even while busy. Raises `WorkerDied`."""


class OpenWork:
    """Silence of a worker with open work. Only progress ends the silence; an answer to a heartbeat does not.

    Example:
        >>> work = OpenWork()
        >>> work.silent_s(10.0, is_open=True, moved=True)
        0.0
        >>> work.silent_s(70.0, is_open=True, moved=False)
        60.0
        >>> work.silent_s(80.0, is_open=False, moved=False)
        0.0
        >>> work.silent_s(90.0, is_open=True, moved=False)  # the work may have come a moment ago
        0.0
    """

    def __init__(self) -> None:
        self.began = False
        """True once the worker has made progress. Before that, its first step may take longer."""
        self._since = 0.0
        self._was_open = False

    def silent_s(self, now: float, *, is_open: bool, moved: bool) -> float:
        """Return the seconds without progress up to ``now``. ``is_open``: True if there is work for the worker;
        ``moved``: True if it made progress since the last call of this method.
        """
        self.began |= moved
        if moved or not is_open or not self._was_open:
            self._since = now
        self._was_open = is_open
        return now - self._since


@dataclass(slots=True)
class Files:
    """Files that one call writes or reads."""

    nbytes: int
    """Bytes of the files, as far as known."""


class Progress:
    """Progress of one worker. Its working threads write it, and another thread reads it.

    Example:
        >>> progress = Progress(clock=iter([0.0, 0.0, 5.0, 12.0]).__next__)
        >>> with progress.working("train_step"):
        ...     progress.advance("micro-batch 3 of 8")
        ...     progress.heartbeat().doing
        'train_step for 12 s (micro-batch 3 of 8), no progress for 7 s'
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._work: str | None = None
        self._place = ""
        self._began = self._moved = clock()
        self._files: Files | None = None
        """Files that are being written or read; None: no files."""

    def advance(self, place: str = "") -> None:
        """Count one more step. ``place``: description of the step; empty keeps the last one."""
        self._moved = self._clock()
        self._place = place or self._place

    @contextmanager
    def working(self, work: str) -> Iterator[None]:
        """Count progress for ``work``, its description, until the block ends. One piece of work at a time."""
        self._work, self._place = work, ""
        self._began = self._moved = self._clock()
        try:
            yield
        finally:
            self._work = None

    def heartbeat(self) -> Heartbeat:
        """Return the heartbeat of the current work; that of an idle worker if there is none."""
        # Read once: the working thread changes these meanwhile.
        work, place, moved = self._work, self._place, self._moved
        if work is None:
            return Heartbeat("")
        now, files = self._clock(), self._files
        where = f" ({place})" if place else ""
        doing = f"{work} for {now - self._began:.0f} s{where}, no progress for {now - moved:.0f} s"
        return Heartbeat(doing, now - moved, None if files is None else files.nbytes)

    @contextmanager
    def reading(self, folder: Path) -> Iterator[None]:
        """Count the files of ``folder`` as being read until the block ends; the number of their bytes is fixed."""
        nbytes, _ = _sizes(folder)
        self._files = Files(nbytes)
        self.advance(f"reading {folder}, {_amount(nbytes)}")
        try:
            yield
        finally:
            self._files = None
            self.advance()

    @contextmanager
    def writing(self, folder: Path) -> Iterator[None]:
        """Count files as being written into ``folder`` until the block ends: growth of their size, or of their space on
        disk, is progress.

        Another thread checks the files. So progress is seen during a single call of a library, and an unresponsive file
        system does not delay heartbeats.
        """
        closed, files = Event(), Files(0)
        # A daemon: a check of a network disk may hang, and must not keep the process from ending.
        looking = Thread(target=self._look, args=(folder, files, closed), name="headway-file-growth", daemon=True)
        self._files = files
        self.advance(f"writing {folder}")
        looking.start()
        try:
            yield
        finally:
            closed.set()
            self._files = None
            self.advance()

    def _look(self, folder: Path, files: Files, closed: Event) -> None:
        """Keep ``files``, which belong to this call alone, up to date with ``folder`` until ``closed`` is set."""
        seen = _sizes(folder)
        while not closed.wait(LOOK_S):
            sizes = _sizes(folder)
            # Checked again: a look may hang for minutes, and the call may be over by then.
            if sizes != seen and not closed.is_set():
                seen = nbytes, on_disk = sizes
                # Not into self._files: a late look would leave its bytes there for the next call's heartbeat.
                files.nbytes = nbytes
                self.advance(f"writing {folder}, {_amount(min(on_disk, nbytes))} of {_amount(nbytes)} on the disk")


_current: ContextVar[Progress] = ContextVar("headway_progress", default=Progress())  # noqa: B039 - one for the process


def progress_here() -> Progress:
    """Return the progress that this thread's work counts for: in a worker's thread the worker's, else the process's."""
    return _current.get()


def count_for(progress: Progress) -> None:
    """Count this thread's work for ``progress`` from now on."""
    _current.set(progress)


@contextmanager
def counting(progress: Progress, work: str) -> Iterator[None]:
    """Count the block, and threads that it starts by `asyncio.to_thread`, as ``work`` of ``progress``."""
    before = _current.set(progress)
    try:
        with progress.working(work):
            yield
    finally:
        _current.reset(before)


def advance(place: str = "") -> None:
    """Count a step of this thread's work, as `Progress.advance` does."""
    progress_here().advance(place)


def _sizes(folder: Path) -> tuple[int, int]:
    """Return the bytes of the files in ``folder``, and the bytes that they take on disk; 0 if the folder is missing.

    safetensors gives a file its final length before it writes: only the second number then shows the progress.
    """
    nbytes = on_disk = 0
    with suppress(OSError):  # the file is being created or renamed
        for entry in os.scandir(folder):
            found = entry.stat()
            nbytes, on_disk = nbytes + found.st_size, on_disk + found.st_blocks * 512
    return nbytes, on_disk


def _amount(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"
