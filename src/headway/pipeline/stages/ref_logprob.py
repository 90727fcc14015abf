"""RefLogProb: log-probs of the frozen reference policy, on the reference's separate ranks.

    consumes        rewarded groups: all that wait, as one batch
    waits for       Reward; the reference's ranks
    is unblocked by Reward; by the reference's ranks, which answer for the whole batch
    produces        the same groups, with a column of log-probs per trajectory

On the actor's own ranks the reference runs inside the fetch instead (`headway.pipeline.stages.actor_train`): two models
driven at once would interleave their collectives differently on each rank.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.training import LogProbEngine
from headway.data.types import ColumnName
from headway.pipeline.admission.fetches import add_column
from headway.pipeline.admission.message_queue import MessageQueue
from headway.pipeline.admission.pipeline_state import RunState
from headway.pipeline.channel import Channel
from headway.pipeline.stage import Stage


class RefLogProb(Stage[list[Group], Group]):
    waits_for_input = "Reward"
    waits_for_output = None

    def __init__(
        self, state: RunState, input: Channel[Group], output: Channel[Group] | MessageQueue, reference: LogProbEngine
    ) -> None:
        super().__init__(state.emit, output=output)
        self._groups = input
        self._reference = reference

    async def get_input_data(self) -> list[Group] | None:
        if (first := await self._groups.get()) is None:
            return None
        return [first, *self._groups.take_waiting()]

    async def process_data(self, groups: list[Group]) -> AsyncGenerator[Group, None]:
        samples = [sample for group in groups for sample in group.samples()]
        with self._waiting_within("log-probs of the ranks of ref"):
            columns = await self._reference.forward_logprobs(samples)
        add_column(groups, ColumnName.REF_LOGPROBS, columns)
        for group in groups:
            yield group
