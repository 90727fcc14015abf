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

from collections.abc import Callable, Sequence
from typing import Any

from headway.agents.interface.tool import Tool, ToolSource, make_tool
from headway.agents.tools.verl_tools import is_tool_object, load_tool_config, make_verl_tool, names_a_tool_config
from headway.runtime.sandbox.python_tool import PYTHON, python_tool
from headway.runtime.sandbox.sandbox import Sandbox
from headway.runtime.sandbox.sandbox_limits import SandboxSpec
from headway.runtime.user_code import load_object


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
