"""Guard of a process: what the process has started ends with it, and all of it with the process that owns it.

    owner ── Popen ─▶ guard ── fork ─▶ the process ─▶ whatever it starts, in whatever session
      │                 ├ the owner ends, however that is, or SIGTERM comes: all below is killed
      │                 └ the process ends: what it has left is killed; then the guard ends as the process has
      └─ waits for the guard: once that is gone, nothing is left

The guard is a subreaper, as Linux calls it: a process whose parent has ended becomes its child, and so stays below it.
Elsewhere there is no guard.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
FORWARDED = signal.SIGUSR2
"""Signal that the guard passes on to its process."""
END_S = 30.0
"""Seconds for the kernel to end what is killed."""
MOST_FILES = 65536
"""More than a process may have open here."""


def run_guarded(owner: int, grace_s: float = 0.0) -> None:
    """Fork, and return in the child alone; this process becomes its guard. Call it before threads are started.

    The child leads a session of its own.

    Args:
        owner: id of the process that has started this one.
        grace_s: seconds that the child has to end by itself once its owner has.
    """
    if sys.platform != "linux":
        return
    adopt_orphans()
    guard = os.getpid()
    if (child := os.fork()) == 0:
        os.setsid()
        die_with(guard)
        return
    code = 1
    try:
        code = _guarded(child, owner, grace_s)
    finally:
        os._exit(code)  # whatever went wrong, the guard never goes on as its process


def die_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, whose main thread has forked it."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before this was set up
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends. No child of this process inherits that."""
    if sys.platform == "linux":
        _prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_children(but: Collection[int] = ()) -> None:
    """Kill all descendants of this process, those that come meanwhile included, and reap them.

    ``but``: children that are left alone, with what they have started. Gives up after `END_S`.
    """
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        below = _children()
        ending = [child for child in below.get(os.getpid(), ()) if child not in but]
        if not ending:
            return
        for pid in [*ending, *_below(ending, below)]:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in ending:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)


def children() -> list[int]:
    """Return the ids of this process's children, ended ones included, as the kernel lists them for each thread.

    Without a look at other processes, of which a large machine has thousands. A child may be missing while others are
    reaped.
    """
    try:
        lists = [Path("/proc/self/task", thread, "children").read_text() for thread in os.listdir("/proc/self/task")]  # noqa: PTH208
    except OSError:  # a kernel that was built without
        return _children().get(os.getpid(), [])
    return [int(pid) for listed in lists for pid in listed.split()]


def descendants(*pids: int) -> list[int]:
    """Return the ids of all processes that ``pids`` started, directly or not, as /proc lists them now."""
    return _below(pids, _children())


def _guarded(child: int, owner: int, grace_s: float) -> int:
    """See the process ``child`` through. Returns its exit code; does not return where a signal has ended it."""
    os.closerange(0, MOST_FILES)  # who reads the process's output, or its connection, waits for all who hold it
    for _ in range(3):
        os.open(os.devnull, os.O_RDWR)
    process = os.pidfd_open(child)

    def send(number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, number)

    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: send(signal.SIGKILL))
    signal.signal(FORWARDED, lambda *_: send(FORWARDED))
    signal.signal(signal.SIGCHLD, lambda *_: _reap_orphans(child))
    ends = select.poll()
    ends.register(process, select.POLLIN)
    with suppress(ProcessLookupError):
        owner_ends = os.pidfd_open(owner)
        ends.register(owner_ends, select.POLLIN)
        if os.getppid() == owner:  # else it has ended, and its id may be another's
            ends.poll()
        ends.unregister(owner_ends)
        ends.poll(grace_s * 1000)
    send(signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    end_children()
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the process has left one, if any
        with suppress(OSError):  # SIGKILL has no handler that could be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _reap_orphans(child: int) -> None:
    """Reap what has ended of the processes that this one has adopted, but not ``child``."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != child:
            os.waitpid(ended.si_pid, 0)


def _children() -> dict[int, list[int]]:
    """The processes of this machine by their parents."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208  # it is looked at often
        if name.isdigit():
            with suppress(OSError):
                stat = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
                children.setdefault(int(stat[1]), []).append(int(name))
    return children


def _below(pids: Collection[int], children: dict[int, list[int]]) -> list[int]:
    found, open_ends = [], list(pids)
    while open_ends:
        below = children.get(open_ends.pop(), [])
        found += below
        open_ends += below
    return found


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)
