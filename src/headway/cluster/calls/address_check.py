"""Check that something answers at an address. Imports no Ray: a wrong address is found before anything waits for it."""

from __future__ import annotations

import asyncio

from headway.errors import ConfigError

ANSWER_S = 3.0
"""Seconds that a machine has to accept a connection."""
ASK_AGAIN_S = 2.0
"""Seconds between two attempts to connect."""
ATTEMPTS = 4
"""Failures in a row until a machine is given up: after 8 s where it refuses, after 20 s where it is silent."""


async def check_listens(address: str, timeout_s: float) -> bool:
    """Check that something listens at ``address``; only Ray can tell whether it is Ray.

    Returns False for an address without a port, such as ``auto``, which only Ray can resolve.

    Raises:
        ConfigError: nothing accepts a connection there within ``timeout_s`` seconds.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return False
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host.removeprefix("[").removesuffix("]"), int(port))
    except (OSError, OverflowError, UnicodeError) as error:  # the latter two: of a bad port and a bad host
        why = str(error) or f"no answer within {timeout_s:g} s"
        raise ConfigError(
            f"cluster.address={address}: nothing answers there ({why}). Start Ray with `ray start --head`, give its "
            "address, or leave cluster.address out to start Ray here"
        ) from None
    writer.close()
    return True


async def answers(host: str, port: int) -> bool:
    """Tell whether something at ``host`` accepts a connection within ``ANSWER_S`` seconds."""
    try:
        async with asyncio.timeout(ANSWER_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def stops_answering(host: str, port: int) -> None:
    """Wait until ``host`` has failed to accept ``ATTEMPTS`` connections in a row, trying again and again."""
    failed = 0
    while failed < ATTEMPTS:
        await asyncio.sleep(ASK_AGAIN_S)
        failed = 0 if await answers(host, port) else failed + 1
