"""Ctrl-C and SIGTERM: what they ask of a run, before, while and after it trains."""

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


def note(reports: Reports, text: str) -> None:
    reports.emit(Note(time=time.monotonic(), level="info", text=text))


class Interrupts:
    """Ctrl-C and SIGTERM, as long as there is anything to close.

    While the pipeline runs the first one asks it to finish its version; any other leaves at once. What is open is then
    closed, which takes a few seconds; nothing disturbs that, so that no process is left behind. In another thread than
    the main one a run hears of no signal: Python has them handled there alone.
    """

    def __init__(self, reports: Reports) -> None:
        self._reports = reports
        self._pipeline: Pipeline | None = None
        self._task: asyncio.Task[Any] | None = None
        """None once it leaves."""
        self._told = False
        """Of the workers' end, once: whoever sends signals may send many."""
        self._before: dict[int, Any] = {}
        """The signals' handlers outside."""

    def __enter__(self) -> Interrupts:
        self._task, loop = asyncio.current_task(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM) if _in_the_main_thread() else ():
            self._before[number] = signal.getsignal(number)
            loop.add_signal_handler(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            asyncio.get_running_loop().remove_signal_handler(number)  # which would leave SIGTERM to the system
            signal.signal(number, before)

    @contextmanager
    def asking(self, pipeline: Pipeline) -> Iterator[None]:
        """The first interrupt within is ``pipeline``'s."""
        self._pipeline = pipeline
        try:
            yield
        finally:
            self._pipeline = None

    def leave_undisturbed(self) -> None:
        self._task = None

    def _on_signal(self) -> None:
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
    """SIGTERM raises `KeyboardInterrupt`, as Ctrl-C does, where no event loop handles it. In the main thread."""
    if not _in_the_main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _in_the_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
