"""Episode settings from a configuration: limits, chat template, endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.agents.chat.chat_template import ChatRenderer
from headway.agents.endpoint.dialect import TextCodec
from headway.agents.endpoint.turns import Doors
from headway.agents.episodes.episode_limits import EpisodeLimits
from headway.agents.episodes.episode_tokens import Chats
from headway.agents.episodes.program_episode import Hosting, Programs
from headway.config.schema import Config
from headway.config.sizing.placement import concurrent, resolve_placement
from headway.data.tokenize import TextStart

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def chat_hosting(
    config: Config, tokenizer: PreTrainedTokenizerBase, programs: Programs, node: str = "127.0.0.1"
) -> Hosting:
    """Hosting of the episodes of ``config`` by ``programs``, whose chats ``tokenizer`` renders. Nothing is started.

    ``node``: the address of this machine for the others.

    Raises:
        ConfigError: the tokenizer has no chat template; or there are tools, and it does not show them, or nothing reads
            its calls.
    """
    chats = chats_of(config, tokenizer)
    return Hosting(
        programs,
        chats.record,
        limits_of(config),
        seed=config.run.seed,
        stop_ids=tuple(sorted(chats.renderer.end_ids)),
        gives_reward=config.reward.by_program,
        keeps_conversations=not config.reward.by_program,
        template_kwargs=config.data.chat_template_kwargs,
        held_out_at_once=held_out_at_once(config),
        endpoint=None if config.rollout.agent is None else _endpoint(config, chats.renderer, node),
    )


def _endpoint(config: Config, renderer: ChatRenderer, node: str) -> Doors:
    """The endpoint of the agents of ``config``."""
    from headway.agents.endpoint.dialects import DIALECTS  # here: the HTTP server takes a third of a second to import
    from headway.agents.endpoint.endpoint_server import Endpoint

    rollout = config.rollout
    return Endpoint(
        DIALECTS,
        texts_of(renderer),
        models=rollout.agent_models,
        tokenizer=renderer.tokenizer.name_or_path,
        strict=rollout.agent_sampling == "strict",
        max_length=limits_of(config).max_length,
        host=node if rollout.endpoint_host == "node" else rollout.endpoint_host,
        node=node,
        port=rollout.endpoint_port,
    )


def texts_of(renderer: ChatRenderer) -> TextCodec:
    """Text to token ids and back, as ``renderer`` has them; a text's ids begin as those of a prompt that is text."""
    start = TextStart(renderer.tokenizer)
    return TextCodec(lambda text: start.added(renderer.encode(text).tolist(), text), renderer.decode)


def chats_of(config: Config, tokenizer: PreTrainedTokenizerBase) -> Chats:
    """The chats that ``tokenizer`` renders. Raises `ConfigError` where it cannot, as `chat_hosting` does."""
    renderer = ChatRenderer(tokenizer, config.data.chat_template_kwargs, most_tokens=limits_of(config).max_length)
    chats = Chats(renderer, config.rollout.tool_parser)
    if config.rollout.tools or config.rollout.mcp:
        _ = chats.for_tools
    return chats


def held_out_at_once(config: Config) -> int:
    """Most held-out episodes that are open at once on each machine with replicas."""
    for_each = config.rollout.val_max_concurrent or 2 * concurrent(config)
    return -(-for_each * len(resolve_placement(config).replicas) // max(1, config.rollout.nnodes))


def limits_of(config: Config) -> EpisodeLimits:
    """Limits of the episodes of ``config``."""
    rollout, data = config.rollout, config.data
    return EpisodeLimits(
        max_length=data.max_prompt_length + data.max_response_length,
        max_turns=rollout.max_turns,
        max_turn_tokens=rollout.max_turn_tokens,
        step_timeout_s=rollout.step_timeout_s,
        episode_timeout_s=rollout.episode_timeout_s,
        train_on=tuple(rollout.train_on_limit),
        retries=rollout.episode_retries,
    )
