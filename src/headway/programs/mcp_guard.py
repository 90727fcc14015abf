"""Start of an MCP server's process that ends when the runner ends that started it, in whatever way that does.

python mcp_guard.py RUNNER COMMAND ARGUMENT …            # becomes COMMAND; a second process watches both

The SDK starts a server as the leader of a session of its own, so that what ends with the runner's group does not reach
it, and a server that does not heed the end of its input would go on. Where Linux's pidfd is not to be had, it is left
to heed that.
"""

from __future__ import annotations

import os
import select
import signal
import sys

MOST_FILES = 65536
"""More than the process may have open."""


def main(runner: int, command: list[str]) -> None:
    """Run ``command`` in place of this process, as a child of the process ``runner``."""
    if sys.platform == "linux":
        ends = [os.pidfd_open(runner), os.pidfd_open(os.getpid())]
        if os.getppid() != runner:  # it ended before this was set up
            return
        # A grandchild: the server knows of no child that it has not started.
        if (child := os.fork()) == 0:
            if os.fork() == 0:
                _end_with(ends)
            os._exit(0)
        os.waitpid(child, 0)
        for end in ends:
            os.close(end)
    os.execvp(command[0], command)


def _end_with(ends: list[int]) -> None:
    """Wait until one of the processes ``ends`` has ended, and end what is left of this group."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the SDK's, for the server, which may not heed it
        lowest = 0
        for end in sorted(ends):  # the server's pipes above all: who reads them waits for all who hold them
            os.closerange(lowest, end)
            lowest = end + 1
        os.closerange(lowest, MOST_FILES)
        watched = select.poll()
        for end in ends:
            watched.register(end, select.POLLIN)
        watched.poll()
        os.killpg(0, signal.SIGKILL)
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
