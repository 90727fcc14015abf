"""Rollout: joins what engines return with the prompts that were asked, into groups.

consumes        finished groups from Generate
waits for       nothing else
produces        groups, complete and unrewarded; a group that was aborted ends here as dropped
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from headway.data.types import FinishReason, Group
from headway.events import TrajectoryFinished
from headway.interfaces import FinishedGroup
from headway.pipeline.channel import Channel
from headway.pipeline.ledger import Fate
from headway.pipeline.stage import Stage
from headway.pipeline.state import RunState, now


class Rollout(Stage[FinishedGroup, Group]):
    waits_for_input = "Generate"

    def __init__(self, state: RunState, input: Channel[FinishedGroup], output: Channel[Group]) -> None:
        super().__init__(state.emit)
        self._state = state
        self._input = input
        self._output = output

    async def get_input_data(self) -> FinishedGroup | None:
        return await self._input.get()

    async def process_data(self, finished: FinishedGroup) -> AsyncGenerator[Group, None]:
        self._report(finished)
        if any(t.finish_reason is FinishReason.ABORTED for t in finished.trajectories):
            self._state.discard(finished.number, Fate.DROPPED, "aborted")
            return
        prompt = self._state.ledger.prompt(finished.number)
        yield Group(finished.number, prompt, finished.trajectories, finished.tokens)

    async def send_output_data(self, group: Group) -> bool:
        return await self._output.send(group)

    def close_output(self) -> None:
        self._output.close()

    def _report(self, finished: FinishedGroup) -> None:
        for trajectory in finished.trajectories:
            self._emit(
                TrajectoryFinished(
                    time=now(),
                    number=finished.number,
                    k=trajectory.id.k,
                    replica=trajectory.replica,
                    prompt_tokens=trajectory.prompt_length,
                    tokens=trajectory.length,
                    finish_reason=trajectory.finish_reason.value,
                    version_spans=trajectory.version_spans,
                    started=trajectory.started,
                    finished=trajectory.finished,
                )
            )
