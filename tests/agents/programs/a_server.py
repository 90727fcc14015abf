"""An MCP server on standard input and output, which tests start: ``python a_server.py [stays]``."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("digits")
counts = {"n": 0}


@server.tool()
def look_up(key: str) -> int:
    """Look a key up in the table.

    Args:
        key: the key
    """
    return {"x": 3, "y": 4}[key]


@server.tool()
async def count() -> str:
    """Count the calls of this process."""
    counts["n"] += 1
    if sys.argv[1:] == ["stays"] and counts["n"] == 1:  # from now on it heeds neither the end of its input nor SIGTERM
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Thread(target=time.sleep, args=(3600,)).start()
    return f"{counts['n']} in {os.getpid()}"


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def hang() -> str:
    """Never answer."""
    time.sleep(3600)
    return ""


@server.tool()
def environment(name: str) -> str:
    """Tell a variable of the environment.

    Args:
        name: the variable
    """
    return os.environ.get(name, "not set")


if __name__ == "__main__":
    server.run("stdio")
