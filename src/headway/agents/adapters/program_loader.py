"""Loading of programs: imports the user's code by its spec, and recognises its form.

loaded = ProgramSpec(environment="game.py:Game").load()       # in a process for user code
loaded.is_async                                               # shares an event loop, or has the process for itself
loaded.describe()                                             # its tools, before the first episode
end = await loaded.serve(start, ask)                          # one episode; ask() is a turn of the policy

| form of an environment | has |
|---|---|
| SkyRL-gym | ``init`` and ``step`` |
| TRL | ``reset``, and ``get_reward`` or methods that are tools |
| Gymnasium and GEM | ``reset`` that takes a seed, and ``step`` |
| OpenEnv | the address of a server |

An environment is a class, or a function that makes one. Such a function is called once, to see the form of its result;
with a parameter ``extras`` it is not called, and is of SkyRL-gym's form.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from headway.agents.adapters.environment_forms import GymProgram, SkyrlProgram, TrlProgram, tool_names
from headway.agents.adapters.environment_loop import EnvironmentPool, ToolLoop
from headway.agents.adapters.mcp_servers import CLOSE_TIMEOUT_S, McpServer, McpServerSpec
from headway.agents.adapters.openenv import OpenEnvProgram
from headway.agents.adapters.user_programs import EXPECTED, AgentProgram, CommandProgram, OwnProgram
from headway.agents.adapters.verl_forms import VerlLoop, is_tool_object, is_verl_loop, load_tool_config, make_verl_tool
from headway.agents.interface.program_chat import Program
from headway.agents.interface.tool import Tool, Toolbox, ToolSource, make_tool
from headway.agents.interface.user_calls import beforehand
from headway.errors import UserCodeError, cut, shown
from headway.runtime.sandbox.python_tool import PYTHON, python_tool
from headway.runtime.sandbox.sandbox import Sandbox
from headway.runtime.sandbox.sandbox_call import SandboxSpec
from headway.runtime.user_code import Parameters, check_call, load_object, names_a_server, resolve_spec

_GYMS = ("gymnasium", "gem", "gym")


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """Choice of a program, from ``config/sections/agent_section.py``. Pickles, and is loaded where user code runs."""

    tools: tuple[str, ...] = ()
    environment: str | None = None
    program: str | None = None
    agent: str | None = None
    command: tuple[str, ...] = ()
    """Command of an agent; empty for other programs."""
    directory: str | None = None
    """Directory in which commands are run, if it exists."""
    model_path: str | None = None
    """Folder of the policy's tokenizer, for programs that work on token ids; None if it does not exist yet."""
    prompt_length: int = 0
    """The run's ``data.max_prompt_length``, for agent loops of verl's form."""
    mcp: tuple[McpServerSpec, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    max_turns: int | None = None
    """The run's ``agent.max_turns``, for SkyRL-gym's environments."""
    sandbox: SandboxSpec = field(default_factory=SandboxSpec)
    """The sandbox of the tool ``python``."""

    @property
    def shown(self) -> str:
        """Name of the program in messages: ``environment game.py:Game``."""
        for kind, spec in (("environment", self.environment), ("program", self.program), ("agent", self.agent)):
            if spec is not None:
                return f"{kind} {_short(spec)}"
        if self.command:
            return f"agent {cut(' '.join(self.command), 60)}"
        return f"tools {', '.join([*map(_short, self.tools), *(server.who for server in self.mcp)])}"

    @property
    def waits_s(self) -> float:
        """Seconds that loading may wait for servers, whose own limits end the wait."""
        given = self.params.get("timeout_s", 30.0)
        there = self.environment is not None and names_a_server(self.environment) and isinstance(given, int | float)
        # For each tool server: to connect to it, to list its tools, and to close it.
        waits = [2 * server.timeout_s + 2 * CLOSE_TIMEOUT_S for server in self.mcp]
        return sum(waits) + (float(given) if there else 0.0)

    def resolved(self) -> ProgramSpec:
        """Return the spec with absolute paths, for a process with another working directory."""
        return replace(
            self,
            tools=tuple(_resolved(tool) for tool in self.tools),
            environment=None if self.environment is None else _resolved(self.environment),
            mcp=tuple(server.resolved() for server in self.mcp),
            program=None if self.program is None else resolve_spec(self.program),
            agent=None if self.agent is None else resolve_spec(self.agent),
            directory=str(Path.cwd()) if self.command else None,
        )

    def load(self) -> Program:
        """Import the user's code and recognise its form.

        Raises:
            UserCodeError: the code does not import, has none of the forms, or does not fit the other settings.
            ProgramAway: something that the environment's function needs is temporarily away.
        """
        with beforehand():
            return _load(self)


def _load(spec: ProgramSpec) -> Program:
    if spec.environment is not None and names_a_server(spec.environment):
        _refuse_tools(spec)
        return OpenEnvProgram(spec.environment, spec.shown, spec.params)
    if spec.environment is not None:
        return _environment(spec, load_object(spec.environment))
    if spec.program is not None:
        _refuse_tools(spec)
        found = load_object(spec.program)
        if inspect.isclass(found) and not hasattr(found, "run") and hasattr(found, "step"):
            raise UserCodeError(f"{spec.shown}: it has step(), as environments have; name it in agent.environment")
        if is_verl_loop(found):
            return VerlLoop(found, spec.shown, spec.params, spec.model_path, spec.prompt_length)
        return OwnProgram(found, spec.shown, spec.params)
    if spec.agent is not None:
        return AgentProgram(load_object(spec.agent), spec.shown, spec.params)
    if spec.command:
        return CommandProgram(spec.command, spec.shown, spec.directory)
    return ToolLoop(load_toolbox(spec), spec.shown)


def load_toolbox(spec: ProgramSpec) -> Toolbox:
    """Return the tools of ``spec``: the user's functions and objects, and those that MCP servers list.

    Raises:
        ConfigError: this machine has no such sandbox.
        UserCodeError: a tool cannot be loaded, a server has none, or two tools have the same name.
        ProgramAway: a server is away for a time.
    """
    servers = [McpServer(server) for server in spec.mcp]
    for server in servers:
        server.load()
    return Toolbox([*load_tools(spec.tools, spec.sandbox), *servers])


def _environment(spec: ProgramSpec, found: Any) -> Program:
    who = spec.shown
    if inspect.iscoroutinefunction(found):
        raise UserCodeError(f"{who}: it is an async function; name it in agent.program, where {EXPECTED}")
    if not callable(found):
        raise UserCodeError(
            f"{who}: it is {shown(found)}, and episodes need an environment each; name its class, or a function that "
            "makes one"
        )
    if _is_skyrl(found):
        _refuse_tools(spec)
        return SkyrlProgram(found, who, spec.params, spec.max_turns)
    check_call(who, found, (), params=spec.params)
    instances = EnvironmentPool(partial(found, **spec.params), who)
    if inspect.isclass(found):
        return _recognised(spec, instances, found, found)
    with instances.one() as environment:
        return _recognised(spec, instances, type(environment), environment)


def _recognised(spec: ProgramSpec, instances: EnvironmentPool, kind: type, environment: Any) -> Program:
    """Return the program of an environment's class. ``environment``: an instance of it, or the class itself."""

    def has(name: str) -> bool:
        return callable(getattr(environment, name, None))

    # A subclass of a gym's class is an environment of that gym, even with get_reward().
    theirs = any(base.__module__.partition(".")[0] in _GYMS for base in kind.__mro__)
    if has("reset") and has("step") and (theirs or not (has("get_reward") or _step_is_a_tool(environment))):
        _refuse_tools(spec)
        return GymProgram(instances, spec.shown, environment)
    if has("reset") and (has("get_reward") or has("step") or tool_names(kind) or _given_tools(spec)):
        return TrlProgram(instances, spec.shown, kind, load_toolbox(spec))
    if has("run"):
        raise UserCodeError(f"{spec.shown}: it has run(), as programs have; name it in agent.program")
    own = [f"{name}()" for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]
    raise UserCodeError(
        f"{spec.shown}: {kind.__name__} has none of the forms of an environment: TRL's, reset(**row) and get_reward() "
        "or methods that are tools; Gymnasium's and GEM's, reset(seed) and step(action); SkyRL-gym's, init(prompt) and "
        f"step(action). It has {', '.join(own) or 'no public methods'}"
    )


def _step_is_a_tool(environment: Any) -> bool:
    """Tell whether ``step`` is a tool and not Gymnasium's: it returns text, and ``reset`` names no seed."""
    returns = getattr(environment.step, "__annotations__", {}).get("return")
    return returns in (str, "str") and "seed" not in Parameters.of(environment.reset).named


def _is_skyrl(found: Callable[..., Any]) -> bool:
    if inspect.isclass(found):
        return callable(getattr(found, "init", None)) and callable(getattr(found, "step", None))
    return "extras" in Parameters.of(found).named


def _refuse_tools(spec: ProgramSpec) -> None:
    if given := _given_tools(spec):
        raise UserCodeError(
            f"{given} beside {spec.shown}, which would not call them; drop {given}: programs give tools by "
            "chat.turn(messages, tools=[…]), environments in TRL's form have them beside their own"
        )


def _given_tools(spec: ProgramSpec) -> str:
    """Return the keys that give tools, for messages."""
    return " and ".join(key for key, value in (("agent.tools", spec.tools), ("agent.mcp", spec.mcp)) if value)


def _resolved(spec: str) -> str:
    """Return ``spec`` with an absolute path if it names a file."""
    if ":" in spec or spec == PYTHON:
        return resolve_spec(spec)
    return str(Path(spec).expanduser().resolve())


def _short(spec: str) -> str:
    if names_a_server(spec):
        return spec
    path, colon, name = spec.rpartition(":")
    return f"{Path(path).name}:{name}" if colon else Path(spec).name


def load_tools(specs: Sequence[str], sandbox: SandboxSpec | None = None) -> list[Tool | ToolSource]:
    """Return the tools of ``specs``: each is ``file.py:function``, a class or an object in verl's form, verl's
    ``tools.yaml``, or ``python``, whose code runs in ``sandbox``.

    Raises:
        ConfigError: this machine has no such sandbox.
        UserCodeError: a file or function does not load, or a function cannot become a tool.
    """
    tools: list[Tool | ToolSource] = []
    for spec in specs:
        if spec == PYTHON:
            given = sandbox or SandboxSpec()
            runs = Sandbox(given)
            runs.probe()
            tools.append(make_tool(python_tool(runs, given.limits), spec))
        elif spec.endswith((".yaml", ".yml")):
            tools += load_tool_config(spec)
        else:
            found = load_object(spec)
            tools.append(make_verl_tool(found, spec) if is_tool_object(found) else make_tool(found, spec))
    return tools
