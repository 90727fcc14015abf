"""The section ``agent``: user code that makes episodes of many turns, and its limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from headway.config.sections.mcp_section import McpServerConfig, mcp_problems
from headway.config.sections.section import NonNegative, Positive, Section, text_or
from headway.runtime.sandbox.python_tool import PYTHON
from headway.runtime.user_code import names_a_server, names_user_code

_EXAMPLES = {
    "tools": "tools.py:look_up",
    "environment": "environment.py:Game",
    "program": "program.py:run",
    "client": "agent.py:run",
}

Limit = Literal["turns", "tokens", "step", "time"]
"""A limit of an episode: ``max_turns``; the tokens of a conversation; ``step_timeout_s``; ``episode_timeout_s``."""


class AgentCommand(Section):
    """An agent that is a command (``agent.client: {command: […]}``)."""

    command: tuple[str, ...] = Field(min_length=1)
    """The program and its arguments. It is given the row as JSON on standard input, and the endpoint in the environment
    (``OPENAI_BASE_URL``, ``OPENAI_API_KEY``); the reward is the last line that it prints."""


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
            Annotated[str, Tag("text")] | Annotated[AgentCommand, Tag("section")],
            Discriminator(text_or("section", Mapping | AgentCommand)),
        ]
        | None
    ) = None
    """An agent that asks for turns over HTTP, with a client of its own: ``file.py:function``, which is ``async def
    run(row, base_url, api_key)`` and returns the reward, or ``{command: [program, argument, …]}``."""
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
    """Seconds without a sign of a runner's event loop after which the runner is replaced."""
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
    episode_retries: NonNegative = 2
    """Number of times that a program is run again for what is away for a time: a lost runner, a connection."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the processes that hold user code: name there → name in your environment. Their values
    are never written down, and are shown as ***. Of your other variables these processes get those of paths, language,
    proxies, certificates and libraries' settings alone (``headway/runtime/workers/environment_variables.py``), and no
    secret."""

    @property
    def has_program(self) -> bool:
        """True where episodes are made by user code."""
        return bool(self.tools or self.mcp or self.environment or self.program or self.client)

    @property
    def client_function(self) -> str | None:
        """The agent's ``file.py:function``; None for a command, and where there is no agent."""
        return self.client if isinstance(self.client, str) else None


def program_problems(
    agent: AgentConfig, *, n: int, by_program: bool, max_response_length: int, stall_timeout_s: float
) -> Iterator[str]:
    """What is wrong with programs and their limits. ``n``: episodes of a group; ``by_program``: the reward is the
    program's own."""
    if agent.has_program and agent.step_timeout_s >= stall_timeout_s:
        yield (
            f"agent.step_timeout_s={agent.step_timeout_s:g} lets all episodes be in a step for longer than nothing "
            f"may move, cluster.stall_timeout_s={stall_timeout_s:g}; lower the one or raise the other"
        )
    given = {
        "tools": agent.tools,
        "mcp": agent.mcp,
        "environment": agent.environment,
        "program": agent.program,
        "client": agent.client,
    }
    chosen = [f"agent.{name}" for name, value in given.items() if value]
    if len(chosen) > 1 and (agent.program or agent.client):
        yield f"{' and '.join(chosen)} are given, and each makes the episodes by itself; keep one of them"
    yield from mcp_problems(agent.mcp, agent.step_timeout_s)
    for name, example in _EXAMPLES.items():
        value = getattr(agent, name)
        for spec in value if isinstance(value, tuple) else [value] if value else []:
            if isinstance(spec, str) and not (names_user_code(spec) or _is_other_form(name, spec)):
                built_in = f", or the built-in {PYTHON}" if name == "tools" else ""
                yield f"agent.{name}={spec}: expected file.py:name, such as {example}{built_in}"
    if agent.params and not (agent.environment or agent.program or agent.client_function):
        yield "agent.params are for an environment, a program or an agent in Python; nothing else has any; drop it"
    # Tools of verl's form give rewards, too: whether these do is known when they are loaded.
    if by_program and not (agent.environment or agent.program or agent.client or agent.tools):
        yield (
            "reward.function=program is the reward of agent.environment, program or client, and none is given; name a "
            "function that scores the last answer"
        )
    if agent.step_timeout_s > agent.episode_timeout_s:
        yield (
            f"agent.step_timeout_s={agent.step_timeout_s:g} is more than the whole episode may take, "
            f"agent.episode_timeout_s={agent.episode_timeout_s:g}; lower the one or raise the other"
        )
    if agent.max_turn_tokens is not None and agent.max_turn_tokens > max_response_length:
        yield (
            f"agent.max_turn_tokens={agent.max_turn_tokens} is more than an answer may have, "
            f"data.max_response_length={max_response_length}; lower the one or raise the other"
        )
    if agent.min_episodes is not None and agent.min_episodes > n:
        yield f"agent.min_episodes={agent.min_episodes} is more than a group has, rollout.n={n}; lower it"


def idle_program_keys(agent: AgentConfig) -> Iterator[tuple[str, str]]:
    """Keys of programs that change nothing → why."""
    if not agent.has_program:
        for key in AgentConfig.model_fields:
            if key not in ("tools", "mcp", "environment", "program", "client", "env"):
                yield (
                    f"agent.{key}",
                    "answers have one turn: there is no agent.tools, environment, program or client",
                )
        return
    if agent.client is None:
        for key in ("sampling", "models", "endpoint_host", "endpoint_port"):
            yield f"agent.{key}", "no agent.client is given, and nothing else asks for turns over HTTP"


def _is_other_form(name: str, spec: str) -> bool:
    """Tell whether ``spec`` is a value of ``agent.NAME`` that is no ``file.py:name``."""
    if name == "environment":
        return names_a_server(spec)
    return name == "tools" and (spec == PYTHON or spec.endswith((".yaml", ".yml")))
