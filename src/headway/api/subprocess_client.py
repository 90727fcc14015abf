"""Run a job in a subprocess, and wait for it: free of the caller's event loop, its torch and Ray, and the remains of
earlier runs.

    caller ── job ──▶ process        ──▶ pages of a cell, then the result or the error
    Ctrl-C ── SIGINT ──▶             the process is in a group of its own: a terminal sends it nothing by itself
    the caller's end ── end of file ──▶ as SIGTERM: a run finishes its version and saves

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
"""Seconds within which the process ends after its last word: the run has been closed by then, whatever its size."""
MOST_SHOWN = 2_000
"""Most characters of what a process printed that are shown when it ends without a word."""

BOOT = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    f"{IMPORTS_AS_HERE}from headway.api.subprocess_client import serve; serve(int(sys.argv[1]))"
)
"""What the process runs. Until `serve` has begun, Ctrl-C ends it without a word."""


Job = Callable[["Console | None"], Any]
"""Work for the process, which shows it on a console, or where it prints. It is pickled, and so is what it returns."""


def carry_out_apart(job: Job, show: Callable[[str], None] | None) -> Any:
    """Carry out ``job`` in a subprocess, and return its result.

    ``show`` gets pages of HTML, each in the place of the one before; without it the process prints where this one does.

    Raises:
        WorkerDied: the process ended without a word.
        KeyboardInterrupt: the job was left at once. Until then each Ctrl-C is passed on to it.
        Whatever the job raises.
    """
    here, there = Pipe()
    with tempfile.TemporaryFile() as printed:
        process, over = _start(there, printed if show is not None else None), False
        # This process's copy: with it open, the end of the other process would never read as end of file
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
                    # It is in a group of its own, so the terminal has not sent it one.
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
    """Return what the process says, read by a thread, so that Ctrl-C cuts no message in two. None is the end."""
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                told.put(connection.recv())
        except (EOFError, OSError):
            pass
        except Exception as cause:  # what was said needs a module that only the process has
            told.put(("raised", RunError(f"the run's process said what cannot be read here: {said_by(cause)}")))
        finally:
            told.put(None)

    threading.Thread(target=read, name="headway-messages", daemon=True).start()
    return told


def _end(process: subprocess.Popen[bytes], *, asked: bool) -> None:
    """Wait until the process is gone. One that is ``asked`` to end may save a checkpoint first, within its run's
    limits, and Ctrl-C kills it. One that has said its last word is ended after `GONE_S`.
    """
    if asked:
        process.terminate()
        try:
            process.wait()
        except KeyboardInterrupt:
            process.kill()
            raise
    # `poll` ends nothing: the first turn only waits.
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
    """Carry out the job that comes over the connection with this ``descriptor``."""
    # Else each worker that the run starts would hold the caller's end open
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    sending = threading.Lock()

    def tell(kind: str, what: Any) -> None:
        with sending, suppress(OSError):  # the caller may be gone
            connection.send((kind, what))

    try:
        # Not before: during the imports Ctrl-C ends the process by the signal itself, without a traceback
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
    """Have the job end as SIGTERM ends it when the caller's process has ended: it says nothing further until then."""

    def wait() -> None:
        with suppress(EOFError, OSError):
            connection.recv()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="headway-caller", daemon=True).start()


def _sendable(error: BaseException) -> BaseException:
    """Return ``error``, or one that says the same and can be read where only Headway and Python are known.

    One that is not Headway's says where it was raised.
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
