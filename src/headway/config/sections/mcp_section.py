"""Keys of ``agent.mcp``: servers whose tools the model may call."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from pydantic import Field

from headway.config.sections.section import Section


class McpServerConfig(Section):
    """An MCP server by its name, whose tools the model may call (docs/agents.md). It needs the extra ``mcp``."""

    command: tuple[str, ...] = ()
    """A command that starts the server and speaks with it over its standard input and output: a program and its
    arguments."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the command. ``$NAME`` in a value stands for a variable of the process that runs
    episodes, such as one of ``agent.env``."""
    url: str | None = None
    """The server's address, in place of a command: one that speaks over streamable HTTP."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of requests to ``url``, with ``$NAME`` as in ``env``."""
    timeout_s: float = Field(30.0, gt=0)
    """Most seconds that an answer of the server may take. The episode of a call that takes longer is run again."""
    per_episode: bool = False
    """Each episode has a connection of its own, and a command is started for each: for servers that remember. Otherwise
    episodes of a process share one."""
    tools: tuple[str, ...] | None = None
    """Names of the tools that are offered. Default: all of the server's."""


def mcp_problems(servers: Mapping[str, McpServerConfig], step_timeout_s: float) -> Iterator[str]:
    """Yield problems of ``agent.mcp``."""
    for name, server in servers.items():
        key = f"agent.mcp.{name}"
        if re.fullmatch(r"[\w-]+", name) is None:
            yield f"agent.mcp: {name!r} is no name for a server; write letters, digits, _ and -"
        if bool(server.command) is (server.url is not None):
            given = "both are given" if server.command else "none is given"
            yield f"{key} needs a command or a url, and {given}; write {key}.command=[program, argument] or {key}.url=https://…"
        if server.url is not None and not server.url.startswith(("http://", "https://")):
            yield f"{key}.url={server.url}: expected the http:// or https:// address of a server"
        if server.env and not server.command:
            yield f"{key}.env is for a command; drop it, or give headers"
        if server.headers and server.url is None:
            yield f"{key}.headers are for a url; drop them, or give env"
        if server.tools == ():
            yield f"{key}.tools is empty, so that the server is of no use; name some of its tools, or take it out"
        if server.timeout_s > step_timeout_s:
            yield (
                f"{key}.timeout_s={server.timeout_s:g} is more than a step may take, agent.step_timeout_s="
                f"{step_timeout_s:g}; lower the one or raise the other"
            )
