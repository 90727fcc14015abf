"""Generate: hands requests to replicas and passes finished groups on, in the order in which they finish.

consumes        waves from PromptLoader
waits for       a replica to finish a group; paused while every replica is halted
is unblocked by the engine (replicas are halted for new weights, or for the trainer, behind this stage's back)
produces        finished groups, or parts of groups that were split
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator

from headway.interfaces import FinishedGroup, GenerateRequest
from headway.pipeline.channel import Channel
from headway.pipeline.fleet import Fleet
from headway.pipeline.halts import Halts
from headway.pipeline.receiver import Replica
from headway.pipeline.router import Router
from headway.pipeline.stage import Stage
from headway.pipeline.stages.prompt_loader import Wave
from headway.pipeline.state import RunState

Share = tuple[Replica, list[GenerateRequest]]
"""A replica and its part of a wave."""


class Generate(Stage[Share, FinishedGroup]):
    concurrency = None
    waits_for_input = "PromptLoader"
    waits_for_output = None

    def __init__(
        self,
        state: RunState,
        input: Channel[Wave],
        output: Channel[FinishedGroup],
        fleet: Fleet,
        halts: Halts,
        router: Router,
    ) -> None:
        super().__init__(state.emit, output=output, gate=halts.gate)
        self._waves = input
        self._fleet = fleet
        self._halts = halts
        self._router = router
        self._shares: deque[Share] = deque()

    async def get_input_data(self) -> Share | None:
        if not self._shares:
            if (wave := await self._waves.get()) is None:
                return None
            shares = self._router.assign(wave, self._halts.available)
            self._shares.extend((self._fleet[name], share) for name, share in shares)
        return self._shares.popleft()

    async def process_data(self, share: Share) -> AsyncGenerator[FinishedGroup, None]:
        replica, requests = share
        with self._waiting_within(replica.name):
            async for finished in self._fleet.generate(replica, requests):
                yield finished
