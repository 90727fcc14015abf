"""The boundary between a runner process and the user code in it, which neither ends nor doubles the process.

Everything imported here is imported in each runner: keep it light.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from headway.runtime.workers.worker_protocol import Hosted


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

    Such a child holds the runner's connection; it would answer the host a second time.
    """
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != pid:
            os._exit(0)
