"""The boundary between a worker process and the user code in it, which neither ends nor doubles the process.

class Echo:                                             # lives in the worker process: `Hosted`
    def describe(self): return "an echo"
    async def serve(self, job, ask): return await ask(job)
    async def close(self): pass

@dataclass(frozen=True)
class EchoSpec:                                         # travels to the process: `HostedSpec`
    shown: str = "echo.py:echo"
    def load(self): return Echo()

Everything imported here is imported in each worker: keep it light.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

Ask = Callable[[Any], Awaitable[Any]]
"""A function that sends the host a message that pickles, and returns what the host answers."""


class Hosted(Protocol):
    """User code, loaded: what a worker process holds, and serves one job after another with."""

    def describe(self) -> Any:
        """Return what the user's code turned out to be: plain data that pickles, told to the host at the start."""

    async def serve(self, job: Any, ask: Ask) -> Any:
        """Do ``job`` and return its result, which pickles and unpickles without the user's modules.

        With several jobs at once in a process this runs on the process's event loop; of one job several asks may be
        open at once there. With one job at a time there is no event loop, so that synchronous code may run one of its
        own: then this may await nothing but ``ask``. Global generators are seeded here, by whatever the job says.

        ``ask`` raises the `HeadwayError` that the host answers with. Exceptions of this call end the job, not the
        process: a `HeadwayError` as itself, any other as `UserCodeFailed` with its text.
        """

    async def close(self) -> None:
        """Close what the user's code holds, before its process ends in order. It has a few seconds."""


class HostedSpec(Protocol):
    """A picklable description of user code that can load it."""

    @property
    def shown(self) -> str:
        """The name of the user's code in messages, such as ``reward.py:score``."""

    def load(self) -> Hosted:
        """Load the code, in the worker process. Raises `UserError` where it cannot be used."""


async def closed(hosted: Hosted) -> None:
    """Have the user's code close what it holds, if it has ``close``. In a process without an event loop this awaits
    nothing."""
    with nothing_returns_but_this_process():
        try:
            await hosted.close()
        except (Exception, SystemExit):
            print_traceback()


def print_traceback() -> None:
    """Print the exception that is being handled; user code may have closed what this process prints to."""
    with suppress(OSError, ValueError):
        traceback.print_exc()


@contextmanager
def nothing_returns_but_this_process() -> Iterator[None]:
    """At the block's end, exit in the children that user code forked in it and let return.

    Such a child holds the worker's connection; it would answer the host a second time.
    """
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != pid:
            os._exit(0)


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
