"""Frames over a socket: messages between Headway's processes that cost only microseconds.

    header: size of the payload, kind, number, detail  │  payload

The users of a connection define the kinds, and the meaning of numbers and payloads.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import NamedTuple

HEADER = struct.Struct("!QBIq")
CHUNK = 1 << 18
"""Maximum number of bytes of one read."""


class Frame(NamedTuple):
    """One message."""

    kind: int
    number: int = 0
    detail: int = 0
    payload: bytes = b""

    def packed(self) -> bytes:
        """Return the frame's bytes."""
        return HEADER.pack(len(self.payload), self.kind, self.number, self.detail) + self.payload


class FrameChannel:
    """One end of a connection, on the running event loop."""

    def __init__(self, sock: socket.socket, on_frame: Callable[[Frame], object], on_end: Callable[[], object]) -> None:
        """Read frames from ``sock`` from now on. ``on_end`` is called once, when the other end is closed."""
        sock.setblocking(False)
        self._sock = sock
        self._on_frame, self._on_end = on_frame, on_end
        self._loop = asyncio.get_running_loop()
        self._unread = bytearray()
        self._gathered: list[bytes] = []
        """Frames that are sent together at the end of this loop turn."""
        self._unsent = bytearray()
        self.is_open = True
        """True while neither end is known to be closed."""
        self._loop.add_reader(sock, self._read)

    def send(self, frame: Frame) -> None:
        """Send ``frame``, at once as far as the socket takes it. Nothing is sent to a closed end."""
        self._gathered.append(frame.packed())  # after the frames sent before in this turn
        self._send_gathered()

    def send_soon(self, frame: Frame) -> None:
        """Send ``frame`` at the end of this turn of the loop, with all others of the turn: the other end wakes up once.

        A blocked or ending loop sends nothing: use this only where no code blocks the loop.
        """
        if self.is_open:
            if not self._gathered:
                self._loop.call_soon(self._send_gathered)
            self._gathered.append(frame.packed())

    def send_with(self, frame: Frame, descriptor: int) -> None:
        """Send a small ``frame`` together with a file descriptor. Raises `OSError` if it cannot be sent at once."""
        self._send_gathered()  # first: these frames come before this one
        socket.send_fds(self._sock, [frame.packed()], [descriptor])

    def drain(self) -> None:
        """Handle all frames that have arrived."""
        while self.is_open and self._read():
            pass

    def close(self) -> None:
        """Close this end. Neither callback is called any more."""
        if self.is_open:
            # Before the channel counts as closed: otherwise the last frames of this turn would be dropped.
            self._send_gathered()
            self.is_open = False
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()

    def _read(self) -> bool:
        """Handle one chunk. Returns False if there was none."""
        try:
            data = self._sock.recv(CHUNK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            # Closed before the callback, so that `is_open` is right in it.
            self.close()
            self._on_end()
            return False
        self._unread += data
        # Checked for each frame: the handler of one may close this end.
        while self.is_open and (frame := self._next()) is not None:
            self._on_frame(frame)
        return True

    def _next(self) -> Frame | None:
        """Take a complete frame from the bytes read; None if there is none."""
        if len(self._unread) < HEADER.size:
            return None
        size, kind, number, detail = HEADER.unpack_from(self._unread)
        end = HEADER.size + size
        if len(self._unread) < end:
            return None
        frame = Frame(kind, number, detail, bytes(self._unread[HEADER.size : end]))
        del self._unread[:end]
        return frame

    def _send_gathered(self) -> None:
        # A view: slicing bytes would copy the rest of a large frame at each send.
        unsent = memoryview(b"".join(self._gathered))
        self._gathered = []
        if not (unsent and self.is_open):
            return
        if not self._unsent:
            unsent = unsent[self._sent(unsent) :]
            if unsent:
                self._loop.add_writer(self._sock, self._send_on)
        # Also while older bytes wait: a frame sent before them would land in the middle of another.
        self._unsent += unsent

    def _sent(self, data: memoryview | bytearray) -> int:
        try:
            return self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:  # the other end has ended, as its process's exit shows
            return len(data)

    def _send_on(self) -> None:
        del self._unsent[: self._sent(self._unsent)]
        if not self._unsent:
            self._loop.remove_writer(self._sock)
