"""Interrupts of a run, before, while and after it trains: Ctrl-C, SIGTERM and SIGHUP.

Outside of a run's event loop, and before there is one: `headway.runtime.signals`.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headway.events import Note
from headway.pipeline.run import Pipeline
from headway.reports.report_manager import Reports
from headway.runtime.signals import Repeats, interrupting_signals


def note(reports: Reports, text: str) -> None:
    reports.emit(Note(time=time.monotonic(), level="info", text=text))


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
        for number in interrupting_signals():
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
