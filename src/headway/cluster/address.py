"""Where a Ray cluster is said to be. Imports no Ray: what is wrong here is found before anything waits for that."""

from __future__ import annotations

import asyncio

from headway.errors import ConfigError


async def check_listens(address: str, timeout_s: float) -> bool:
    """Fail at once where nothing listens at ``address``; whether it is Ray that does, only Ray can tell.

    False: it names no port, as ``auto``, and is Ray's to resolve.

    Raises:
        ConfigError: nothing accepts a connection there within ``timeout_s`` seconds.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return False
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host.removeprefix("[").removesuffix("]"), int(port))
    except (OSError, OverflowError, UnicodeError) as error:  # the latter two: of a port and a host that cannot be
        why = str(error) or f"no answer within {timeout_s:g} s"
        raise ConfigError(
            f"cluster.address={address}: nothing answers there ({why}). Start Ray with `ray start --head`, give its "
            "address, or leave cluster.address out to start Ray here"
        ) from None
    writer.close()
    return True
