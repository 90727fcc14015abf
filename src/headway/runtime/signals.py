"""SIGTERM and SIGHUP, treated like SIGINT. Imports nothing heavy.

`timeout` sends its signal twice, to the process and to its group. The shell of a closing terminal sends SIGHUP, and the
kernel sends it again when the shell has ended. Neither means a second request: see `Repeats`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType

SAME_S = 1.0
"""Seconds within which a repeated SIGTERM or SIGHUP counts as the same signal, sent in two ways."""


def interrupting_signals() -> tuple[signal.Signals, ...]:
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
        """Tell whether this signal repeats one less than `SAME_S` ago. Always False for Ctrl-C: users press it
        twice.
        """
        now = time.monotonic()
        if number != signal.SIGINT and now - self._counted.get(number, -SAME_S) < SAME_S:
            return True
        self._counted[number] = now
        return False


@contextmanager
def signals_handled(on_signal: Callable[[], object]) -> Iterator[None]:
    """Let the event loop call ``on_signal`` for SIGINT, SIGTERM and SIGHUP; a signal sent in two ways counts once."""
    import asyncio

    loop, repeats = asyncio.get_running_loop(), Repeats()

    def handle(number: int) -> None:
        if not repeats.is_one(number):
            on_signal()

    # Checked before the loop's handlers replace them.
    before = {number: signal.getsignal(number) for number in interrupting_signals()}
    for number in before:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)  # this call restores the default for SIGTERM
            signal.signal(number, handler)


@contextmanager
def handled(handler: Callable[[int, FrameType | None], object], numbers: Collection[int]) -> Iterator[None]:
    """Call ``handler`` for these signals within the block, outside of event loops. Afterwards the old ones are
    restored.
    """
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class _Interrupt(Repeats):
    """Signal handler that raises `KeyboardInterrupt`, once for a signal that is sent in two ways."""

    def __call__(self, number: int, frame: object) -> None:
        if not self.is_one(number):
            raise KeyboardInterrupt


@contextmanager
def terminations_as_interrupts() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise `KeyboardInterrupt`, as Ctrl-C does, outside of event loops. For the main thread.

    Within another such block this does nothing: a single handler counts signals that are sent in two ways.
    """
    others = [number for number in interrupting_signals() if number != signal.SIGINT]
    with handled(_Interrupt(), [one for one in others if not isinstance(signal.getsignal(one), _Interrupt)]):
        yield
