"""Python processes with this one's imports, and the guard above them, which ends all descendants with the owner.

    owner ── Popen ─▶ guard ── fork ─▶ the process ─▶ its descendants, in any session
                        ├ the owner ends in any way, or SIGTERM comes: the guard kills all below it
                        └ the process ends: the guard kills its descendants, and exits as the process did

The owner waits for the guard: when the guard has ended, no descendant is left. The guard is a subreaper of Linux: it
adopts each descendant whose parent ends.
"""

from __future__ import annotations

import ctypes
import json
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
"""Limit in seconds for killed processes to end. A process that releases its memory more slowly is not waited for."""
MOST_FILES = 65536
"""Number larger than all file descriptors of a process."""
STOPPED_S = 2.0
"""Seconds that a process may be stopped (SIGSTOP) before it is killed. Short stops have no effect."""


def run_guarded(owner: int) -> None:
    """Fork, and return only in the child, whose guard this process becomes. Call it before threads are started.

    The child leads a new session. ``owner``: id of the process that started this one.
    """
    # Before the fork: the child's processes may lose their parent at once.
    adopt_orphans()
    guard = os.getpid()
    if (child := os.fork()) == 0:
        # First: from now on a signal to the owner's group does not reach the processes below.
        os.setsid()
        die_with(guard)
        return
    try:
        os._exit(_guarded(child, owner))
    finally:
        os._exit(1)  # after an error: the guard must not run its process's code


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send ``by`` to this process when its parent ends. The parent's main thread must have forked it."""
    _prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it ended before this was set up
        os._exit(1)


def adopt_orphans() -> None:
    """Adopt, from now on, each descendant whose parent ends. Children of this process do not inherit this."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_children(but: Collection[int] = ()) -> None:
    """Kill and reap all descendants of this process, until there are none or `END_S` has passed.

    ``but``: children that are spared, with all their descendants.
    """
    until = time.monotonic() + END_S
    looks_without = 0
    # Repeatedly: this process inherits, and sees, a process's children only when that process ends.
    while time.monotonic() < until:
        below = _children()
        ending = [child for child in below.get(os.getpid(), ()) if child not in but]
        # Twice: a listing misses the child of a process that forks and ends during it. This was seen with a bwrap whose
        # caller was killed: its child waited for ever.
        looks_without = 0 if ending else looks_without + 1
        if looks_without == 2:
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

    Other processes, of which a large machine has thousands, are not read. A child may be missing while others are
    reaped.
    """
    try:
        # Of every thread: the kernel lists a child only under the thread that has forked it.
        lists = [Path("/proc/self/task", thread, "children").read_text() for thread in os.listdir("/proc/self/task")]  # noqa: PTH208
    except OSError:  # a kernel built without this file
        return _children().get(os.getpid(), [])
    return [int(pid) for listed in lists for pid in listed.split()]


def descendants(*pids: int) -> list[int]:
    """Return the ids of the descendants of ``pids`` that /proc lists now."""
    return _below(pids, _children())


def is_stopped(pid: int) -> bool:
    """Tell whether a signal has stopped a process; False if unknown."""
    with suppress(OSError):
        # Behind the last bracket, since a program's name may have blanks: the state of proc(5).
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    return False


def _guarded(child: int, owner: int) -> int:
    """Guard ``child`` until it and its descendants have ended. Returns its exit code, or ends by the same signal."""
    os.closerange(0, MOST_FILES)  # a pipe or socket of the process ends only when the guard does not hold it either
    for _ in range(3):
        os.open(os.devnull, os.O_RDWR)
    # By descriptor: when a signal is sent, the id of an ended child may be another process's.
    process = os.pidfd_open(child)

    def send(number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, number)

    # These must not end the guard, and with it the process: only the owner decides.
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
        if os.getppid() == owner:  # otherwise it has ended, and its id may be another process's
            ends.poll()
    # Also after the child has ended: the signal then does nothing, and there is no race.
    send(signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    end_children()
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the process's own core dump is enough
        with suppress(OSError):  # SIGKILL cannot have a handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _reap_orphans(child: int) -> None:
    """Reap adopted processes that have ended, but not ``child``."""
    with suppress(ChildProcessError):
        # WNOWAIT only checks: the child's own status is for `waitpid` in `_guarded`.
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != child:
            os.waitpid(ended.si_pid, 0)


def _children() -> dict[int, list[int]]:
    """Return the machine's process ids by parent."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208  # it is looked at often
        if name.isdigit():
            with suppress(OSError):
                # After the last bracket: a program's name may contain brackets and spaces.
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


IMPORTS_AS_HERE = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); owner = int(sys.argv.pop()); "
"""First statements of a `python_command` program: they take the import path of the owner, which started it."""


GUARDED = f"{IMPORTS_AS_HERE}from headway.runtime.process_tree import run_guarded; run_guarded(owner); "
"""First statements of a program whose descendants end with it, and which ends with its owner: see `run_guarded`.
SIGTERM to the started process, which is the guard, ends all of them."""


def python_command(program: str, *arguments: str) -> list[str]:
    """Return the command that runs ``program``: Python code that begins with `IMPORTS_AS_HERE` or `GUARDED`.

    The program's ``sys.argv[1:]`` are ``arguments``.
    """
    path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
    return [sys.executable, "-c", program, *arguments, str(os.getpid()), path]
