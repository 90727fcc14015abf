"""RefLogProb: the frozen reference policy's log-probs, where the reference has ranks of its own.

    consumes        rewarded groups: all that wait, as one batch
    waits for       the reference's ranks
    produces        the same groups, with a column of log-probs per trajectory

On the actor's own ranks the reference runs inside the fetch instead (`headway.pipeline.stages.actor_train`): two models
driven at once would interleave their collectives differently on each rank.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from headway.data.types import Group, Sample
from headway.interfaces import LogProbEngine
from headway.pipeline.channel import Channel
from headway.pipeline.message_queue import MessageQueue
from headway.pipeline.stage import Stage
from headway.pipeline.state import RunState


class RefLogProb(Stage[list[Group], Group]):
    waits_for_input = "Reward"

    def __init__(
        self, state: RunState, input: Channel[Group], output: Channel[Group] | MessageQueue, reference: LogProbEngine
    ) -> None:
        super().__init__(state.emit)
        self._input = input
        self._output = output
        self._reference = reference

    async def get_input_data(self) -> list[Group] | None:
        if (first := await self._input.get()) is None:
            return None
        return [first, *self._input.take_waiting()]

    async def process_data(self, groups: list[Group]) -> AsyncGenerator[Group, None]:
        await add_ref_logprobs(groups, self._reference)
        for group in groups:
            yield group

    async def send_output_data(self, group: Group) -> bool:
        return await self._output.send(group)

    def close_output(self) -> None:
        self._output.close()


def forward_samples(groups: Sequence[Group]) -> list[Sample]:
    """Every trajectory of the groups, for a forward pass, in order."""
    return [
        Sample(tokens=at.tokens, k=at.index, prompt_length=t.prompt_length, length=t.length)
        for group in groups
        for at, t in zip(group.responses, group.trajectories, strict=True)
    ]


async def add_ref_logprobs(groups: Sequence[Group], reference: LogProbEngine) -> None:
    """Set ``ref_logprobs`` of every group."""
    columns = iter(await reference.forward_logprobs(forward_samples(groups)))
    for group in groups:
        group.ref_logprobs = tuple(next(columns) for _ in group.trajectories)
