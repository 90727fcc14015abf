"""Run a job in a subprocess and wait for it: apart from the caller's event loop, torch and Ray, and from earlier runs.

    caller ── job ──▶ process        ──▶ pages of a cell, then the result or the error
    Ctrl-C ── SIGINT ──▶             the process is in a group of its own: a terminal sends it nothing by itself
    the caller's end ── end of file ──▶ like SIGTERM: a run finishes its version and saves

`serve` is the process's end: one job, whose result or error is its last message.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, TYPE_CHECKING, Any

from headway.errors import HeadwayError, RunError, WorkerDied, said_by
from headway.reports.live.live_view import Cell
from headway.runtime.process_tree import IMPORTS_AS_HERE, python_command
from headway.runtime.signals import terminations_as_interrupts

if TYPE_CHECKING:
    from rich.console import Console

GONE_S = 60.0
"""Seconds for the process to end after its last message: before that the run was closed, whatever its size."""
MOST_SHOWN = 2_000
"""Maximum characters of a process's output in the error when it ends without a result."""

BOOT = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    f"{IMPORTS_AS_HERE}from headway.api.subprocess_client import serve; serve(int(sys.argv[1]))"
)
"""Python code of the process. Ctrl-C ends it without a message until `serve` has begun."""


Job = Callable[["Console | None"], Any]
"""Work for the process; its argument is the console to show it on, or None. The job and its result are pickled."""


def carry_out_apart(job: Job, show: Callable[[str], None] | None) -> Any:
    """Carry out ``job`` in a subprocess, and return its result.

    ``show`` gets pages of HTML, each of which replaces the one before. None: the process prints where this one does.

    Raises:
        WorkerDied: the process ended without a result.
        KeyboardInterrupt: the job was left at once. Until then each Ctrl-C is passed on to it.
        BaseException: the job's own error.
    """
    here, there = Pipe()
    with tempfile.TemporaryFile() as printed:
        process, over = _start(there, printed if show is not None else None), False
        # Close this process's copy: otherwise the other process's end would never read as end of file
        there.close()
        try:
            here.send((job, show is not None))
            told = _messages(here)
            while True:
                try:
                    message = told.get()
                except KeyboardInterrupt:
                    if process.poll() is not None:
                        raise
                    # The process has its own group, so the terminal has not sent it a signal.
                    process.send_signal(signal.SIGINT)
                    continue
                if message is not None and message[0] == "page":
                    if show is not None:
                        show(message[1])
                    continue
                over = True
                match message:
                    case ("returned", result):
                        return result
                    case ("raised", error):
                        raise error
                ended = _end_of(process, printed)
                raise KeyboardInterrupt if process.returncode == -signal.SIGINT else WorkerDied(ended)
        finally:
            _end(process, asked=not over)
            here.close()


def _start(there: Connection, printed: IO[bytes] | None) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            python_command(BOOT, str(there.fileno())),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=None if printed is None else subprocess.STDOUT,
            pass_fds=[there.fileno()],
            process_group=0,
        )
    except OSError as cause:
        raise RunError(f"no process could be started ({sys.executable}): {cause}") from cause


def _messages(connection: Connection) -> queue.SimpleQueue[Any]:
    """Return a queue of the process's messages; None is the end. A thread reads them, so that Ctrl-C splits none."""
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                told.put(connection.recv())
        except (EOFError, OSError):
            pass
        except Exception as cause:  # unpickling needs a module that only the process has
            told.put(("raised", RunError(f"the run's process said what cannot be read here: {said_by(cause)}")))
        finally:
            told.put(None)

    threading.Thread(target=read, name="headway-messages", daemon=True).start()
    return told


def _end(process: subprocess.Popen[bytes], *, asked: bool) -> None:
    """Wait until the process is gone. A process that was ``asked`` to end may save a checkpoint first, within its run's
    limits; Ctrl-C kills it. Another one has sent its last message, and is ended by a signal after `GONE_S`.
    """
    if asked:
        process.terminate()
        try:
            process.wait()
        except KeyboardInterrupt:
            process.kill()
            raise
    # `poll` ends nothing: the first iteration only waits.
    for end in (process.poll, process.terminate, process.kill):
        end()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GONE_S)
            return


def _end_of(process: subprocess.Popen[bytes], printed: IO[bytes]) -> str:
    with suppress(subprocess.TimeoutExpired):
        process.wait(GONE_S)
    printed.seek(0)
    last = printed.read().decode(errors="replace")[-MOST_SHOWN:].strip()
    how = f"signal {-process.returncode}" if (process.returncode or 0) < 0 else f"exit code {process.returncode}"
    return f"the run's process ended without a word ({how})" + (f". It printed:\n{last}" if last else "")


def serve(descriptor: int) -> None:
    """Run the job that comes over the connection with this ``descriptor``."""
    # Otherwise each worker that the run starts would hold the caller's end open
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    sending = threading.Lock()

    def tell(kind: str, what: Any) -> None:
        with sending, suppress(OSError):  # the caller may be gone
            connection.send((kind, what))

    try:
        # Only now: during the imports Ctrl-C ends the process by the signal itself, without a traceback
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with terminations_as_interrupts():
            job, in_a_cell = connection.recv()
            _end_with_the_caller(connection)
            cell = Cell(partial(tell, "page")) if in_a_cell else None
            try:
                result = job(cell)
            finally:
                if cell is not None:
                    cell.close()
        tell("returned", result)
    except BaseException as error:
        tell("raised", _sendable(error))
    sys.stdout.flush()


def _end_with_the_caller(connection: Connection) -> None:
    """End the job like SIGTERM once the caller's process has ended, which closes the connection."""

    def wait() -> None:
        with suppress(EOFError, OSError):
            connection.recv()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="headway-caller", daemon=True).start()


def _sendable(error: BaseException) -> BaseException:
    """Return ``error``, or one with the same message that can be unpickled with only Headway and Python installed.

    An error that is not Headway's also says where it was raised.
    """
    if not isinstance(error, HeadwayError | KeyboardInterrupt):
        error.add_note("".join(traceback.format_exception(error)))
    if type(error).__module__.partition(".")[0] in ("headway", "builtins"):
        with suppress(Exception):
            pickle.loads(pickle.dumps(error))  # an error whose constructor takes more may not come back
            return error
    sendable = RunError(said_by(error))
    for note in getattr(error, "__notes__", ()):
        sendable.add_note(note)
    return sendable
