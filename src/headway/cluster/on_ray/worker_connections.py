"""Calls between workers over a socket: a message costs microseconds, instead of half a millisecond over Ray.

caller ─▶ worker: CALL, EACH (method and arguments) · LEAVE (a call)
worker ─▶ caller: RESULT (of a call) · ITEM, END (of an iteration) · ERROR (of either)

A caller first sends the worker's key, which it has from Ray, and the number of its session, which outlives a TCP
connection; the worker reads nothing else before it has seen the key. When a connection breaks, the caller opens another
one for `RECONNECT_S`. Each end tells how many frames it has received, and the other sends the rest again: each call is
executed once, and each result arrives once. Only frames of the newest connection count.

A worker cannot tell a lost caller from a late one: it cancels the calls after `SESSION_S`. Each end keeps sent frames
until the other has received them: a caller keeps the arguments of its open calls, a worker their results and up to
`KEPT_BYTES` of items, beyond which its iterations wait.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import os
import pickle
import secrets
import socket
import struct
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Any

from headway.cluster.role_host import RoleHost
from headway.config.sizing.timeouts import GREETING_S, RECONNECT_S, SESSION_S
from headway.errors import HeadwayError, said_by
from headway.runtime.frames import HEADER, Frame, FrameChannel

KEY_BYTES = 32


class CallFrameKind(IntEnum):
    """Kind of a frame. A frame's number is the number of the caller's call."""

    CALL = auto()
    EACH = auto()
    LEAVE = auto()
    RESULT = auto()
    ITEM = auto()
    END = auto()
    ERROR = auto()
    GONE = auto()
    """The caller has closed its session. Also given to the caller's own calls when the worker is gone."""
    RECEIVED = auto()
    """Number of the session's frames received so far, as detail. This frame itself is not counted."""
    REFUSED = auto()
    """The worker does not know the key or the session."""


GREETING = struct.Struct(f"!{KEY_BYTES}s16sIQ")
"""Key, session, number of the connection within it (from 1), number of frames received."""
RECEIVED_FRAMES, RECEIVED_BYTES = 64, 1 << 20
"""Number of frames, or of their bytes, after which an end acknowledges them."""
KEPT_BYTES = 1 << 26
"""Number of unacknowledged bytes at which iterations wait: more than a fast network has under way."""


class FrameSession:
    """One end of a session: numbered, acknowledged frames over one TCP connection after another."""

    def __init__(self) -> None:
        self.received = 0
        """Number of frames received so far."""
        self.has_room = asyncio.Event()
        """Event that is set while at most `KEPT_BYTES` are kept."""
        self.has_room.set()
        self._channel: FrameChannel | None = None
        self._kept: deque[Frame] = deque()
        self._kept_nbytes = 0
        self._acknowledged = 0
        self._told = 0
        self._untold_nbytes = 0

    def _on_frame(self, frame: Frame) -> None:
        """Handle a received frame."""
        raise NotImplementedError

    def _on_break(self) -> None:
        """Handle a broken connection."""
        raise NotImplementedError

    def attach(self, sock: socket.socket, received: int) -> None:
        """Continue over ``sock``, and close the previous connection. ``received``: number of frames that the other end
        has.
        """
        self.detach()
        self._forget(received)  # before the rest is sent again: the other end would execute frames twice
        self._channel = FrameChannel(sock, self._read, self._broken)
        for frame in self._kept:
            self._channel.send_soon(frame)

    def detach(self) -> None:
        """Close the connection, if there is one. Its later frames are ignored."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def send(self, frame: Frame, *, soon: bool = True) -> None:
        """Send ``frame``, now or over a later connection. ``soon``: see `FrameChannel.send_soon`."""
        self._kept.append(frame)  # also with a connection: it may break with the frame under way
        self._kept_nbytes += len(frame.payload) + HEADER.size
        if self._channel is not None:
            (self._channel.send_soon if soon else self._channel.send)(frame)
        if self._kept_nbytes > KEPT_BYTES:
            self.has_room.clear()

    def _read(self, frame: Frame) -> None:
        if frame.kind == CallFrameKind.RECEIVED:  # not counted: it is never sent again, and has no number
            self._forget(frame.detail)
            return
        self.received += 1
        self._untold_nbytes += len(frame.payload)
        self._on_frame(frame)
        if self.received - self._told >= RECEIVED_FRAMES or self._untold_nbytes >= RECEIVED_BYTES:
            self._told, self._untold_nbytes = self.received, 0
            if self._channel is not None:
                self._channel.send_soon(Frame(CallFrameKind.RECEIVED, detail=self.received))

    def _forget(self, received: int) -> None:
        while self._acknowledged < received and self._kept:
            self._kept_nbytes -= len(self._kept.popleft().payload) + HEADER.size
            self._acknowledged += 1
        if self._kept_nbytes <= KEPT_BYTES:
            self.has_room.set()

    def _broken(self) -> None:
        self._channel = None
        self._on_break()


@dataclass(frozen=True, slots=True)
class CallAddress:
    """Address at which a worker takes calls, with the key that a caller has to send."""

    host: str
    port: int
    key: bytes = field(repr=False)


class CallServer:
    """The worker's end. Runs the methods of a hosted role on the running event loop."""

    def __init__(self, host: RoleHost, interface: str) -> None:
        """Listen at ``interface``, this machine's address for callers."""
        self._host = host
        self._listening = socket.create_server((interface, 0), family=_family(interface), backlog=128)
        self._listening.setblocking(False)
        self.address = CallAddress(interface, self._listening.getsockname()[1], secrets.token_bytes(KEY_BYTES))
        self._greeting: set[asyncio.Task[None]] = set()
        self._callers: dict[bytes, _Caller] = {}
        """Callers by session."""
        asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def close(self) -> None:
        """Accept no more callers. Connected ones stay."""
        asyncio.get_running_loop().remove_reader(self._listening)
        self._listening.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the caller has gone already
            return
        task = asyncio.get_running_loop().create_task(self._greet(sock))
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)

    async def _greet(self, sock: socket.socket) -> None:
        """Serve a caller with the right key and a new or known session; refuse others."""
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(GREETING_S):
                # Nothing else is read before the key is checked: unpickling a frame can run any code.
                key, session, connection, received = GREETING.unpack(await _exactly(sock, GREETING.size))
                # In constant time: the time of `==` would reveal how many bytes of a guess are right.
                known = hmac.compare_digest(key, self.address.key)
                if not known or (caller := self._caller(session, connection)) is None:
                    await loop.sock_sendall(sock, Frame(CallFrameKind.REFUSED).packed())
                    sock.close()
                    return
        except (OSError, EOFError):  # a time-out, too
            sock.close()
            return
        _set_up(sock)
        caller.attach(sock, received)

    def _caller(self, session: bytes, connection: int) -> _Caller | None:
        """Return the caller of a session: a new one for the first connection, None for an unknown session."""
        caller = self._callers.get(session)
        if caller is None and connection == 1:
            caller = self._callers[session] = _Caller(self._host, lambda: self._callers.pop(session, None))
        if caller is None or connection <= caller.connection:
            return None  # the session has ended, or a later connection has been opened
        caller.connection = connection
        return caller


class _Caller(FrameSession):
    """One caller, as the worker sees it. Its open calls are cancelled when its session ends."""

    def __init__(self, host: RoleHost, on_end: Callable[[], object]) -> None:
        super().__init__()
        self.connection = 0
        """Number of the caller's newest connection."""
        self._host = host
        self._on_end = on_end
        self._open: dict[int, asyncio.Task[None]] = {}
        self._ending: asyncio.TimerHandle | None = None

    def attach(self, sock: socket.socket, received: int) -> None:
        """Go on over a new connection."""
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        self.detach()
        # Before any frame: the caller reads this header by itself, and only then what was kept for it.
        with suppress(OSError):  # an empty socket takes so few bytes; a broken one is noticed by the session
            sock.send(Frame(CallFrameKind.RECEIVED, detail=self.received).packed())
        super().attach(sock, received)

    def _on_break(self) -> None:
        if self._ending is None:
            self._ending = asyncio.get_running_loop().call_later(SESSION_S, self._end)

    def _end(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        self.detach()
        self._on_end()
        for task in list(self._open.values()):
            task.cancel()

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == CallFrameKind.GONE:
            self._end()
            return
        if frame.kind == CallFrameKind.LEAVE:
            if (task := self._open.get(frame.number)) is not None:
                task.cancel()
            return
        task = asyncio.get_running_loop().create_task(self._serve(frame))
        self._open[frame.number] = task
        task.add_done_callback(lambda _: self._open.pop(frame.number, None))

    async def _serve(self, frame: Frame) -> None:
        try:
            method, args = pickle.loads(frame.payload)
            if frame.kind == CallFrameKind.CALL:
                result = await self._host.call(method, *args)
                self._send(CallFrameKind.RESULT, frame.number, result)
                return
            async with aclosing(self._host.each(method, *args)) as items:
                async for item in items:
                    self._send(CallFrameKind.ITEM, frame.number, item)
                    # Wait for a caller that does not read: without this its items grew to 1 GiB, and the worker was
                    # lost.
                    await self.has_room.wait()
                    if frame.detail:
                        await asyncio.sleep(frame.detail / 1e6)
            self._send(CallFrameKind.END, frame.number, None)
        except BaseException as error:  # any error: otherwise the caller would wait for ever
            self.send(Frame(CallFrameKind.ERROR, frame.number, 0, _told(error)), soon=False)
            if not isinstance(error, Exception):
                raise

    def _send(self, kind: CallFrameKind, number: int, what: Any) -> None:
        self.send(Frame(kind, number, 0, pickle.dumps(what, pickle.HIGHEST_PROTOCOL)))


class WorkerConnection(FrameSession):
    """The caller's end, on the running event loop. Make it with `connected`."""

    def __init__(self, address: CallAddress) -> None:
        super().__init__()
        self._address = address
        self._id = secrets.token_bytes(16)
        self._connections = itertools.count(1)
        self._opening: asyncio.Task[None] | None = None
        self._open: dict[int, asyncio.Queue[Frame]] = {}
        self._last = 0
        self._why = "it has ended before"
        self.ended = False

    async def call(self, method: str, *args: Any) -> Any:
        """Return the method's result.

        Raises:
            HeadwayError: the method raised it.
            Failed: the method raised something else.
            ConnectionEnded: the worker is gone.
        """
        # Closed at once: a cancelled call must tell the worker to stop, not when the generator is collected.
        async with aclosing(self._answers(CallFrameKind.CALL, method, args)) as answers:
            return await anext(answers)

    def each(self, method: str, *args: Any, apart_s: float = 0.0) -> AsyncGenerator[Any, None]:
        """Yield the items of the worker's asynchronous generator, at least ``apart_s`` seconds apart. Closing this
        generator closes the worker's. Raises like `call`.
        """
        return self._answers(CallFrameKind.EACH, method, args, round(apart_s * 1e6))

    def close(self) -> None:
        """Leave the worker, which cancels the open calls."""
        if self._opening is not None:
            self._opening.cancel()
        self.send(Frame(CallFrameKind.GONE), soon=False)
        self._end("this end was closed")

    async def open(self) -> None:
        """Open a TCP connection of the session.

        Raises `ConnectionEnded` when another process answers, and `OSError` or `EOFError` when none does.
        """
        address = self._address
        sock = socket.socket(_family(address.host), socket.SOCK_STREAM)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        # A number for each attempt: the worker refuses an earlier one that arrives late.
        greeting = GREETING.pack(address.key, self._id, next(self._connections), self.received)
        try:
            async with asyncio.timeout(GREETING_S):
                await loop.sock_connect(sock, (address.host, address.port))
                await loop.sock_sendall(sock, greeting)
                _, kind, _, received = HEADER.unpack(await _exactly(sock, HEADER.size))
            if kind != CallFrameKind.RECEIVED:
                raise ConnectionEnded(f"{_place(address)} does not know this caller: another process listens there")
        except BaseException:  # cancelled, too, as by the time limit of `_open_again`
            sock.close()
            raise
        _set_up(sock)
        self.attach(sock, received)

    async def _open_again(self) -> None:
        """Try to reopen the broken connection until the worker is known to be gone or `RECONNECT_S` are over."""
        place, why, wait_s = _place(self._address), "", 0.05
        try:
            async with asyncio.timeout(RECONNECT_S):
                while True:
                    try:
                        return await self.open()
                    # The worker's process has ended. Further attempts would only delay its replacement.
                    except ConnectionRefusedError:
                        return self._end(f"the connection to {place} broke, and nothing listens there any more")
                    except ConnectionEnded as error:
                        return self._end(f"the connection to {place} broke: {error}")
                    except (OSError, EOFError) as error:
                        why = f": {said_by(error)}"
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, 1.0)
        except TimeoutError:
            self._end(
                f"the connection to {place} broke, and process {os.getpid()} on {socket.gethostname()} could not open "
                f"it again within {RECONNECT_S:g} s{why}"
            )

    async def _answers(
        self, kind: CallFrameKind, method: str, args: tuple[Any, ...], detail: int = 0
    ) -> AsyncGenerator[Any, None]:
        if self.ended:
            raise ConnectionEnded(self._why)
        asked = pickle.dumps((method, args), pickle.HIGHEST_PROTOCOL)  # before the call is entered: it may raise
        self._last += 1
        number = self._last
        frames = self._open[number] = asyncio.Queue()
        self.send(Frame(kind, number, detail, asked))
        over = False
        try:
            while True:
                frame = await frames.get()
                over = frame.kind != CallFrameKind.ITEM
                match frame.kind:
                    case CallFrameKind.END:
                        return
                    case CallFrameKind.GONE:
                        raise ConnectionEnded(self._why)
                    case CallFrameKind.ERROR:
                        error = _unpickled(frame.payload)
                        raise error if isinstance(error, HeadwayError) else CallFailed(error)
                yield _unpickled(frame.payload)
                if over:  # a RESULT is the only answer of its call
                    return
        finally:
            del self._open[number]
            if not over and not self.ended:
                self.send(Frame(CallFrameKind.LEAVE, number), soon=False)

    def _on_frame(self, frame: Frame) -> None:
        if (frames := self._open.get(frame.number)) is not None:  # else it was left
            frames.put_nowait(frame)

    def _on_break(self) -> None:
        self._opening = asyncio.get_running_loop().create_task(self._open_again())

    def _end(self, why: str) -> None:
        self.ended, self._why = True, why
        self.detach()
        for frames in self._open.values():
            frames.put_nowait(Frame(CallFrameKind.GONE))


class ConnectionEnded(Exception):
    """Error for a connection to a worker that has ended or cannot be made."""


class CallFailed(Exception):
    """Error for a method that raised an error other than Headway's, with its text."""


async def connected(address: CallAddress) -> WorkerConnection:
    """Connect to the worker at ``address``. Raises `ConnectionEnded` where nothing answers there."""
    connection = WorkerConnection(address)
    try:
        await connection.open()
    except (OSError, EOFError) as error:  # a time-out, too
        number = getattr(error, "errno", None)
        why = os.strerror(number) if number else str(error) or f"no answer within {GREETING_S:g} s"
        raise ConnectionEnded(
            f"no connection to {_place(address)}: {why}. The run's processes call each other on ports that the system "
            "chooses; a firewall between its machines must let them through"
        ) from error
    return connection


async def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    """Return the next ``nbytes``. Raises `EOFError` if the other end closes earlier."""
    read = b""
    while len(read) < nbytes:
        more = await asyncio.get_running_loop().sock_recv(sock, nbytes - len(read))
        if not more:
            raise EOFError("the other end was closed")
        read += more
    return read


def _place(address: CallAddress) -> str:
    return f"{address.host}, port {address.port}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _set_up(sock: socket.socket) -> None:
    """Send small messages at once, and notice within a minute if the other end of an idle connection is gone. For a
    busy connection TCP retries for many minutes, and the driver's watch of machines notices first.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _told(error: BaseException) -> bytes:
    """Pickle ``error`` if it is Headway's and can be unpickled, otherwise its text."""
    if isinstance(error, HeadwayError):
        with suppress(Exception):
            pickled = pickle.dumps(error)
            pickle.loads(pickled)  # some errors can be pickled and not unpickled: `__init__` takes other arguments
            return pickled
    return pickle.dumps(said_by(error))


def _unpickled(payload: bytes) -> Any:
    try:
        return pickle.loads(payload)
    except Exception as error:
        raise CallFailed(f"its answer cannot be read here: {said_by(error)}") from error
