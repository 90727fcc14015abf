"""Calls of one worker by another over a socket, where a message must cost microseconds: Ray's costs half a millisecond.

caller ─▶ worker: CALL, EACH (method and arguments) · LEAVE (a call)
worker ─▶ caller: RESULT (of a call) · ITEM, END (of an iteration) · ERROR (of either)

A caller begins with the worker's key, which Ray has brought to it: nothing else of what comes is read before.
"""

from __future__ import annotations

import asyncio
import hmac
import pickle
import secrets
import socket
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any

from headway.cluster.role_host import RoleHost
from headway.errors import HeadwayError, RunError
from headway.frames import Channel, Frame

KEY_BYTES = 32
GREETING_S = 30.0
"""Seconds for a connection to be made, and for its caller to give the key."""

BETWEEN_ITEMS_S = 0.01
"""Least seconds between two items of one iteration: an engine finishes calls in every step, and a process that wakes up
for each of them takes cores from the next step. Meanwhile they gather in one batch."""


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
    """Where a worker takes calls, and what proves that a caller may call."""

    host: str
    port: int
    key: bytes


class CallServer:
    """The worker's end: it runs the methods of a hosted role, on the running event loop."""

    def __init__(self, host: RoleHost, interface: str) -> None:
        """``interface``: this machine's address for callers."""
        self._host = host
        self._listening = socket.create_server((interface, 0), backlog=128)
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
        except OSError:  # the caller has gone already
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
            _without_delay(sock)
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
                    await asyncio.sleep(BETWEEN_ITEMS_S)
            self._send(Kind.END, frame.number, None)
        except Exception as error:  # whatever it is, the caller has to hear of it
            told = error if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}"
            self._send(Kind.ERROR, frame.number, told)

    def _send(self, kind: Kind, number: int, what: Any) -> None:
        self._channel.send(Frame(kind, number, 0, pickle.dumps(what, pickle.HIGHEST_PROTOCOL)))

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

    def each(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        """Yield what the method, an asynchronous generator, yields. Leaving it ends it there. Raises as `call` does."""
        return self._answers(Kind.EACH, method, args)

    def close(self) -> None:
        """Leave the worker, which cancels the calls that are open."""
        self._channel.close()
        self._on_end()

    async def _answers(self, kind: Kind, method: str, args: tuple[Any, ...]) -> AsyncGenerator[Any, None]:
        if self.ended:
            raise ConnectionEnded
        self._last += 1
        number = self._last
        frames = self._open[number] = asyncio.Queue()
        self._channel.send(Frame(kind, number, 0, pickle.dumps((method, args), pickle.HIGHEST_PROTOCOL)))
        over = False
        try:
            while True:
                frame = await frames.get()
                over = frame.kind != Kind.ITEM
                match frame.kind:
                    case Kind.END:
                        return
                    case Kind.GONE:
                        raise ConnectionEnded
                    case Kind.ERROR:
                        error = pickle.loads(frame.payload)
                        raise error if isinstance(error, HeadwayError) else Failed(error)
                yield pickle.loads(frame.payload)
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
    """Connect to the worker at ``address``. Raises `RunError` where nothing answers there."""
    sock = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(GREETING_S):
            await loop.sock_connect(sock, (address.host, address.port))
            await loop.sock_sendall(sock, address.key)
    except TimeoutError:
        sock.close()
        raise RunError(
            f"no connection to {address.host}:{address.port} within {GREETING_S:g} s: the run's processes call each "
            "other on ports that the system chooses, which a firewall between its machines must let through"
        ) from None
    except OSError as error:
        sock.close()
        raise ConnectionEnded(str(error)) from error
    except BaseException:
        sock.close()
        raise
    _without_delay(sock)
    return Connection(sock)


def _without_delay(sock: socket.socket) -> None:
    """Send small messages at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
