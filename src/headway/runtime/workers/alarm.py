"""A time limit that the kernel keeps, for calls of user code inside a runner."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def killed_after(seconds: float) -> Iterator[None]:
    """Let the kernel end this process when the block takes longer than ``seconds``.

    The alarm's default action needs no interpreter: it also ends a call that never gives it back (a regular expression
    that backtracks for ever). The host reads the signal from the exit status. A call that takes the alarm for itself is
    left to the host's limit on the job.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # each time: user code may have set a handler of its own
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
