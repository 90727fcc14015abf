"""The address at which agents reach the endpoint, tried before a run: the HTTP server itself is slow to import."""

from __future__ import annotations

import asyncio

from headway.errors import ConfigError


def cannot_listen(host: str, port: int, cause: Exception) -> ConfigError:
    """Make the error of an endpoint that cannot listen there."""
    return ConfigError(
        f"the endpoint for agents cannot listen at {host}:{port}: {getattr(cause, 'strerror', None) or cause}; set "
        "rollout.endpoint_port=0 for any free port, and rollout.endpoint_host to an address of this machine"
    )


async def check_address(host: str, port: int) -> None:
    """Listen for a moment. Raises `ConfigError` where ``port`` is in use, or ``host`` is no address of this machine."""
    try:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)
    except (OSError, UnicodeError) as cause:
        raise cannot_listen(host, port, cause) from cause
    server.close()
    await server.wait_closed()
