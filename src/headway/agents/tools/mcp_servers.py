"""MCP servers, whose tools the model may call, by the official SDK (the extra ``mcp``).

server = McpServer(McpServerSpec("search", command=("npx", "search-server")))
server.load()                                       # asks for its tools, and leaves it again
server.tools[0].schema                              # the server's own, as the model is told it

A server is connected to at the first call: once in a process, or once in an episode with ``per_episode``. What ends or
is late is left, and the next call connects anew; the episode whose call it was is run again.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart
from headway.agents.interface.tool import Tool, ToolResult
from headway.agents.interface.user_calls import awaited, is_away
from headway.agents.tools.mcp_connection import (
    CLOSE_TIMEOUT_S,
    McpConnection,
    McpServerSpec,
    ServerTimeout,
    in_words,
    transport,
)
from headway.errors import ProgramAway, ProgramFailed, Unavailable, UserCodeError, cut, said_by

MOST_PAGES = 100
"""Most pages of a server's list of tools."""
MISSING = (
    "agent.mcp needs the package mcp, 2 or later, which is not installed here; install it with: "
    "pip install 'headway[mcp]'"
)


def check_sdk() -> None:
    """Raise `UserCodeError` where the SDK is not installed."""
    try:
        from mcp import Client  # noqa: F401
    except ImportError as cause:
        raise UserCodeError(MISSING) from cause


class McpServer:
    """A server's tools. Make one and `load` it where no event loop runs, or in any thread that may wait."""

    gives_reward = False

    def __init__(self, spec: McpServerSpec, target: Callable[[], Any] | None = None) -> None:
        """``target``: what the SDK's client connects to, in place of the spec's command or URL."""
        self.spec = spec
        self._target = target or partial(transport, spec)
        self._shared = _McpLink(spec, self._target)
        self.tools: Sequence[Tool] = ()

    def load(self) -> None:
        """Ask the server for its tools, over a connection that ends with that.

        Raises:
            UserCodeError: the SDK is not installed, the command is not found, what answers is no MCP server, or it
                lacks a tool that is named.
            ProgramAway: it is away for a time.
        """
        check_sdk()
        others = threading.enumerate()
        with ThreadPoolExecutor(1) as thread:  # the SDK needs a loop, and one may run here
            try:
                listed = thread.submit(asyncio.run, self._list()).result()
            except Unavailable as cause:
                if self.spec.command:  # nothing that a later try would find otherwise
                    raise UserCodeError(f"{cause}; {self._advice(cause)}") from cause
                raise ProgramAway(f"{cause}; {self._advice(cause)}") from cause
            except ProgramFailed as cause:
                raise UserCodeError(str(cause)) from cause
        for watcher in threading.enumerate():
            # asyncio's, for the end of a server's process; no thread may run where processes are forked next.
            if watcher not in others and watcher.name.startswith("waitpid-"):
                watcher.join(CLOSE_TIMEOUT_S)
        self.tools = self._offered([tool for tool in listed if self.spec.tools is None or tool[0] in self.spec.tools])
        names = [name for name, _ in listed]
        if missing := [name for name in self.spec.tools or () if name not in names]:
            raise UserCodeError(
                f"{self.spec.who}.tools: the server has no tool {', '.join(missing)}; it has {', '.join(names)}"
            )
        if not self.tools:
            raise UserCodeError(f"{self.spec.who}: the server has no tools; take it out")

    def _advice(self, cause: Unavailable) -> str:
        who = self.spec.who
        if self.spec.command and isinstance(cause, ServerTimeout):
            return f"raise {who}.timeout_s, or try the command by hand"
        if self.spec.command:
            return "what it printed is above, or in the workers' log"
        late = f"raise {who}.timeout_s, " if isinstance(cause, ServerTimeout) else ""
        return f"{late}start the server, or correct {who}.url"

    def begin(self, start: EpisodeStart) -> _McpEpisode:
        return _McpEpisode(self, _McpLink(self.spec, self._target) if self.spec.per_episode else self._shared)

    def over(self, link: _McpLink) -> tuple[Tool, ...]:
        """The server's tools, called over ``link``."""
        return tuple(
            Tool(tool.name, tool.schema, partial(link.call, tool.name), origin=tool.origin) for tool in self.tools
        )

    def _offered(self, listed: Sequence[tuple[str, dict[str, Any]]]) -> tuple[Tool, ...]:
        return tuple(
            Tool(name, schema, partial(self._shared.call, name), origin=self.spec.who) for name, schema in listed
        )

    async def _list(self) -> list[tuple[str, dict[str, Any]]]:
        """Names and schemas of all tools."""
        link = _McpLink(self.spec, self._target)
        try:
            return await link.list_tools()
        finally:
            await link.close()


class _McpEpisode:
    """A server's tools in one episode."""

    def __init__(self, server: McpServer, link: _McpLink) -> None:
        self._link, self._own = link, server.spec.per_episode
        self.tools = server.over(link)

    async def end(self) -> EpisodeEnd:
        return EpisodeEnd()

    async def close(self) -> None:
        if self._own:
            await awaited(self._link.close())


class _McpLink:
    """A connection to a server, made when it is needed, and anew after it was lost."""

    def __init__(self, spec: McpServerSpec, target: Callable[[], Any]) -> None:
        self._spec, self._target = spec, target
        self._connection: McpConnection | None = None
        self._opening = asyncio.Lock()

    async def call(self, tool: str, /, **arguments: Any) -> ToolResult:
        """Call a tool of the server's.

        Raises:
            Unavailable: the server is away, ended, or is late.
            ProgramFailed: it answered with what MCP or its own output schema forbids, or with an image.
        """
        connection = await self._connected()
        answered = connection.answered
        doing = f"the call of its tool {tool!r}"
        try:
            result = await self._answer(connection, connection.client.call_tool(tool, dict(arguments)), doing)
        except _CallRefused as refused:
            return ToolResult(f"Error: {tool} failed: {refused}", failed=True)
        except TimeoutError:
            if connection.answered == answered:  # nobody heard of it meanwhile: it hangs
                connection.lose()
            raise Unavailable(
                f"{self._spec.who}: {doing} was waited for {self._spec.timeout_s:g} s, and the server did not answer "
                f"(agent.mcp.{self._spec.name}.timeout_s)"
            ) from None
        text = _text_of(result, f"{self._spec.who}: {doing}")
        return ToolResult(f"Error: {tool} failed: {text}", failed=True) if result.is_error else ToolResult(text)

    async def list_tools(self) -> list[tuple[str, dict[str, Any]]]:
        """Ask for the name and the schema of each tool. Raises as `call` does."""
        connection = await self._connected()
        found: list[tuple[str, dict[str, Any]]] = []
        cursor: str | None = None
        for _ in range(MOST_PAGES):
            try:
                page = await self._answer(connection, connection.client.list_tools(cursor=cursor), "its list of tools")
            except TimeoutError:
                raise ServerTimeout(
                    f"{self._spec.who}: its list of tools was waited for {self._spec.timeout_s:g} s, and the server "
                    "did not answer"
                ) from None
            except _CallRefused as refused:
                raise ProgramFailed(f"{self._spec.who}: its list of tools was refused: {refused}") from None
            for tool in page.tools:
                described = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                found.append((tool.name, {"type": "function", "function": described}))
            cursor = page.next_cursor
            if cursor is None:
                return found
        raise ProgramFailed(f"{self._spec.who}: its list of tools has no end: {MOST_PAGES} pages were read")

    async def close(self) -> None:
        """End the connection, if there is one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _connected(self) -> McpConnection:
        async with self._opening:
            if self._connection is None or self._connection.lost:
                connection = McpConnection(self._spec, self._target)
                await connection.open()
                self._connection = connection
            return self._connection

    async def _answer(self, connection: McpConnection, asked: Any, doing: str) -> Any:
        """Wait for an answer of the server's, its own end, or the time-out."""
        from mcp import MCPError
        from pydantic import ValidationError

        who = self._spec.who
        noise = connection.noise
        call = asyncio.ensure_future(asked)
        try:
            await asyncio.wait(
                {call, connection.holder}, timeout=self._spec.timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if call.done():
                result = call.result()
                connection.answered += 1
                connection.tell_noise()
                return result
            if connection.lost:
                raise Unavailable(f"{who}: the server ended during {doing}{connection.why}")
            if connection.noise > noise:
                raise ProgramFailed(f"{who}: the server answered {doing} with what is not MCP: {connection.wrote}")
            raise TimeoutError
        except MCPError as error:
            connection.answered += 1
            raise self._refusal(connection, error, doing) from error
        except (Unavailable, ProgramFailed, TimeoutError):
            raise
        except Exception as cause:
            # The SDK checks results by MCP's own schema and by the tool's.
            if isinstance(cause, ValidationError | RuntimeError) and not connection.lost:
                what = "what its schema forbids"
                raise ProgramFailed(f"{who}: the server answered {doing} with {what}: {in_words(cause)}") from cause
            connection.lose()
            kind = Unavailable if is_away(cause) else ProgramFailed
            raise kind(f"{who}: {doing} raised {said_by(cause)}") from cause
        finally:
            call.cancel()

    def _refusal(self, connection: McpConnection, error: Any, doing: str) -> Exception:
        """The error of a call that the server, or the SDK in its place, refused: by JSON-RPC's and the SDK's codes."""
        import mcp_types as types

        who, text = self._spec.who, cut(" ".join(error.message.split()), 300)
        # The code of a closed connection is also that of any error of a server's own: the SDK's words tell them apart.
        closed = error.code == types.CONNECTION_CLOSED and text == "Connection closed"
        timed_out = error.code == types.REQUEST_TIMEOUT
        if closed or timed_out or text in ("Session terminated", "Server returned an error response"):
            connection.lose()
            return Unavailable(f"{who}: the server went away during {doing}: {text}{connection.why}")
        if error.code in (types.PARSE_ERROR, types.INVALID_REQUEST, types.METHOD_NOT_FOUND):
            return ProgramFailed(f"{who}: the server answered {doing} with what is not MCP: {text}")
        return _CallRefused(text)


class _CallRefused(Exception):
    """Exception for a call that the server refused. Its text goes to the model."""


def _text_of(result: Any, who: str) -> str:
    """Text of a call's result."""
    texts = []
    for block in result.content:
        resource = getattr(block, "resource", None)
        text = getattr(resource if resource is not None else block, "text", None)
        if text is None and block.type == "resource_link":
            text = str(block.uri)
        if text is None:
            raise ProgramFailed(
                f"{who} was answered with {block.type} content, and Headway trains models of text alone"
            )
        texts.append(text)
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)
