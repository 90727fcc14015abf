"""Hosting of programs as a configuration asks for it: their processes, limits, chat template and endpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.agents.adapters.mcp_servers import McpServerSpec
from headway.agents.adapters.program_loader import ProgramSpec
from headway.agents.chat.chat_template import ChatRenderer
from headway.agents.endpoint.dialect import TextCodec
from headway.agents.episodes.episode_limits import EpisodeLimits
from headway.agents.episodes.episode_tokens import Chats
from headway.agents.episodes.program_episode import Hosting, Programs
from headway.agents.interface.program_chat import Ask
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, ProgramDescription
from headway.config.schema import Config
from headway.config.sizing.placement import concurrent, resolve_placement
from headway.data.tokenize import TextStart
from headway.errors import ConfigError, RunError
from headway.runtime.workers.worker_pool import START_TIMEOUT_S, WorkerPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headway.agents.endpoint.endpoint_server import Endpoint


CLOSE_S = 10.0
"""Limit in seconds for environments to be closed when a run ends."""


class ProgramWorkers:
    """`headway.agents.episodes.program_episode.Programs` in separate processes."""

    def __init__(self, name: str, config: Config, logs: Path | None, model_path: str | None = None) -> None:
        """
        Args:
            name: of the episode worker, for messages.
            logs: directory for the output of programs; None for this process's stderr.
            model_path: folder of the policy's tokenizer; None if it does not exist yet.
        """
        self._name = name
        self._agent = config.agent
        self._spec = replace(program_spec(config), model_path=model_path)
        self._log = None if logs is None else logs / f"{name}-programs.log"
        self._pool: WorkerPool | None = None
        self.waits_s = self._spec.waits_s
        """Seconds that loading may wait for servers, beside the time of the user's code."""

    async def describe(self) -> ProgramDescription:
        """Load the user's code in the first process, and return its description.

        Raises:
            UserError: the code cannot be used; says why.
            WorkerDied: a process ended while it loaded the code.
        """
        self._pool = self._made(
            "environment process", processes=self._agent.environment_processes, at_once=1, forked=True
        )
        described: ProgramDescription = await self._pool.start()
        known = {tool["function"]["name"] for tool in described.tools}
        if known and (unknown := {*self._agent.side_effects} - known - {"*"}):
            raise ConfigError(
                f"agent.side_effects: there is no tool named {', '.join(sorted(unknown))}; there are: "
                f"{', '.join(sorted(known))}; * stands for all that a program does"
            )
        return described

    async def start(self) -> ProgramDescription:
        """Load the user's code, and start the processes that its episodes need. Returns and raises as `describe`."""
        described = await self.describe()
        await self.get_ready(described)
        return described

    async def get_ready(self, described: ProgramDescription) -> None:
        """Start the processes for episodes of code with the description ``described``. Raises as `describe`."""
        if not described.is_async:
            return
        await self.close()  # the process of `describe` takes one episode at a time; coroutines share theirs
        self._pool = self._made(
            "user-code worker", processes=self._agent.workers, at_once=None, stall_s=self._agent.stall_s
        )
        await self._pool.start()

    def _made(self, kind: str, **settings: Any) -> WorkerPool:
        return WorkerPool(
            f"{kind} of {self._name}",
            self._spec,
            log_path=self._log,
            env=variables(self._agent.env),
            start_timeout_s=START_TIMEOUT_S + self.waits_s,
            close_s=CLOSE_S,
            **settings,
        )

    async def run(self, job: EpisodeStart, on_ask: Ask, *, on_begin: Callable[[], object] | None = None) -> EpisodeEnd:
        """See `headway.agents.episodes.program_episode.Programs.run`."""
        if self._pool is None:
            raise RunError(f"{self._name}: the workers were not started")
        end: EpisodeEnd = await self._pool.run(job, on_ask, on_begin=on_begin)
        return end

    async def close(self) -> None:
        """End all processes."""
        if self._pool is not None:
            await self._pool.close()


def program_spec(config: Config) -> ProgramSpec:
    """Return the program of ``config``, with absolute paths."""
    agent = config.agent
    return ProgramSpec(
        tools=agent.tools,
        mcp=tuple(McpServerSpec(name=name, **dict(server)) for name, server in agent.mcp.items()),
        environment=agent.environment,
        program=agent.program,
        agent=agent.client_function,
        command=agent.client if isinstance(agent.client, tuple) else (),
        params=agent.params,
        max_turns=agent.max_turns,
        prompt_length=config.data.max_prompt_length,
        sandbox=config.sandbox.spec,
    ).resolved()


def variables(names: dict[str, str]) -> dict[str, str]:
    """Return the values of ``agent.env``, from this process's environment.

    Raises:
        ConfigError: one of them is not set.
    """
    missing = [name for name in names.values() if name not in os.environ]
    if missing:
        raise ConfigError(
            f"agent.env: {', '.join(missing)} is not set in the environment; export it before the run, or drop it"
        )
    return {name: os.environ[theirs] for name, theirs in names.items()}


def chat_hosting(
    config: Config, tokenizer: PreTrainedTokenizerBase, programs: Programs, node: str = "127.0.0.1"
) -> Hosting:
    """Return the hosting of ``config``'s episodes by ``programs``, with chats rendered by ``tokenizer``. Starts
    nothing.

    ``node``: address of this machine for others.

    Raises:
        ConfigError: the tokenizer has no chat template; or there are tools, and it does not show them, or no parser
            reads its calls.
    """
    chats = chats_of(config, tokenizer)
    return Hosting(
        programs,
        chats.new_episode,
        limits_of(config),
        seed=config.run.seed,
        stop_ids=tuple(sorted(chats.renderer.end_ids)),
        gives_reward=config.reward.by_program,
        template_kwargs=config.data.chat_template_kwargs,
        held_out_at_once=held_out_at_once(config),
        endpoint=None if config.agent.client is None else _endpoint(config, chats.renderer, node),
    )


def _endpoint(config: Config, renderer: ChatRenderer, node: str) -> Endpoint:
    """Return the endpoint for the agents of ``config``."""
    from headway.agents.endpoint.endpoint_server import Endpoint  # here: it takes a third of a second to import

    agent = config.agent
    return Endpoint(
        texts_of(renderer),
        models=agent.models,
        tokenizer=renderer.tokenizer.name_or_path,
        strict=agent.sampling == "strict",
        max_length=limits_of(config).max_length,
        host=node if agent.endpoint_host == "node" else agent.endpoint_host,
        node=node,
        port=agent.endpoint_port,
    )


def texts_of(renderer: ChatRenderer) -> TextCodec:
    """Return a codec between text and token ids, by ``renderer``. Ids begin like those of a text prompt."""
    start = TextStart(renderer.tokenizer)
    return TextCodec(lambda text: start.added(renderer.encode(text).tolist(), text), renderer.decode)


def chats_of(config: Config, tokenizer: PreTrainedTokenizerBase) -> Chats:
    """Return the chats that ``tokenizer`` renders. Raises `ConfigError` if it cannot render what the run needs."""
    renderer = ChatRenderer(tokenizer, config.data.chat_template_kwargs, most_tokens=limits_of(config).max_length)
    chats = Chats(renderer, config.agent.tool_parser)
    if config.agent.tools or config.agent.mcp:
        _ = chats.parser
    return chats


def held_out_at_once(config: Config) -> int:
    """Return the maximum number of open held-out episodes on each machine with replicas."""
    for_each = 2 * concurrent(config)
    return -(-for_each * len(resolve_placement(config).replicas) // max(1, config.rollout.nnodes))


def limits_of(config: Config) -> EpisodeLimits:
    """Return the limits of the episodes of ``config``."""
    agent, data = config.agent, config.data
    return EpisodeLimits(
        max_length=data.max_prompt_length + data.max_response_length,
        max_turns=agent.max_turns,
        max_turn_tokens=agent.max_turn_tokens,
        step_timeout_s=agent.step_timeout_s,
        episode_timeout_s=agent.episode_timeout_s,
        train_on=tuple(agent.train_on_limit),
        side_effects=agent.side_effects,
    )
