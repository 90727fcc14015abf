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
from headway.errors import ScoringFailed, WorkerDied
from headway.events import ValidationFinished
from headway.interfaces import FinishedGroup, GenerateRequest, Priority, RewardFn, RolloutEngine, SamplingParams
from headway.pipeline.channel import Channel
from headway.pipeline.concurrently import failing_as_one
from headway.pipeline.fleet import Fleet
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
        fleet: Fleet,
        prompts: Sequence[Prompt],
        reward: RewardFn,
        *,
        n: int,
        sampling: SamplingParams,
    ) -> None:
        super().__init__(state.emit)
        self._state = state
        self._input = input
        self._fleet = fleet
        self._prompts = prompts
        self._reward = reward
        self._n = n
        self._sampling = sampling

    async def get_input_data(self) -> Validation | None:
        return await self._input.get()

    async def process_data(self, validation: Validation) -> AsyncGenerator[None, None]:
        started, replica = now(), validation.replica
        while (answers := await self._answers_of(replica)) is None:
            replica = self._fleet.validator
            self._state.validation(replica.name, running=True)
        trajectories = [t for finished, _ in answers for t in finished.trajectories]
        scores = [score for _, score in answers]
        self._emit(
            ValidationFinished(
                time=now(),
                # Another replica may have taken over, with a version of its own: the tokens know.
                version=max((v for t in trajectories for _, v in t.version_spans), default=validation.version),
                accuracy=sum(score or 0.0 for score in scores) / max(1, len(scores)),
                problems=len(scores),
                mean_tokens=sum(t.length for t in trajectories) / max(1, len(trajectories)),
                failed=sum(score is None for score in scores),
                span=(started, now()),
            )
        )
        return
        yield

    async def _answers_of(self, replica: RolloutEngine) -> list[tuple[FinishedGroup, float | None]] | None:
        """Answers to all problems and their scores; None when ``replica`` died over it and others go on."""
        requests = [
            GenerateRequest(i, prompt, self._n, self._sampling, Priority.VALIDATION)
            for i, prompt in enumerate(self._prompts)
        ]
        answers: list[FinishedGroup] = []
        scoring: list[asyncio.Task[float | None]] = []
        with failing_as_one():
            async with asyncio.TaskGroup() as tasks:
                try:
                    with self._waiting_within(replica.name):
                        async for finished in replica.generate(requests):
                            answers.append(finished)
                            scoring.append(tasks.create_task(self._score(finished)))
                except WorkerDied as death:
                    for task in scoring:
                        task.cancel()
                    await self._fleet.lose(replica, death)
                    return None
                # Nothing decodes for the validation any more: the replica may load again while scores come in.
                self._state.validation(replica.name, running=False)
        return [(answer, task.result()) for answer, task in zip(answers, scoring, strict=True)]

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
