"""Ranks on the virtual clock that can die, and be started again: of a trainer, a reference, log-probs or a critic."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from headway.data.interfaces.training import StepContext, StepReport
from headway.data.interfaces.weights import GatherReport, SendReport
from headway.data.types import Column, Outcomes, TrainSample
from headway.errors import RunError, StallError, WorkerDied
from headway.pipeline.recovery.liveness import ProcessLook, given_up
from headway.pipeline.recovery.rank_restarts import RestartableRanks
from headway.planner.simulation.simulated_trainer import SimulatedTransport
from headway.runtime.progress import Heartbeat
from headway.runtime.task_groups import concurrently
from tests.pipeline.fake_policies import FakeCritic, FakeLogProb, FakeReceiver, FakeReference, FakeTrainer
from tests.pipeline.fakes import FakeRollout

R = TypeVar("R")
Weights = tuple[tuple[Any, ...], ...]
"""What a trainer was trained on since the initial model: of each step the samples, the columns and the context."""


class Mortal:
    """Ranks of one role."""

    def __init__(self, name: str, reset: Callable[[], Awaitable[None]]) -> None:
        """``reset``: makes of them what they were at the start."""
        self.name = name
        self._reset = reset
        self.restarts = 0
        self.fails_to_start = 0
        """Number of starts that fail."""
        self.silent = False
        """Answers nothing, as a process that was stopped."""
        self.looks: ProcessLook | None = None
        """State of its process, by its machine's system."""
        self.replicas: list[FakeRollout] = []
        """Those in its processes, which die with it."""
        self.start_replicas: Callable[[int], list[FakeRollout]] | None = None
        """Makes others at its restart of that number; None where replicas have processes of their own."""
        self._death: WorkerDied | None = None
        self._ended = asyncio.Event()

    def restartable(self, seconds: float) -> RestartableRanks:
        replicas = None if self.start_replicas is None else lambda: self.replicas
        return RestartableRanks(lambda: [self], self.died, lambda: self.restart(seconds), replicas)

    def die(self) -> None:
        self._death = self._death or WorkerDied(f"worker {self.name} died: its process ended")
        self._ended.set()
        for replica in self.replicas:
            replica.die(self._death)

    async def died(self) -> NoReturn:
        await concurrently([self._died(), self._given_up()])
        raise AssertionError

    async def _given_up(self) -> NoReturn:
        async def look() -> ProcessLook | None:
            return self.looks

        raise WorkerDied(f"worker {self.name} {await given_up(self.heartbeat, look, 60.0)}")

    async def _died(self) -> NoReturn:
        await self._ended.wait()
        await asyncio.sleep(0.0625)  # a call may fail before
        raise self._death or AssertionError

    async def restart(self, seconds: float) -> None:
        self.die()
        await asyncio.sleep(seconds)
        if self.fails_to_start:
            self.fails_to_start -= 1
            raise StallError(f"{self.name} was not up again")
        self.restarts += 1
        self._death, self._ended, self.silent = None, asyncio.Event(), False
        await self._reset()
        if self.start_replicas is not None:
            self.replicas = self.start_replicas(self.restarts)

    async def heartbeat(self) -> Heartbeat:
        if self.silent:
            await asyncio.Event().wait()
        return Heartbeat("")

    async def living(self, call: Coroutine[Any, Any, R]) -> R:
        """Return the result of ``call``, unless they are dead or die meanwhile."""
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


class MortalReference(FakeReference):
    def __init__(self, seconds: float = 0.5) -> None:
        super().__init__(seconds)
        self.life = Mortal("ref-0", _nothing)

    async def forward_logprobs(self, samples: Sequence[TrainSample]) -> list[Column]:
        return await self.life.living(super().forward_logprobs(samples))


class MortalLogProb(FakeLogProb):
    """Its receivers die with it, and have version 0 when they were started again."""

    def __init__(self, receivers: Sequence[FakeReceiver], seconds: float = 0.5) -> None:
        super().__init__(receivers, seconds)
        self.life = Mortal("logp-0", self._fresh)
        for receiver in receivers:
            receiver.living = self.life.living

    async def proximal_logprobs(self, samples: Sequence[TrainSample], version: int) -> list[Column]:
        return await self.life.living(super().proximal_logprobs(samples, version))

    async def _fresh(self) -> None:
        for receiver in self._receivers:
            receiver.version = 0


class MortalCritic(FakeCritic):
    """The batches that it was trained on stand for its weights."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.weights: tuple[Any, ...] = ()
        self.life = Mortal("critic-0", self.fresh)
        self._files: dict[str, tuple[Any, ...]] = {}
        self._at_copy: tuple[Any, ...] = ()
        self._has_batch = False

    def share(self, trainer: MortalTrainer) -> None:
        """Live on the ranks of ``trainer``."""
        self.life, trainer.critic = trainer.life, self

    async def fresh(self) -> None:
        self.weights, self._doing, self._has_batch = (), None, False

    async def begin_batch(self, mini_batches: Sequence[Sequence[TrainSample]]) -> None:
        await self.life.living(super().begin_batch(mini_batches))
        self._has_batch = True

    async def end_batch(self) -> None:
        await self.life.living(super().end_batch())
        self._has_batch = False

    async def forward_values(self, samples: Sequence[TrainSample]) -> list[Column]:
        columns = await self.life.living(super().forward_values(samples))
        return [Column((column.handle, len(self.weights)), column.index) for column in columns]

    async def advantages(self, samples: Sequence[TrainSample], outcomes: Outcomes) -> dict[str, list[Column]]:
        return {
            "advantages": [Column(("advantage", *values(sample)), sample.index) for sample in samples],
            "returns": [Column(("return", *values(sample)), sample.index) for sample in samples],
        }

    async def train_step(self, samples: Sequence[TrainSample]) -> StepReport:
        assert self._has_batch or self.shares_ranks, "a step is of a batch that has begun"
        trained = tuple((sample.episode, sample.index, *values(sample)) for sample in samples)
        assert [("return", *values(sample)) for sample in samples] == [s.columns["returns"].handle for s in samples]
        report = await self.life.living(self._step())
        self.weights += (trained,)
        return report

    async def _step(self) -> StepReport:
        await self.ranks("a step of the critic", self._step_s)
        return StepReport(skipped=False, metrics={"critic/loss": 0.0})

    @property
    def shares_ranks(self) -> bool:
        return self.ranks != self._compute

    async def copy_state(self) -> None:
        await self.life.living(super().copy_state())
        self._at_copy = self.weights

    async def save(self, path: Path) -> None:
        copied = self._at_copy
        await self.life.living(super().save(path))
        self._files[path.name] = copied

    async def load(self, path: Path) -> None:
        self.weights = self._files[path.name]


def values(sample: TrainSample) -> tuple[Any, ...]:
    """How often the critic had been trained when it gave the sample's values."""
    return (sample.columns["values"].handle[1],)


async def _nothing() -> None: ...


class MortalTrainer(FakeTrainer):
    """What it was trained on stands for its weights."""

    def __init__(self, transport: SimulatedTransport, **arguments: Any) -> None:
        super().__init__(transport, **arguments)
        self.weights: Weights = ()
        self.sent: dict[int, Weights] = {}
        """Weights under each version's name, as they were sent last."""
        self.life = Mortal(self.name, self._fresh)
        self.life.heartbeat = self.heartbeat  # type: ignore[method-assign]
        self._living = self.life.living
        self.critic: MortalCritic | None = None
        """Critic that shares the ranks."""
        self.snapshots = Snapshots(self)
        self._files: dict[Path, Weights] = {}
        self._at_copy: Weights = ()
        self._gathered: Weights = ()

    async def _fresh(self) -> None:
        self.weights = ()
        if self.critic is not None:
            await self.critic.fresh()
        self._doing, self._computes, self._copy, self._sending, self._saving = None, False, None, 0, False
        if self.fetches and self.fetches[-1][2] is None:
            await FakeTrainer.end_batch(self)

    async def heartbeat(self) -> Heartbeat:
        if self.life.silent:
            await asyncio.Event().wait()
        return await super().heartbeat()

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


class Snapshots:
    """Memory of a process that outlives the trainer; sending takes ``send_s``."""

    def __init__(self, trainer: MortalTrainer) -> None:
        self.send_s = 0.25
        self.outlives_machines = True
        self.fails: list[str] = []
        """Of the next snapshots: why they are not taken; nothing where they are."""
        self.kept: dict[int, tuple[Weights, Any]] = {}
        self.loaded: list[int] = []
        self._trainer = trainer

    async def keep(self, version: int) -> bool:
        copied, critic = self._trainer._at_copy, self._trainer.critic
        assert not self._trainer._saving
        self._trainer._saving = True
        try:
            await self._trainer._living(asyncio.sleep(self.send_s))
        finally:
            self._trainer._saving = False
        if why := self.fails.pop(0) if self.fails else "":
            raise RunError(why)
        self.kept = {version: (copied, None if critic is None else critic._at_copy)}
        return self.outlives_machines

    async def load(self, version: int) -> None:
        if version not in self.kept:
            raise RunError("episode-worker-0 is gone")
        await self._trainer._living(asyncio.sleep(self.send_s))
        self._trainer.weights, of_critic = self.kept[version]
        if self._trainer.critic is not None:
            self._trainer.critic.weights = of_critic
        self.loaded.append(version)
