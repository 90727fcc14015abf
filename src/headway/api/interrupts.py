"""Signals of a run: Ctrl-C, SIGTERM and SIGHUP end it in order, or at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headway.runtime.signals import signals_handled


class Interrupts:
    """Handling of Ctrl-C, SIGTERM and SIGHUP until the run has closed everything.

    Within `asking` the first signal asks for an orderly end; any other signal leaves at once. The run then closes what
    is open, which takes a few seconds. Further signals do not cut that short, so that no process is left behind. A run
    outside the main thread gets no signals: Python handles them only there.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._stop: tuple[Callable[[], None], str] | None = None
        """Function that asks for an orderly end, and the work that is finished first; None: a signal leaves at once."""
        self._task: asyncio.Task[Any] | None = None
        """Task of the run; None once it leaves."""
        self._told = False
        """True once the user was told that the workers are being ended. Further signals print nothing."""
        self._handled = signals_handled(self._on_signal)

    def __enter__(self) -> Interrupts:
        self._task = asyncio.current_task()
        self._handled.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._handled.__exit__(*failure)

    @contextmanager
    def asking(self, stop: Callable[[], None], after: str) -> Iterator[None]:
        """Have the first signal within the block call ``stop``. ``after``: what the run finishes first, for users."""
        self._stop = stop, after
        try:
            yield
        finally:
            self._stop = None

    def leave_undisturbed(self) -> None:
        self._task = None

    def _on_signal(self) -> None:
        if self._task is None:
            if not self._told:
                self._say("ending the workers, which takes a few seconds")
            self._told = True
        elif self._stop is not None:
            stop, after = self._stop
            self._say(f"stopping after {after}; press Ctrl-C again to leave at once")
            stop()
            self._stop = None  # the next signal leaves at once
        else:
            # Once: a further cancellation would cut the ending of the workers short.
            self._task.cancel()
            self._task = None
