"""Calls of one worker by another over a socket, where a message must cost microseconds: Ray's costs half a millisecond.

caller ─▶ worker: CALL, EACH (method and arguments) · LEAVE (a call)
worker ─▶ caller: RESULT (of a call) · ITEM, END (of an iteration) · ERROR (of either)

A caller begins with the worker's key, which Ray has brought to it: nothing else of what comes is read before.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import pickle
import secrets
import socket
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Any

from headway.cluster.role_host import RoleHost
from headway.errors import HeadwayError, said_by
from headway.frames import Channel, Frame

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
    """Never sent: the connection has ended."""


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
        """Serve a caller that knows the key, and close the connection of any other."""
        sock.setblocking(False)
        key = b""
        try:
            async with asyncio.timeout(GREETING_S):
                while len(key) < KEY_BYTES:
                    more = await asyncio.get_running_loop().sock_recv(sock, KEY_BYTES - len(key))
                    if not more:
                        break
                    key += more
        except (OSError, TimeoutError):
            key = b""
        if hmac.compare_digest(key, self.address.key):
            _set_up(sock)
            _Caller(self._host, sock)
        else:
            sock.close()


class _Caller:
    """One caller of a worker, until its connection ends: then its open calls are cancelled."""

    def __init__(self, host: RoleHost, sock: socket.socket) -> None:
        self._host = host
        self._open: dict[int, asyncio.Task[None]] = {}
        self._channel = Channel(sock, self._on_frame, self._on_end)

    def _on_frame(self, frame: Frame) -> None:
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
            self._channel.send(Frame(Kind.ERROR, frame.number, 0, _told(error)))
            if not isinstance(error, Exception):
                raise

    def _send(self, kind: Kind, number: int, what: Any) -> None:
        self._channel.send_soon(Frame(kind, number, 0, pickle.dumps(what, pickle.HIGHEST_PROTOCOL)))

    def _on_end(self) -> None:
        for task in list(self._open.values()):
            task.cancel()


class Connection:
    """The caller's end, on the running event loop. Make it with `connected`."""

    def __init__(self, sock: socket.socket) -> None:
        self._channel = Channel(sock, self._on_frame, self._on_end)
        self._open: dict[int, asyncio.Queue[Frame]] = {}
        self._last = 0
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
        self._channel.close()
        self._on_end()

    async def _answers(
        self, kind: Kind, method: str, args: tuple[Any, ...], detail: int = 0
    ) -> AsyncGenerator[Any, None]:
        if self.ended:
            raise ConnectionEnded("it has ended before")
        asked = pickle.dumps((method, args), pickle.HIGHEST_PROTOCOL)
        self._last += 1
        number = self._last
        frames = self._open[number] = asyncio.Queue()
        self._channel.send_soon(Frame(kind, number, detail, asked))
        over = False
        try:
            while True:
                frame = await frames.get()
                over = frame.kind != Kind.ITEM
                match frame.kind:
                    case Kind.END:
                        return
                    case Kind.GONE:
                        raise ConnectionEnded("the other end was closed")
                    case Kind.ERROR:
                        error = _unpickled(frame.payload)
                        raise error if isinstance(error, HeadwayError) else Failed(error)
                yield _unpickled(frame.payload)
                if over:
                    return
        finally:
            del self._open[number]
            if not over:
                self._channel.send(Frame(Kind.LEAVE, number))

    def _on_frame(self, frame: Frame) -> None:
        if (frames := self._open.get(frame.number)) is not None:  # else it was left
            frames.put_nowait(frame)

    def _on_end(self) -> None:
        self.ended = True
        for frames in self._open.values():
            frames.put_nowait(Frame(Kind.GONE))


class ConnectionEnded(Exception):
    """The connection to a worker has ended, or cannot be made."""


class Failed(Exception):
    """The method has failed with something else than an error of Headway's. The text says with what."""


async def connected(address: CallAddress) -> Connection:
    """Connect to the worker at ``address``. Raises `ConnectionEnded` where nothing answers there."""
    sock = socket.socket(_family(address.host), socket.SOCK_STREAM)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(GREETING_S):
            await loop.sock_connect(sock, (address.host, address.port))
            await loop.sock_sendall(sock, address.key)
    except OSError as error:  # a time-out, too
        sock.close()
        why = os.strerror(error.errno) if error.errno else f"no answer within {GREETING_S:g} s"
        raise ConnectionEnded(
            f"no connection to {address.host}, port {address.port}: {why}. The run's processes call each other on "
            "ports that the system chooses, which a firewall between its machines must let through"
        ) from error
    except BaseException:
        sock.close()
        raise
    _set_up(sock)
    return Connection(sock)


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
