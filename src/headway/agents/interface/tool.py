"""Tools that the model may call: functions, sources with state for each episode, and all tools of a run.

box = Toolbox([*load_tools(["tools.py:look_up"]), *servers])
async with box.episode(start) as given:
    await chat.turn(messages, given.tools)
    return await given.end()                        # the reward that tools give, and their numbers
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any, Protocol

from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, ToolSchema
from headway.agents.interface.user_calls import awaited
from headway.errors import ProgramFailed, Unavailable, UserCodeError, said_by, shown, writable

NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
"""Pattern of tool names that APIs and MCP accept."""
EXPECTED = (
    "a tool is a function that has a type on each parameter and a docstring: what it does and, under a line 'Args:', "
    "a line 'name: what it is' for each parameter"
)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of one call of a tool."""

    text: str
    """Text for the model: the tool's return value, or its exception."""
    failed: bool = False
    """True if the tool raised, or reported a failure."""
    reward: float | None = None
    """Reward of the turn that made the call; None if the tool gives none."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    schema: dict[str, Any] = field(repr=False)
    """``{"type": "function", "function": {"name": …, "description": …, "parameters": …}}``."""
    function: Callable[..., Any] | None = field(repr=False)
    """Function of the tool. Returns a value to show to the model, or a `ToolResult`; None: the program calls it
    itself."""
    show: Callable[[Any], str] = field(default_factory=lambda: shown_to_model, repr=False)
    """Converts the function's result to text for the model."""
    blocks: bool | None = None
    """True if the function runs in the calling thread and blocks it. Default: True except for coroutine functions."""
    origin: str = ""
    """The setting that names the tool, for messages."""

    def __post_init__(self) -> None:
        """
        Raises:
            UserCodeError: APIs do not accept the name.
        """
        if not isinstance(self.name, str) or NAME.fullmatch(self.name) is None:
            left_out = f", or leave it out ({self.origin}.tools)" if self.origin.startswith("agent.mcp.") else ""
            raise UserCodeError(
                f"{self.origin}: a tool has the name {shown(self.name)}; expected 1 to 128 of a-z, A-Z, 0-9, _, . and -"
                f", as APIs take them; rename it{left_out}"
            )

    @property
    def is_async(self) -> bool:
        """True if the function shares an event loop with others; otherwise it blocks its caller."""
        return inspect.iscoroutinefunction(self.function) if self.blocks is None else not self.blocks

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Call the tool with ``arguments`` that fit its schema. Its exceptions become messages to the model.

        Cancellation, interrupts and `Unavailable` pass through: the model has no part in them.
        """
        assert self.function is not None, "the program calls it itself"
        try:
            value = self.function(**arguments)
            if inspect.isawaitable(value):
                # A blocking function awaits only what needs no event loop: inside a loop it could not run its own.
                value = await (value if self.blocks else awaited(value))
            if isinstance(value, ToolResult):
                return ToolResult(writable(value.text), value.failed, value.reward)
            return ToolResult(writable(self.show(value)))
        except (Unavailable, ProgramFailed):
            raise
        except (Exception, SystemExit) as cause:  # a tool that calls sys.exit() must not end the process
            return ToolResult(f"Error: {self.name} failed: {said_by(cause)}", failed=True)


class OpenToolbox:
    """The tools of one episode."""

    def __init__(self, tools: Sequence[Tool], *ends: Callable[[], Awaitable[EpisodeEnd]]) -> None:
        """``ends``: functions that return the tools' reward and metrics at the episode's end."""
        self.tools = tools
        self._ends = ends

    async def end(self, end: EpisodeEnd | None = None) -> EpisodeEnd:
        """Return the episode's end: ``end``, with the rewards and the metrics of the tools added."""
        ends = [*([] if end is None else [end]), *[await end_of() for end_of in self._ends]]
        rewards = [one.reward for one in ends if one.reward is not None]
        metrics = {name: value for one in ends for name, value in one.metrics.items()}
        return EpisodeEnd(reward=sum(rewards) if rewards else None, metrics=metrics)


class ToolSource(Protocol):
    """Tools with state for each episode: an object, a connection, rewards."""

    @property
    def tools(self) -> Sequence[Tool]:
        """Tools known before the first episode. Calls go to the tools that `episode` yields."""
        ...

    @property
    def gives_reward(self) -> bool:
        """True if the tools may give rewards."""
        ...

    def episode(self, start: EpisodeStart) -> AbstractAsyncContextManager[OpenToolbox]:
        """Open the tools for one episode. Their state is made at their first call, and released after the last."""
        ...


def shown_to_model(value: Any) -> str:
    """Return a tool's result as text for the model: text unchanged, plain data as JSON, anything else by ``str``."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def make_tool(function: Callable[..., Any], spec: str) -> Tool:
    """Make the tool that calls ``function``, a function or a bound method, which messages name ``spec``.

    Raises:
        UserCodeError: ``function`` cannot become a tool; says why, what was given, and what is expected.
    """
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        raise UserCodeError(f"{spec}: it is a {type(function).__name__}, and no tool can be made of it; {EXPECTED}")
    signature = inspect.signature(function)
    refused = f"{spec}: no tool can be made of {function.__name__}{signature}"
    for parameter in signature.parameters.values():
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD, Parameter.POSITIONAL_ONLY):
            raise UserCodeError(f"{refused}: {str(parameter)!r} cannot be given by name, as arguments of calls are")
    untyped = [name for name, parameter in signature.parameters.items() if parameter.annotation is Parameter.empty]
    if untyped:
        raise UserCodeError(f"{refused}: there is no type on {', '.join(untyped)}; {EXPECTED}")
    if not inspect.getdoc(function):
        raise UserCodeError(f"{refused}: it has no docstring; {EXPECTED}")
    from transformers.utils import get_json_schema

    try:
        with _torch_left_out():
            schema = get_json_schema(function)
    except Exception as cause:
        raise UserCodeError(f"{refused}: {said_by(cause)}; {EXPECTED}") from cause
    return Tool(function.__name__, schema, function, origin=spec)


@contextmanager
def _torch_left_out() -> Iterator[None]:
    """Keep transformers from importing torch, which it does only to recognise tensors: that costs a second and 180 MiB
    in each process of tools. No effect if user code has imported torch already.
    """
    from transformers.utils import chat_template_utils

    asks = getattr(chat_template_utils, "is_torch_available", None)
    if asks is None or "torch" in sys.modules:
        yield
        return
    chat_template_utils.is_torch_available = lambda: False
    try:
        yield
    finally:
        chat_template_utils.is_torch_available = asks


class Toolbox:
    """The tools that the model is offered. ``bool(toolbox)`` tells whether there are any."""

    def __init__(self, given: Sequence[Tool | ToolSource] = ()) -> None:
        """
        Raises:
            UserCodeError: two tools have the same name.
        """
        self._given = given
        self.tools: list[Tool] = [tool for one in given for tool in ((one,) if isinstance(one, Tool) else one.tools)]
        """Tools known before the first episode."""
        found: dict[str, Tool] = {}
        for tool in self.tools:
            _check_types(tool)
            if tool.name in found:
                raise UserCodeError(
                    f"{tool.origin}: there is a tool named {tool.name!r} already, of {found[tool.name].origin}; the "
                    "model tells tools apart by their names: rename one, or leave one out (agent.mcp.NAME.tools)"
                )
            found[tool.name] = tool

    def __bool__(self) -> bool:
        return bool(self.tools)

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """Schemas of the tools, for the model."""
        return tuple(tool.schema for tool in self.tools)

    @property
    def is_async(self) -> bool:
        """True if no tool blocks the event loop in which it is called."""
        return all(tool.is_async for tool in self.tools)

    @property
    def gives_reward(self) -> bool:
        """True if a tool may give rewards."""
        return any(one.gives_reward for one in self._given if not isinstance(one, Tool))

    @asynccontextmanager
    async def episode(self, start: EpisodeStart) -> AsyncIterator[OpenToolbox]:
        """Open the tools for one episode, and close them after it, also after a failure."""
        tools: list[Tool] = []
        async with AsyncExitStack() as stack:
            sources: list[OpenToolbox] = []
            for one in self._given:
                if isinstance(one, Tool):
                    tools.append(one)
                else:
                    # By an exit stack: if a later source fails, the earlier ones are closed.
                    sources.append(await stack.enter_async_context(one.episode(start)))
                    tools += sources[-1].tools
            yield OpenToolbox(tools, *(source.end for source in sources))


def _check_types(tool: Tool) -> None:
    """Refuse a schema with a type that JSON Schema lacks: such arguments could not be checked."""
    from jsonschema.validators import Draft202012Validator, validator_for

    parameters = tool.schema["function"].get("parameters") or {}
    meta = validator_for(parameters, default=Draft202012Validator)
    for error in meta(meta.META_SCHEMA).iter_errors(parameters):
        if error.path and error.path[-1] == "type":
            where = ".".join(map(str, error.path))
            raise UserCodeError(
                f"{tool.origin}: the parameters of the tool {tool.name!r} have {where}={shown(error.instance)}; "
                "expected array, boolean, integer, null, number, object, string, or a list of these"
            )
