"""Protocol between host and worker: frames over a socket.

    host   ─▶ worker:  START · JOB · ANSWER, REFUSAL (to an ask) · CANCEL · PING
    worker ─▶ host:    LOADED, FAILED (the start) · ASK · WITHDRAWN (an ask) · RESULT, ERROR (the job) · PONG
    host   ─▶ fork server: FORK (with the new worker's socket) · REAP          fork server ─▶ host: FORKED · REAPED

A frame's number is that of the job, or of the order to a fork server. Its detail is the number of an ask within its
job; in a fork server's frames it is the process id, or how the process ended.

Payloads are pickled apart from their frames: one that does not unpickle fails its own job alone.
"""

from __future__ import annotations

import os
import pickle
import re
import socket
from enum import IntEnum, auto
from typing import Any

from headway.errors import HeadwayError, UserCodeFailed, cut, said_by
from headway.runtime.frames import HEADER, Frame
from headway.runtime.workers.redaction import Redaction

MOST_SAID = 300
"""Most characters that are told of an exception of user code."""


class FrameKind(IntEnum):
    """The meaning of a frame."""

    START = auto()
    LOADED = auto()
    FAILED = auto()
    JOB = auto()
    ASK = auto()
    WITHDRAWN = auto()
    ANSWER = auto()
    REFUSAL = auto()
    RESULT = auto()
    ERROR = auto()
    CANCEL = auto()
    PING = auto()
    PONG = auto()
    FORK = auto()
    FORKED = auto()
    REAP = auto()
    REAPED = auto()


class BlockingChannel:
    """One end of a connection in a process without an event loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self.sock = sock
        self._reader = sock.makefile("rb")

    def send(self, frame: Frame) -> None:
        """Send ``frame``. Raises `OSError` where the connection is gone."""
        self.sock.sendall(frame.packed())

    def receive(self) -> Frame | None:
        """Wait for the next frame. Returns None when the other end is closed."""
        header = self._reader.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        size, kind, number, detail = HEADER.unpack(header)
        payload = self._reader.read(size) if size else b""
        return Frame(kind, number, detail, payload) if len(payload) == size else None


def pickled_error(error: BaseException, redaction: Redaction) -> bytes:
    """Pickle the text of ``error``, and the class of Headway's that it is raised as on the other side.

    The exception itself does not travel: it may not survive pickling, or need modules that the other side lacks.
    Secrets are taken out before the text is cut, since half a secret would not be found.
    """
    for kind in type(error).__mro__:
        if issubclass(kind, HeadwayError) and kind.__module__.startswith("headway."):
            return pickle.dumps((kind, redaction.of(str(error))))
    return pickle.dumps((UserCodeFailed, cut(redaction.of(said_by(error, most=1 << 20)), MOST_SAID)))


def raised(payload: bytes) -> HeadwayError:
    """Make the error that `pickled_error` has pickled; of a variable that user code was not given it says how to."""
    kind, text = pickle.loads(payload)
    missing = re.search(r"KeyError: '(\w+)'", text)
    if missing is not None and (name := missing[1]) in os.environ:
        text = f"{text}; user code does not get your variable {name}: pass it on by agent.env={{{name}: {name}}}"
    error: HeadwayError = kind(text)
    return error


def unpickled(payload: bytes, what: str) -> Any:
    """Return the pickled value. Raises `UserCodeFailed` where it does not unpickle, with ``what`` it was."""
    try:
        return pickle.loads(payload)
    except Exception as cause:
        raise UserCodeFailed(f"{what} cannot be read by another process: {said_by(cause)}; give plain data") from cause
