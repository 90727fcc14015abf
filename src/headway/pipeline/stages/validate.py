"""Validate: held-out accuracy of a version, beside training.

    consumes        validations that are due
    waits for       its replica, which loads nothing newer until it is done
    produces        nothing but the event

Outside the inequality: validation generates with first priority and trains nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from headway.data.types import Prompt
from headway.errors import ScoringFailed
from headway.events import ValidationFinished
from headway.interfaces import FinishedGroup, GenerateRequest, Priority, RewardFn, RolloutEngine, SamplingParams
from headway.pipeline.channel import Channel
from headway.pipeline.concurrently import failing_as_one
from headway.pipeline.stage import Stage
from headway.pipeline.state import RunState, now


@dataclass(frozen=True, slots=True)
class Validation:
    version: int
    replica: RolloutEngine


class Validate(Stage[Validation, None]):
    waits_for_input = "ParamUpdate"

    def __init__(
        self,
        state: RunState,
        input: Channel[Validation],
        prompts: Sequence[Prompt],
        reward: RewardFn,
        *,
        n: int,
        sampling: SamplingParams,
    ) -> None:
        super().__init__(state.emit)
        self._state = state
        self._input = input
        self._prompts = prompts
        self._reward = reward
        self._n = n
        self._sampling = sampling

    async def get_input_data(self) -> Validation | None:
        return await self._input.get()

    async def process_data(self, validation: Validation) -> AsyncGenerator[None, None]:
        started = now()
        requests = [
            GenerateRequest(i, prompt, self._n, self._sampling, Priority.VALIDATION)
            for i, prompt in enumerate(self._prompts)
        ]
        scoring: list[asyncio.Task[float | None]] = []
        tokens = 0
        with failing_as_one():
            async with asyncio.TaskGroup() as tasks:
                with self._waiting_within(validation.replica.name):
                    async for finished in validation.replica.generate(requests):
                        tokens += sum(t.length for t in finished.trajectories)
                        scoring.append(tasks.create_task(self._score(finished)))
                # Nothing decodes for the validation any more: the replica may load again while scores come in.
                self._state.validation(validation.replica.name, running=False)
        scores = [task.result() for task in scoring]
        self._emit(
            ValidationFinished(
                time=now(),
                version=validation.version,
                accuracy=sum(score or 0.0 for score in scores) / max(1, len(scores)),
                problems=len(scores),
                mean_tokens=tokens / max(1, len(scores) * self._n),
                failed=sum(score is None for score in scores),
                span=(started, now()),
            )
        )
        return
        yield

    async def send_output_data(self, output: None) -> bool:
        return True

    async def _score(self, finished: FinishedGroup) -> float | None:
        """Mean score of a problem's answers; None when it could not be scored, which counts as 0."""
        prompt = self._prompts[finished.number]
        try:
            scores = await self._reward.score(prompt, [t.text for t in finished.trajectories])
        except ScoringFailed:
            return None
        return float(scores.mean())
