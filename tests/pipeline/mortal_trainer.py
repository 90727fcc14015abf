"""A trainer on the virtual clock whose ranks can die, and be started again."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from headway.data.interfaces.training import StepContext, StepReport
from headway.data.interfaces.weights import GatherReport, SendReport
from headway.data.types import Column, TrainSample
from headway.errors import StallError, WorkerDied
from headway.pipeline.recovery.liveness import ProcessLook, given_up
from headway.planner.simulation.simulated_trainer import SimulatedTransport
from headway.runtime.progress import Heartbeat
from headway.runtime.task_groups import concurrently
from tests.pipeline.fake_policies import FakeTrainer

R = TypeVar("R")
Weights = tuple[tuple[Any, ...], ...]
"""What a trainer was trained on since the initial model: of each step the samples, the columns and the context."""


class MortalTrainer(FakeTrainer):
    """What it was trained on stands for its weights."""

    def __init__(self, transport: SimulatedTransport, **arguments: Any) -> None:
        super().__init__(transport, **arguments)
        self.weights: Weights = ()
        self.sent: dict[int, Weights] = {}
        """Weights under each version's name, as they were sent last."""
        self.restarts = 0
        self.fails_to_start = 0
        """Number of starts that fail."""
        self.silent = False
        """Answers nothing, as a process that was stopped."""
        self.looks: ProcessLook | None = None
        """State of its process, by its machine's system."""
        self._files: dict[Path, Weights] = {}
        self._at_copy: Weights = ()
        self._gathered: Weights = ()
        self._death: WorkerDied | None = None
        self._ended = asyncio.Event()

    def die(self) -> None:
        self._death = self._death or WorkerDied("worker actor-0 died: its process ended")
        self._ended.set()

    async def died(self) -> NoReturn:
        await concurrently([self._died(), self._given_up()])
        raise AssertionError

    async def _given_up(self) -> NoReturn:
        async def look() -> ProcessLook | None:
            return self.looks

        raise WorkerDied(f"worker actor-0 {await given_up(self.heartbeat, look, 60.0)}")

    async def _died(self) -> NoReturn:
        await self._ended.wait()
        await asyncio.sleep(0.0625)  # a call may fail before
        raise self._death or AssertionError

    async def restart(self, seconds: float) -> None:
        self.die()
        await asyncio.sleep(seconds)
        if self.fails_to_start:
            self.fails_to_start -= 1
            raise StallError("the trainer was not up again")
        self.restarts += 1
        self._death, self._ended, self.silent, self.weights = None, asyncio.Event(), False, ()
        self._doing, self._computes, self._copy, self._sending, self._saving = None, False, None, 0, False
        if self.fetches and self.fetches[-1][2] is None:
            await FakeTrainer.end_batch(self)

    async def heartbeat(self) -> Heartbeat:
        if self.silent:
            await asyncio.Event().wait()
        return await super().heartbeat()

    async def _living(self, call: Coroutine[Any, Any, R]) -> R:
        """Return the result of ``call``, unless the trainer is dead or dies meanwhile."""
        if self._death is not None:
            call.close()
            raise self._death
        work, end = asyncio.ensure_future(call), asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait([work, end], return_when=asyncio.FIRST_COMPLETED)
            if self.silent:
                await self._ended.wait()
            if self._death is not None:
                raise self._death
            return work.result()
        finally:
            work.cancel()
            end.cancel()
            await asyncio.wait([work, end])

    async def begin_batch(self, mini_batches: Sequence[Sequence[TrainSample]]) -> None:
        await self._living(super().begin_batch(mini_batches))

    async def end_batch(self) -> None:
        await self._living(super().end_batch())

    async def forward_logprobs(self, samples: Sequence[TrainSample]) -> list[Column]:
        return await self._living(super().forward_logprobs(samples))

    async def train_step(self, samples: Sequence[TrainSample], context: StepContext) -> StepReport:
        report = await self._living(super().train_step(samples, context))
        columns = tuple((sample.episode, sample.index, tuple(sorted(sample.columns))) for sample in samples)
        self.weights += ((columns, context.version, context.progress, context.clip_scale),)
        return report

    async def reach(self, receivers: Sequence[str]) -> None:
        await self._living(super().reach(receivers))

    async def send_weights(self, version: int, receivers: Sequence[str]) -> SendReport:
        report = await self._living(super().send_weights(version, receivers))
        self.sent[version] = self.weights
        return report

    async def gather_weights(self, version: int) -> GatherReport:
        report = await self._living(super().gather_weights(version))
        self._gathered = self.weights
        return report

    async def send_gathered(self, version: int, receivers: Sequence[str]) -> SendReport:
        gathered = self._gathered
        report = await self._living(super().send_gathered(version, receivers))
        self.sent[version] = gathered
        return report

    async def copy_state(self) -> None:
        await self._living(super().copy_state())
        self._at_copy = self.weights

    async def save(self, path: Path, driver_state: Mapping[str, Any]) -> None:
        copied = self._at_copy
        await self._living(super().save(path, driver_state))
        self._files[path] = copied

    async def load(self, path: Path) -> dict[str, Any]:
        self.weights = self._files[path]
        return {}
