"""PromptLoader: admits prompts into the pipeline, as many as staleness allows.

consumes        the prompt source
waits for       room under the inequality (and, in batch admission, for the last wave to be rewarded)
is unblocked by a new version served, a discarded group, a rewarded group, a finished validation
produces        waves: lists of requests that reach an engine in one call
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from headway.config.schema import Admission
from headway.data.types import Prompt
from headway.interfaces import GenerateRequest, PromptSource, SamplingParams
from headway.pipeline.channel import Channel
from headway.pipeline.stage import Stage
from headway.pipeline.staleness import wave_size
from headway.pipeline.state import RunState

Wave = list[GenerateRequest]


class PromptLoader(Stage[list[Prompt], Wave]):
    waits_for_input = "room under the staleness limit"

    def __init__(
        self,
        state: RunState,
        source: PromptSource,
        output: Channel[Wave],
        *,
        admission: Admission,
        n: int,
        sampling: SamplingParams,
    ) -> None:
        super().__init__(state.emit)
        self._state = state
        self._source = source
        self._output = output
        self._admission = admission
        self._n = n
        self._sampling = sampling
        self._ended = False

    async def get_input_data(self) -> list[Prompt] | None:
        await self._state.changed.until(lambda: self._ended or self._room() > 0)
        if self._ended:
            return None
        prompts: list[Prompt] = []
        while len(prompts) < self._room() and (prompt := self._source.next()) is not None:
            prompts.append(prompt)
        return prompts or None

    async def process_data(self, prompts: list[Prompt]) -> AsyncGenerator[Wave, None]:
        yield [
            GenerateRequest(number=self._state.admit(prompt), prompt=prompt, n=self._n, sampling=self._sampling)
            for prompt in prompts
        ]

    async def send_output_data(self, wave: Wave) -> bool:
        return await self._output.send(wave)

    def close_output(self) -> None:
        self._output.close()

    def end(self) -> None:
        """Admit nothing further."""
        self._ended = True
        self._state.changed.changed()

    def _room(self) -> int:
        state = self._state
        return wave_size(
            self._admission,
            room=state.staleness.room,
            unrewarded=state.unrewarded,
            # Strictly on-policy, a wave also waits for its version's validation: what shares a batch with it must be
            # the same in every run. With η > 0 generation goes on beside validation.
            engine_is_taken=state.staleness.eta == 0 and bool(state.validating),
            groups_per_version=state.staleness.groups_per_version,
        )
