"""The forms of user code, and how they are told apart.

| form | has |
|---|---|
| SkyRL-gym | ``init`` and ``step`` |
| TRL | ``reset``, and ``get_reward`` or methods that are tools |
| Gymnasium and GEM | ``reset`` that takes a seed, and ``step`` |
| OpenEnv | the address of a server |

An environment is a class, or a function that makes one: of that one is made to see its form, unless it has a parameter
``extras``, which makes it one of SkyRL-gym.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headway.agents.adapters.environment_pool import Instances
from headway.agents.adapters.gymnasium import GymProgram
from headway.agents.adapters.openenv import OpenEnvProgram
from headway.agents.adapters.skyrl_gym import SkyrlProgram
from headway.agents.adapters.tool_loop import ToolLoop
from headway.agents.adapters.trl_environments import TrlProgram, tool_names
from headway.agents.adapters.verl_loop import VerlLoop, is_verl_loop
from headway.agents.programs.command_agents import CommandProgram
from headway.agents.programs.custom_program import EXPECTED, OwnProgram, check_arguments
from headway.agents.programs.http_agents import AgentProgram
from headway.agents.programs.program import Program, ProgramSpec
from headway.agents.tools.mcp_servers import McpServer
from headway.agents.tools.python_tools import load_tools
from headway.agents.tools.toolbox import Toolbox
from headway.errors import UserCodeError, shown
from headway.runtime.user_code import load_object, names_a_server

_GYMS = ("gymnasium", "gem", "gym")


def load_program(spec: ProgramSpec) -> Program:
    """Import the code that ``spec`` names, and return the program that it is.

    Raises:
        UserCodeError: the code does not import, has none of the forms, or does not go with what else the spec has.
    """
    if spec.environment is not None and spec.program is not None:
        raise UserCodeError(
            "rollout.environment and rollout.program are both given; an episode has one program: drop one"
        )
    if spec.environment is not None and names_a_server(spec.environment):
        _refuse_tools(spec)
        return OpenEnvProgram(spec.environment, spec.shown, spec.params)
    if spec.environment is not None:
        return _environment(spec, load_object(spec.environment))
    if spec.program is not None:
        if given := _given_tools(spec):
            raise UserCodeError(
                f"{given} beside rollout.program: {spec.shown} gives the model its tools itself, by "
                f"chat.turn(messages, tools=[…]); drop {given}"
            )
        return _own(spec, load_object(spec.program))
    if spec.agent is not None or spec.command:
        return _agent(spec)
    if not _given_tools(spec):
        raise UserCodeError("there is no program; give rollout.tools, environment, program or agent")
    return ToolLoop(load_toolbox(spec))


def load_toolbox(spec: ProgramSpec) -> Toolbox:
    """The tools of ``spec``: functions and objects of the user's, and those of MCP servers, which are asked for them.

    Raises:
        ConfigError: this machine has no such sandbox.
        UserCodeError: they cannot be loaded, a server has none, or two have one name.
        ProgramAway: a server is away for a time.
    """
    servers = [McpServer(server) for server in spec.mcp]
    for server in servers:
        server.load()
    return Toolbox([*load_tools(spec.tools, spec.sandbox), *servers])


def _agent(spec: ProgramSpec) -> Program:
    if spec.agent is not None:
        return AgentProgram(load_object(spec.agent), spec.shown, spec.params)
    return CommandProgram(spec.command, spec.shown, spec.directory)


def _own(spec: ProgramSpec, found: Any) -> Program:
    if inspect.isclass(found) and not hasattr(found, "run") and hasattr(found, "step"):
        raise UserCodeError(f"{spec.shown}: it has step(), as environments have; name it in rollout.environment")
    if is_verl_loop(found):
        return VerlLoop(found, spec.shown, spec.params, spec.model_path, spec.prompt_length)
    return OwnProgram(found, spec.shown, spec.params)


def _environment(spec: ProgramSpec, found: Any) -> Program:
    who = spec.shown
    if inspect.iscoroutinefunction(found):
        raise UserCodeError(f"{who}: it is an async function; name it in rollout.program, where {EXPECTED}")
    if not callable(found):
        raise UserCodeError(
            f"{who}: it is {shown(found)}, and episodes need an environment each; name its class, or a function that "
            "makes one"
        )
    if _is_skyrl(found):
        _refuse_tools(spec)
        return SkyrlProgram(found, who, spec.params, spec.max_turns)
    check_arguments(who, found, (), spec.params)
    instances = Instances(partial(found, **spec.params), who)
    if inspect.isclass(found):
        return _recognised(spec, instances, found, found)
    with instances.one() as environment:
        return _recognised(spec, instances, type(environment), environment)


def _recognised(spec: ProgramSpec, instances: Instances, kind: type, environment: Any) -> Program:
    """The program of an environment's class; ``environment`` is one of it, or the class again."""
    match _form_of(kind, environment, bool(_given_tools(spec))):
        case "TRL":
            return TrlProgram(instances, spec.shown, kind, load_toolbox(spec))
        case "gym":
            _refuse_tools(spec)
            return GymProgram(instances, spec.shown, environment)
        case _:
            raise UserCodeError(_lacking(spec.shown, kind, environment))


def _form_of(kind: type, environment: Any, has_tools: bool) -> str | None:
    def has(name: str) -> bool:
        return callable(getattr(environment, name, None))

    if not has("reset"):
        return None
    if any(base.__module__.partition(".")[0] in _GYMS for base in kind.__mro__) and has("step"):
        return "gym"
    if has("get_reward") or (has("step") and _step_is_a_tool(environment)):
        return "TRL"
    if has("step"):
        return "gym"
    return "TRL" if tool_names(kind) or has_tools else None


def _step_is_a_tool(environment: Any) -> bool:
    """Tell a tool that is named step from Gymnasium's: it returns text, and ``reset`` names no seed."""
    try:
        returns = inspect.signature(environment.step).return_annotation
        return returns in (str, "str") and "seed" not in inspect.signature(environment.reset).parameters
    except (TypeError, ValueError):
        return False


def _is_skyrl(found: Callable[..., Any]) -> bool:
    if inspect.isclass(found):
        return callable(getattr(found, "init", None)) and callable(getattr(found, "step", None))
    try:
        return "extras" in inspect.signature(found).parameters
    except (TypeError, ValueError):
        return False


def _lacking(who: str, kind: type, environment: Any) -> str:
    """The message for an environment of no known form."""
    if callable(getattr(environment, "run", None)):
        return f"{who}: it has run(), as programs have; name it in rollout.program"
    forms: Mapping[str, Mapping[str, str]] = {
        "TRL's": {"reset": "reset(**row)", "get_reward": "get_reward() or methods that are tools"},
        "Gymnasium's and GEM's": {"reset": "reset(seed)", "step": "step(action)"},
        "SkyRL-gym's": {"init": "init(prompt)", "step": "step(action)"},
    }
    said = []
    for form, methods in forms.items():
        lacks = [how for name, how in methods.items() if not callable(getattr(environment, name, None))]
        said.append(f"{form} has {' and '.join(methods.values())}: here is no {' and no '.join(lacks)}")
    own = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]
    return (
        f"{who}: {kind.__name__} has none of the forms of an environment. {'; '.join(said)}. "
        f"It has {', '.join(f'{name}()' for name in own) or 'no public methods'}"
    )


def _refuse_tools(spec: ProgramSpec) -> None:
    if given := _given_tools(spec):
        raise UserCodeError(
            f"{given} beside {spec.shown}: there an action is all of the model's text, and tools are not called"
            f"; drop {given}, or write the environment in TRL's form"
        )


def _given_tools(spec: ProgramSpec) -> str:
    """The keys that give tools, for messages."""
    return " and ".join(key for key, value in (("rollout.tools", spec.tools), ("rollout.mcp", spec.mcp)) if value)
