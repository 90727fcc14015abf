"""A program: one form of user code, told by its spec, that makes one episode after the other.

    loaded = ProgramSpec(environment="game.py:Game").load()       # in a process for user code
    loaded.is_async                                               # shares an event loop with others, or is alone
    loaded.describe()                                             # its form and tools, before the first episode
    end = await loaded.serve(start, ask)                          # one episode; ask() is a turn of the policy

Each form is one file of this package; `headway.agents.programs.program_loader` tells them apart.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from headway.agents.interface.failures import Insisted, failing
from headway.agents.interface.program_chat import Ask, Chat, Tally
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, ToolSchema
from headway.agents.interface.sent_messages import SentMessages
from headway.agents.tools.mcp_servers import McpServerSpec
from headway.errors import EpisodeOver, HeadwayError, ProgramAway, ProgramFailed, UserCodeError, cut
from headway.runtime.sandbox.python_tool import PYTHON
from headway.runtime.sandbox.sandbox_limits import SandboxSpec
from headway.runtime.user_code import names_a_server, resolve_spec


@dataclass(frozen=True, slots=True)
class ProgramDescription:
    """The facts of a program that are known before its first episode."""

    form: str
    """Name of the form by which the user's code was recognised."""
    is_async: bool
    """The program shares an event loop with others; otherwise it blocks, and needs a process of its own."""
    tools: tuple[ToolSchema, ...] = ()
    """Schemas of the tools that are known beforehand."""
    gives_reward: bool | None = None
    """The program gives rewards; None where only its episodes tell."""
    columns: tuple[str, ...] = ()
    """Columns that every row of the data has to have."""


class Program(Protocol):
    """One form of user code."""

    is_async: bool
    """The program shares an event loop with others; otherwise it blocks, and needs a process of its own."""

    def describe(self) -> ProgramDescription:
        """Return what is known before the first episode. May make an environment for that.

        Raises:
            UserCodeError: the user's code cannot be used; says why.
        """
        ...

    async def run(self, start: EpisodeStart, chat: Chat) -> EpisodeEnd:
        """Make one episode. What its chat has recorded is added to the end: failed tools, rewards of turns.

        Rewards of turns that the end has itself are one for each turn, in the order in which turns were asked for.

        Raises:
            EpisodeOver: a limit has ended the episode, and nothing is to be added to the rewards that turns were given.
            ProgramFailed: the user's code raised, or returned what it must not.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """The user's choice of a program, as ``config/sections/program_section.py`` has it. Pickles, and is loaded where
    user code runs."""

    tools: tuple[str, ...] = ()
    environment: str | None = None
    program: str | None = None
    agent: str | None = None
    command: tuple[str, ...] = ()
    """The command of an agent that is one."""
    directory: str | None = None
    """The directory that commands are run in, where it is there."""
    model_path: str | None = None
    """Folder of the policy's tokenizer, for programs that work on token ids; None where there is none yet."""
    prompt_length: int = 0
    """The run's ``data.max_prompt_length``, which agent loops of verl's form are told."""
    mcp: tuple[McpServerSpec, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    max_turns: int | None = None
    """The run's ``rollout.max_turns``, which SkyRL-gym's environments are told."""
    sandbox: SandboxSpec = field(default_factory=SandboxSpec)
    """The sandbox of the tool ``python``."""

    @property
    def shown(self) -> str:
        """The program in messages: ``environment game.py:Game``."""
        if self.environment is not None:
            return f"environment {_short(self.environment)}"
        if self.program is not None:
            return f"program {_short(self.program)}"
        if self.agent is not None:
            return f"agent {_short(self.agent)}"
        if self.command:
            return f"agent {cut(' '.join(self.command), 60)}"
        return f"tools {', '.join([*map(_short, self.tools), *(server.who for server in self.mcp)])}"

    @property
    def waits_s(self) -> float:
        """Seconds for which loading may wait for servers, which say themselves that they are late."""
        given = self.params.get("timeout_s", 30.0)
        there = self.environment is not None and names_a_server(self.environment) and isinstance(given, int | float)
        return sum(server.load_timeout_s for server in self.mcp) + (float(given) if there else 0.0)

    def resolved(self) -> ProgramSpec:
        """Return the spec with absolute paths, for a process with another working directory."""
        return replace(
            self,
            tools=tuple(_resolved(tool) for tool in self.tools),
            environment=None if self.environment is None else _resolved(self.environment),
            mcp=tuple(server.resolved() for server in self.mcp),
            program=None if self.program is None else resolve_spec(self.program),
            agent=None if self.agent is None else resolve_spec(self.agent),
            directory=str(Path.cwd()) if self.command else None,
        )

    def load(self) -> LoadedProgram:
        """Import the user's code and recognise its form.

        Raises:
            UserCodeError: the code does not import, or has none of the forms; says what each of them lacks.
            ProgramAway: a function that makes the environment met something that is away for a time.
        """
        from headway.agents.programs.program_loader import load_program  # the forms are built on what stands here

        with _beforehand():
            return LoadedProgram(load_program(self), self.shown)


class LoadedProgram:
    """A program in the process that runs it: its episodes, each with one end or one error."""

    def __init__(self, program: Program, shown: str) -> None:
        self._program, self.shown = program, shown

    @property
    def is_async(self) -> bool:
        """The program shares an event loop with others; otherwise it blocks, and needs a process of its own."""
        return self._program.is_async

    def describe(self) -> ProgramDescription:
        """Return what is known before the first episode. May make an environment for that.

        Raises:
            UserCodeError: the user's code cannot be used; says why.
            ProgramAway: what it needs is away for a time.
        """
        with _beforehand():
            return self._program.describe()

    async def serve(self, start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        """Make the episode ``start``, asking the policy for turns by ``ask``.

        Before a program that is alone in its process begins, the global generators are seeded with the episode's seed.
        Where a limit ends the episode, its end has the rewards that were given before.

        Raises:
            ProgramAway: something that the program needs is away for a time; it may be run again.
            ProgramFailed: the program failed; the message names the user's code, and standard error has the traceback.
        """
        tally = Tally()
        if start.messages_are_kept:
            ask = SentMessages(ask).ask
        if not self._program.is_async:
            seed_generators(start.seed)
        try:
            with failing(self.shown):
                end = await self._program.run(start, Chat(ask, start, tally, self.shown))
                if end.turn_rewards:
                    tally.give(end.turn_rewards, self.shown)
        except EpisodeOver:
            end = EpisodeEnd()
        except Insisted as insisted:
            print(f"{start.name}: {insisted}; it was left there", file=sys.stderr)
            end = EpisodeEnd()
        except ProgramFailed:
            raise
        except HeadwayError as cause:
            raise ProgramFailed(str(cause)) from cause
        finally:
            tally.closed = True
        return replace(end, turn_rewards=tally.turn_rewards, tool_errors=tally.tool_errors)

    async def close(self) -> None:
        """Close the environments that are kept from one episode to the next, where the program's form has any."""
        close = getattr(self._program, "close", None)
        if close is not None:
            await close()


@contextmanager
def _beforehand() -> Iterator[None]:
    """Turn failures of user code before the first episode into what they are there: something wrong that was given."""
    try:
        yield
    except ProgramAway:
        raise
    except ProgramFailed as cause:
        raise UserCodeError(str(cause)) from cause


def seed_generators(seed: int) -> None:
    """Seed Python's global generator and, where it is imported, numpy's."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


def _resolved(spec: str) -> str:
    """``spec`` with an absolute path, where it names a file."""
    if names_a_server(spec) or spec == PYTHON:
        return spec
    return resolve_spec(spec) if ":" in spec else str(Path(spec).expanduser().resolve())


def _short(spec: str) -> str:
    if names_a_server(spec):
        return spec
    path, colon, name = spec.rpartition(":")
    return f"{Path(path).name}:{name}" if colon else Path(spec).name
