"""Interface between the endpoint and an episode.

class Echo:                                                 # `Turns`: one try of an episode's program
    name, sampling, trains = "episode (0, 3, 0, 1)", SamplingParams(max_tokens=64), True
    async def turn(self, request): return MadeTurn(0, answer, prompt_tokens=9, sampled=tokens)
    async def count(self, request): return 9
    def note(self, kind, reason): ...

with endpoint.open(Echo()) as access:                       # access.base_url, access.api_key: of this try alone
    ...
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from headway.agents.interface.program_messages import TurnAnswer, TurnRequest
from headway.data.interfaces.rollout import SamplingParams
from headway.data.types import SampledTokens
from headway.errors import ConfigError


class TurnNote(StrEnum):
    """Irregular requests of an agent, counted in metrics by these names."""

    REFUSED = "refused_requests"
    """Requests that were answered with an error."""
    OVERRIDDEN = "overridden_sampling"
    """Requests whose sampling was replaced by the run's."""
    REPEATED = "repeated_requests"
    """Requests that were asked again, and answered with what was sampled for the first one."""
    HUNG_UP = "hung_up_requests"
    """Requests whose client did not wait for the answer."""


@dataclass(frozen=True, slots=True)
class MadeTurn:
    """A turn of the policy."""

    number: int
    """Number of the turn among all that this try has asked for."""
    answer: TurnAnswer
    prompt_tokens: int
    sampled: SampledTokens
    """The tokens [T] as the engine sampled them."""


class Turns(Protocol):
    """One try of an episode's program."""

    name: str
    """Name of the episode in messages for people."""
    sampling: SamplingParams
    """The sampling of its turns, whatever is asked for."""
    trains: bool
    """The episode is trained on: what it samples has to be of the run's distribution."""

    async def turn(self, request: TurnRequest) -> MadeTurn:
        """Have the policy make a turn. Cancelled, the turn is given up; asked for again, it is the same turn.

        Raises:
            EpisodeOver: a limit has ended the episode.
            UserError: the request cannot be used; says why.
        """

    async def count(self, request: TurnRequest) -> int:
        """The number of tokens of the context that the turn would have. No turn is made.

        Raises:
            UserError: the request cannot be used; says why.
        """

    def note(self, kind: TurnNote, reason: str) -> None:
        """Count what an agent did not get, and why."""


def cannot_listen(host: str, port: int, cause: Exception) -> ConfigError:
    """Make the error of an endpoint that cannot listen there."""
    return ConfigError(
        f"the endpoint for agents cannot listen at {host}:{port}: {getattr(cause, 'strerror', None) or cause}; set "
        "agent.endpoint_port=0 for any free port, and agent.endpoint_host to an address of this machine"
    )


async def check_address(host: str, port: int) -> None:
    """Listen for a moment. Raises `ConfigError` where ``port`` is in use, or ``host`` is no address of this machine."""
    try:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)
    except (OSError, UnicodeError) as cause:
        raise cannot_listen(host, port, cause) from cause
    server.close()
    await server.wait_closed()
