"""Environments in the form of TRL: ``reset(**row)``, methods that are tools, ``get_reward()``.

Read from TRL 1.16 (``GRPOTrainer._generate_and_score_completions``): an environment is made once and reset for each
episode, what ``reset`` returns is appended to the last message of the prompt, and every public function of the class
but ``reset`` and ``get_reward`` is a tool, whose result is told to the model as ``str()`` writes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from headway.agents.adapters.environment_loop import Instances, call_until_answered
from headway.agents.interface.program_chat import Chat
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, Message, ProgramDescription, with_text
from headway.agents.interface.tool import Tool, Toolbox, make_tool
from headway.agents.interface.user_calls import are_coroutines, called, failing, number, seed_generators
from headway.errors import EpisodeOver, ProgramFailed, UserCodeError, shown


class TrlProgram:
    """An environment in the form of TRL. Its reward is ``get_reward()``, else its attribute ``reward`` if any."""

    def __init__(self, instances: Instances, who: str, kind: type, tools: Toolbox) -> None:
        self._instances, self._who, self._tools = instances, who, tools
        self._schemas: dict[str, dict[str, Any]] = {}
        own = [getattr(kind, name) for name in (*tool_names(kind), "reset", "get_reward") if hasattr(kind, name)]
        self.is_async = are_coroutines(*own) and tools.is_async

    def describe(self) -> ProgramDescription:
        with self._instances.one() as environment:
            schemas = tuple(tool.schema for tool in self._all_tools(environment, self._tools.tools))
            given = _row_parameters(environment.reset)
        return ProgramDescription(
            "TRL",
            self.is_async,
            tools=schemas,
            gives_reward=True if hasattr(type(environment), "get_reward") else None,
            columns=tuple(n for n, p in given.items() if p.default is p.empty and n != "prompt"),
        )

    async def run(self, start: EpisodeStart, chat: Chat) -> EpisodeEnd:
        with self._instances.one() as environment:
            async with self._tools.episode(start) as given:
                tools = self._all_tools(environment, given.tools)
                messages = await self._reset(environment, start)
                with suppress(EpisodeOver):
                    await call_until_answered(chat, messages, tools)
                return await given.end(EpisodeEnd(reward=await self._reward(environment)))

    def _all_tools(self, environment: Any, others: Sequence[Tool]) -> list[Tool]:
        tools = list(others)
        for name in tool_names(type(environment)):
            if of := [tool.origin for tool in others if tool.name == name]:
                raise UserCodeError(f"{self._who}: it has a tool {name!r}, and so has {of[0]}; rename one")
            tools.append(self._tool(name, getattr(environment, name)))
        return tools

    def _tool(self, name: str, method: Callable[..., Any]) -> Tool:
        if name not in self._schemas:
            try:
                self._schemas[name] = make_tool(method, f"{self._who}.{name}").schema
            except UserCodeError as cause:
                raise UserCodeError(f"{cause}; a method that is no tool has a name that begins with _") from cause
        return Tool(name, self._schemas[name], method, show=_as_trl_shows)

    async def _reset(self, environment: Any, start: EpisodeStart) -> list[Message]:
        if (
            not self.is_async
        ):  # once more, since making the environment may have drawn numbers, and lending one does not
            seed_generators(start.seed)
        row: dict[str, Any] = {"prompt": start.with_prompt()["prompt"], **start.row}
        named = _row_parameters(environment.reset)
        if lacking := [n for n, p in named.items() if p.default is p.empty and n not in row]:
            raise ProgramFailed(
                f"{self._who}: reset() needs {', '.join(map(repr, lacking))}, and the row has {', '.join(sorted(row))}"
                "; give the parameter a default, or the row that column"
            )
        takes_all = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(environment.reset).parameters.values())
        with failing(f"{self._who}: reset()"):
            value = await called(environment.reset, **{n: v for n, v in row.items() if takes_all or n in named})
        if value is None:
            return list(start.messages)
        text = value if isinstance(value, str) else _text_of_blocks(value)
        if text is None:
            raise ProgramFailed(
                f"{self._who}: reset() returned {shown(value)}, expected text, which is appended to the prompt, or None"
            )
        return with_text(start.messages, text)

    async def _reward(self, environment: Any) -> float | None:
        if hasattr(type(environment), "get_reward"):
            with failing(f"{self._who}: get_reward()"):
                value = await called(environment.get_reward)
            return number(value, f"{self._who}: what get_reward() returned")
        with failing(f"{self._who}: its attribute reward"):  # may be a property, which computes it
            value = getattr(environment, "reward", None)
        return None if value is None or callable(value) else number(value, f"{self._who}: its attribute reward")


def tool_names(kind: type) -> list[str]:
    """Names of the methods of a class that are tools to TRL, by name: its public functions, inherited ones too."""
    functions = inspect.getmembers(kind, predicate=inspect.isfunction)
    return [name for name, _ in functions if name not in ("reset", "get_reward") and not name.startswith("_")]


def _row_parameters(reset: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The columns that ``reset`` names."""
    parameters = inspect.signature(reset).parameters.items()
    return {name: one for name, one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}


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
