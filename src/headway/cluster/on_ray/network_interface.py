"""Addresses of machines: finds the network card of an address, and checks that an address answers.

Gloo takes the address that the host's name resolves to, which on many machines is 127.0.0.1: ranks on two machines then
wait for each other at the wrong place. Groups of torch.distributed's own read the card's name from the environment.

Imports no Ray: a wrong address is found before anything waits for it.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path

from headway.config.sizing.timeouts import MACHINE_AGAIN_S, MACHINE_ANSWERS_S, MACHINE_ATTEMPTS
from headway.errors import ConfigError

INTERFACES_V6 = Path("/proc/net/if_inet6")
_SIOCGIFADDR = 0x8915
"""Code of the Linux ioctl that returns the IPv4 address of a network card."""
# Behind the name (16 bytes), the family (2) and the port (2).
_ADDRESS = slice(20, 24)
"""Slice of the address in the kernel's answer (struct ifreq)."""


def network_environment(host: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that make Gloo and NCCL use ``host``, this machine's address for other machines.

    Variables already in ``given`` are left out. Empty for a loopback address, or one that no card has.
    """
    if is_loopback(host) or (card := card_of(host)) is None:
        return {}
    wanted = {"GLOO_SOCKET_IFNAME": card, "NCCL_SOCKET_IFNAME": f"={card}"}  # "=": the exact name, not a prefix
    return {name: value for name, value in wanted.items() if name not in given}


def is_loopback(host: str) -> bool:
    """Tell whether ``host`` is a loopback address, which only this machine reaches. False for a host name."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def card_of(host: str) -> str | None:
    """Return the name of the network card with the address ``host``; None if there is none or it is unknown."""
    try:
        address = ip_address(host)
    except ValueError:
        return None
    if address.version == 6:
        lines = INTERFACES_V6.read_text(encoding="utf-8").splitlines() if INTERFACES_V6.exists() else []
        return next((fields[-1] for fields in map(str.split, lines) if fields[0] == address.packed.hex()), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, card in socket.if_nameindex():
            try:
                # A struct ifreq begins with the card's name, padded with zeros; the kernel answers in the same bytes.
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", card.encode()))
            except OSError:  # a card without an address
                continue
            if answer[_ADDRESS] == address.packed:
                return card
    return None


async def check_listens(address: str, timeout_s: float) -> None:
    """Check that something listens at ``address``. Does not check that it is Ray.

    An address without a port, such as ``auto``, is not checked: only Ray can resolve it.

    Raises:
        ConfigError: nothing accepts a connection there within ``timeout_s`` seconds.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    # An IPv6 address stands in brackets before a port, and sockets take it without.
    if host and port.isdecimal() and not await answers(host.strip("[]"), int(port), timeout_s):
        raise ConfigError(
            f"cluster.address={address}: nothing answers there within {timeout_s:g} s. Start Ray with `ray start "
            "--head`, give its address, or leave cluster.address out to start Ray here"
        )


async def answers(host: str, port: int, timeout_s: float = MACHINE_ANSWERS_S) -> bool:
    """Return True if ``host`` accepts a connection at ``port`` within ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, OverflowError, UnicodeError):  # the last two: a bad port, a bad host
        return False
    writer.close()
    return True


async def stops_answering(host: str, port: int) -> None:
    """Try to connect to ``host`` until `MACHINE_ATTEMPTS` attempts in a row have failed."""
    failed = 0
    while failed < MACHINE_ATTEMPTS:
        await asyncio.sleep(MACHINE_AGAIN_S)
        failed = 0 if await answers(host, port) else failed + 1
