"""Tools alone: the model calls the user's functions until it answers without a call."""

from __future__ import annotations

from collections.abc import Sequence

from headway.programs.chat import Chat
from headway.programs.messages import EpisodeEnd, EpisodeStart, Message
from headway.programs.program import ProgramDescription
from headway.programs.tools import Tool


class ToolLoop:
    """The program of ``rollout.tools``: the prompt, and turns until one calls no tool. It gives no reward."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = tools
        self.is_async = all(tool.is_async for tool in tools)

    def describe(self) -> ProgramDescription:
        schemas = tuple(tool.schema for tool in self._tools)
        return ProgramDescription("tools", self.is_async, tools=schemas, gives_reward=False)

    async def run(self, start: EpisodeStart, chat: Chat) -> EpisodeEnd:
        await call_until_answered(chat, start.messages, self._tools)
        return EpisodeEnd()


async def call_until_answered(chat: Chat, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
    """Have the policy answer ``messages``, and call the tools that it calls, until an answer calls none."""
    messages = list(messages)
    answer = await chat.turn(messages, tools)  # type: ignore[arg-type]  # users give functions or schemas
    while answer.calls:
        messages += [answer.message, *await chat.call_tools(answer)]
        answer = await chat.turn(messages, tools)  # type: ignore[arg-type]  # as above
