"""What host and runner say to each other: frames over a socket.

    host   ─▶ runner:  START · JOB · ANSWER, REFUSAL (to an ask) · CANCEL · PING
    runner ─▶ host:    LOADED, FAILED (the start) · ASK · WITHDRAWN (an ask) · RESULT, ERROR (the job) · PONG
    host   ─▶ nursery: FORK (with the new runner's socket) · REAP          nursery ─▶ host: FORKED · REAPED

Payloads are pickled apart from their frames: one that does not unpickle fails its own job alone.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Callable, Iterator
from enum import IntEnum, auto
from typing import Any, NamedTuple

from headway.errors import HeadwayError, UserCodeFailed, cut, said_by
from headway.runners.redaction import Redaction

HEADER = struct.Struct("!QBIq")
CHUNK = 1 << 18
"""Most bytes that are read at once."""
MOST_SAID = 300
"""Most characters that are told of an exception of user code."""


class Kind(IntEnum):
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


KINDS = {int(kind): kind for kind in Kind}


class Frame(NamedTuple):
    """One message."""

    kind: Kind
    job: int = 0
    """Number of the job, or of the order to a nursery."""
    detail: int = 0
    """Number of an ask within its job; of a nursery's frames the process id, or how it ended."""
    payload: bytes = b""

    def packed(self) -> bytes:
        """Return the frame's bytes."""
        return HEADER.pack(len(self.payload), self.kind, self.job, self.detail) + self.payload


class Frames:
    """Decoder of a stream of frames."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add ``data``, and yield the frames that are complete."""
        self._unread += data
        begin = 0
        try:
            while len(self._unread) - begin >= HEADER.size:
                size, kind, job, detail = HEADER.unpack_from(self._unread, begin)
                end = begin + HEADER.size + size
                if len(self._unread) < end:
                    break
                payload = bytes(self._unread[begin + HEADER.size : end])
                begin = end
                yield Frame(KINDS[kind], job, detail, payload)
        finally:
            del self._unread[:begin]


class Channel:
    """One end of a connection, on the running event loop."""

    def __init__(self, sock: socket.socket, on_frame: Callable[[Frame], object], on_end: Callable[[], object]) -> None:
        """Read frames from ``sock`` from now on. ``on_end`` is called once, when the other end is closed."""
        sock.setblocking(False)
        self._sock = sock
        self._on_frame, self._on_end = on_frame, on_end
        self._loop = asyncio.get_running_loop()
        self._frames = Frames()
        self._unsent = bytearray()
        self._open = True
        self._loop.add_reader(sock, self._read)

    def send(self, frame: Frame) -> None:
        """Send ``frame``, at once as far as the socket takes it. To an end that is closed nothing is sent."""
        if not self._open:
            return
        data = memoryview(frame.packed())
        if not self._unsent:
            data = data[self._sent(data) :]
            if data:
                self._loop.add_writer(self._sock, self._send_on)
        self._unsent += data

    def send_with(self, frame: Frame, descriptor: int) -> None:
        """Send a small ``frame`` together with a file descriptor. Raises `OSError` where it cannot be sent at once."""
        socket.send_fds(self._sock, [frame.packed()], [descriptor])

    def drain(self) -> None:
        """Handle now whatever has arrived."""
        while self._open and self._read():
            pass

    def close(self) -> None:
        """Close this end. Neither callback is called any more."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()

    def _read(self) -> bool:
        """Handle one chunk. Returns False where there was none."""
        try:
            data = self._sock.recv(CHUNK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
            self._on_end()
            return False
        for frame in self._frames.feed(data):
            self._on_frame(frame)
            if not self._open:
                break
        return True

    def _sent(self, data: memoryview | bytearray) -> int:
        try:
            return self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:  # the other end has ended, which its process's end tells
            return len(data)

    def _send_on(self) -> None:
        del self._unsent[: self._sent(self._unsent)]
        if not self._unsent:
            self._loop.remove_writer(self._sock)


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
        size, kind, job, detail = HEADER.unpack(header)
        payload = self._reader.read(size) if size else b""
        return Frame(KINDS[kind], job, detail, payload) if len(payload) == size else None


def pickled_error(error: BaseException, redaction: Redaction) -> bytes:
    """Pickle what is told of ``error``: its text, and the class of Headway's that it is raised as on the other side.

    The exception itself does not travel: it may not survive pickling, or need modules that the other side lacks.
    Secrets are taken out before the text is cut, since half a secret would not be found.
    """
    for kind in type(error).__mro__:
        if issubclass(kind, HeadwayError) and kind.__module__.startswith("headway."):
            return pickle.dumps((kind, redaction.of(str(error))))
    return pickle.dumps((UserCodeFailed, cut(redaction.of(said_by(error, most=1 << 20)), MOST_SAID)))


def raised(payload: bytes) -> HeadwayError:
    """Make the error that `pickled_error` has pickled."""
    kind, text = pickle.loads(payload)
    error: HeadwayError = kind(text)
    return error


def unpickled(payload: bytes, what: str) -> Any:
    """Return the pickled value. Raises `UserCodeFailed` where it does not unpickle, with ``what`` it was."""
    try:
        return pickle.loads(payload)
    except Exception as cause:
        raise UserCodeFailed(f"{what} cannot be read by another process: {said_by(cause)}; give plain data") from cause
