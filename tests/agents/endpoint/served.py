"""Episodes whose program is an agent of this process, at a real endpoint on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headway.agents.chat.chat_template import ChatRenderer
from headway.agents.endpoint.endpoint_server import Endpoint
from headway.agents.episodes.episode_limits import EpisodeLimits
from headway.agents.episodes.episode_tokens import Chats
from headway.agents.episodes.episode_worker import EpisodeWorker, local_episode_worker
from headway.agents.episodes.program_episode import Hosting
from headway.agents.episodes.program_workers import texts_of
from headway.agents.interface.program_chat import Ask
from headway.agents.interface.program_messages import Access, EpisodeEnd, EpisodeStart
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import SamplingParams
from headway.data.types import Trajectory
from tests.agents.episodes.program_episodes import RENDERER, Here, Policy, check_trained_tokens, request

LIMITS = EpisodeLimits(max_length=2000, max_turns=20, step_timeout_s=20, episode_timeout_s=60)
Agent = Callable[[Access], Awaitable[Any]]


def endpoint(renderer: ChatRenderer = RENDERER, **settings: Any) -> Endpoint:
    return Endpoint(texts_of(renderer), **settings)


@dataclass
class Served:
    """What a group of episodes of an agent came to."""

    group: Group
    policies: Sequence[Policy]
    returned: list[Any] = field(default_factory=list)
    """What the agent returned, episode by episode as they ended."""

    @property
    def episode(self) -> Trajectory:
        [episode] = self.group.trajectories
        return episode

    @property
    def rows(self) -> list[Any]:
        assert self.group.tokens is not None
        return list(self.group.tokens)

    @property
    def calls(self) -> int:
        """Number of calls that the policies were asked for."""
        return sum(len(policy.calls) for policy in self.policies)


async def served(
    agent: Agent,
    *,
    policies: Sequence[Policy] | None = None,
    limits: EpisodeLimits = LIMITS,
    n: int = 1,
    max_tokens: int = 50,
    renderer: ChatRenderer = RENDERER,
    meanwhile: Callable[[EpisodeWorker], Awaitable[None]] | None = None,
    **settings: Any,
) -> Served:
    """One group of ``n`` episodes, each made by ``agent``, whose reward is 1."""
    policies = policies or [Policy(seconds=0.01)]
    returned = []

    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        assert start.access is not None
        returned.append(await agent(start.access))
        return returned[-1] if isinstance(returned[-1], EpisodeEnd) else EpisodeEnd(1.0)

    hosting = Hosting(
        Here(program),
        Chats(renderer).new_episode,
        limits,
        stop_ids=tuple(renderer.end_ids),
        endpoint=endpoint(renderer, **settings),
    )
    assert hosting.endpoint is not None
    await hosting.endpoint.start()
    asked = replace(request(n), sampling=SamplingParams(max_tokens))
    async with local_episode_worker(*policies, hosting=hosting) as worker:
        beside = None if meanwhile is None else asyncio.ensure_future(meanwhile(worker))
        (group,) = [group async for group in worker.generate([asked])]
        if beside is not None:
            await beside
    check_trained_tokens(group)
    return Served(group, policies, returned)
