"""The table of ``lookup.py`` behind an MCP server: ``lookup_mcp.yaml`` starts it."""

from lookup import value
from mcp.server.mcpserver import MCPServer

server = MCPServer("table")


@server.tool()
def look_up(key: str) -> str:
    """Look a key up in the table."""
    return str(value(key))


if __name__ == "__main__":
    server.run("stdio")
