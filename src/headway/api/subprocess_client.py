"""Run a job in a subprocess, and wait for it: free of the caller's event loop, its torch and Ray, and the remains of
earlier runs.

    caller ── job ──▶ process        ──▶ pages of a cell, then the result or the error
    Ctrl-C ── SIGINT ──▶             the process is in a group of its own: a terminal sends it nothing by itself
    the caller's end ── end of file ──▶ as SIGTERM: a run finishes its version and saves
"""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, TYPE_CHECKING, Any, Protocol

from headway.errors import RunError, WorkerDied, said_by
from headway.runtime.child_python import IMPORTS_AS_HERE, python_command

if TYPE_CHECKING:
    from rich.console import Console

GONE_S = 60.0
"""Seconds within which the process ends after its last word: the run has been closed by then, whatever its size."""
MOST_SHOWN = 2_000
"""Most characters of what a process printed that are shown when it ends without a word."""

BOOT = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    f"{IMPORTS_AS_HERE}from headway.api.subprocess_main import serve; serve(int(sys.argv[1]))"
)
"""What the process runs. Until `serve` has begun, Ctrl-C ends it without a word."""


class SubprocessJob(Protocol):
    """Work for the process. It is pickled, and so is what it returns."""

    def carry_out(self, console: Console | None) -> Any:
        """Do the work and return its result, showing it on ``console``, or where the process prints."""


class Page(str):
    """Page of a cell, as HTML."""

    __slots__ = ()


def carry_out_apart(job: SubprocessJob, show: Callable[[str], None] | None) -> Any:
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
        there.close()
        try:
            here.send((job, show is not None))
            told = _messages(here)
            while True:
                try:
                    message = told.get()
                    if isinstance(message, Page):
                        if show is not None:
                            show(message)
                        continue
                except KeyboardInterrupt:
                    if process.poll() is not None:
                        raise
                    process.send_signal(signal.SIGINT)
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
