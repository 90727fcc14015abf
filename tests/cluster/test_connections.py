"""Calls of a worker over a socket, within one process: no Ray."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from headway.cluster.on_ray import worker_connections
from headway.cluster.on_ray.worker_connections import (
    CallAddress,
    CallFailed,
    CallServer,
    ConnectionEnded,
    WorkerConnection,
    connected,
)
from headway.cluster.role_host import RoleHost
from headway.config.sizing.timeouts import RECONNECT_S, SESSION_S
from headway.errors import DataError


class Unreadable(DataError):
    """An error that cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class Answers:
    """A role with one method of each kind."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.left = asyncio.Event()
        self.filled = 0

    async def note(self, number: int) -> int:
        self.order.append(number)
        return number

    async def refuse(self) -> None:
        raise DataError("no such prompt")

    async def refuse_unreadably(self) -> None:
        raise Unreadable("a lock in it")

    async def cancel_itself(self) -> None:
        raise asyncio.CancelledError

    async def fail(self) -> None:
        raise KeyError("lost")

    async def give(self) -> Any:
        return lambda: None  # which cannot be pickled

    async def wait(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()

    async def count(self, n: int) -> AsyncIterator[int]:
        for number in range(n):
            yield number

    async def fill(self, n: int) -> AsyncIterator[bytes]:
        for self.filled in range(1, n + 1):
            yield bytes(1 << 20)

    def close(self) -> None: ...


@pytest_asyncio.fixture
async def served() -> AsyncIterator[tuple[Answers, CallServer, WorkerConnection]]:
    role = Answers()
    host = RoleHost(role, "answers")
    server = CallServer(host, "127.0.0.1")
    connection = await connected(server.address)
    yield role, server, connection
    connection.close()
    server.close()
    await host.end()


Served = tuple[Answers, CallServer, WorkerConnection]


async def test_calls_begin_in_their_order_and_each_gets_its_own_answer(served: Served) -> None:
    role, _, connection = served
    assert await asyncio.gather(*(connection.call("note", n) for n in range(50))) == list(range(50))
    assert role.order == list(range(50))
    assert [item async for item in connection.each("count", 3)] == [0, 1, 2]


async def test_errors_arrive_as_they_were_raised_if_they_are_headways_and_as_text_if_not(served: Served) -> None:
    _, _, connection = served
    with pytest.raises(DataError, match=r"^no such prompt$"):
        await connection.call("refuse")
    with pytest.raises(CallFailed, match="KeyError: 'lost'"):
        await connection.call("fail")
    with pytest.raises(CallFailed, match="pickle"):
        await connection.call("give")
    with pytest.raises(CallFailed, match="no attribute 'unknown'"):
        await connection.call("unknown")
    with pytest.raises(CallFailed, match="Unreadable: a lock in it"):
        await connection.call("refuse_unreadably")
    with pytest.raises(CallFailed, match="CancelledError"):
        await connection.call("cancel_itself")


async def test_a_call_that_is_cancelled_or_whose_caller_has_left_is_cancelled_where_it_runs(served: Served) -> None:
    role, server, connection = served
    waiting = asyncio.create_task(connection.call("wait"))
    await connection.call("note", 0)
    waiting.cancel()
    await role.left.wait()
    role.left.clear()
    other = await connected(server.address)
    open_call = asyncio.create_task(other.call("wait"))
    await other.call("note", 1)
    other.close()
    with pytest.raises(ConnectionEnded):
        await open_call
    await role.left.wait()
    with pytest.raises(ConnectionEnded):
        await other.call("note", 2)
    assert await connection.call("note", 3) == 3, "others go on"


async def test_items_come_at_once_unless_they_are_asked_for_apart(served: Served) -> None:
    _, _, connection = served
    began = time.monotonic()
    assert len([item async for item in connection.each("count", 500)]) == 500
    assert time.monotonic() - began < 5.0
    came = [time.monotonic() async for _ in connection.each("count", 3, apart_s=0.2)]
    assert len(came) == 3
    assert came[-1] - came[0] > 0.2  # of 0.4: the first may be late


async def test_an_ipv6_address_will_do() -> None:
    role = Answers()
    host = RoleHost(role, "answers")
    try:
        server = CallServer(host, "::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    connection = await connected(server.address)
    assert await connection.call("note", 1) == 1
    connection.close()
    server.close()
    await host.end()


async def test_nobody_is_served_without_the_key(served: Served) -> None:
    _, server, connection = served
    with pytest.raises(ConnectionEnded, match="does not know this caller"):
        await connected(replace(server.address, key=bytes(32)))
    with socket.create_connection((server.address.host, server.address.port)) as short:
        short.sendall(b"x")
    assert await connection.call("note", 1) == 1


async def test_where_nothing_listens_there_is_no_connection(served: Served) -> None:
    _, server, _ = served
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # kept, so that nobody else listens there meanwhile
        port = unused.getsockname()[1]
        with pytest.raises(ConnectionEnded, match=rf"no connection to 127.0.0.1, port {port}: .*refused.* a firewall"):
            await connected(replace(server.address, port=port))
    assert server.address.key.hex() not in repr(server.address) and repr(server.address.key) not in repr(server.address)


class Cuts:
    """A proxy in front of a server, which cuts connections after so many bytes of one direction, one after another."""

    def __init__(self, address: CallAddress, seed: int, cuts: int) -> None:
        self._address = address
        self._random = random.Random(seed)
        self.left = cuts
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> CallAddress:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return replace(self._address, port=self._server.sockets[0].getsockname()[1])

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        out_reader, out_writer = await asyncio.open_connection(self._address.host, self._address.port)
        limits = [1 << 60, 1 << 60]
        if self.left:
            self.left -= 1
            limits[self._random.randrange(2)] = self._random.randrange(100, 3000)
        ways = [(reader, out_writer, limits[0]), (out_reader, writer, limits[1])]
        both = [asyncio.create_task(self._copy(*way)) for way in ways]
        self._tasks.update(both)
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for task in both:
            task.cancel()
        writer.transport.abort()
        out_writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int) -> None:
        while limit > 0 and (data := await reader.read(min(limit, 65536))):
            limit -= len(data)
            writer.write(data)
            await writer.drain()


@pytest.mark.parametrize("seed", range(10))
async def test_a_connection_that_breaks_again_and_again_loses_and_repeats_no_call_and_no_item(seed: int) -> None:
    role = Answers()
    host = RoleHost(role, "answers")
    server = CallServer(host, "127.0.0.1")
    proxy = Cuts(server.address, seed, 6)
    async with proxy as address:
        connection = await connected(address)

        async def stream() -> list[int]:
            return [item async for item in connection.each("count", 200)]

        results = await asyncio.gather(*(connection.call("note", n) for n in range(300)), stream(), stream())
        assert results[:300] == role.order == list(range(300))
        assert results[300:] == [list(range(200))] * 2
        assert proxy.left < 6, "connections were cut"
        connection.close()
    server.close()
    await host.end()


async def test_a_worker_where_nothing_listens_any_more_is_gone_at_once() -> None:
    host = RoleHost(Answers(), "answers")
    server = CallServer(host, "127.0.0.1")
    connection = await connected(server.address)
    waiting = asyncio.create_task(connection.call("wait"))
    await connection.call("note", 0)
    server.close()
    connection._channel._sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
    with pytest.raises(ConnectionEnded, match="nothing listens there"):
        await waiting
    with pytest.raises(ConnectionEnded, match="nothing listens there"):
        await connection.call("note", 1)
    await host.end()


async def test_a_server_that_does_not_know_the_session_is_another_process(served: Served) -> None:
    _, server, connection = served
    server._callers.clear()
    waiting = asyncio.create_task(connection.call("wait"))
    await connection.call("note", 0)
    connection._channel._sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
    with pytest.raises(ConnectionEnded, match="does not know this caller"):
        await waiting


class Clock:
    """The event loop's clock, which stands still between two advances."""

    def __init__(self) -> None:
        self.time = asyncio.get_running_loop().time()

    async def advance(self, seconds: float) -> None:
        self.time += seconds
        await turns()


@pytest_asyncio.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: made.time)
    return made


async def turns(until: Callable[[], bool] = lambda: False) -> None:
    """Let the event loop make turns, until a condition holds."""
    for _ in range(1000):
        if until():
            return
        await asyncio.sleep(0)


async def test_the_calls_of_a_caller_that_does_not_come_back_are_cancelled_in_a_while(
    served: Served, clock: Clock
) -> None:
    role, server, _ = served
    killed = await connected(server.address)
    waiting = asyncio.create_task(killed.call("wait"))
    await killed.call("note", 0)
    killed.detach()  # as the end of its process does
    (caller,) = (caller for caller in server._callers.values() if caller._open)
    await turns(lambda: caller._ending is not None)
    await clock.advance(SESSION_S - 1)
    assert not role.left.is_set(), "it may be on its way"
    await clock.advance(1)
    assert role.left.is_set() and caller not in server._callers.values()
    waiting.cancel()


async def test_a_broken_connection_that_cannot_be_opened_again_has_ended(served: Served, clock: Clock) -> None:
    _, server, connection = served

    def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    refusing = await asyncio.start_server(refuse, "127.0.0.1", 0)
    connection._address = replace(server.address, port=refusing.sockets[0].getsockname()[1])
    waiting = asyncio.create_task(connection.call("wait"))
    await connection.call("note", 0)
    connection._channel._sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
    await turns()
    await clock.advance(RECONNECT_S - 1)
    assert not waiting.done()
    await clock.advance(1)
    assert connection.ended
    with pytest.raises(ConnectionEnded, match="open it again within 10 s: "):
        await waiting
    refusing.close()


@pytest.mark.parametrize("broken", [False, True])
async def test_an_iteration_waits_for_a_caller_that_does_not_read(
    served: Served, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """The memory of the worker does not grow with what it could say; nothing is lost once the caller reads again."""
    monkeypatch.setattr(worker_connections, "KEPT_BYTES", 4 << 20)
    role, _, connection = served

    async def items() -> list[bytes]:
        return [item async for item in connection.each("fill", 20)]

    reading = asyncio.create_task(items())
    await connection.call("note", 0)
    channel = connection._channel
    assert channel is not None
    if broken:
        connection.detach()
    else:
        asyncio.get_running_loop().remove_reader(channel._sock)
    await turns()
    made = role.filled
    await turns()
    assert role.filled == made < 20
    if broken:
        await connection.open()
    else:
        asyncio.get_running_loop().add_reader(channel._sock, channel._read)
    assert await reading == [bytes(1 << 20)] * 20
