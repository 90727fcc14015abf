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
    """An MCP server whose tools the model may call (docs/agents.md). Needs the extra ``mcp``."""

    command: tuple[str, ...] = ()
    """Command that starts a server on standard input and output: a program and its arguments."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the command. ``$NAME`` in a value stands for a variable of the process that runs
    episodes, such as one of ``agent.env``."""
    url: str | None = None
    """Address of a server that speaks streamable HTTP, in place of a command."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of requests to ``url``, with ``$NAME`` as in ``env``."""
    timeout_s: float = Field(30.0, gt=0)
    """Time limit in seconds of an answer of the server. After a time-out the call's episode is run again."""
    per_episode: bool = False
    """Give each episode its own connection, and its own process of ``command``: for stateful servers. False: episodes
    of a process share one."""
    tools: tuple[str, ...] | None = None
    """Names of the server's tools to offer. Default: all."""


MAKES_EPISODES = ("tools", "mcp", "environment", "program", "client")
"""Keys that make user code produce the episodes."""
_EXAMPLES = {
    "tools": "tools.py:look_up",
    "environment": "environment.py:Game",
    "program": "program.py:run",
    "client": "agent.py:run",
}

Limit = Literal["turns", "tokens", "step", "time"]
"""Name of an episode's limit: ``max_turns``, the tokens of a conversation, ``step_timeout_s``,
``episode_timeout_s``."""


class AgentConfig(Section):
    """Programs of episodes: user code that calls the policy, where it runs, and its limits (docs/agents.md)."""

    tools: tuple[str, ...] = ()
    """Tools that the model may call, each ``file.py:function`` with types and a docstring, a class of verl's form, or
    verl's ``tools.yaml``; or ``python``, which runs the model's code in the sandbox."""
    mcp: dict[str, McpServerConfig] = Field(default_factory=dict)
    """MCP servers by name, whose tools are offered beside ``tools``."""
    environment: str | None = None
    """An environment, ``file.py:Class``, with the interface of TRL, Gymnasium, GEM or SkyRL-gym, which is detected; or
    the address of an OpenEnv server, ``ws://host:8000``."""
    program: str | None = None
    """Your own program, ``file.py:function``: ``async def run(row, chat)``, which returns the reward."""
    client: (
        Annotated[
            Annotated[str, Tag("text")] | Annotated[tuple[str, ...], Field(min_length=1), Tag("list")],
            Discriminator(text_or_list),
        ]
        | None
    ) = None
    """An agent that requests turns over HTTP with its own client: ``file.py:function``, an ``async def run(row,
    base_url, api_key)`` that returns the reward; or a command, ``[program, argument, …]``, which gets the row as JSON
    on standard input and the endpoint in the environment (``OPENAI_BASE_URL``, ``OPENAI_API_KEY``), and prints the
    reward on its last line."""
    sampling: Literal["override", "strict"] = "override"
    """Handling of an agent's request with other sampling parameters than the run's, which training could not account
    for: ``override`` uses the run's and counts the request, ``strict`` refuses it."""
    models: tuple[str, ...] = Field(("policy", "default"), min_length=1)
    """Model names under which agents may request the policy."""
    endpoint_host: str = "127.0.0.1"
    """Address of the endpoint for agents, on each machine with replicas. ``node`` is the machine's address in the
    cluster, for agents that start processes on other machines which request turns."""
    endpoint_port: int = Field(0, ge=0, lt=2**16)
    """Port of the endpoint on each machine; 0: any free port."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor, or further ones of the program or agent."""
    tool_parser: str = "auto"
    """Parser of tool calls: ``template``, ``hermes``, ``llama3_json``, ``mistral``, ``qwen3_coder``, ``glm``,
    ``deepseek``, ``kimi``, ``harmony``, or ``auto``: the one that fits the model's chat template."""
    workers: Positive = 2
    """Number of processes for asynchronous programs on each machine with replicas."""
    environment_processes: Positive = 64
    """Maximum number of processes for synchronous environments and tools, one per open episode, on each machine with
    replicas. Further episodes wait before their first turn."""
    stall_s: float = Field(2.0, gt=0)
    """Seconds without a response of a user-code worker's event loop after which the worker is replaced."""
    max_turns: Positive = 10
    """Maximum number of turns of an episode."""
    max_turn_tokens: Positive | None = None
    """Maximum number of tokens of one turn. A turn of this length does not count as cut off
    (``algorithm.overlong_filtering``). Default: ``data.max_response_length``. A conversation, with the tokens of tools
    and environments, has at most ``data.max_prompt_length + data.max_response_length`` tokens."""
    step_timeout_s: float = Field(60.0, gt=0)
    """Time limit in seconds of a program between two turns."""
    episode_timeout_s: float = Field(600.0, gt=0)
    """Time limit in seconds of an episode. The clocks of this and ``step_timeout_s`` stop while replicas are paused or
    asleep."""
    train_on_limit: tuple[Limit, ...] = ("turns", "tokens")
    """Limits after which an episode is still trained on, with its reward by then. An episode that another limit ends
    has failed."""
    min_episodes: Positive | None = None
    """Minimum number of episodes that did not fail for their group to be trained on. Default: ``k`` for estimators of
    pass@k, 2 for those that compare the episodes of a group, else 1."""
    side_effects: tuple[str, ...] = ()
    """Names of tools that must not be called twice for one answer; ``*``: everything that programs and environments do.
    When a program is run again, after a resume or the loss of a worker, an episode that may have called such a tool
    starts over with new answers."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the processes with user code: name there → name in your environment. Their values are
    never written, and are shown as ***. Of your other variables these processes get only those for paths, language,
    proxies, certificates and libraries (``headway/runtime/workers/redaction.py``), and no secrets."""

    @property
    def has_program(self) -> bool:
        """True if user code makes the episodes."""
        return any(getattr(self, name) for name in MAKES_EPISODES)

    @property
    def client_function(self) -> str | None:
        """The agent's ``file.py:function``; None for a command, or without an agent."""
        return self.client if isinstance(self.client, str) else None


def program_problems(agent: AgentConfig) -> Iterator[str]:
    """Yield the problems of the named programs."""
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
    """Tell whether ``spec`` is a valid value of ``agent.NAME`` in another form than ``file.py:name``."""
    if name == "environment":
        return names_a_server(spec)
    return name == "tools" and (spec == PYTHON or spec.endswith((".yaml", ".yml")))


CODE = "code"
"""Name of the reward that runs a row's unit tests."""
LEAST_CPU_S = 10.0
"""Minimum limit of processor time, in seconds."""
LEAST_MIB = 64
"""Memory in MiB that an interpreter needs to start."""


class SandboxConfig(Section):
    """The sandbox of the tool ``python`` and the reward ``code`` (docs/sandbox.md). A bare name is ``{kind: …}``."""

    kind: Literal["bubblewrap", "process_limits"] = "bubblewrap"
    """The kind: ``bubblewrap`` puts each call into its own namespaces; ``process_limits`` only bounds a call's
    resources, and protects nothing."""
    wall_s: float = Field(10.0, gt=0, le=3600)
    """Time limit in seconds of a call, and of its processes' processor time (at least 10). A test of the reward
    ``code`` has its own limit, ``reward.params.timeout_s``."""
    memory_mib: int = Field(512, ge=LEAST_MIB)
    """Memory limit in MiB of all processes of a call together, files included."""

    @property
    def spec(self) -> SandboxSpec:
        """The sandbox that this section describes."""
        limits = SandboxLimits(self.wall_s, max(LEAST_CPU_S, self.wall_s), self.memory_mib)
        return SandboxSpec(self.kind, limits)
