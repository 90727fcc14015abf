"""Values: the critic's estimate for each state of a fetch, on the critic's separate ranks.

consumes        fetches
waits for       the critic to be trained on all earlier ones
is unblocked by CriticTrain; by the critic's ranks, which answer
produces        the same fetches, with a column of values per trajectory
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from headway.events import Emit
from headway.pipeline.admission.fetches import Fetch, FetchSource
from headway.pipeline.channel import Channel
from headway.pipeline.critic_turns import Critic
from headway.pipeline.stage import Stage


class Values(Stage[Fetch, Fetch]):
    waits_for_output = "ActorTrain"

    def __init__(self, emit: Emit, input: FetchSource, output: Channel[Fetch], critic: Critic, *, follows: str) -> None:
        """Build the stage. ``follows``: where its fetches come from, in words for the user."""
        super().__init__(emit, input, output)
        self.waits_for_input = follows
        self._critic = critic

    async def process_data(self, fetch: Fetch) -> AsyncGenerator[Fetch, None]:
        if fetch.groups:
            with self._waiting_within("the critic"):
                await self._critic.add_values(fetch)
        yield fetch
