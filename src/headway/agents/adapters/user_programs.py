"""Programs that are the user's own, ``async def run(row, chat)`` or a class with ``run``; and agents: user code that
asks for turns over HTTP, at the endpoint of its episode worker, by its own client.

async def run(row, base_url, api_key):                      # or def run(…), which has a process for each episode
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    answer = await client.chat.completions.create(model="policy", messages=row["messages"])
    return float(answer.choices[0].message.content == row["answer"])

An object with ``run(data, **kwargs)`` is AReaL's form. A command gets the row on standard input and the endpoint in its
environment, and prints the reward last:

agent.client=[node, agent.js]                  # OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, …
> {"steps": 3}                                  # printed by the command: whatever it likes,
> {"reward": 1.0}                               # and last a number, or an object that has a reward
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import shutil
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, closing, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from headway.agents.interface.program_chat import Chat, Program
from headway.agents.interface.program_messages import Access, EpisodeEnd, EpisodeStart
from headway.agents.interface.user_calls import are_coroutines, called, innermost, number, path_of_commands, plain
from headway.errors import ProgramFailed, UserCodeError, shown
from headway.runtime.user_code import Parameters, check_call

RETURNS = "expected a number, a list with a number for each turn, both as (number, list), or None"
EXPECTED = "a program is async def run(row, chat), or a class or an object that has it"


class UsersRun:
    """The user's ``run``: a function, or a method of an object or a class.

    Of a class each episode gets a new object, made with ``agent.params``; a function is called with these.
    """

    def __init__(self, found: Any, who: str, params: Mapping[str, Any], expected: str) -> None:
        """``expected``: description of what ``found`` should be, for messages.

        Raises:
            UserCodeError: ``found`` has no ``run``, or it yields.
        """
        self._who, self._params = who, dict(params)
        self._make: Callable[..., Any] | None = found if inspect.isclass(found) else None
        run = found if callable(found) and self._make is None else getattr(found, "run", None)
        if run is None:
            raise UserCodeError(f"{who}: it is {_kind(found)} without run; {expected}")
        self._run: Callable[..., Any] = run
        self.given = self._params if self._make is None else {}
        """Arguments of every call; empty for a class."""
        self.parameters = Parameters.of(run)
        self.name = str(getattr(run, "__qualname__", type(run).__name__))
        inner = innermost(run)
        if inspect.isasyncgenfunction(inner) or inspect.isgeneratorfunction(inner):
            raise UserCodeError(f"{who}: it yields, and so returns no reward; return the episode's reward instead")
        self.is_async = are_coroutines(run)
        """True if ``run`` is a coroutine function, so that it does not block the event loop."""

    def check(self, *positional: str, names: Sequence[str] = ()) -> None:
        """Check that ``run`` takes arguments ``positional`` by position, and those of ``names`` by name.

        Raises:
            UserCodeError: it does not; says what it takes and what it is given.
        """
        before = () if self._make is None else ("self",)
        check_call(self._who, self._run, (*before, *positional), params={**dict.fromkeys(names), **self.given})
        if self._make is not None:
            check_call(self._who, self._make, (), params=self._params)

    def of_an_episode(self) -> Callable[..., Any]:
        """Return the function to call in one episode."""
        if self._make is None:
            return functools.partial(self._run, **self.given)
        run: Callable[..., Any] = self._make(**self._params).run
        return run


class OwnProgram(Program):
    """Program that is the user's own function or class (`UsersRun`)."""

    def __init__(self, found: Any, who: str, params: Mapping[str, Any]) -> None:
        self.who, self._run = who, UsersRun(found, who, params, EXPECTED)
        if not self._run.is_async:
            raise UserCodeError(
                f"{who}: {self._run.name} is a plain function, and would hold all other episodes while it waits for "
                "the model; write async def, and await chat.turn(…); code that blocks goes into asyncio.to_thread(…)"
            )
        self._run.check("row", "chat")

    async def run(self, start: EpisodeStart, chat: Chat) -> EpisodeEnd:
        return end_of(await self._run.of_an_episode()(start.with_prompt(), chat), self.who)


def end_of(value: Any, who: str, expected: str = RETURNS) -> EpisodeEnd:
    """Return the end of an episode whose program returned ``value``.

    Raises:
        ProgramFailed: ``value`` is not as ``expected``.
    """
    episode, turns = plain(value), None
    if isinstance(episode, list):
        episode, turns = None, episode
    elif isinstance(episode, tuple) and len(episode) == 2 and isinstance(episode[1], list | tuple):
        episode, turns = episode
    # An empty list is refused, too: neither the episode nor a turn would have a reward.
    if turns == [] or isinstance(episode, str | bytes) or not (episode is None or hasattr(episode, "__float__")):
        raise ProgramFailed(f"{who} returned {shown(value)}, {expected}")
    what = f"{who}: the reward that it returned"
    return EpisodeEnd(
        reward=None if episode is None else number(episode, what),
        turn_rewards=tuple(number(one, f"{what} for turn {n}") for n, one in enumerate(turns or ())),
    )


def _kind(found: Any) -> str:
    return f"a class {found.__name__}" if inspect.isclass(found) else f"an object of {type(found).__name__}"


AGENT_EXPECTED = "an agent is async def run(row, base_url, api_key), or a class or an object that has it"
_GIVEN = ("base_url", "api_key", "http_client", "model", "tokenizer", "seed")
"""Arguments that an agent gets by name, if it has parameters of these names."""
_GIVEN_TO_ALL = ("base_url", "api_key", "http_client")
"""Arguments that an agent also gets as ``**kwargs``, as AReaL gives them."""


class AgentProgram(Program):
    """An agent in Python: a function of the row, or AReaL's form, an object with ``run(data, **kwargs)``.

    It returns the episode's reward, as programs do, or rewards by the ids of answers.
    """

    def __init__(self, found: Any, who: str, params: Mapping[str, Any]) -> None:
        self.who, self._run = who, UsersRun(found, who, params, AGENT_EXPECTED)
        self.is_async = self._run.is_async
        self._tls: ssl.SSLContext | None = None
        takes = self._run.parameters
        if not takes.order:
            raise UserCodeError(f"{who}: it takes no row of the data; {AGENT_EXPECTED}")
        behind = takes.order[1:]
        wanted = [name for name in _GIVEN if name in behind or (takes.takes_all and name in _GIVEN_TO_ALL)]
        self._names = [name for name in wanted if name not in self._run.given]
        if unknown := [name for name in takes.lacking({*self._names, *self._run.given}) if name in behind]:
            raise UserCodeError(
                f"{who}: there is nothing for its parameter {' and '.join(map(repr, unknown))}: behind the row, "
                f"arguments are given by name, and there are {', '.join(_GIVEN)} and those of agent.params; rename "
                "the parameter, or give it a default"
            )
        self._run.check("row", names=self._names)

    async def run(self, start: EpisodeStart, chat: Chat) -> EpisodeEnd:
        access = accessed(start)
        given: dict[str, Any] = {"base_url": access.base_url, "api_key": access.api_key, "model": access.model}
        given |= {"tokenizer": access.tokenizer, "seed": start.seed}
        async with self._http_client() as given["http_client"]:
            arguments = {name: given[name] for name in self._names}
            value = await called(self._run.of_an_episode(), start.with_prompt(), **arguments)
        return _end(value, self.who, access.tag)

    @asynccontextmanager
    async def _http_client(self) -> AsyncIterator[Any]:
        """Yield an HTTP client of one episode, for OpenAI's argument ``http_client``; the agent may close it. None if
        the agent has no parameter for it, or the package is missing.

        The context for TLS is shared by the process: it takes a tenth of a second to make.
        """
        if "http_client" not in self._names or find_spec("openai") is None:
            yield None
            return
        import openai

        self._tls = self._tls or ssl.create_default_context()  # once for all episodes: it reads all certificates
        if self.is_async:
            async with aclosing(openai.DefaultAsyncHttpxClient(verify=self._tls)) as client:
                yield client
        else:
            with closing(openai.DefaultHttpxClient(verify=self._tls)) as blocking:
                yield blocking


def accessed(start: EpisodeStart) -> Access:
    """Return the agent's access to the policy. Raises `ProgramFailed` if there is no endpoint."""
    if start.access is None:
        raise ProgramFailed(
            "an agent needs an endpoint, and its episode worker has none; it was hosted as another program"
        )
    return start.access


def _end(value: Any, who: str, tag: str) -> EpisodeEnd:
    """Return the end of an episode whose agent returned ``value``."""
    if not isinstance(value, Mapping):
        end = end_of(value, who, f"{RETURNS}, or a dict of numbers by the ids of answers")
        return replace(end, turn_rewards=(), answer_rewards=end.turn_rewards) if end.turn_rewards else end
    rewards: dict[int, float] = {}
    for id, reward in value.items():
        rewards[_turn_of(id, who, tag)] = number(reward, f"{who}: the reward of {shown(id)}")
    return EpisodeEnd(answer_rewards=rewards)


def _turn_of(id: Any, who: str, tag: str) -> int:
    """Return the number of the turn with the answer ``id``, such as ``chatcmpl-3-8d0c``, which ends with ``tag``."""
    parts = str(id).split("-")
    if len(parts) < 3 or not parts[-2].isdecimal() or parts[-1] != tag:
        raise ProgramFailed(
            f"{who} returned a reward for {shown(id)}, which is the id of no answer in this episode; expected a number "
            "for the id of each answer that is given one"
        )
    return int(parts[-2])


EXPECTED_LINE = 'expected a number, or an object with one, such as {"reward": 1.0}, as the last line'


class CommandProgram(Program):
    """Program that runs a command for each episode."""

    def __init__(self, command: Sequence[str], who: str, directory: str | None) -> None:
        """``directory``: working directory of the command, if it exists."""
        self._command, self.who = list(command), who
        self._directory = directory if directory is not None and Path(directory).is_dir() else None
        program = self._command[0]
        found = shutil.which(program, path=path_of_commands())
        if found is None and not Path(self._directory or ".", program).exists():
            raise UserCodeError(f"{who}: there is no program {program!r} here; install it, or give its path")

    async def run(self, start: EpisodeStart, chat: Chat) -> EpisodeEnd:
        access = accessed(start)
        root = access.base_url.removesuffix("/v1")
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.subprocess_exec(
            lambda: _CommandCleanup(2**16, loop),
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self._directory,
            start_new_session=True,  # so that its child processes end with it
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
            assert process.stdin and process.stdout and process.stderr, "they were asked for"
            # Concurrently: a command blocks on a full pipe while only the other one is read.
            output, errors, _ = await asyncio.gather(
                tail_of(process.stdout),
                tail_of(process.stderr, 300, copied_to=sys.stderr),
                _written(process.stdin, start),
            )
            status = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            transport.close()  # an input that is not read would stay open until the event loop has gone
            await process.wait()
        if status != 0:
            said = " ".join(errors.decode(errors="replace").split()) or "it printed no error"
            raise ProgramFailed(f"{self.who} ended with status {status}: {said}")
        line = output.rstrip().rpartition(b"\n")[2].decode(errors="replace")
        return EpisodeEnd(reward=self._reward(line) if line else None)

    def _reward(self, line: str) -> float | None:
        try:
            value: Any = json.loads(line)
        except ValueError:
            raise ProgramFailed(f"{self.who}: it printed {shown(line)} as its last line; {EXPECTED_LINE}") from None
        if isinstance(value, dict):
            value = value.get("reward")
        return None if value is None else number(value, f"{self.who}: the reward in its last line")


class _CommandCleanup(asyncio.subprocess.SubprocessStreamProtocol):
    """Protocol that kills a command's leftover processes when it ends: they would keep its output open."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._group = transport.get_pid()

    def process_exited(self) -> None:
        with suppress(ProcessLookupError):
            # Before the base class, which waits for the pipes' ends: leftover processes of the group hold them.
            os.killpg(self._group, signal.SIGKILL)
        super().process_exited()


async def _written(stdin: asyncio.StreamWriter, start: EpisodeStart) -> None:
    with suppress(ConnectionError):  # a command need not read its input
        stdin.write(json.dumps(start.with_prompt(), default=str).encode() + b"\n")
        await stdin.drain()
    stdin.close()


async def tail_of(output: asyncio.StreamReader, most: int = 2**20, copied_to: TextIO | None = None) -> bytes:
    """Read to the end; return the last ``most`` bytes. ``copied_to``: a stream that gets all of it."""
    last = b""
    while printed := await output.read(2**16):
        if copied_to is not None:
            copied_to.write(printed.decode(errors="replace"))
        last = (last + printed)[-most:]
    return last
