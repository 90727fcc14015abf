"""The section ``agent``: user code that makes episodes of many turns, and its limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from headway.config.sections.section import Positive, Section, text_or_list
from headway.runtime.sandbox.python_tool import PYTHON
from headway.runtime.sandbox.sandbox_call import SandboxLimits, SandboxSpec
from headway.runtime.user_code import names_a_server, names_user_code


class McpServerConfig(Section):
    """An MCP server by its name, whose tools the model may call (docs/agents.md). It needs the extra ``mcp``."""

    command: tuple[str, ...] = ()
    """A command that starts the server and speaks with it over its standard input and output: a program and its
    arguments."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the command. ``$NAME`` in a value stands for a variable of the process that runs
    episodes, such as one of ``agent.env``."""
    url: str | None = None
    """The server's address, in place of a command: one that speaks over streamable HTTP."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of requests to ``url``, with ``$NAME`` as in ``env``."""
    timeout_s: float = Field(30.0, gt=0)
    """Most seconds that an answer of the server may take. The episode of a call that takes longer is run again."""
    per_episode: bool = False
    """Each episode has a connection of its own, and a command is started for each: for servers that remember. Otherwise
    episodes of a process share one."""
    tools: tuple[str, ...] | None = None
    """Names of the tools that are offered. Default: all of the server's."""


MAKES_EPISODES = ("tools", "mcp", "environment", "program", "client")
"""Keys of which one makes the episodes."""
_EXAMPLES = {
    "tools": "tools.py:look_up",
    "environment": "environment.py:Game",
    "program": "program.py:run",
    "client": "agent.py:run",
}

Limit = Literal["turns", "tokens", "step", "time"]
"""A limit of an episode: ``max_turns``; the tokens of a conversation; ``step_timeout_s``; ``episode_timeout_s``."""


class AgentConfig(Section):
    """Programs of episodes: user code that calls the policy, where it runs, and its limits (docs/agents.md)."""

    tools: tuple[str, ...] = ()
    """Tools that the model may call, each ``file.py:function`` with types and a docstring, a class of verl's form, or
    verl's ``tools.yaml``; or ``python``, which runs the model's code in the sandbox."""
    mcp: dict[str, McpServerConfig] = Field(default_factory=dict)
    """MCP servers by name, whose tools are offered beside ``tools``."""
    environment: str | None = None
    """An environment, ``file.py:Class``, in the form of TRL, Gymnasium, GEM or SkyRL-gym, by which it is recognised; or
    the address of a server of OpenEnv's, ``ws://host:8000``."""
    program: str | None = None
    """A program of one's own, ``file.py:function``: ``async def run(row, chat)``, which returns the reward."""
    client: (
        Annotated[
            Annotated[str, Tag("text")] | Annotated[tuple[str, ...], Field(min_length=1), Tag("list")],
            Discriminator(text_or_list),
        ]
        | None
    ) = None
    """An agent that asks for turns over HTTP, with a client of its own: ``file.py:function``, which is ``async def
    run(row, base_url, api_key)`` and returns the reward; or a command, ``[program, argument, …]``, which is given the
    row as JSON on standard input, and the endpoint in the environment (``OPENAI_BASE_URL``, ``OPENAI_API_KEY``); the
    reward is the last line that it prints."""
    sampling: Literal["override", "strict"] = "override"
    """What becomes of requests of agents for other sampling than the run's, which training could not follow: the run's
    holds, and they are counted, or they are refused."""
    models: tuple[str, ...] = Field(("policy", "default"), min_length=1)
    """Names under which agents may ask for the policy."""
    endpoint_host: str = "127.0.0.1"
    """Address at which agents reach the endpoint: this one of each machine with replicas, or ``node`` for that by which
    the cluster knows the machine, where agents start something on other machines that asks for turns."""
    endpoint_port: int = Field(0, ge=0, lt=2**16)
    """Port of the endpoint on each machine; 0 for any that is free."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's constructor, or further ones of the program or agent, by name."""
    tool_parser: str = "auto"
    """Parser of tool calls: ``template``, ``hermes``, ``llama3_json``, ``mistral``, ``qwen3_coder``, ``glm``,
    ``deepseek``, ``kimi``, ``harmony``, or ``auto`` for the one that reads what the model's chat template writes."""
    workers: Positive = 2
    """Number of processes that asynchronous programs share, on each machine that has replicas."""
    environment_processes: Positive = 64
    """Most processes of synchronous environments and tools, one for each episode that is open, on each machine that
    has replicas. Further episodes wait before their first turn."""
    stall_s: float = Field(2.0, gt=0)
    """Seconds without a sign of a user-code worker's event loop after which that is replaced."""
    max_turns: Positive = 10
    """Most turns of an episode."""
    max_turn_tokens: Positive | None = None
    """Most tokens of one turn; one that has as many is not cut off (``algorithm.overlong_filtering``). Default:
    ``data.max_response_length``. A conversation, those of tools and environments included, has at most
    ``data.max_prompt_length + data.max_response_length`` tokens."""
    step_timeout_s: float = Field(60.0, gt=0)
    """Most seconds that a program may take between two turns."""
    episode_timeout_s: float = Field(600.0, gt=0)
    """Most seconds of an episode. Clocks of steps and episodes stop while the policy is halted or asleep."""
    train_on_limit: tuple[Limit, ...] = ("turns", "tokens")
    """Limits that leave an episode trained on, with the reward that it has by then. An episode that another one ends
    has failed."""
    min_episodes: Positive | None = None
    """Fewest episodes of a group that must not have failed for the others to be trained on. Default: ``k`` for
    estimators of pass@k, 2 for those that compare the episodes of a group, else 1."""
    side_effects: tuple[str, ...] = ()
    """Names of tools that must not be called twice for one answer; ``*`` for all that programs and environments do.
    Where a program is run again, after a resume or the loss of a worker, an episode that may have called one already is
    begun anew with other answers."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the processes that hold user code: name there → name in your environment. Their values
    are never written down, and are shown as ***. Of your other variables these processes get those of paths, language,
    proxies, certificates and libraries' settings alone (``headway/runtime/workers/redaction.py``), and no
    secret."""

    @property
    def has_program(self) -> bool:
        """True where episodes are made by user code."""
        return any(getattr(self, name) for name in MAKES_EPISODES)

    @property
    def client_function(self) -> str | None:
        """The agent's ``file.py:function``; None for a command, and where there is no agent."""
        return self.client if isinstance(self.client, str) else None


def program_problems(agent: AgentConfig) -> Iterator[str]:
    """Yield what is wrong with the programs that are named."""
    chosen = [f"agent.{name}" for name in MAKES_EPISODES if getattr(agent, name)]
    if len(chosen) > 1 and (agent.program or agent.client):
        yield f"{' and '.join(chosen)} are given, and each makes the episodes by itself; keep one of them"
    for name, example in _EXAMPLES.items():
        value = agent.client_function if name == "client" else getattr(agent, name)
        for spec in value if isinstance(value, tuple) else [value] if value else []:
            if not (names_user_code(spec) or _is_other_form(name, spec)):
                built_in = f", or the built-in {PYTHON}" if name == "tools" else ""
                yield f"agent.{name}={spec}: expected file.py:name, such as {example}{built_in}"
    if agent.params and not (agent.environment or agent.program or agent.client_function):
        yield "agent.params are for an environment, a program or an agent in Python; nothing else has any; drop it"


def _is_other_form(name: str, spec: str) -> bool:
    """Tell whether ``spec`` is a value of ``agent.NAME`` that is no ``file.py:name``."""
    if name == "environment":
        return names_a_server(spec)
    return name == "tools" and (spec == PYTHON or spec.endswith((".yaml", ".yml")))


CODE = "code"
"""Name of the reward that runs a row's unit tests."""
LEAST_CPU_S = 10.0
"""Least limit of processor time, in seconds."""
LEAST_MIB = 64
"""Memory that an interpreter needs to start."""


class SandboxConfig(Section):
    """The sandbox of the tool ``python`` and the reward ``code`` (docs/sandbox.md). A bare name is ``{kind: …}``."""

    kind: Literal["bubblewrap", "process_limits"] = "bubblewrap"
    """The kind: ``bubblewrap`` puts each call into namespaces of its own; ``process_limits`` bounds what it takes, and
    protects nothing else."""
    wall_s: float = Field(10.0, gt=0, le=3600)
    """Most seconds of a call, and of processor time of its processes (10 at least). A test of the reward ``code`` has
    its own limit, ``reward.params.timeout_s``."""
    memory_mib: int = Field(512, ge=LEAST_MIB)
    """Largest memory of all processes of a call together, files included, in MiB."""

    @property
    def spec(self) -> SandboxSpec:
        """The sandbox that the section asks for."""
        limits = SandboxLimits(self.wall_s, max(LEAST_CPU_S, self.wall_s), self.memory_mib)
        return SandboxSpec(self.kind, limits)
