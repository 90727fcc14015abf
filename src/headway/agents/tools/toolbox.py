"""All tools of a run, ``rollout.tools`` and those of ``rollout.mcp``, and what they hold for each episode.

box = Toolbox([*load_tools(["tools.py:look_up"]), *servers])
async with box.episode(start) as given:
    await call_until_answered(chat, messages, given.tools)
    return await given.end()                        # the reward that tools give, and their numbers
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from headway.agents.interface.awaiting import is_in_a_loop
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, ToolSchema
from headway.agents.interface.tool import EpisodeTools, Tool, ToolSource
from headway.errors import UserCodeError

CLOSE_TIMEOUT_S = 20.0
"""Seconds for a tool to give back what an episode held."""


class OpenToolbox:
    """The tools of one episode."""

    def __init__(self, tools: Sequence[Tool], parts: Sequence[EpisodeTools]) -> None:
        self.tools = tools
        self._parts = parts

    async def end(self, end: EpisodeEnd | None = None) -> EpisodeEnd:
        """Return the episode's end: the rewards that tools give it, and their numbers, added to those of ``end``."""
        ends = [*([] if end is None else [end]), *[await part.end() for part in self._parts]]
        rewards = [one.reward for one in ends if one.reward is not None]
        metrics = {name: value for one in ends for name, value in one.metrics.items()}
        return EpisodeEnd(reward=sum(rewards) if rewards else None, metrics=metrics)


class Toolbox:
    """The tools that the model is offered. ``bool(toolbox)`` tells whether there are any."""

    def __init__(self, given: Sequence[Tool | ToolSource] = ()) -> None:
        """
        Raises:
            UserCodeError: two tools have one name.
        """
        self._given = given
        self.tools: list[Tool] = [tool for one in given for tool in _tools(one)]
        """The tools as they are known before the first episode."""
        found: dict[str, Tool] = {}
        for tool in self.tools:
            if tool.name in found:
                raise UserCodeError(_twice(tool, found[tool.name]))
            found[tool.name] = tool

    def __bool__(self) -> bool:
        return bool(self.tools)

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """Schemas of the tools, for the model."""
        return tuple(tool.schema for tool in self.tools)

    @property
    def is_async(self) -> bool:
        """None of the tools blocks the event loop that it is called in."""
        return all(tool.is_async for tool in self.tools)

    @property
    def gives_reward(self) -> bool:
        """Some of the tools may give rewards."""
        return any(one.gives_reward for one in self._given if not isinstance(one, Tool))

    @asynccontextmanager
    async def episode(self, start: EpisodeStart) -> AsyncIterator[OpenToolbox]:
        """Open the tools for one episode, and close them after it, also when it fails."""
        parts: list[EpisodeTools] = []
        tools: list[Tool] = []
        for one in self._given:
            if isinstance(one, Tool):
                tools.append(one)
                continue
            parts.append(one.begin(start))
            tools += parts[-1].tools
        try:
            yield OpenToolbox(tools, parts)
        finally:
            for part in parts:
                await _closed(part)


def _tools(one: Tool | ToolSource) -> Sequence[Tool]:
    return (one,) if isinstance(one, Tool) else one.tools


def _twice(tool: Tool, other: Tool) -> str:
    """The message for two tools of one name."""
    server = next((one.origin for one in (tool, other) if one.origin.startswith("rollout.mcp.")), None)
    if tool.origin != other.origin:
        left_out = f", or leave one out ({server}.tools)" if server is not None else ""
        return (
            f"{tool.origin}: there is a tool named {tool.name!r} already, of {other.origin}; the model tells tools "
            f"apart by their names, so rename one{left_out}"
        )
    if server is None:
        return f"rollout.tools names {tool.origin} twice; drop one"
    return (
        f"{server}: the server lists two tools named {tool.name!r}, and the model tells tools apart by their names; "
        f"mend the server, or leave them out ({server}.tools)"
    )


async def _closed(part: EpisodeTools) -> None:
    """Close, and print what is raised: the episode has ended, and what it was worth does not depend on this."""
    try:
        if is_in_a_loop():
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await part.close()
        else:
            await part.close()
    except (Exception, SystemExit):
        traceback.print_exc(file=sys.stderr)
