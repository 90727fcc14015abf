"""Generate: hands requests to replicas and passes finished groups on, in the order in which they finish.

consumes        waves from PromptLoader
waits for       a replica to finish a group
is unblocked by the engine (decoding is paused and resumed by ParamUpdate, behind this stage's back)
produces        finished groups
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator

from headway.interfaces import FinishedGroup, GenerateRequest
from headway.pipeline.channel import Channel
from headway.pipeline.router import Router
from headway.pipeline.stage import Stage
from headway.pipeline.stages.prompt_loader import Wave
from headway.pipeline.state import RunState

Share = tuple[int, list[GenerateRequest]]
"""A replica's index and its part of a wave."""


class Generate(Stage[Share, FinishedGroup]):
    concurrency = None
    waits_for_input = "PromptLoader"

    def __init__(self, state: RunState, input: Channel[Wave], output: Channel[FinishedGroup], router: Router) -> None:
        super().__init__(state.emit)
        self._input = input
        self._output = output
        self._router = router
        self._shares: deque[Share] = deque()

    async def get_input_data(self) -> Share | None:
        if not self._shares:
            if (wave := await self._input.get()) is None:
                return None
            self._shares.extend(self._router.assign(wave))
        return self._shares.popleft()

    async def process_data(self, share: Share) -> AsyncGenerator[FinishedGroup, None]:
        index, requests = share
        replica = self._router.replicas[index]
        with self._waiting_within(replica.name):
            async for finished in replica.generate(requests):
                self._router.finished(index, len(finished.trajectories))
                yield finished

    async def send_output_data(self, finished: FinishedGroup) -> bool:
        return await self._output.send(finished)

    def close_output(self) -> None:
        self._output.close()
