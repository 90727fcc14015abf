"""Agents that are commands: the row on standard input, the endpoint in the environment, the reward as the last line.

rollout.agent={command: [node, agent.js]}       # OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, …
> {"steps": 3}                                  # printed by the command: whatever it likes,
> {"reward": 1.0}                               # and last a number, or an object that has a reward
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.agents.interface.command_path import path_of_commands
from headway.agents.interface.failures import number
from headway.agents.interface.program import ProgramDescription
from headway.agents.interface.program_chat import Chat
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart
from headway.agents.programs.http_agents import accessed
from headway.errors import ProgramFailed, UserCodeError, cut, shown

MOST_LINE = 2**20
"""Most bytes of a line that is read for a reward."""
EXPECTED = 'expected a number, or an object with one, such as {"reward": 1.0}, as the last line'


class CommandProgram:
    """A command, which is run for each episode."""

    is_async = True

    def __init__(self, command: Sequence[str], who: str, directory: str | None) -> None:
        """``directory``: where the command is run, if it is there."""
        self._command, self._who = list(command), who
        self._directory = directory if directory is not None and Path(directory).is_dir() else None
        program = self._command[0]
        found = shutil.which(program, path=path_of_commands())
        if found is None and not Path(self._directory or ".", program).exists():
            raise UserCodeError(f"{who}: there is no program {program!r} here; install it, or give its path")

    def describe(self) -> ProgramDescription:
        return ProgramDescription("command", self.is_async)

    async def run(self, start: EpisodeStart, chat: Chat) -> EpisodeEnd:
        access = accessed(start)
        root = access.base_url.removesuffix("/v1")
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.subprocess_exec(
            lambda: _CommandCleanup(MOST_LINE, loop),
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self._directory,
            start_new_session=True,  # so that what it starts ends with it
            env={
                **os.environ,
                "PATH": path_of_commands(),
                "OPENAI_BASE_URL": access.base_url,
                "OPENAI_API_BASE": access.base_url,
                "OPENAI_API_KEY": access.api_key,
                "OPENAI_MODEL": access.model,
                "ANTHROPIC_BASE_URL": root,
                "ANTHROPIC_API_KEY": access.api_key,
                "ANTHROPIC_MODEL": access.model,
                "HEADWAY_SEED": str(start.seed),
            },
        )
        process = asyncio.subprocess.Process(transport, protocol, loop)
        try:
            said, printed, _ = await asyncio.gather(
                _last_line(process.stdout), _copied(process.stderr), _written(process.stdin, start)
            )
            status = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if status != 0:
            raise ProgramFailed(f"{self._who} ended with status {status}: {cut(printed, 300) or 'it printed no error'}")
        return EpisodeEnd(reward=self._reward(said))

    def _reward(self, line: str) -> float | None:
        try:
            value: Any = json.loads(line) if line else None
        except ValueError:
            raise ProgramFailed(f"{self._who}: it printed {shown(line)} as its last line; {EXPECTED}") from None
        if isinstance(value, dict):
            value = value.get("reward")
        return None if value is None else number(value, f"{self._who}: the reward in its last line")


class _CommandCleanup(asyncio.subprocess.SubprocessStreamProtocol):
    """Ends what a command has left behind once it ends itself: while that holds its output, the output has no end."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._group = transport.get_pid()

    def process_exited(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGKILL)
        super().process_exited()


async def _written(stdin: asyncio.StreamWriter | None, start: EpisodeStart) -> None:
    assert stdin is not None, "it was asked for"
    with suppress(ConnectionError):  # a command may read nothing
        stdin.write(json.dumps(start.with_prompt(), default=str).encode() + b"\n")
        await stdin.drain()
    stdin.close()


async def _last_line(stdout: asyncio.StreamReader | None) -> str:
    """Read to the end, and return the last line that is not empty."""
    last = b""
    async for line in _lines(stdout):
        last = line.strip() or last
    return last.decode(errors="replace")


async def _copied(stderr: asyncio.StreamReader | None) -> str:
    """Copy what is printed to this process's log; return the end of it in one line."""
    kept: deque[str] = deque(maxlen=3)
    async for line in _lines(stderr):
        text = line.decode(errors="replace")
        sys.stderr.write(text)
        if text.strip():
            kept.append(" ".join(text.split()))
    return " ".join(kept)


async def _lines(stream: asyncio.StreamReader | None) -> Any:
    """Yield lines; of one that is too long, nothing."""
    assert stream is not None, "it was asked for"
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # longer than the limit: the stream has dropped it
            continue
        if not line:
            return
        yield line
