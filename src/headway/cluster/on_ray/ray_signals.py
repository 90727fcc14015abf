"""Keeping signals with the driver, which ends a run in order: `ray.init` replaces SIGTERM's handler twice, and starts
Ray's processes where signals to the driver's group end them.

Ray's Python sets a handler that ends the process at once. Its core sets one beneath Python's, which prints a stack
trace, goes on to Python's, and aborts the process three seconds later, in the middle of closing. No setting keeps Ray
from either.

`timeout`, Slurm and closing terminals signal all processes of a group. Ray's would end at that before the driver has
finished its version, so they begin sessions of their own, and workers with them. A driver that is killed still takes
them along: the kernel ends what Ray has started with the thread that started it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import ray._private.services as starting
import ray._private.utils as taking

TAKES = "set_sigterm_handler"
"""Name of the function with which `ray.init` replaces SIGTERM's handler: ``(handler)``."""
STARTS = "ConsolePopen"
"""Name in Ray of the `subprocess.Popen` with which each of Ray's processes on this machine is started."""


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Keep SIGTERM's handler during and after the block, in which Ray may start. Call it in the main thread."""
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    takes = getattr(taking, TAKES, None)
    if takes is not None:
        setattr(taking, TAKES, lambda handler: None)
    try:
        yield
    finally:
        if takes is not None:
            setattr(taking, TAKES, takes)
        signal.signal(signal.SIGTERM, before)  # above all for the system, which would call the core's handler
        signal.siginterrupt(signal.SIGTERM, False)  # the same as an event loop's


@contextmanager
def sessions_of_their_own() -> Iterator[None]:
    """Let the processes that Ray starts in the block lead sessions, which no signal to this process's group reaches."""
    starts = getattr(starting, STARTS, None)
    if starts is None:
        yield
        return
    setattr(starting, STARTS, partial(starts, start_new_session=True))
    try:
        yield
    finally:
        setattr(starting, STARTS, starts)
