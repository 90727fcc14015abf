"""Tools: the user's Python functions, with types and a docstring, that the model may call.

def look_up(key: str) -> int:
    '''Look a key up in the table.

    Args:
        key: the key
    '''
    return TABLE[key]

[tool] = load_tools(["tools.py:look_up"])
tool.schema                                         # as `transformers.utils.get_json_schema` makes it
result = await tool.call({"key": "x"})              # result.text is what the model is told
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any

from headway.errors import ProgramFailed, Unavailable, UserCodeError, said_by, writable
from headway.programs.waiting import called
from headway.sandbox.limits import SandboxSpec
from headway.sandbox.python import PYTHON, python_tool
from headway.sandbox.sandbox import Sandbox
from headway.user_code import load_function

EXPECTED = (
    "a tool is a function that has a type on each parameter and a docstring: what it does and, under a line 'Args:', "
    "a line 'name: what it is' for each parameter"
)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The outcome of one call of a tool."""

    text: str
    """Text for the model: what the tool returned, or what it raised."""
    failed: bool = False
    """The tool raised."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    schema: dict[str, Any] = field(repr=False)
    """``{"type": "function", "function": {"name": …, "description": …, "parameters": …}}``."""
    function: Callable[..., Any] = field(repr=False)
    show: Callable[[Any], str] = field(default_factory=lambda: shown_to_model, repr=False)
    """Turns what the function returns into the text that the model is told."""

    @property
    def is_async(self) -> bool:
        """The function is a coroutine function; any other one runs, and blocks, where it is called."""
        return inspect.iscoroutinefunction(self.function)

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Call the tool with ``arguments`` that fit its schema. What it raises becomes a message to the model.

        Cancellation and interrupts pass through, and so does `Unavailable`: the model has no part in that.
        """
        try:
            return ToolResult(writable(self.show(await called(self.function, **arguments))))
        except (Unavailable, ProgramFailed):
            raise
        except (Exception, SystemExit) as cause:  # a tool that calls sys.exit() ends no process of ours
            return ToolResult(f"Error: {self.name} failed: {said_by(cause)}", failed=True)


def load_tools(specs: Sequence[str], sandbox: SandboxSpec | None = None) -> list[Tool]:
    """The tools of ``specs``, each ``file.py:function``, or ``python``, whose code runs in ``sandbox``.

    Raises:
        ConfigError: this machine has no such sandbox.
        UserCodeError: a file or function that does not load, a function that no tool can be made of, or two of a name.
    """
    tools: dict[str, Tool] = {}
    for spec in specs:
        tool = make_tool(_python(sandbox or SandboxSpec()) if spec == PYTHON else load_function(spec), spec)
        if tool.name in tools:
            raise UserCodeError(
                f"{spec}: there is a tool named {tool.name!r} already; the model tells tools apart by their names, so "
                "rename one"
            )
        tools[tool.name] = tool
    return list(tools.values())


def _python(spec: SandboxSpec) -> Callable[..., Any]:
    """The tool ``python``, after its sandbox was tried here."""
    sandbox = Sandbox(spec)
    sandbox.probe()
    return python_tool(sandbox, spec.limits)


def make_tool(function: Callable[..., Any], spec: str) -> Tool:
    """The tool that calls ``function``: a function or a bound method, which messages name ``spec``.

    Raises:
        UserCodeError: no tool can be made of it; says why, what was given, and what is expected.
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
    return Tool(function.__name__, schema, function)


@contextmanager
def _torch_left_out() -> Iterator[None]:
    """Keep transformers from importing torch, which it does merely to know a tensor's type if it sees one: a second and
    180 MiB for each process of tools. Where user code has imported torch already, nothing changes.
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


def shown_to_model(value: Any) -> str:
    """Text of what a tool returned, for the model: text as it is, plain data as JSON, anything else as it prints."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)
