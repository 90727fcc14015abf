"""SIGTERM stays with the driver, which ends a run in order at it, though `ray.init` takes the signal away twice.

Ray's Python sets a handler that ends the process at once. Its core sets one beneath Python's, which prints a stack
trace, goes on to Python's, and aborts the process three seconds later, in the middle of closing. No setting keeps Ray
from either.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray._private.utils as taking

TAKES = "set_sigterm_handler"
"""Called as ``(handler)`` at the beginning of `ray.init`."""


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Inside, Ray may start; the handler of SIGTERM before is that within and after. In the main thread."""
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
        signal.siginterrupt(signal.SIGTERM, False)  # as an event loop has it
