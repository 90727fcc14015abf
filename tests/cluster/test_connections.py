"""Calls of a worker over a socket, within one process: no Ray."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from headway.cluster.connections import CallServer, Connection, ConnectionEnded, Failed, connected
from headway.cluster.role_host import RoleHost
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

    def close(self) -> None: ...


@pytest_asyncio.fixture
async def served() -> AsyncIterator[tuple[Answers, CallServer, Connection]]:
    role = Answers()
    host = RoleHost(role, "answers")
    server = CallServer(host, "127.0.0.1")
    connection = await connected(server.address)
    yield role, server, connection
    connection.close()
    server.close()
    await host.close()


Served = tuple[Answers, CallServer, Connection]


async def test_calls_begin_in_their_order_and_each_gets_its_own_answer(served: Served) -> None:
    role, _, connection = served
    assert await asyncio.gather(*(connection.call("note", n) for n in range(50))) == list(range(50))
    assert role.order == list(range(50))
    assert [item async for item in connection.each("count", 3)] == [0, 1, 2]


async def test_errors_arrive_as_they_were_raised_if_they_are_headways_and_as_text_if_not(served: Served) -> None:
    _, _, connection = served
    with pytest.raises(DataError, match=r"^no such prompt$"):
        await connection.call("refuse")
    with pytest.raises(Failed, match="KeyError: 'lost'"):
        await connection.call("fail")
    with pytest.raises(Failed, match="pickle"):
        await connection.call("give")
    with pytest.raises(Failed, match="no attribute 'unknown'"):
        await connection.call("unknown")
    with pytest.raises(Failed, match="Unreadable: a lock in it"):
        await connection.call("refuse_unreadably")
    with pytest.raises(Failed, match="CancelledError"):
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
    apart = [time.monotonic() async for _ in connection.each("count", 3, apart_s=0.05)]
    assert apart[-1] - apart[0] > 0.09


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
    await host.close()


async def test_nobody_is_served_without_the_key(served: Served) -> None:
    _, server, connection = served
    wrong = await connected(replace(server.address, key=bytes(32)))
    with pytest.raises(ConnectionEnded):
        await wrong.call("note", 0)
    with socket.create_connection((server.address.host, server.address.port)) as short:
        short.sendall(b"x")
    assert await connection.call("note", 1) == 1


async def test_where_nothing_listens_there_is_no_connection(served: Served) -> None:
    _, server, _ = served
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(ConnectionEnded, match=rf"no connection to 127.0.0.1, port {port}: .*refused.* a firewall"):
        await connected(replace(server.address, port=port))
    assert server.address.key.hex() not in repr(server.address) and repr(server.address.key) not in repr(server.address)
