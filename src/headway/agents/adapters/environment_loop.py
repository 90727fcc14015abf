"""Episode loop of all environments: begin, then turns of the policy and steps of the environment, then the end.

    begin(row) ─▶ messages ─▶ chat.turn ─▶ answer ─▶ step(answer) ─▶ more messages, a reward ─▶ … ─▶ done ─▶ end

A form of environments (Gymnasium's, SkyRL-gym's, TRL's, OpenEnv's, tools alone) is a subclass of `EnvironmentProgram`.
It turns the environment's output into messages, and the policy's answers into actions.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from headway.agents.interface.program_chat import Chat, Program
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, Message, ProgramDescription, TurnAnswer
from headway.agents.interface.tool import OpenToolbox, Tool, Toolbox
from headway.agents.interface.user_calls import called, close_quietly, failing, seed_generators
from headway.errors import EpisodeOver

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Step:
    """Output of an environment: its first observation, or its reply to an answer."""

    messages: Sequence[Message] = ()
    """Messages to append to the conversation."""
    done: bool = False
    reward: float | None = None
    """Reward of the turn that made the answer; None if there is none."""
    answered: Message | None = None
    """Message that replaces the answer in the conversation; None keeps the answer."""


class EnvironmentProgram(Program, Generic[E]):
    """Program that plays episodes of an environment of the type ``E``; a form of environments is a subclass."""

    gives_reward = True

    @abstractmethod
    def episode(self, start: EpisodeStart) -> AbstractAsyncContextManager[E]:
        """Open an environment for one episode."""

    @abstractmethod
    async def begin(self, environment: E, start: EpisodeStart) -> Step:
        """Reset the environment; its messages begin the conversation."""

    async def step(self, environment: E, answer: TurnAnswer, chat: Chat) -> Step:
        """Apply the policy's answer. Here: make its tool calls; an answer without calls ends the episode."""
        return Step(await chat.call_tools(answer)) if answer.calls else Step(done=True)

    async def end(self, environment: E) -> EpisodeEnd:
        """Return the episode's end. Its turns have their rewards already."""
        return EpisodeEnd()

    def tools(self, environment: E) -> Sequence[Tool]:
        """Return the tools that the policy is offered."""
        return ()

    async def run(self, start: EpisodeStart, chat: Chat) -> EpisodeEnd:
        """Make one episode. See `Program.run`."""
        async with self.episode(start) as environment:
            if not self.is_async:
                # Seeded again: making an environment may draw random numbers, reusing one does not.
                seed_generators(start.seed)
            with suppress(EpisodeOver):
                step = await self.begin(environment, start)
                messages = step.messages
                while not step.done:
                    answer = await chat.turn(messages, self.tools(environment))  # type: ignore[arg-type]
                    step = await self.step(environment, answer, chat)
                    if step.reward is not None:
                        chat.reward(step.reward, answer)
                    # A new list: the sent request holds the previous one.
                    messages = [*messages, step.answered or answer.message, *step.messages]
            return await self.end(environment)

    async def call(self, environment: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the user's environment. Its exceptions become `ProgramFailed` or `ProgramAway`."""
        with failing(f"{self.who}: {method}()"):
            return await called(getattr(environment, method), *args, **kwargs)


class ToolLoop(EnvironmentProgram[OpenToolbox]):
    """The program of ``agent.tools`` and ``agent.mcp``: the prompt, and turns until a turn calls no tool.

    Its only rewards are those of tools in verl's form.
    """

    def __init__(self, tools: Toolbox, who: str) -> None:
        self._tools, self.who = tools, who
        self.is_async = tools.is_async

    def describe(self) -> ProgramDescription:
        gives_reward = None if self._tools.gives_reward else False
        return ProgramDescription(self.is_async, self._tools.schemas, gives_reward)

    def episode(self, start: EpisodeStart) -> AbstractAsyncContextManager[OpenToolbox]:
        return self._tools.episode(start)

    def tools(self, environment: OpenToolbox) -> Sequence[Tool]:
        return environment.tools

    async def begin(self, environment: OpenToolbox, start: EpisodeStart) -> Step:
        return Step(start.messages)

    async def end(self, environment: OpenToolbox) -> EpisodeEnd:
        return await environment.end()


class EnvironmentPool:
    """Pool of environments of one kind, reset and reused except after an episode that failed or was cancelled.

    Example:
        >>> pool = EnvironmentPool(dict, "environment game.py:Game")
        >>> with pool.one() as first:
        ...     pass
        >>> with pool.one() as again:
        ...     again is first
        True
    """

    def __init__(self, make: Callable[[], Any], who: str) -> None:
        self._make, self._who = make, who
        self._free: list[Any] = []
        self._process = os.getpid()

    @contextmanager
    def one(self) -> Iterator[Any]:
        """Lend an environment for one episode; makes one if none is free."""
        # A forked process would share the connections of earlier environments with its siblings, so it makes new ones.
        # Not by a fork hook: in a child that never comes here, destructors would close connections that its parent
        # uses.
        if self._process != os.getpid():
            self._process, self._free = os.getpid(), []
        if self._free:
            instance = self._free.pop()
        else:
            with failing(f"{self._who}: making it"):
                instance = self._make()
        yield instance
        # Not in a finally: after an exception the environment's state is unknown.
        self._free.append(instance)

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[Any]:
        """Like `one`, but closes an environment that is not reused."""
        with self.one() as instance:
            try:
                yield instance
            except BaseException:
                await close(instance)
                raise

    async def close(self) -> None:
        """Close the environments that are not lent."""
        # Not in a forked process: that would close connections that the parent still uses.
        while self._process == os.getpid() and self._free:
            await close(self._free.pop())


async def close(environment: Any) -> None:
    """Close an environment, if it has ``close()``. Exceptions are only printed: no episode depends on it."""
    if callable(closing := getattr(environment, "close", None)):
        await close_quietly(closing)
