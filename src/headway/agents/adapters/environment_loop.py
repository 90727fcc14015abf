"""Environments that are made once and reset often, and the loop of tools alone."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from typing import Any

from headway.agents.interface.program_chat import Chat
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, Message, ProgramDescription
from headway.agents.interface.tool import Tool, Toolbox
from headway.agents.interface.user_calls import called, failing, is_in_a_loop
from headway.errors import EpisodeOver

CLOSE_S = 10.0
"""Seconds for an asynchronous ``close()`` of an environment."""


class Instances:
    """Environments of one kind. One that failed, or whose episode was cancelled, is not used again."""

    def __init__(self, make: Callable[[], Any], who: str) -> None:
        self._make, self._who = make, who
        self._free: list[Any] = []
        self._process = os.getpid()

    @contextmanager
    def one(self) -> Iterator[Any]:
        """Lend an environment for the time of an episode; makes one where none is free."""
        instance = self._take()
        try:
            yield instance
        except EpisodeOver:
            self._free.append(instance)
            raise
        self._free.append(instance)

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[Any]:
        """`one`, which closes an environment that is not used again."""
        with self.one() as instance:
            try:
                yield instance
            except EpisodeOver:
                raise
            except BaseException:
                await close(instance)
                raise

    async def close(self) -> None:
        """Close those that are not lent."""
        while self._process == os.getpid() and self._free:
            await close(self._free.pop())

    def _take(self) -> Any:
        # A forked process shares the connections of what was made before the fork with its siblings: it makes its own.
        if self._process != os.getpid():
            self._process, self._free = os.getpid(), []
        if self._free:
            return self._free.pop()
        with failing(f"{self._who}: making it"):
            return self._make()


async def close(environment: Any) -> None:
    """Close an environment that has ``close()``. What that raises is printed: no episode depends on it."""
    closing = getattr(environment, "close", None)
    if not callable(closing):
        return
    try:
        async with asyncio.timeout(CLOSE_S) if is_in_a_loop() else nullcontext():
            await called(closing)
    except (Exception, SystemExit):
        traceback.print_exc(file=sys.stderr)


class ToolLoop:
    """The program of ``rollout.tools`` and ``rollout.mcp``: the prompt, and turns until one calls no tool.

    It gives no reward but those that tools in verl's form give.
    """

    def __init__(self, tools: Toolbox) -> None:
        self._tools = tools
        self.is_async = tools.is_async

    def describe(self) -> ProgramDescription:
        gives_reward = None if self._tools.gives_reward else False
        return ProgramDescription("tools", self.is_async, tools=self._tools.schemas, gives_reward=gives_reward)

    async def run(self, start: EpisodeStart, chat: Chat) -> EpisodeEnd:
        async with self._tools.episode(start) as given:
            with suppress(EpisodeOver):
                await call_until_answered(chat, start.messages, given.tools)
            return await given.end()


async def call_until_answered(chat: Chat, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
    """Have the policy answer ``messages``, and call the tools that it calls, until an answer calls none."""
    messages = list(messages)
    answer = await chat.turn(messages, tools)  # type: ignore[arg-type]  # users give functions or schemas
    while answer.calls:
        messages += [answer.message, *await chat.call_tools(answer)]
        answer = await chat.turn(messages, tools)  # type: ignore[arg-type]  # as above
