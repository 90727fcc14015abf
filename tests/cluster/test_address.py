"""An address at which nothing listens is told at once, before Ray is asked or even imported."""

from __future__ import annotations

import asyncio
import socket

import pytest

from headway.cluster.on_ray.network_interface import check_listens
from headway.errors import ConfigError
from tests.cli.test_commands import python


def listening(family: socket.AddressFamily) -> socket.socket:
    return socket.create_server(("::1" if family is socket.AF_INET6 else "127.0.0.1", 0), family=family)


@pytest.mark.parametrize("prefix", ["", "ray://"])
async def test_a_port_that_accepts_a_connection_listens(prefix: str) -> None:
    with listening(socket.AF_INET) as server:
        await check_listens(f"{prefix}127.0.0.1:{server.getsockname()[1]}", 5.0)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
async def test_an_address_of_ipv6_stands_in_brackets() -> None:
    with listening(socket.AF_INET6) as server:
        await check_listens(f"[::1]:{server.getsockname()[1]}", 5.0)


@pytest.mark.parametrize("address", ["auto", "local", "ray://host", "6379", ":6379", ""])
async def test_what_names_no_port_is_left_to_ray(address: str) -> None:
    await check_listens(address, 5.0)


@pytest.mark.parametrize("prefix", ["", "ray://"])
async def test_a_port_at_which_nothing_listens_is_a_config_error(prefix: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"{prefix}127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"^cluster\.address={address}: nothing answers .*5 s"):
            await check_listens(address, 5.0)


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "a..b:6379"])
async def test_a_port_or_a_host_that_cannot_be_is_a_config_error(address: str) -> None:
    with pytest.raises(ConfigError, match="nothing answers"):
        await check_listens(address, 5.0)


async def test_silence_ends_with_the_time_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(host: str, port: int) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", silent)
    with pytest.raises(ConfigError, match=r"nothing answers .*0\.01 s"):
        await check_listens("10.0.0.1:6379", 0.01)


def test_asking_imports_no_ray() -> None:
    done = python("-c", "import sys, headway.cluster.on_ray.network_interface; sys.exit('ray' in sys.modules)")
    assert done.returncode == 0, done.stderr
