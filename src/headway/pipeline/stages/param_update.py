"""ParamUpdate: brings a new version from the trainer to every replica, in five phases.

    gather ▶ send (trainer)  ║  recv ▶ register (replica, decoding goes on)      then, replica by replica
    wait for its validation ▶ halt(policy) ▶ load ▶ release

    consumes        updates from ActorTrain
    waits for       the transfer; a validation that still runs; in ``drain``, what is in flight
    produces        validations that are due

*Synchronous*: the transfer is one collective, and the trainer goes on when every replica has loaded. *Overlapped*: the
trainer goes on after gather; each replica receives and loads at its own pace, and skips a version that a newer one
overtook before its transfer began. The halt comes last, so that a replica stops for the swap alone.

A validation is due every ``test_freq`` versions. It is handed on as soon as its replica has loaded, while others still
do.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from headway.errors import WorkerDied
from headway.events import UpdateFinished, UpdatePhase, UpdateSuperseded
from headway.interfaces import OverlappingTrainEngine, RolloutEngine, TrainEngine
from headway.pipeline.channel import Channel
from headway.pipeline.concurrently import concurrently
from headway.pipeline.fleet import Fleet
from headway.pipeline.on_update import Halts
from headway.pipeline.stage import Stage
from headway.pipeline.stages.actor_train import Update
from headway.pipeline.stages.validate import Validation
from headway.pipeline.state import RunState, now
from headway.pipeline.transfer import ReceiverDied, Transfer


@dataclass(frozen=True, slots=True)
class Load:
    """What loading a version cost one replica."""

    validation_s: float
    """Its validation was waited for."""
    stall_s: float
    """From the end of the pause to the end of resume: nothing decoded."""
    interrupted: int


Deliver = Callable[[RolloutEngine, int], Coroutine[Any, Any, Load | None]]


class Schedule(ABC):
    """How the weights of a version get to the replicas, and when the trainer may go on."""

    @abstractmethod
    async def publish(self, update: Update, load: Deliver) -> tuple[float, list[Load | None]]:
        """Transfer ``update``, ``load`` it at each replica, and set ``update.released`` when the trainer may go on.

        Returns the seconds that the trainer gathered, and what each replica's load cost: None where it has none.
        """


class Synchronous(Schedule):
    def __init__(self, trainer: TrainEngine, transfer: Transfer, fleet: Fleet) -> None:
        self._trainer = trainer
        self._transfer = transfer
        self._fleet = fleet

    async def publish(self, update: Update, load: Deliver) -> tuple[float, list[Load | None]]:
        gather_s, receivers = await self._transfer.together(self._trainer, update.version)
        loads = await concurrently(load(replica, update.version) for replica in receivers)
        update.release()
        return gather_s, loads


class Overlapped(Schedule):
    def __init__(self, state: RunState, trainer: OverlappingTrainEngine, transfer: Transfer, fleet: Fleet) -> None:
        self._state = state
        self._trainer = trainer
        self._transfer = transfer
        self._fleet = fleet
        self._newest = 0
        self._turns: dict[str, asyncio.Lock] = {}
        """One delivery at a time per replica, in order of versions."""

    async def publish(self, update: Update, load: Deliver) -> tuple[float, list[Load | None]]:
        self._newest = update.version  # before gather: what has not begun by now must not read the copy any more
        gather_s = await self._transfer.gather(self._trainer, update.version)
        update.release()
        deliveries = (self._deliver(replica, update.version, load) for replica in self._fleet.receivers)
        return gather_s, await concurrently(deliveries)

    async def _deliver(self, replica: RolloutEngine, version: int, load: Deliver) -> Load | None:
        async with self._turns.setdefault(replica.name, asyncio.Lock()):
            if version < self._newest:
                self._state.emit(UpdateSuperseded(time=now(), version=version, replica=replica.name))
                return None
            try:
                await self._transfer.apart(self._trainer, version, replica)
            except ReceiverDied as lost:
                await self._fleet.lose(replica, lost.death)
                return None
            return await load(replica, version)


class ParamUpdate(Stage[Update, Validation]):
    concurrency = None
    waits_for_input = "ActorTrain"

    def __init__(
        self,
        state: RunState,
        input: Channel[Update],
        output: Channel[Validation],
        trainer: TrainEngine,
        fleet: Fleet,
        halts: Halts,
        *,
        overlapped: bool,
        test_freq: int,
        timeout_s: float,
    ) -> None:
        """``test_freq`` counts versions between two validations; -1: none is due here."""
        super().__init__(state.emit)
        self._state = state
        self._input = input
        self._output = output
        self._fleet = fleet
        self._halts = halts
        self._test_freq = test_freq
        self._validated = 0
        """The newest version whose validation was due and ordered."""
        transfer = Transfer(state, fleet, self._waiting_within, timeout_s)
        self._schedule: Schedule
        if overlapped:
            if not isinstance(trainer, OverlappingTrainEngine):
                raise TypeError(f"{type(trainer).__name__} cannot send weights while it trains on")
            self._schedule = Overlapped(state, trainer, transfer, fleet)
        else:
            self._schedule = Synchronous(trainer, transfer, fleet)

    async def get_input_data(self) -> Update | None:
        return await self._input.get()

    async def process_data(self, update: Update) -> AsyncGenerator[Validation, None]:
        started = now()
        gather_s, loads = await self._schedule.publish(update, self._load)
        released = update.released_at if update.released_at is not None else now()
        done = [load for load in loads if load is not None]
        stall_s = released - started - gather_s
        self._emit(
            UpdateFinished(
                time=now(),
                version=update.version,
                trainer_stall_s=stall_s,
                rollout_stall_s=sum(load.stall_s for load in done) / max(1, len(done)),
                validation_stall_s=min(stall_s, max((load.validation_s for load in done), default=0.0)),
                interrupted=sum(load.interrupted for load in done),
            )
        )
        return
        yield

    async def send_output_data(self, validation: Validation) -> bool:
        return await self._output.send(validation)

    def close_output(self) -> None:
        self._output.close()

    async def _load(self, replica: RolloutEngine, version: int) -> Load | None:
        """Swap the staged ``version`` in. None when ``replica`` died."""
        try:
            return await self._swap(replica, version)
        except WorkerDied as death:
            await self._fleet.lose(replica, death)
            return None

    async def _swap(self, replica: RolloutEngine, version: int) -> Load:
        with self._waiting_within(f"{replica.name} to {self._halts.policy}"):
            halt = await self._halts.halt(replica, "load")
        stopped = now()
        with self._waiting_within(f"{replica.name} to load"):
            seconds = await replica.activate(version)
        self._emit(UpdatePhase(time=now(), version=version, phase="load", where=replica.name, seconds=seconds))
        # Marked before the new version opens admission: no wave may slip in ahead of its version's validation.
        if replica is self._fleet.validator and self._is_due(version):
            self._validated = version
            # Else one that another replica died over waits behind this halt already, and will be this version's.
            if replica.name not in self._state.validating:
                self._state.validation(replica.name, running=True)
                await self.send_output_data(Validation(version, replica))
        self._fleet.serve(replica, version)
        await self._halts.release(replica, "load")
        return Load(halt.validation_s, now() - stopped, halt.interrupted)

    def _is_due(self, version: int) -> bool:
        """Also for the first one served after a version that was due and superseded."""
        return self._test_freq > 0 and version // self._test_freq > self._validated // self._test_freq
