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
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import Parameter
from typing import Any

from headway.agents.interface.tool import Tool, ToolSource
from headway.agents.tools.verl_tools import is_tool_object, load_tool_config, make_verl_tool, names_a_tool_config
from headway.errors import UserCodeError, said_by
from headway.runtime.sandbox.python_tool import PYTHON, python_tool
from headway.runtime.sandbox.sandbox import Sandbox
from headway.runtime.sandbox.sandbox_limits import SandboxSpec
from headway.runtime.user_code import load_object

EXPECTED = (
    "a tool is a function that has a type on each parameter and a docstring: what it does and, under a line 'Args:', "
    "a line 'name: what it is' for each parameter"
)


def load_tools(specs: Sequence[str], sandbox: SandboxSpec | None = None) -> list[Tool | ToolSource]:
    """The tools of ``specs``, each ``file.py:function``, a class or an object in verl's form, or verl's ``tools.yaml``;
    or ``python``, whose code runs in ``sandbox``.

    Raises:
        ConfigError: this machine has no such sandbox.
        UserCodeError: a file or function that does not load, or a function that no tool can be made of.
    """
    tools: list[Tool | ToolSource] = []
    for spec in specs:
        if spec == PYTHON:
            tools.append(make_tool(_python(sandbox or SandboxSpec()), spec))
            continue
        if names_a_tool_config(spec):
            tools += load_tool_config(spec)
            continue
        found = load_object(spec)
        tools.append(make_verl_tool(found, spec) if is_tool_object(found) else make_tool(found, spec))
    return tools


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
    return Tool(function.__name__, schema, function, origin=spec)


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
