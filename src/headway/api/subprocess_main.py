"""The process that carries a job out: one job, whose result or error is its last word."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from headway.api.subprocess_client import Page
from headway.errors import HeadwayError, RunError, said_by
from headway.reports.live.live_view import Cell
from headway.runtime.signals import terminations_as_interrupts


def serve(descriptor: int) -> None:
    """Carry out the job that comes over the connection with this ``descriptor``."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    told = _SubprocessOutput(connection)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with terminations_as_interrupts():
            job, in_a_cell = connection.recv()
            _end_with_the_caller(connection)
            cell = Cell(lambda page: told.send(Page(page))) if in_a_cell else None
            try:
                result = job.carry_out(cell)
            finally:
                if cell is not None:
                    cell.close()
        told.send(("returned", result))
    except BaseException as error:
        told.send(("raised", _sendable(error)))
    sys.stdout.flush()


class _SubprocessOutput:
    """Thread-safe messages to the caller. Sends nothing once the caller is gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        with self._lock, suppress(OSError):
            self._connection.send(message)


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
            pickle.loads(pickle.dumps(error))
            return error
    sendable = RunError(said_by(error))
    for note in getattr(error, "__notes__", ()):
        sendable.add_note(note)
    return sendable
