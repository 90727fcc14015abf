"""Environments in the form of TRL: ``reset(**row)``, methods that are tools, ``get_reward()``.

Read from TRL 1.16 (``GRPOTrainer._generate_and_score_completions``): an environment is made once and reset for each
episode, what ``reset`` returns is appended to the last message of the prompt, and every public function of the class
but ``reset`` and ``get_reward`` is a tool, whose result is told to the model as ``str()`` writes it.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from headway.agents.adapters.environment_loop import EnvironmentPool, EnvironmentProgram, Step, call_tools
from headway.agents.interface.program_chat import Chat
from headway.agents.interface.program_messages import (
    EpisodeEnd,
    EpisodeStart,
    ProgramDescription,
    TurnAnswer,
    with_text,
)
from headway.agents.interface.tool import OpenToolbox, Tool, Toolbox, make_tool
from headway.agents.interface.user_calls import are_coroutines, failing, number
from headway.errors import ProgramFailed, UserCodeError, shown
from headway.runtime.user_code import Parameters


@dataclass(frozen=True, slots=True)
class _TrlEpisode:
    """An environment and the tools beside it, for one episode."""

    environment: Any
    beside: OpenToolbox
    tools: Sequence[Tool]


class TrlProgram(EnvironmentProgram[_TrlEpisode]):
    """An environment in the form of TRL. Its reward is ``get_reward()``, else its attribute ``reward`` if any."""

    def __init__(self, instances: EnvironmentPool, who: str, kind: type, tools: Toolbox) -> None:
        self._instances, self.who, self._tools = instances, who, tools
        self._schemas: dict[str, dict[str, Any]] = {}
        own = [getattr(kind, name) for name in (*tool_names(kind), "reset", "get_reward") if hasattr(kind, name)]
        self.is_async = are_coroutines(*own) and tools.is_async

    def describe(self) -> ProgramDescription:
        with self._instances.one() as environment:
            schemas = tuple(tool.schema for tool in self._all_tools(environment, self._tools.tools))
            needed = Parameters.of(environment.reset).lacking(["prompt"])
        gives_reward = True if hasattr(type(environment), "get_reward") else None
        return ProgramDescription("TRL", self.is_async, schemas, gives_reward, columns=tuple(needed))

    @asynccontextmanager
    async def episode(self, start: EpisodeStart) -> AsyncIterator[_TrlEpisode]:
        with self._instances.one() as environment:
            async with self._tools.episode(start) as beside:
                yield _TrlEpisode(environment, beside, self._all_tools(environment, beside.tools))

    def tools(self, environment: _TrlEpisode) -> Sequence[Tool]:
        return environment.tools

    async def begin(self, environment: _TrlEpisode, start: EpisodeStart) -> Step:
        row: dict[str, Any] = {"prompt": start.with_prompt()["prompt"], **start.row}
        takes = Parameters.of(environment.environment.reset)
        if lacking := takes.lacking(row):
            raise ProgramFailed(
                f"{self.who}: reset() needs {', '.join(map(repr, lacking))}, and the row has {', '.join(sorted(row))}"
                "; give the parameter a default, or the row that column"
            )
        value = await self.call(environment.environment, "reset", **takes.given(row))
        if value is None:
            return Step(start.messages)
        text = value if isinstance(value, str) else _text_of_blocks(value)
        if text is None:
            raise ProgramFailed(
                f"{self.who}: reset() returned {shown(value)}, expected text, which is appended to the prompt, or None"
            )
        return Step(with_text(start.messages, text))

    async def step(self, environment: _TrlEpisode, answer: TurnAnswer, chat: Chat) -> Step:
        return await call_tools(answer, chat)

    async def end(self, environment: _TrlEpisode) -> EpisodeEnd:
        of, what = environment.environment, "its attribute reward"
        if hasattr(type(of), "get_reward"):
            what, value = "what get_reward() returned", await self.call(of, "get_reward")
        else:
            with failing(f"{self.who}: {what}"):  # may be a property, which computes it
                value = getattr(of, "reward", None)
            value = None if callable(value) else value
            if value is None:
                return await environment.beside.end()
        return await environment.beside.end(EpisodeEnd(reward=number(value, f"{self.who}: {what}")))

    def _all_tools(self, environment: Any, others: Sequence[Tool]) -> list[Tool]:
        tools = list(others)
        for name in tool_names(type(environment)):
            if of := [tool.origin for tool in others if tool.name == name]:
                raise UserCodeError(f"{self.who}: it has a tool {name!r}, and so has {of[0]}; rename one")
            tools.append(self._tool(name, getattr(environment, name)))
        return tools

    def _tool(self, name: str, method: Callable[..., Any]) -> Tool:
        if name not in self._schemas:
            try:
                self._schemas[name] = make_tool(method, f"{self.who}.{name}").schema
            except UserCodeError as cause:
                raise UserCodeError(f"{cause}; a method that is no tool has a name that begins with _") from cause
        return Tool(name, self._schemas[name], method, show=_as_trl_shows)


def tool_names(kind: type) -> list[str]:
    """Names of the methods of a class that are tools to TRL, by name: its public functions, inherited ones too."""
    functions = inspect.getmembers(kind, predicate=inspect.isfunction)
    return [name for name, _ in functions if name not in ("reset", "get_reward") and not name.startswith("_")]


def _as_trl_shows(value: Any) -> str:
    """Text of a tool's result as TRL tells it to the model."""
    text = _text_of_blocks(value)
    return str(value) if text is None else text


def _text_of_blocks(value: Any) -> str | None:
    """Text of a list of content blocks; None where the value is none.

    Raises:
        ProgramFailed: one of the blocks is an image.
    """
    if not isinstance(value, list) or not value or not all(isinstance(one, Mapping) and "type" in one for one in value):
        return None
    if any(one["type"] != "text" for one in value):
        raise ProgramFailed(f"{shown(value)} has blocks that are no text, and Headway trains models of text alone")
    return "".join(str(one.get("text", "")) for one in value)
