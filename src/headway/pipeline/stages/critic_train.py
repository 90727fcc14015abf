"""CriticTrain: trains the critic on each fetch beside the trainer, on the critic's own ranks.

consumes        fetches with values and returns, from ActorTrain as soon as it has advantages
waits for       ActorTrain; the critic's ranks
is unblocked by ActorTrain, which hands a fetch on before its own steps
produces        a critic that Values may ask about the next fetch
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from headway.events import Emit
from headway.pipeline.admission.fetches import Fetch
from headway.pipeline.channel import Channel
from headway.pipeline.critic_turns import Critic
from headway.pipeline.stage import Stage


class CriticTrain(Stage[Fetch, None]):
    waits_for_input = "ActorTrain"

    def __init__(self, emit: Emit, input: Channel[Fetch], critic: Critic) -> None:
        super().__init__(emit, input)
        self._critic = critic

    async def process_data(self, fetch: Fetch) -> AsyncGenerator[None, None]:
        with self._waiting_within("the critic's step"):
            await self._critic.train(fetch)
        return
        yield
