"""Processes that this one started, watched by descriptors: a process that got the id of another is never signalled."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from headway.config.sizing.timeouts import KILLED_S
from headway.runtime.process_tree import descendants

CAN_WATCH = hasattr(os, "pidfd_open")
"""True on Linux, where processes can be watched. Elsewhere families are empty."""
ORDERLY_S = 5.0
"""Seconds that a process has to end by itself, before SIGTERM."""
TERMINATED_S = 2.0
"""Seconds that it has to end in order, before SIGKILL. The release of its memory goes on with either."""


def named(programs: Collection[str], title: str) -> dict[str, int]:
    """Return process ids by program, of ``programs`` that this process has started with ``title`` on command lines."""
    found = {}
    for pid in descendants(os.getpid()):
        with suppress(OSError):  # the process has ended
            if (program := Path(f"/proc/{pid}/exe").readlink().name) in programs and title in _command_line(pid):
                found[program] = pid
    return found


class Watched:
    """Watch on any process of this machine."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor: int | None = None
        self._ended = False
        if CAN_WATCH:
            with suppress(OSError):  # the process has ended, or this system lets nobody watch
                self._descriptor = os.pidfd_open(pid)

    @property
    def can_be_watched(self) -> bool:
        """True where this system can watch the process, until watching ends."""
        return self._descriptor is not None

    @property
    def has_ended(self) -> bool:
        """Tell whether the process is known to have ended, even if its parent has not collected its exit status."""
        if self._descriptor is not None:
            end = select.poll()  # not select, which refuses descriptors from 1024 on
            end.register(self._descriptor, select.POLLIN)
            self._ended = bool(end.poll(0))
        return self._ended

    async def ended(self) -> None:
        """Wait until the process has ended; return at once if it cannot be watched. Watching ends then."""
        if self._descriptor is None:
            return
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._descriptor, end.set)
        try:
            await end.wait()
        finally:
            loop.remove_reader(self._descriptor)
        self._ended = True
        self.close()

    def close(self) -> None:
        """Stop watching. A known end of the process stays known."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class ChildProcesses:
    """Processes that this one has started so far with ``title`` in their command lines, and all that those started."""

    def __init__(self, title: str = "") -> None:
        self._title = title
        self._descriptors: dict[int, int] = {}
        """Descriptors by process id; one becomes readable when its process has ended."""
        self.update()

    def __len__(self) -> int:
        return len(self._descriptors)

    def update(self) -> None:
        """Add processes started since. Earlier ones are kept, even if a process between them and this one has ended."""
        if not CAN_WATCH:
            return
        opened: dict[int, int] = {}
        for pid in self._find():
            try:
                opened[pid] = os.pidfd_open(pid)
            except OSError:
                continue  # the process has ended
        confirmed = self._find()  # a process id may have changed hands between looking and opening
        for pid, descriptor in opened.items():
            if pid in confirmed:
                self._close(pid)
                self._descriptors[pid] = descriptor
            else:
                os.close(descriptor)

    def left_after(self, seconds: float) -> list[int]:
        """Return the processes that have not ended within ``seconds``. The others are forgotten."""
        deadline = time.monotonic() + seconds
        pids = {descriptor: pid for pid, descriptor in self._descriptors.items()}
        ends = select.poll()
        for descriptor in pids:
            ends.register(descriptor, select.POLLIN)
        while self._descriptors:
            ended = ends.poll(max(0.0, deadline - time.monotonic()) * 1000)
            for descriptor, _ in ended:
                ends.unregister(descriptor)
                self._close(pids[descriptor])
            if not ended:
                break
        return list(self._descriptors)

    def end(
        self, orderly_s: float = ORDERLY_S, terminated_s: float = TERMINATED_S, killed_s: float = KILLED_S
    ) -> list[int]:
        """Wait ``orderly_s`` for all to end by themselves, then end the stragglers. Blocks.

        Returns the processes that are there ``killed_s`` after SIGKILL; nothing is watched any more.
        """
        left = self.left_after(orderly_s)
        for number, within_s in ((signal.SIGTERM, terminated_s), (signal.SIGKILL, killed_s)):
            if left:
                for descriptor in self._descriptors.values():
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(descriptor, number)
                left = self.left_after(within_s)
        for pid in left:
            self._close(pid)
        return left

    def _find(self) -> set[int]:
        titled = {pid for pid in descendants(os.getpid()) if self._title in _command_line(pid)}
        return titled | set(descendants(*titled))

    def _close(self, pid: int) -> None:
        if (descriptor := self._descriptors.pop(pid, None)) is not None:
            os.close(descriptor)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
