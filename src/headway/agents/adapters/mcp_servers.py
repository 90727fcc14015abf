"""MCP servers, whose tools the model may call, by the official SDK (the extra ``mcp``).

server = McpServer(McpServerSpec("search", command=("npx", "search-server")))
server.load()                                       # asks for its tools, and leaves it again
server.tools[0].schema                              # the server's own, as the model is told it

The first call connects to the server: once per process, or once per episode with ``per_episode``. A connection that
ends or is late is dropped, and the next call connects anew; the episode of the failed call is run again.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import os
import shutil
import string
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.agents.interface.program_messages import EpisodeStart
from headway.agents.interface.tool import OpenToolbox, Tool, ToolResult
from headway.agents.interface.user_calls import close_quietly, is_away, path_of_commands
from headway.errors import ProgramAway, ProgramFailed, Unavailable, UserCodeError, cut, said_by
from headway.runtime.task_groups import failure_ignored

if TYPE_CHECKING:
    from mcp import Client

CLOSE_TIMEOUT_S = 10.0
"""Limit in seconds for closing a connection; the SDK gives a server's process 6 s of it."""
MOST_PAGES = 100
"""Maximum number of pages of a server's list of tools."""
MISSING = (
    "agent.mcp needs the package mcp, 2 or later, which is not installed here; install it with: "
    "pip install 'headway[mcp]'"
)


def check_sdk() -> None:
    """Raise `UserCodeError` if the SDK is not installed."""
    try:
        from mcp import Client  # noqa: F401
    except ImportError as cause:
        raise UserCodeError(MISSING) from cause


@dataclass(frozen=True, slots=True)
class McpServerSpec:
    """Settings of one server, from ``config/sections/agent_section.py``."""

    name: str
    command: tuple[str, ...] = ()
    """Command that starts the server, which speaks on standard input and output; empty if there is a URL."""
    env: Mapping[str, str] = field(default_factory=dict)
    url: str | None = None
    """Address of a server that speaks streamable HTTP; None if there is a command."""
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 30.0
    per_episode: bool = False
    tools: tuple[str, ...] | None = None
    """Names of the tools that are offered; None for all."""

    @property
    def who(self) -> str:
        """Name of the server in messages."""
        return f"agent.mcp.{self.name}"

    def resolved(self) -> McpServerSpec:
        """Return the spec with absolute paths of the files in its command, for another working directory."""
        command = tuple(
            str(Path(part).absolute()) if (n or os.sep in part) and Path(part).is_file() else part
            for n, part in enumerate(self.command)
        )
        return replace(self, command=command)


class McpServer:
    """Tools of a server. `load` blocks: call it where no event loop runs, or in any thread that may wait."""

    gives_reward = False

    def __init__(self, spec: McpServerSpec, target: Callable[[], Any] | None = None) -> None:
        """``target``: maker of what the SDK's client connects to, in place of the spec's command or URL."""
        self.spec = spec
        self._target = target or partial(_transport, spec)
        self._shared = _McpLink(spec, self._target)
        self.tools: Sequence[Tool] = ()

    def load(self) -> None:
        """Ask the server for its tools, over a connection that is closed afterwards.

        Raises:
            UserCodeError: the SDK is not installed, the command is not found, the server does not speak MCP, or it
                lacks a tool that the settings name.
            ProgramAway: the server cannot be reached now.
        """
        check_sdk()
        others = threading.enumerate()
        with ThreadPoolExecutor(1) as thread:  # the SDK needs a loop, and this thread may run one
            try:
                listed = thread.submit(asyncio.run, self._list()).result()
            except Unavailable as cause:
                if self.spec.command:  # a command that fails now would fail later, too
                    raise UserCodeError(f"{cause}; what it printed is above, or in the workers' log") from cause
                raise ProgramAway(f"{cause}; start the server, or correct {self.spec.who}.url") from cause
            except ProgramFailed as cause:
                raise UserCodeError(str(cause)) from cause
        for watcher in threading.enumerate():
            # asyncio's threads, which wait for a server's process to end: none may run when processes are forked next.
            if watcher not in others and watcher.name.startswith("waitpid-"):
                watcher.join(CLOSE_TIMEOUT_S)
        names = [tool["name"] for tool in listed]
        if missing := [name for name in self.spec.tools or () if name not in names]:
            raise UserCodeError(
                f"{self.spec.who}.tools: the server has no tool {', '.join(missing)}; it has {', '.join(names)}"
            )
        self.tools = [
            Tool(
                tool["name"],
                {"type": "function", "function": tool},
                partial(self._shared.call, tool["name"]),
                origin=self.spec.who,
            )
            for tool in listed
            if self.spec.tools is None or tool["name"] in self.spec.tools
        ]
        if not self.tools:
            raise UserCodeError(f"{self.spec.who}: the server has no tools; take it out")

    @asynccontextmanager
    async def episode(self, start: EpisodeStart) -> AsyncIterator[OpenToolbox]:
        if not self.spec.per_episode:
            yield OpenToolbox(self.tools)
            return
        link = _McpLink(self.spec, self._target)
        try:
            yield OpenToolbox([replace(tool, function=partial(link.call, tool.name)) for tool in self.tools])
        finally:
            await close_quietly(link.close)

    async def _list(self) -> list[dict[str, Any]]:
        link = _McpLink(self.spec, self._target)
        try:
            return await link.list_tools()
        finally:
            await link.close()


class _McpLink:
    """Connection to a server, made at the first call, and again after it was lost."""

    def __init__(self, spec: McpServerSpec, target: Callable[[], Any]) -> None:
        self._spec, self._target = spec, target
        self._connection: _McpConnection | None = None
        self._opening = asyncio.Lock()

    async def call(self, tool: str, /, **arguments: Any) -> ToolResult:
        """Call a tool of the server. A refused call becomes text for the model.

        Raises:
            Unavailable: the server is away, has ended, or is late.
            ProgramFailed: its answer violates MCP or its own output schema, or has an image.
        """
        doing = f"the call of its tool {tool!r}"
        try:
            result = await self._answer(lambda client: client.call_tool(tool, dict(arguments)), doing)
        except _CallRefused as refused:
            return ToolResult(f"Error: {tool} failed: {refused}", failed=True)
        text = _text_of(result, f"{self._spec.who}: {doing}")
        return ToolResult(f"Error: {tool} failed: {text}", failed=True) if result.is_error else ToolResult(text)

    async def list_tools(self) -> list[dict[str, Any]]:
        """Ask for the name, description and parameters of each tool. Raises as `call` does."""
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        for _ in range(MOST_PAGES):  # a server may return cursors without end
            try:
                page = await self._answer(lambda client, at=cursor: client.list_tools(cursor=at), "its list of tools")
            except _CallRefused as refused:
                raise ProgramFailed(f"{self._spec.who}: its list of tools was refused: {refused}") from None
            found += [
                {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                for tool in page.tools
            ]
            cursor = page.next_cursor
            if cursor is None:
                return found
        raise ProgramFailed(f"{self._spec.who}: its list of tools has no end: {MOST_PAGES} pages were read")

    async def close(self) -> None:
        """End the connection, if there is one."""
        # Removed first: a call during the close opens another connection.
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _answer(self, ask: Callable[..., Any], doing: str) -> Any:
        """Send a request, and wait for its answer, the end of the connection, or the time-out."""
        import mcp_types as types
        from mcp import MCPError
        from pydantic import ValidationError

        # One at a time: concurrent calls would each start a server.
        async with self._opening:
            if self._connection is None or self._connection.lost:
                connection = _McpConnection(self._spec, self._target)
                await connection.open()
                self._connection = connection
            connection = self._connection
        who, answered = self._spec.who, connection.answered
        call = asyncio.ensure_future(ask(connection.client))
        try:
            # Not wait_for: it would cancel the call, and its own error would hide the server's.
            await asyncio.wait(
                {call, connection.holder}, timeout=self._spec.timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if call.done():
                result = call.result()
                connection.answered += 1
                return result
        except MCPError as error:
            text = cut(" ".join(error.message.split()), 300)
            if _is_lost(error, text):
                connection.lose()
                raise Unavailable(f"{who}: the server went away during {doing}: {text}") from error
            connection.answered += 1
            if error.code in (types.PARSE_ERROR, types.INVALID_REQUEST, types.METHOD_NOT_FOUND):
                raise ProgramFailed(f"{who}: the server answered {doing} with what is not MCP: {text}") from error
            raise _CallRefused(text) from error
        except Exception as cause:  # the SDK checks results by MCP's own schema and by the tool's
            if is_away(cause):
                connection.lose()
                raise Unavailable(f"{who}: {doing} raised {said_by(cause)}") from cause
            if not isinstance(cause, ValidationError | RuntimeError):
                connection.lose()
            raise ProgramFailed(f"{who}: the server answered {doing} with what is wrong: {_in_words(cause)}") from cause
        finally:
            call.cancel()
        if connection.lost:
            raise Unavailable(f"{who}: the server ended during {doing}")
        if connection.answered == answered:  # no other call was answered either: the server hangs, not the tool
            connection.lose()
        raise Unavailable(
            f"{who}: {doing} was waited for {self._spec.timeout_s:g} s, and the server did not answer ({who}.timeout_s)"
        )


class _McpConnection:
    """One connection, held by a separate task: the SDK requires one task to open and close it."""

    client: Client

    def __init__(self, spec: McpServerSpec, target: Callable[[], Any]) -> None:
        self._spec, self._target = spec, target
        loop = asyncio.get_running_loop()
        self._ending = asyncio.Event()
        self._ready: asyncio.Future[None] = failure_ignored(loop.create_future())
        """Done when connected; has the exception if that failed."""
        self.answered = 0
        """Number of answers so far."""
        # Without an episode's context, by which workers tell whose code holds their loop: it belongs to no episode.
        self.holder = loop.create_task(self._hold(), context=contextvars.Context())

    @property
    def lost(self) -> bool:
        """True once the connection has ended or is ending."""
        return self.holder.done() or self._ending.is_set()

    def lose(self) -> None:
        """Start to close the connection, without waiting."""
        self._ending.set()

    async def open(self) -> None:
        """Connect. Raises `Unavailable` if the server is away, `ProgramFailed` if it does not speak MCP."""
        spec = self._spec
        where = spec.url or " ".join(spec.command) or "it"
        try:
            connected, _ = await asyncio.wait({self._ready}, timeout=spec.timeout_s)
        except asyncio.CancelledError:
            self.holder.cancel()
            raise
        if not connected:
            self.holder.cancel()
            await asyncio.wait({self.holder}, timeout=CLOSE_TIMEOUT_S)
            raise Unavailable(
                f"{spec.who}: {where} was waited for {spec.timeout_s:g} s, and did not answer ({spec.who}.timeout_s)"
            )
        if (cause := self._ready.exception()) is None or isinstance(cause, UserCodeError):
            return self._ready.result()
        away = is_away(cause) or _is_lost(_root(cause), str(_root(cause)))
        kind = Unavailable if away else ProgramFailed
        raise kind(f"{spec.who}: cannot connect to {where}: {_in_words(cause)}") from cause

    async def close(self) -> None:
        """Close the connection, and wait until it and the server's process have ended."""
        self._ending.set()
        await asyncio.wait({self.holder}, timeout=CLOSE_TIMEOUT_S)
        if not self.holder.done():
            self.holder.cancel()
            await asyncio.wait({self.holder}, timeout=CLOSE_TIMEOUT_S)

    async def _hold(self) -> None:
        from mcp import Client

        try:
            async with Client(self._target(), cache=None) as self.client:
                if not self._ready.done():
                    self._ready.set_result(None)
                await self._ending.wait()
        except (Exception, asyncio.CancelledError) as cause:
            if not self._ready.done():  # `open` raises it: an exception of this task would reach no caller
                self._ready.set_exception(cause)


class _CallRefused(Exception):
    """Exception for a call that the server refused. Its text goes to the model."""


def _is_lost(error: BaseException, text: str) -> bool:
    """Tell whether the SDK's code and text mean that the connection or the server's session is over."""
    import mcp_types as types

    code = getattr(error, "code", None)
    # A closed connection and a server's own errors have the same code: only the SDK's text differs.
    closed = code == types.CONNECTION_CLOSED and "Connection closed" in text
    return (
        closed or code == types.REQUEST_TIMEOUT or text in ("Session terminated", "Server returned an error response")
    )


def _root(cause: BaseException) -> BaseException:
    """Return the exception at the bottom of nested exception groups."""
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return cause


def _in_words(cause: BaseException) -> str:
    """Describe the root of ``cause``; if an answer does not fit MCP's schema, the field and what was expected."""
    from pydantic import ValidationError

    cause = _root(cause)
    if not isinstance(cause, ValidationError):
        return cut(" ".join(said_by(cause).split()), 300)
    first = cause.errors(include_url=False, include_context=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _text_of(result: Any, who: str) -> str:
    """Return the text of a call's result."""
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


@asynccontextmanager
async def _transport(spec: McpServerSpec) -> AsyncIterator[Any]:
    """Open the SDK's connection to the server of ``spec``."""
    for name in ("mcp.client.stdio", "mcp.client.streamable_http"):
        logging.getLogger(name).addFilter(_one_line)
    if spec.url is not None:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        headers = {name: _filled_in(value, f"{spec.who}.headers") for name, value in spec.headers.items()}
        # `timeout_s` bounds each answer: the call is awaited for so long.
        async with (
            httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(spec.timeout_s, read=None)) as client,
            streamable_http_client(spec.url, http_client=client) as streams,
        ):
            yield streams
        return
    from mcp.client.stdio import StdioServerParameters, stdio_client

    own = {name: _filled_in(value, f"{spec.who}.env") for name, value in spec.env.items()}
    env = {"PATH": path_of_commands(), **own}
    if shutil.which(spec.command[0], path=env["PATH"]) is None:
        raise UserCodeError(
            f"{spec.who}.command: there is no command {spec.command[0]!r}; install it, or give its path"
        )
    server = StdioServerParameters(command=spec.command[0], args=list(spec.command[1:]), env=env)
    async with stdio_client(server, errlog=sys.stderr) as streams:
        yield streams


def _one_line(record: logging.LogRecord) -> bool:
    """Keep the SDK from printing tracebacks: it prints one for each line of a server that does not speak MCP."""
    if record.exc_info and (cause := record.exc_info[1]) is not None:
        said = " ".join(said_by(cause).split())
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {cut(said, 300)}", (), None
    return True


def _filled_in(value: str, where: str) -> str:
    """Return ``value`` with ``$NAME`` replaced by that environment variable of this process."""
    try:
        return string.Template(value).substitute(os.environ)
    except (KeyError, ValueError) as cause:
        raise UserCodeError(
            f"{where}: {value!r} has a $ without a variable ({cause}); set it by agent.env, or write $$ for a $"
        ) from None
