"""Interrupts of a run, before, while and after it trains: Ctrl-C, SIGTERM and SIGHUP.

`timeout` sends its signal twice, to the process and to its group; the shell of a terminal that closes sends SIGHUP, and
the kernel sends it again when the shell has ended. Neither means a second request: see `Repeats`.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headway.events import Note
from headway.pipeline.run import Pipeline
from headway.reports.bundle import Reports

SAME_S = 1.0
"""Seconds within which a repeated SIGTERM or SIGHUP counts as the same signal, sent in two ways."""


def note(reports: Reports, text: str) -> None:
    reports.emit(Note(time=time.monotonic(), level="info", text=text))


def _signals() -> tuple[signal.Signals, ...]:
    """Return the signals that interrupt a run. An ignored SIGHUP stays ignored: the run was started with ``nohup``."""
    if threading.current_thread() is not threading.main_thread():
        return ()
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) if ignored else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Repeats:
    """Detector of signals that repeat one already counted."""

    def __init__(self) -> None:
        self._counted: dict[int, float] = {}
        """Time at which each signal, by number, was counted last, on the monotonic clock."""

    def is_one(self, number: int) -> bool:
        """Tell whether this signal repeats one less than `SAME_S` ago. Never true of Ctrl-C: users press it twice."""
        now = time.monotonic()
        if number != signal.SIGINT and now - self._counted.get(number, -SAME_S) < SAME_S:
            return True
        self._counted[number] = now
        return False


class Interrupts:
    """Handling of Ctrl-C, SIGTERM and SIGHUP, as long as there is anything to close.

    While the pipeline runs, the first signal asks it to finish its version; any other leaves at once. What is open is
    then closed, which takes a few seconds; nothing disturbs that, so that no process is left behind. A run in another
    thread than the main one gets no signals: Python handles them in the main thread alone.
    """

    def __init__(self, reports: Reports) -> None:
        self._reports = reports
        self._pipeline: Pipeline | None = None
        self._task: asyncio.Task[Any] | None = None
        """Task of the run; None once it leaves."""
        self._told = False
        """True once the user was informed that the workers are being ended; further signals print nothing."""
        self._before: dict[int, Any] = {}
        """Handlers that the signals had before."""
        self._repeats = Repeats()

    def __enter__(self) -> Interrupts:
        self._task, loop = asyncio.current_task(), asyncio.get_running_loop()
        for number in _signals():
            self._before[number] = signal.getsignal(number)
            loop.add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            asyncio.get_running_loop().remove_signal_handler(number)  # this call leaves SIGTERM to the system
            signal.signal(number, before)

    @contextmanager
    def asking(self, pipeline: Pipeline) -> Iterator[None]:
        """Let the first interrupt before the end of the block ask ``pipeline`` to stop."""
        self._pipeline = pipeline
        try:
            yield
        finally:
            self._pipeline = None

    def leave_undisturbed(self) -> None:
        self._task = None

    def _on_signal(self, number: int) -> None:
        if self._repeats.is_one(number):
            return
        if self._task is None:
            if not self._told:
                note(self._reports, "ending the workers, which takes a few seconds")
            self._told = True
        elif self._pipeline is not None:
            note(self._reports, "stopping after this version; press Ctrl-C again to leave at once")
            self._pipeline.request_stop()
            self._pipeline = None
        else:
            self._task.cancel()
            self._task = None


@contextmanager
def terminations_as_interrupts() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise `KeyboardInterrupt`, as Ctrl-C does, outside of event loops. For the main thread."""
    repeats = Repeats()

    def interrupt(number: int, frame: object) -> None:
        if not repeats.is_one(number):
            raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _signals() if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
