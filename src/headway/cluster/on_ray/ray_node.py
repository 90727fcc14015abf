"""Ray node started by this process: watches its processes, and removes all of it at the end.

Each start of Ray leaves a folder of logs and sockets in Ray's temporary directory. It is removed here after Ray's last
process has ended. After a failure of Ray, its logs are copied to the run's first.

Signals stay with the driver, which ends a run in order: `ray.init` replaces SIGTERM's handler twice, and starts Ray's
processes where signals to the driver's group end them.

Ray's Python sets a handler that ends the process at once. Its core sets one beneath Python's, which prints a stack
trace, goes on to Python's, and aborts the process three seconds later, in the middle of closing. No setting keeps Ray
from either.

`timeout`, Slurm and closing terminals signal all processes of a group. Ray's would end at that before the driver has
finished its version, so they begin sessions of their own, and workers with them. A driver that is killed still takes
them along: the kernel ends what Ray has started with the thread that started it.

Processes are watched by descriptors: a process that got the id of another is never signalled.
"""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import ray
import ray._private.services as starting
import ray._private.utils as taking
from ray._private.node import Node

from headway.config.sizing.timeouts import KILLED_S, ORDERLY_S, TERMINATED_S
from headway.errors import RunError, WorkerDied
from headway.runtime.process_tree import PR_SET_PDEATHSIG, descendants
from headway.runtime.task_groups import concurrently, never


class Watched:
    """Watch on a process of this machine by a descriptor, since the process's id may be reused after its end."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = False
        self._descriptor: int | None = None
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended = True
        except OSError as cause:
            raise RunError(
                f"process {pid} cannot be watched (pidfd_open: {cause}); Linux has this from 5.3 on"
            ) from cause

    @property
    def has_ended(self) -> bool:
        """Return True if the process is known to have ended, even if its parent has not collected its exit status."""
        return self.ends_within(0.0)

    def ends_within(self, seconds: float) -> bool:
        """Wait for the process's end, at most ``seconds``. Returns True if it has ended. Blocks."""
        if self._descriptor is not None:
            end = select.poll()  # not select, which refuses descriptors from 1024 on
            end.register(self._descriptor, select.POLLIN)
            if end.poll(max(0.0, seconds) * 1000):
                self._ended = True
                self.close()
        return self._ended

    async def ended(self) -> None:
        """Wait until the process has ended. Returns at once if that is known already, or after `close`."""
        if self._descriptor is None:
            return
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        # A copy per waiter, since a loop has one reader per descriptor. Without it only the ranks' watch saw the end of
        # Ray's raylet, and the run tried to restart them for minutes.
        descriptor = os.dup(self._descriptor)
        loop.add_reader(descriptor, end.set)
        try:
            await end.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        self._ended = True
        self.close()

    def signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if self._descriptor is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def close(self) -> None:
        """Stop watching. A known end of the process stays known."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class ChildProcesses:
    """Descendants of this process: children with ``title`` in their command lines, and all their descendants."""

    def __init__(self, title: str = "") -> None:
        self._title = title
        self._processes: dict[int, Watched] = {}
        self.update()

    def __len__(self) -> int:
        return len(self._processes)

    def named(self, programs: Collection[str]) -> dict[str, Watched]:
        """Return program -> process, for processes that run one of ``programs``."""
        found = {}
        for pid, process in self._processes.items():
            with suppress(OSError):  # the process has ended
                if (program := Path(f"/proc/{pid}/exe").readlink().name) in programs:
                    found[program] = process
        return found

    def update(self) -> None:
        """Add new processes. Earlier ones are kept, even if their parent has ended."""
        self.left_after(0.0)  # first: the id of an ended process may be reused
        opened = {pid: Watched(pid) for pid in self._find() if pid not in self._processes}
        confirmed = self._find()  # a process id may have changed hands between looking and opening
        for pid, process in opened.items():
            if pid in confirmed:
                self._processes[pid] = process
            else:
                process.close()

    def left_after(self, seconds: float) -> list[int]:
        """Return the ids of processes that have not ended within ``seconds``. Ended ones are forgotten."""
        deadline = time.monotonic() + seconds
        for pid, process in list(self._processes.items()):
            if process.ends_within(deadline - time.monotonic()):
                del self._processes[pid]
        return list(self._processes)

    def end(
        self, orderly_s: float = ORDERLY_S, terminated_s: float = TERMINATED_S, killed_s: float = KILLED_S
    ) -> list[int]:
        """Wait ``orderly_s`` for all processes to end by themselves, then end the rest. Blocks.

        Returns the ids of processes left ``killed_s`` after SIGKILL. Nothing is watched afterwards.
        """
        left = self.left_after(orderly_s)
        for number, within_s in ((signal.SIGTERM, terminated_s), (signal.SIGKILL, killed_s)):
            if left:
                for process in self._processes.values():
                    process.signal(number)
                left = self.left_after(within_s)
        for process in self._processes.values():
            process.close()
        return left

    def _find(self) -> set[int]:
        titled = {pid for pid in descendants(os.getpid()) if self._title in _command_line(pid)}
        return titled | set(descendants(*titled))


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


LATEST = "session_latest"
"""Name of the link to the newest session, beside the sessions' folders."""
TELLING = ("raylet.out", "raylet.err", "gcs_server.out", "gcs_server.err")
"""Names of the logs that explain why Ray's own processes, or workers, ended."""
MOST_BYTES = 4 * 2**20
"""Number of bytes kept from the end of each log."""


class RayNode:
    """Ray node that this process starts, until `leave`. Each run has its own session, in its own folder."""

    def __init__(self, session: Path, logs: Path) -> None:
        """Prepare a node. ``session``: the folder of its session; ``logs``: where logs worth keeping are copied."""
        self._session = session
        self._kept_logs = logs
        # The session's name stands in the command line of all that this process started for it.
        self._family = ChildProcesses(session.name)
        self._servers = self._family.named(("raylet", "gcs_server"))
        self._keeps_logs = False

    @property
    def lost(self) -> str | None:
        """Return a message when a process of Ray that workers need has ended; None while all of them live."""
        for name, process in self._servers.items():
            if process.has_ended:
                return (
                    f"Ray's {name} on this machine (pid {process.pid}) ended, and the run's workers with it. If its "
                    f"log, {self._kept_logs / f'{name}.out'}, does not tell why, it was killed from outside: by "
                    "somebody's `ray stop`, or by the kernel because memory had run out (`dmesg` tells)"
                )
        return None

    async def died(self) -> NoReturn:
        """Wait until a process of Ray that workers need has ended, and raise `WorkerDied`."""

        async def ends(process: Watched) -> None:
            await process.ended()
            raise WorkerDied(self.lost or "Ray on this machine ended")

        await concurrently(map(ends, self._servers.values()))
        await never()  # none was found at the start

    def keep_logs(self) -> None:
        """Copy Ray's logs before their folder is removed: they may explain a failure."""
        self._keeps_logs = True

    def leave(self, killed_s: float) -> None:
        """Leave Ray, end its remaining processes, and remove its session's folder. Blocks.

        Raises `RunError` if processes are left ``killed_s`` after they were killed.
        """
        if self.lost:  # before the shutdown, which ends all of them
            self._keeps_logs = True
        self._family.update()  # before Ray ends: afterwards its leftover processes have no parent
        try:
            ray.shutdown()
        finally:
            if left := self._family.end(killed_s=killed_s):
                # Their session's folder stays: these processes may still use it.
                raise RunError(f"processes of Ray are still there after they were killed: {left}")
            if self._keeps_logs:
                keep_ends(self._session / "logs", self._kept_logs)
            remove_session(self._session)


def keep_ends(logs: Path, kept: Path) -> None:
    """Copy the ends of the logs in `TELLING` into ``kept``. Errors are ignored."""
    for name in TELLING:
        with suppress(OSError), (logs / name).open("rb") as source:
            source.seek(max(0, os.fstat(source.fileno()).st_size - MOST_BYTES))
            if end := source.read():
                kept.mkdir(parents=True, exist_ok=True)
                (kept / name).write_bytes(end)


def remove_session(session: Path) -> None:
    """Remove a session's folder, and the link to the newest session if it points there. A missing folder is no
    error.
    """
    shutil.rmtree(session, ignore_errors=True)
    latest = session.with_name(LATEST)
    with suppress(OSError):
        if latest.readlink().name == session.name:
            latest.unlink()


@contextmanager
def replaced(module: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a function of Ray by ``make(function)`` for the duration of the block. Does nothing if this version of
    Ray lacks it.
    """
    before = getattr(module, name, None)
    if before is not None:
        setattr(module, name, make(before))
    try:
        yield
    finally:
        if before is not None:
            setattr(module, name, before)


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Keep SIGTERM's handler during and after the block, in which Ray may start. Outside the main thread, the main
    thread has to call `restore_sigterm` afterwards.
    """
    with replaced(taking, "set_sigterm_handler", lambda takes: lambda handler: None):
        try:
            yield
        finally:
            restore_sigterm()


def restore_sigterm() -> None:
    """Reinstall Python's handler of SIGTERM in place of that of Ray's core. Call it in the main thread."""
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)
        signal.siginterrupt(signal.SIGTERM, False)  # the same as an event loop's
        signal.alarm(0)  # where the core's handler was called, it ends the process by an alarm


@contextmanager
def without_services() -> Iterator[None]:
    """Start Ray in the block without its log monitor, autoscaler and dashboard server, which runs do not use. Each
    takes a second of CPU time, and `ray.init` waits for the last.
    """
    with ExitStack() as replacing:
        for start in ("start_log_monitor", "start_monitor", "start_api_server"):
            replacing.enter_context(replaced(Node, start, lambda starts: lambda *_, **__: None))
        yield


def sessions_of_their_own() -> AbstractContextManager[None]:
    """Start Ray's processes in the block in sessions of their own, so that signals to this process's group do not reach
    them.
    """
    # A `subprocess.Popen`, with which each of Ray's processes on this machine is started.
    return replaced(starting, "ConsolePopen", lambda starts: partial(_start_process, starts))


_EXEC = (
    "import ctypes, os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]); "
    f"ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, signal.SIGKILL); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)
"""What Ray does between fork and exec (`start_ray_process`): ignore Ctrl-C, and end with the thread that started it,
also where that ended before this was set up.
"""


def _start_process(starts: Callable[..., Any], command: Sequence[str], **settings: Any) -> Any:
    # Ray has Python run between fork and exec. In such a copy of a process of many threads Python lets go of all that
    # other threads held: process groups of Gloo, whose destructors hung there, or died by SIGSEGV, and ray.init waited.
    settings.pop("preexec_fn", None)
    return starts(
        [sys.executable, "-I", "-S", "-c", _EXEC, str(os.getpid()), *command], start_new_session=True, **settings
    )
