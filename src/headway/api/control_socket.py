"""A run's control socket and its commands: the process that trains it listens, and ``headway ctl`` asks it for things.

    RUN/control.sock    ◀── {"command": "profile", "versions": 1}                  one line
                        ──▶ {"say": "the window is open …"}, {"alive": true}, …    then {"end": true}, or an error

Only the run's own user may connect. What was asked for goes on where whoever asked hangs up.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from headway.api.profile_window import ProfileWindow
from headway.errors import ConfigError, DataError, HeadwayError, RunError, StallError, UserError, said_by
from headway.reports.record.events_file import look_through
from headway.reports.run_directory import RunDirectory, is_trained

ADDRESS_BYTES = 107
"""Longest path that the kernel takes as a socket's address."""
LINE_BYTES = 64 * 2**10
ASKING_S = 10.0
"""Seconds for whoever connects to say what it wants."""
ALIVE_EVERY_S = 5.0
"""Seconds after which a run that has nothing to tell says that it is there."""
SILENT_S = 120.0
"""Seconds without a word after which a run's process is taken for one that stands still. In one process with trainer
and engines it is silent while a trace is written."""
LAST_WORDS_S = 2.0
"""Seconds for answers under way at the end of a run."""

Message = dict[str, Any]
Answer = Callable[[Message], AsyncGenerator[str, None]]
"""Function that does what a message asks for: it yields lines for the user, and raises the errors of `errors`."""


# ---------------------------------------------------------------------------------------------- the run's side


@asynccontextmanager
async def listening(path: Path, answer: Answer) -> AsyncIterator[None]:
    """Serve the socket ``path`` in the block. The caller holds the run's lock: a socket there is a killed run's.

    Raises `OSError` where the file system has no sockets, or something else has that name.
    """
    server = _ControlServer(answer)
    bound = _bind(path)
    try:
        listener = await asyncio.start_unix_server(server.serve, sock=bound, limit=LINE_BYTES)
    except BaseException:
        bound.close()
        raise
    try:
        yield
    finally:
        listener.close()
        _remove(path)
        await server.close()


def _bind(path: Path) -> socket.socket:
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        path.unlink()
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(path) as address:
            bound.bind(address)
        path.chmod(0o600)  # nobody can connect before it listens
        bound.setblocking(False)
    except BaseException:
        bound.close()
        raise
    return bound


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """Yield a name of ``path`` that is short enough for the kernel: by its folder's descriptor, where it has to be."""
    if len(os.fsencode(path)) <= ADDRESS_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class _ControlServer:
    """Server of a run's socket: one task for each that asks."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._open: set[asyncio.Task[Any]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            with suppress(ConnectionError, TimeoutError):  # whoever asked has hung up, or does not read
                await self._serve(reader, writer)
        finally:
            self._open.discard(task)
            writer.close()

    async def close(self) -> None:
        """Give answers under way a moment to end, and hang up."""
        if self._open:
            await asyncio.wait(self._open, timeout=LAST_WORDS_S)
        for task in list(self._open):
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ASKING_S):
                message = _parsed(await reader.readline())
        except (TimeoutError, ValueError) as cause:  # a line that is too long is a ValueError, too
            await _send(writer, {"error": f"this run was asked for nothing that it understands: {said_by(cause)}"})
            return
        try:
            async with aclosing(self._answer(message)) as lines, aclosing(_with_pauses(lines)) as said:
                async for line in said:
                    await _send(writer, {"alive": True} if line is None else {"say": line})
        except HeadwayError as failure:
            await _send(writer, {"error": str(failure), "user": isinstance(failure, UserError)})
        else:
            await _send(writer, {"end": True})


async def _with_pauses(lines: AsyncGenerator[str, None]) -> AsyncGenerator[str | None, None]:
    """Yield the lines, and None whenever there was none for `ALIVE_EVERY_S`."""

    async def next_line() -> str | None:
        return await anext(lines, None)

    while True:
        following = asyncio.create_task(next_line())
        try:
            while not (await asyncio.wait([following], timeout=ALIVE_EVERY_S))[0]:
                yield None
        finally:
            if not following.done():
                following.cancel()
                with suppress(asyncio.CancelledError):
                    await following
        if (line := following.result()) is None:
            return
        yield line


def _parsed(line: bytes) -> Message:
    """Return a line's message. Raises `ValueError`."""
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"expected a JSON object, got {line[:80]!r}")
    return message


async def _send(writer: asyncio.StreamWriter, message: Message) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    async with asyncio.timeout(ASKING_S):
        await writer.drain()


# ---------------------------------------------------------------------------------------------- whoever asks


def ask(run: RunDirectory, message: Message) -> Iterator[str]:
    """Send ``message`` to the process that trains ``run``, and yield the lines that it answers with.

    Raises:
        UserError: nobody trains the run, or not here, or what is asked for cannot be done.
        StallError: the process does not answer any more.
        RunError: it ended before it had answered.
    """
    for answer in _answers(run, message):
        match answer:
            case {"say": str(text)}:
                yield text
            case {"error": str(text), "user": True}:
                raise UserError(text)
            case {"error": str(text)}:
                raise RunError(text)
            case {"end": True}:
                return
    raise RunError(f"{run.path}: the process that trains this run ended before it had answered")


def _answers(run: RunDirectory, message: Message) -> Iterator[Message]:
    """Yield what comes back, until the process hangs up. Raises `UserError` and `StallError`."""
    with _connected(run) as connection, connection.makefile("rb") as lines:
        try:
            connection.sendall(json.dumps(message).encode() + b"\n")
            for line in lines:
                if not line.endswith(b"\n"):
                    return
                yield _parsed(line)
        except TimeoutError as cause:
            raise StallError(
                f"{run.path}: waited {SILENT_S:g} s for {_holder(run)}, which trains this run, to say anything; it "
                "stands still, or is suspended"
            ) from cause
        except ConnectionError:
            return


@contextmanager
def _connected(run: RunDirectory) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(SILENT_S)
        try:
            with _address(run.control) as address:
                connection.connect(address)
        except TimeoutError as cause:
            raise StallError(f"{run.path}: {_holder(run)} trains this run, and takes no connection") from cause
        except PermissionError as cause:
            raise UserError(f"{run.path}: this run is another user's, who alone may ask it for something") from cause
        except OSError as cause:
            raise UserError(f"{run.path}: {_why_alone(run)}") from cause
        yield connection


def _holder(run: RunDirectory) -> str:
    """Return who took the run's lock last, in its own words. The lock itself is not touched."""
    try:
        return run.lock.read_text(encoding="utf-8").strip() or "another process"
    except (OSError, UnicodeDecodeError):
        return "another process"


def _why_alone(run: RunDirectory) -> str:
    """Return why a run does not answer."""
    trained = is_trained(run.lock)
    if trained is False:
        with suppress(DataError):
            if look_through(run.events).ended == "completed":
                return "no process trains this run, which is complete: a run is asked while it trains"
        return f"no process trains this run. To go on with it: headway train --resume {run.path}"
    holder, here = _holder(run), socket.gethostname()
    if trained is None and " on " in holder and not holder.endswith(f" on {here}"):
        return (
            f"{holder} trains this run, or did, and this machine is {here}, which cannot tell; give the command there"
        )
    return (
        f"{holder} trains this run, and cannot be asked: it is still starting, or ending. If that stays so, the run "
        "warned at its start that it cannot be asked, and why"
    )


class RunControl:
    """Answers of one run to ``headway ctl``."""

    def __init__(self) -> None:
        self.window: ProfileWindow | None = None
        """Window of the run's profiles; None before training begins."""

    async def answer(self, message: Message) -> AsyncGenerator[str, None]:
        """Do what ``message`` asks for, and yield lines for the user. Raises `UserError` where that cannot be."""
        if message.get("command") != "profile":
            raise UserError(f"this run can be asked for profile, not for {message.get('command')!r}")
        if self.window is None:
            raise UserError("this run is still starting, and has nothing to profile; ask again when it trains")
        match message:
            case {"versions": int(versions), "seconds": int() | float() as seconds}:
                told = self.window.ask(versions=versions, seconds=seconds)
            case _:
                raise ConfigError("expected the numbers versions and seconds")
        async with aclosing(told.lines()) as lines:
            async for line in lines:
                yield line
