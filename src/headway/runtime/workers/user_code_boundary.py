"""The boundary between a worker process and its user code, and the protocol between host and worker.

class Echo:                                             # lives in the worker process: `Hosted`
    def describe(self): return "an echo"
    async def serve(self, job, ask): return await ask(job)
    async def close(self): pass

@dataclass(frozen=True)
class EchoSpec:                                         # travels to the process: `HostedSpec`
    shown: str = "echo.py:echo"
    def load(self): return Echo()

Frames over a socket:

    host   ─▶ worker:  START · JOB · ANSWER, REFUSAL (to an ask) · CANCEL · PING
    worker ─▶ host:    LOADED, FAILED (the start) · ASK · WITHDRAWN (an ask) · RESULT, ERROR (the job) · PONG
    host   ─▶ fork server: FORK (with the new worker's socket) · REAP          fork server ─▶ host: FORKED · REAPED

A frame's number is that of the job, or of the order to a fork server. Its detail is the number of an ask within its
job; in a fork server's frames it is the process id, or how the process ended. Payloads are pickled separately from
their frames: a payload that does not unpickle fails only its own job.

Everything imported here is imported in each worker: keep it light.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import socket
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any, Protocol

from headway.errors import HeadwayError, UserCodeFailed, cut, said_by
from headway.runtime.frames import HEADER, Frame
from headway.runtime.workers.redaction import Redaction

Ask = Callable[[Any], Awaitable[Any]]
"""Function that sends the host a picklable message, and returns the host's answer."""


class Hosted(Protocol):
    """Loaded user code in a worker process, which serves jobs."""

    def describe(self) -> Any:
        """Return a picklable description of the user's code, which the host gets at the start."""

    async def serve(self, job: Any, ask: Ask) -> Any:
        """Do ``job`` and return its result. The result must pickle, and unpickle without the user's modules.

        With concurrent jobs in a process this runs on the process's event loop, and one job may have several open asks.
        With one job at a time there is no event loop, so that synchronous code may run its own: then this may await
        only ``ask``. Global random generators are seeded here, as the job says.

        ``ask`` raises the `HeadwayError` that the host answers with. Exceptions of this call end the job, not the
        process: a `HeadwayError` as itself, any other as `UserCodeFailed` with its text.
        """

    async def close(self) -> None:
        """Close the user code's resources before an orderly end of its process. It has a few seconds."""


class HostedSpec(Protocol):
    """A picklable description of user code that can load it."""

    @property
    def shown(self) -> str:
        """The name of the user's code in messages, such as ``reward.py:score``."""

    def load(self) -> Hosted:
        """Load the code, in the worker process. Raises `UserError` if it cannot be used."""


async def closed(hosted: Hosted) -> None:
    """Call ``close`` of the user's code, if it has one. In a process without an event loop this awaits nothing."""
    try:
        await hosted.close()
    except (Exception, SystemExit):
        print_traceback()


def print_traceback() -> None:
    """Print the exception being handled, unless user code has closed stderr."""
    with suppress(OSError, ValueError):
        traceback.print_exc()


def closed_in_children(sock: socket.socket) -> socket.socket:
    """Return ``sock``, the worker's connection, which forked children of user code now close as they begin.

    A child that user code lets return would answer the host a second time: it ends before it can.
    """

    def close() -> None:
        with suppress(OSError):  # the child of a child
            # Not `sock.close()`, which has no effect while the reader from `makefile` is open.
            os.close(sock.detach())

    os.register_at_fork(after_in_child=close)
    return sock


@contextmanager
def killed_after(seconds: float) -> Iterator[None]:
    """Let the kernel end this process if the block takes longer than ``seconds``.

    The alarm's default action needs no interpreter: it also ends a call that never returns to it (a regular expression
    that backtracks for ever). The host reads the signal from the exit status. If a call replaces the alarm, only the
    host's limit on the job is left.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # each time: user code may have set its own handler
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        # Also after a failure: a leftover alarm would kill the worker in its next job.
        signal.setitimer(signal.ITIMER_REAL, 0)


MOST_SAID = 300
"""Maximum number of characters of the message of an exception in user code."""


FrameKind = IntEnum(
    "FrameKind",
    "START LOADED FAILED JOB ASK WITHDRAWN ANSWER REFUSAL RESULT ERROR CANCEL PING PONG FORK FORKED REAP REAPED",
)
"""The meaning of a frame."""


class BlockingChannel:
    """One end of a connection in a process without an event loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self.sock = sock
        self._reader = sock.makefile("rb")

    def send(self, frame: Frame) -> None:
        """Send ``frame``. Raises `OSError` if the connection is gone."""
        if self.sock.fileno() < 0:  # by `closed_in_children`: this is a forked child that user code let return
            os._exit(0)
        self.sock.sendall(frame.packed())

    def receive(self) -> Frame | None:
        """Wait for the next frame. Returns None when the other end is closed."""
        header = self._reader.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        size, kind, number, detail = HEADER.unpack(header)
        payload = self._reader.read(size) if size else b""
        # A short payload means the end of the connection, not a frame.
        return Frame(kind, number, detail, payload) if len(payload) == size else None


def pickled_error(error: BaseException, redaction: Redaction) -> bytes:
    """Pickle the text of ``error``, and Headway's class with which the other side raises it.

    The exception itself is not sent: it may not survive pickling, or need modules that the other side lacks.
    """
    # A user's subclass of Headway's errors is sent as Headway's class: the host cannot import the user's.
    for kind in type(error).__mro__:
        if issubclass(kind, HeadwayError) and kind.__module__.startswith("headway."):
            return pickle.dumps((kind, redaction.of(str(error))))
    return pickle.dumps((UserCodeFailed, said_without_secrets(error, redaction)))


def said_without_secrets(error: BaseException, redaction: Redaction) -> str:
    """Describe ``error`` in one line. Secrets are removed before the text is cut: half a secret would not be found."""
    return cut(redaction.of(said_by(error, most=1 << 20)), MOST_SAID)


def raised(payload: bytes) -> HeadwayError:
    """Return the error that `pickled_error` pickled, with advice if user code lacks an environment variable."""
    kind, text = pickle.loads(payload)
    missing = re.search(r"KeyError: '(\w+)'", text)
    if missing is not None and (name := missing[1]) in os.environ:
        text = f"{text}; user code does not get your variable {name}: pass it on by agent.env={{{name}: {name}}}"
    error: HeadwayError = kind(text)
    return error


def unpickled(payload: bytes, what: str) -> Any:
    """Return the pickled value. Raises `UserCodeFailed` if it does not unpickle. ``what``: its name in the message."""
    try:
        return pickle.loads(payload)
    except Exception as cause:
        raise UserCodeFailed(f"{what} cannot be read by another process: {said_by(cause)}; give plain data") from cause


def answer_in(frame: Frame) -> Any:
    """Return the host's answer to an ask. Raises the `HeadwayError` with which the host refused it."""
    if frame.kind == FrameKind.REFUSAL:
        raise pickle.loads(frame.payload)
    return unpickled(frame.payload, "the answer")
