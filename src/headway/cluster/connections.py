"""Calls of one worker by another over a socket, where a message must cost microseconds: Ray's costs half a millisecond.

caller ─▶ worker: CALL, EACH (method and arguments) · LEAVE (a call)
worker ─▶ caller: RESULT (of a call) · ITEM, END (of an iteration) · ERROR (of either)

A caller begins with the worker's key, which Ray has brought to it: nothing else of what comes is read before. Behind it
stands its session, which outlives a TCP connection. The caller opens a broken one again, each end tells how many frames
it has received, and the other sends the rest once more: each call is executed once, each result arrives once. The
connection that was opened last is the only one whose frames count.
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
from headway.config.timeouts import RECONNECT_S, SESSION_S
from headway.errors import HeadwayError, said_by
from headway.frames import HEADER, Channel, Frame

KEY_BYTES = 32
GREETING_S = 30.0
"""Seconds for a connection to be made, and for its caller to give the key."""


class Kind(IntEnum):
    """The meaning of a frame, whose number is that of a call of its caller's."""

    CALL = auto()
    EACH = auto()
    LEAVE = auto()
    RESULT = auto()
    ITEM = auto()
    END = auto()
    ERROR = auto()
    GONE = auto()
    """The caller has closed its session; at the caller: the worker is gone."""
    RECEIVED = auto()
    """So many frames of the session have been received (detail). Counts as none of them."""
    REFUSED = auto()
    """The worker does not know the key or the session."""


GREETING = struct.Struct(f"!{KEY_BYTES}s16sIQ")
"""Key, session, number of the connection within it (from 1), number of frames received."""
RECEIVED_FRAMES, RECEIVED_BYTES = 64, 1 << 20
"""Frames and bytes after which the other end is told that they were received: it keeps hardly more than these."""
KEPT_BYTES = 1 << 30
"""Most bytes that an end keeps for the other while there is no connection."""


class Session:
    """One end's numbered, acknowledged frames, over one TCP connection after another."""

    def __init__(self, on_frame: Callable[[Frame], object], on_break: Callable[[], object]) -> None:
        """``on_break`` is called when the connection has broken, or too much is kept for the next one."""
        self.received = 0
        """Number of frames received so far."""
        self.too_much = False
        """More than `KEPT_BYTES` are kept while there is no connection."""
        self._on_frame, self._on_break = on_frame, on_break
        self._channel: Channel | None = None
        self._kept: deque[Frame] = deque()
        self._kept_nbytes = 0
        self._acknowledged = 0
        self._told = 0
        self._untold_nbytes = 0

    def attach(self, sock: socket.socket, received: int) -> None:
        """Go on over ``sock``, whose other end has ``received`` so many frames. The connection before it is closed."""
        self.detach()
        self._forget(received)
        self._channel = Channel(sock, self._read, self._broken)
        for frame in self._kept:
            self._channel.send_soon(frame)

    def detach(self) -> None:
        """Close the connection, if there is one. Nothing more of it counts."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def send(self, frame: Frame, *, soon: bool = True) -> None:
        """Send ``frame`` once, now or over a later connection; ``soon``: see `Channel.send_soon`."""
        self._kept.append(frame)
        self._kept_nbytes += len(frame.payload) + HEADER.size
        if self._channel is not None:
            (self._channel.send_soon if soon else self._channel.send)(frame)
        elif self._kept_nbytes > KEPT_BYTES and not self.too_much:
            self.too_much = True
            self._on_break()

    def _read(self, frame: Frame) -> None:
        if frame.kind == Kind.RECEIVED:
            self._forget(frame.detail)
            return
        self.received += 1
        self._untold_nbytes += len(frame.payload)
        self._on_frame(frame)
        if self.received - self._told >= RECEIVED_FRAMES or self._untold_nbytes >= RECEIVED_BYTES:
            self._told, self._untold_nbytes = self.received, 0
            if self._channel is not None:
                self._channel.send_soon(Frame(Kind.RECEIVED, detail=self.received))

    def _forget(self, received: int) -> None:
        while self._acknowledged < received and self._kept:
            self._kept_nbytes -= len(self._kept.popleft().payload) + HEADER.size
            self._acknowledged += 1

    def _broken(self) -> None:
        self._channel = None
        self._on_break()


@dataclass(frozen=True, slots=True)
class CallAddress:
    """Address at which a worker takes calls, with the key that a caller has to give."""

    host: str
    port: int
    key: bytes = field(repr=False)


class CallServer:
    """The worker's end: it runs the methods of a hosted role, on the running event loop."""

    def __init__(self, host: RoleHost, interface: str) -> None:
        """``interface``: this machine's address for callers."""
        self._host = host
        self._listening = socket.create_server((interface, 0), family=_family(interface), backlog=128)
        self._listening.setblocking(False)
        self.address = CallAddress(interface, self._listening.getsockname()[1], secrets.token_bytes(KEY_BYTES))
        self._greeting: set[asyncio.Task[None]] = set()
        self._callers: dict[bytes, _Caller] = {}
        """Callers by their sessions"""
        asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def close(self) -> None:
        """Take no more callers. Those that are there stay."""
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
        """Serve a caller that knows the key and whose session is new or known here; refuse any other."""
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(GREETING_S):
                told = await _exactly(sock, KEY_BYTES)
                known = hmac.compare_digest(told, self.address.key)
                if known:
                    told += await _exactly(sock, GREETING.size - KEY_BYTES)
                    _, session, connection, received = GREETING.unpack(told)
                    caller = self._caller(session, connection)
                if not known or caller is None:
                    await loop.sock_sendall(sock, Frame(Kind.REFUSED).packed())
                    sock.close()
                    return
        except (OSError, EOFError):  # a time-out, too
            sock.close()
            return
        _set_up(sock)
        caller.attach(sock, received)

    def _caller(self, session: bytes, connection: int) -> _Caller | None:
        """Return the caller of a session: a new one for its first connection, None where it is not known."""
        caller = self._callers.get(session)
        if caller is None and connection == 1:
            caller = self._callers[session] = _Caller(self._host, lambda: self._callers.pop(session, None))
        if caller is None or connection <= caller.connection:
            return None  # the session has ended, or a later connection has been opened
        caller.connection = connection
        return caller


class _Caller:
    """One caller of a worker, until its session ends: then its open calls are cancelled."""

    def __init__(self, host: RoleHost, on_end: Callable[[], object]) -> None:
        self.connection = 0
        """Number of its last connection."""
        self._host = host
        self._on_end = on_end
        self._open: dict[int, asyncio.Task[None]] = {}
        self._session = Session(self._on_frame, self._on_break)
        self._ending: asyncio.TimerHandle | None = None

    def attach(self, sock: socket.socket, received: int) -> None:
        """Go on over a new connection."""
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        self._session.detach()
        with suppress(OSError):  # an empty socket takes so few bytes; a broken one is noticed by the session
            sock.send(Frame(Kind.RECEIVED, detail=self._session.received).packed())
        self._session.attach(sock, received)

    def _on_break(self) -> None:
        if self._session.too_much:
            self._end()
        elif self._ending is None:
            self._ending = asyncio.get_running_loop().call_later(SESSION_S, self._end)

    def _end(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        self._session.detach()
        self._on_end()
        for task in list(self._open.values()):
            task.cancel()

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == Kind.GONE:
            self._end()
            return
        if frame.kind == Kind.LEAVE:
            if (task := self._open.get(frame.number)) is not None:
                task.cancel()
            return
        task = asyncio.get_running_loop().create_task(self._serve(frame))
        self._open[frame.number] = task
        task.add_done_callback(lambda _: self._open.pop(frame.number, None))

    async def _serve(self, frame: Frame) -> None:
        try:
            method, args = pickle.loads(frame.payload)
            if frame.kind == Kind.CALL:
                result = await self._host.call(method, *args)
                self._send(Kind.RESULT, frame.number, result)
                return
            async with aclosing(self._host.stream(method, *args)) as items:
                async for item in items:
                    self._send(Kind.ITEM, frame.number, item)
                    if frame.detail:
                        await asyncio.sleep(frame.detail / 1e6)
            self._send(Kind.END, frame.number, None)
        except BaseException as error:  # whatever it is, a caller that is still there has to hear of it
            self._session.send(Frame(Kind.ERROR, frame.number, 0, _told(error)), soon=False)
            if not isinstance(error, Exception):
                raise

    def _send(self, kind: Kind, number: int, what: Any) -> None:
        self._session.send(Frame(kind, number, 0, pickle.dumps(what, pickle.HIGHEST_PROTOCOL)))


class Connection:
    """The caller's end, on the running event loop. Make it with `connected`."""

    def __init__(self, address: CallAddress) -> None:
        self._address = address
        self._id = secrets.token_bytes(16)
        self._session = Session(self._on_frame, self._on_break)
        self._connections = itertools.count(1)
        self._opening: asyncio.Task[None] | None = None
        self._open: dict[int, asyncio.Queue[Frame]] = {}
        self._last = 0
        self._why = "it has ended before"
        self.ended = False

    async def call(self, method: str, *args: Any) -> Any:
        """Return the method's result. Raises the `HeadwayError` that it raised, `Failed` for anything else, and
        `ConnectionEnded` where the worker is gone.
        """
        async with aclosing(self._answers(Kind.CALL, method, args)) as answers:
            return await anext(answers)

    def each(self, method: str, *args: Any, apart_s: float = 0.0) -> AsyncGenerator[Any, None]:
        """Yield what the method, an asynchronous generator, yields, ``apart_s`` seconds apart or more. Leaving it ends
        it there. Raises as `call` does.
        """
        return self._answers(Kind.EACH, method, args, round(apart_s * 1e6))

    def close(self) -> None:
        """Leave the worker, which cancels the calls that are open."""
        if self._opening is not None:
            self._opening.cancel()
        self._session.send(Frame(Kind.GONE), soon=False)
        self._end("this end was closed")

    async def open(self) -> None:
        """Open a TCP connection of the session. Raises `ConnectionEnded` where nothing answers, or not as it should."""
        address = self._address
        sock = socket.socket(_family(address.host), socket.SOCK_STREAM)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        greeting = GREETING.pack(address.key, self._id, next(self._connections), self._session.received)
        try:
            async with asyncio.timeout(GREETING_S):
                await loop.sock_connect(sock, (address.host, address.port))
                await loop.sock_sendall(sock, greeting)
                _, kind, _, received = HEADER.unpack(await _exactly(sock, HEADER.size))
            if kind != Kind.RECEIVED:
                raise ConnectionEnded(f"{_place(address)} does not know this caller: another process listens there")
        except BaseException:
            sock.close()
            raise
        _set_up(sock)
        self._session.attach(sock, received)

    async def _open_again(self) -> None:
        """Open the broken connection again, at growing distances, unless the worker is gone."""
        place, why, wait_s = _place(self._address), "", 0.05
        try:
            async with asyncio.timeout(RECONNECT_S):
                while True:
                    try:
                        return await self.open()
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
                f"the connection to {place} broke, and process {os.getpid()} on {socket.gethostname()} waited "
                f"{RECONNECT_S:g} s to open it again{why}"
            )

    async def _answers(
        self, kind: Kind, method: str, args: tuple[Any, ...], detail: int = 0
    ) -> AsyncGenerator[Any, None]:
        if self.ended:
            raise ConnectionEnded(self._why)
        asked = pickle.dumps((method, args), pickle.HIGHEST_PROTOCOL)
        self._last += 1
        number = self._last
        frames = self._open[number] = asyncio.Queue()
        self._session.send(Frame(kind, number, detail, asked))
        over = False
        try:
            while True:
                frame = await frames.get()
                over = frame.kind != Kind.ITEM
                match frame.kind:
                    case Kind.END:
                        return
                    case Kind.GONE:
                        raise ConnectionEnded(self._why)
                    case Kind.ERROR:
                        error = _unpickled(frame.payload)
                        raise error if isinstance(error, HeadwayError) else Failed(error)
                yield _unpickled(frame.payload)
                if over:
                    return
        finally:
            del self._open[number]
            if not over and not self.ended:
                self._session.send(Frame(Kind.LEAVE, number), soon=False)

    def _on_frame(self, frame: Frame) -> None:
        if (frames := self._open.get(frame.number)) is not None:  # else it was left
            frames.put_nowait(frame)

    def _on_break(self) -> None:
        if self._session.too_much:
            if self._opening is not None:
                self._opening.cancel()
            self._end(f"more than {KEPT_BYTES >> 20} MiB wait for a connection to {_place(self._address)}, which broke")
        else:
            self._opening = asyncio.get_running_loop().create_task(self._open_again())

    def _end(self, why: str) -> None:
        self.ended, self._why = True, why
        self._session.detach()
        for frames in self._open.values():
            frames.put_nowait(Frame(Kind.GONE))


class ConnectionEnded(Exception):
    """The connection to a worker has ended, or cannot be made."""


class Failed(Exception):
    """The method has failed with something else than an error of Headway's. The text says with what."""


async def connected(address: CallAddress) -> Connection:
    """Connect to the worker at ``address``. Raises `ConnectionEnded` where nothing answers there."""
    connection = Connection(address)
    try:
        await connection.open()
    except (OSError, EOFError) as error:  # a time-out, too
        number = getattr(error, "errno", None)
        why = os.strerror(number) if number else said_by(error) or f"no answer within {GREETING_S:g} s"
        if isinstance(error, TimeoutError) and not number:
            why = f"no answer within {GREETING_S:g} s"
        raise ConnectionEnded(
            f"no connection to {_place(address)}: {why}. The run's processes call each other on "
            "ports that the system chooses, which a firewall between its machines must let through"
        ) from error
    return connection


async def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    """Return the next ``nbytes``. Raises `EOFError` where the other end is closed before."""
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
    """Send small messages at once, and notice another end that is silently gone within a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # not everywhere
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _told(error: BaseException) -> bytes:
    """Pickle ``error`` if it is Headway's and can be read again, and else what it says."""
    if isinstance(error, HeadwayError):
        with suppress(Exception):
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
            return pickled
    return pickle.dumps(said_by(error))


def _unpickled(payload: bytes) -> Any:
    try:
        return pickle.loads(payload)
    except Exception as error:
        raise Failed(f"what it answers cannot be read here: {said_by(error)}") from error
