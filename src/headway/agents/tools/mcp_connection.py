"""One connection to an MCP server, by the official SDK: to a command that it starts, or to an address."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import re
import shutil
import string
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.agents.interface.user_calls import is_away, path_of_commands
from headway.errors import ProgramFailed, Unavailable, UserCodeError, cut, said_by, shown

if TYPE_CHECKING:
    from mcp import Client


_LOGGERS = ("mcp.client.stdio", "mcp.client.streamable_http")


def root(cause: BaseException) -> BaseException:
    """The exception that a group of exceptions comes down to."""
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return cause


def is_unfit(cause: BaseException) -> bool:
    """Tell whether a message does not fit MCP's schema."""
    from pydantic import ValidationError

    return isinstance(root(cause), ValidationError)


def unreadable(cause: Exception) -> Any:
    """The text or error in place of a message."""
    errors: Any = getattr(cause, "errors", list)()
    return errors[0].get("input") if errors else said_by(cause)


def in_words(cause: BaseException) -> str:
    """Say what ``cause`` comes down to: of what does not fit a schema which field, what is there, what was expected."""
    cause = root(cause)
    if is_unfit(cause):
        return _unfit(cause)
    by_the_tool: Any = cause.__cause__
    if isinstance(cause, RuntimeError) and hasattr(by_the_tool, "json_path"):  # jsonschema's, of a tool's result
        where = str(by_the_tool.json_path).replace("$", "structuredContent", 1)
        return f"{where}: {cut(' '.join(str(by_the_tool.message).split()), 200)}"
    return said_by(cause)


def _unfit(error: Any) -> str:
    """The words of pydantic's ``ValidationError``. Of a block that may be of several kinds it has errors for each."""
    errors = error.errors(include_url=False, include_context=False)
    other_kinds = {one["loc"][:-1] for one in errors if one["type"] == "literal_error"}
    first = next((one for one in errors if one["loc"][:-1] not in other_kinds), None)
    first = first or next(one for one in errors if one["type"] == "literal_error")
    where = ".".join(str(part) for part in first["loc"] if not str(part)[:1].isupper())  # no names of the SDK's classes
    if first["type"] == "missing":
        return f"{where} is missing in {shown(first['input'])}"
    expected = re.sub(r" or instance of \w+", "", first["msg"]).removeprefix("Input should be ")
    return f"{where or 'it'} is {shown(first['input'])}, expected {expected}"


def keep_to_one_line() -> None:
    """Keep the SDK from printing tracebacks: what it cannot read is heard of as noise, and all else is one line."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_one_line)


def _one_line(record: logging.LogRecord) -> bool:
    cause = record.exc_info[1] if record.exc_info else None
    if cause is not None:
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {said_by(cause)}", (), None
    return not isinstance(cause, ValueError)


CLOSE_TIMEOUT_S = 10.0
"""Seconds for a connection to end; the SDK gives a server's process six of them."""


@dataclass(frozen=True, slots=True)
class McpServerSpec:
    """The user's choice of a server, as ``config/sections/agent_section.py`` has it."""

    name: str
    command: tuple[str, ...] = ()
    """The command that starts it and speaks on its standard input and output; empty where there is a URL."""
    env: Mapping[str, str] = field(default_factory=dict)
    url: str | None = None
    """Its address, where it speaks over streamable HTTP."""
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 30.0
    per_episode: bool = False
    tools: tuple[str, ...] | None = None
    """The tools that are offered; None for all."""

    @property
    def who(self) -> str:
        """The server in messages."""
        return f"agent.mcp.{self.name}"

    @property
    def load_timeout_s(self) -> float:
        """Seconds that loading its tools may wait for the server: until it is there, for its tools, and for its end."""
        return 2 * self.timeout_s + 2 * CLOSE_TIMEOUT_S

    def resolved(self) -> McpServerSpec:
        """Return the spec with absolute paths of the files in its command, for another working directory."""
        command = tuple(
            str(Path(part).absolute()) if (n or os.sep in part) and Path(part).is_file() else part
            for n, part in enumerate(self.command)
        )
        return replace(self, command=command)


class ServerTimeout(Unavailable):
    """Exception for a server that has not answered in time."""


class McpConnection:
    """One connection, held open by a separate task: the SDK wants one task to open and close it."""

    def __init__(self, spec: McpServerSpec, target: Callable[[], Any]) -> None:
        self._spec, self._target = spec, target
        self._ending = asyncio.Event()
        self._cause: BaseException | None = None
        self.answered = 0
        """Number of answers so far."""
        self.noise, self.wrote = 0, ""
        """How often something came in place of MCP's messages, and what it was the last time."""
        self._told = False
        self.client: Client
        self.holder: asyncio.Task[None]

    @property
    def lost(self) -> bool:
        """The connection is over, or is ending."""
        return self.holder.done() or self._ending.is_set()

    @property
    def why(self) -> str:
        """Its cause, to append to a message."""
        return "" if self._cause is None else f": {in_words(self._cause)}"

    def tell_noise(self) -> None:
        """Print, once, what the server writes beside its answers, which are understood all the same."""
        if self.noise and not self._told:
            self._told = True
            print(
                f"{self._spec.who}: the server wrote {self.wrote} beside its answers, which is not MCP and was passed "
                "over; what is for people belongs on its standard error",
                file=sys.stderr,
            )

    def lose(self) -> None:
        """Have it end, without waiting for that."""
        self._ending.set()

    async def open(self) -> None:
        """Connect. Raises `Unavailable` for a server that is away, `ProgramFailed` for what is none."""
        who, loop = self._spec.who, asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        # It belongs to no episode: not its context, by which workers tell whose code holds their loop.
        self.holder = loop.create_task(self._hold(ready), context=contextvars.Context())
        try:
            await asyncio.wait({ready, self.holder}, timeout=self._spec.timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            late = not self.holder.done()
            if not ready.done():
                self.holder.cancel()
        if ready.done() and late:
            return
        await asyncio.wait({self.holder}, timeout=CLOSE_TIMEOUT_S)
        wrote = f"; it wrote {self.wrote}, which is not MCP; name an MCP server" if self.noise else ""
        if late:
            said = f"{who}: {self._shown} was waited for {self._spec.timeout_s:g} s, and did not answer{wrote}"
            raise ProgramFailed(said) if wrote else ServerTimeout(said)
        cause = self._cause or ConnectionError("the connection ended")
        if isinstance(cause, UserCodeError):
            raise cause
        kind = Unavailable if is_away(cause) or _is_closed(cause) else ProgramFailed
        unfit = "its answer is not MCP: " if is_unfit(cause) else ""
        other = f"; correct {who}.url" if self._spec.url is not None and kind is ProgramFailed else ""
        raise kind(f"{who}: cannot connect to {self._shown}: {unfit}{in_words(cause)}{wrote}{other}") from cause

    async def close(self) -> None:
        """End it, and wait for that: for a server's process, too."""
        self._ending.set()
        await asyncio.wait({self.holder}, timeout=CLOSE_TIMEOUT_S)
        if not self.holder.done():
            self.holder.cancel()
            await asyncio.wait({self.holder}, timeout=CLOSE_TIMEOUT_S)

    async def _hold(self, ready: asyncio.Future[None]) -> None:
        from mcp import Client

        async def heard(message: Any) -> None:
            if isinstance(message, Exception):
                self.noise, self.wrote = self.noise + 1, shown(unreadable(message))

        try:
            async with Client(self._target(), message_handler=heard, cache=None) as self.client:
                if not ready.done():
                    ready.set_result(None)
                await self._ending.wait()
        except (Exception, asyncio.CancelledError) as cause:
            self._cause = cause

    @property
    def _shown(self) -> str:
        return self._spec.url or " ".join(self._spec.command) or "it"


@asynccontextmanager
async def transport(spec: McpServerSpec) -> AsyncIterator[Any]:
    """The SDK's connection to the server of ``spec``."""
    keep_to_one_line()
    if spec.url is not None:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        headers = {name: _filled_in(value, f"{spec.who}.headers") for name, value in spec.headers.items()}
        # How long an answer may take is bounded by `timeout_s`, for which the call is waited for.
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


def _filled_in(value: str, where: str) -> str:
    """``value`` with ``$NAME`` replaced by that variable of this process's environment."""
    try:
        return string.Template(value).substitute(os.environ)
    except KeyError as missing:
        raise UserCodeError(
            f"{where}: there is no variable {missing} for ${missing.args[0]}; set it by agent.env or write $$ for a $"
        ) from None
    except ValueError:
        raise UserCodeError(f"{where}: a $ stands before no name; write $NAME for a variable, or $$ for a $") from None


def _is_closed(cause: BaseException) -> bool:
    """Tell whether the SDK says that the server's end of the connection is closed."""
    import mcp_types as types

    return getattr(root(cause), "code", None) == types.CONNECTION_CLOSED
