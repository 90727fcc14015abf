"""Tools alone: the model calls the user's functions until it answers without a call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from headway.agents.interface.program import ProgramDescription
from headway.agents.interface.program_chat import Chat
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, Message
from headway.agents.interface.tool import Tool
from headway.agents.tools.toolbox import Toolbox
from headway.errors import EpisodeOver


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
