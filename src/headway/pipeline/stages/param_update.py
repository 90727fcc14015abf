"""ParamUpdate: brings a new version from the trainer to every receiver, in five phases.

    gather ▶ send (trainer)  ║  recv ▶ register (replica, decoding goes on)      then, replica by replica
    wait for its validation ▶ halt(policy) ▶ load ▶ release

    consumes        updates from ActorTrain
    waits for       the transfer; a validation that still runs; in ``drain``, what is in flight
    is unblocked by replicas that received and loaded, or are lost; by Validate, whose answers are there
    produces        validations that are due

*Synchronous*: the transfer is one collective, and the trainer goes on when every receiver has loaded. *Overlapped*: the
trainer goes on after gather; the receivers of each copy (of a machine) receive and load at their own pace, and skip a
version that a newer one overtook before its transfer began. The halt comes last, so that a replica stops for the swap
alone; one without a second buffer is halted first.

A validation is due every ``test_freq`` versions. It is handed on as soon as its replica has loaded, while others still
do; one over all replicas when the last of them has.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from headway.config.schema import Config
from headway.data.interfaces.training import OverlappingTrainEngine, TrainEngine
from headway.data.interfaces.weights import GatherReport
from headway.errors import RunError
from headway.events import UpdateFinished, UpdateSuperseded
from headway.pipeline.actor_critic import Actor
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.channel import Channel
from headway.pipeline.recovery.rank_restarts import RankRestarts
from headway.pipeline.stage import Stage
from headway.pipeline.stages.actor_train import PendingUpdate
from headway.pipeline.stages.validate import Validation, Validators
from headway.pipeline.update.trainer_lease import TrainerLease
from headway.pipeline.update.version_transfer import Delivery, VersionTransfer
from headway.pipeline.update.weight_loading import LoadCost, Probe, WeightLoading
from headway.pipeline.weight_receiver import ReceiverClient, Replica
from headway.runtime.task_groups import concurrently


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """Result of publishing a version: every receiver serves it, or skipped it."""

    gather_s: float
    loads: Sequence[LoadCost]
    full_nbytes: int | None
    changed: float | None


class Schedule(ABC):
    """Schedule of an update: how a version reaches the receivers, and when training resumes."""

    @abstractmethod
    async def publish(
        self, update: PendingUpdate, receivers: Callable[[], Sequence[ReceiverClient]]
    ) -> PublishedVersion:
        """Transfer ``update``, load it on all that ``receivers`` gives, and release it when training may resume."""

    keeps_version = False
    """True where the version that was published last can be sent whatever the trainer does meanwhile."""

    @abstractmethod
    async def restored(self, version: int, late: Sequence[ReceiverClient]) -> None:
        """Note that a trainer that was started again holds ``version``, for a moment. ``late``: receivers that need it
        of this moment.
        """


class Synchronous(Schedule):
    def __init__(
        self, trainer: TrainEngine, transfer: VersionTransfer, loading: WeightLoading, restarts: RankRestarts
    ) -> None:
        self._restarts = restarts
        self._trainer = trainer
        self._transfer = transfer
        self._loading = loading

    async def publish(
        self, update: PendingUpdate, receivers: Callable[[], Sequence[ReceiverClient]]
    ) -> PublishedVersion:
        version, to = update.version, receivers()
        await self._loading.make_ready(to)
        delivered = await self._restarts.surviving(partial(self._transfer.together, self._trainer, version, to))
        loads = await self._loading.load_all(delivered.receivers, version, delivered.probe)
        update.release()
        return PublishedVersion(delivered.gather_s, _known(loads), delivered.full_nbytes, delivered.changed)

    async def restored(self, version: int, late: Sequence[ReceiverClient]) -> None:
        if late:
            delivered = await self._transfer.together(self._trainer, version, late)
            await self._loading.load_all(delivered.receivers, version, delivered.probe)


class Overlapped(Schedule):
    def __init__(
        self,
        state: RunState,
        trainer: OverlappingTrainEngine,
        transfer: VersionTransfer,
        loading: WeightLoading,
        restarts: RankRestarts,
    ) -> None:
        self._restarts = restarts
        self._state = state
        self._trainer = trainer
        self._transfer = transfer
        self._loading = loading
        self._newest: int | None = None
        self._gathered = GatherReport(0.0, 0)
        """Report of the newest version, which the trainer's copy holds."""
        self._turns: dict[str, asyncio.Lock] = {}
        """Locks by copy, so that each gets one delivery at a time, in order of versions."""

    keeps_version = True

    async def publish(
        self, update: PendingUpdate, receivers: Callable[[], Sequence[ReceiverClient]]
    ) -> PublishedVersion:
        if self._newest is not None and update.version <= self._newest:  # the copy has it, or a newer one
            gathered = replace(self._gathered, gather_s=0.0)
        else:
            self._newest = update.version  # before gather: what has not begun by now must not read the copy any more
            gather = partial(self._transfer.gather, self._trainer, update.version)
            self._gathered = gathered = await self._restarts.surviving(gather)
        update.release()
        by_copy: dict[str, list[ReceiverClient]] = {}
        for receiver in receivers():
            by_copy.setdefault(receiver.copy, []).append(receiver)
        deliveries = await concurrently(
            self._deliver(copy, of_copy, update.version, gathered.probe) for copy, of_copy in by_copy.items()
        )
        full_nbytes = max((one.full_nbytes for one, _ in deliveries if one.full_nbytes is not None), default=None)
        loads = [load for _, loaded in deliveries for load in loaded]
        return PublishedVersion(gathered.gather_s, _known(loads), full_nbytes, gathered.changed)

    async def restored(self, version: int, late: Sequence[ReceiverClient]) -> None:
        if version == self._newest:  # the copy was lost with the trainer
            self._gathered = await self._transfer.gather(self._trainer, version)

    async def _deliver(
        self, copy: str, receivers: Sequence[ReceiverClient], version: int, probe: Probe | None
    ) -> tuple[Delivery, Sequence[LoadCost | None]]:
        async with self._turns.setdefault(copy, asyncio.Lock()):
            loaded = self._state.staleness.loaded  # meanwhile; a replica that joins has loaded nothing, not version 0
            others = {one.name: one.version for one in receivers if not isinstance(one, Replica)}
            receivers = [one for one in receivers if (loaded | others).get(one.name) != version]
            if not receivers or self._are_overtaken(receivers, version):
                return Delivery(), ()
            await self._loading.make_ready(receivers)
            delivered = await self._restarts.surviving(partial(self._send, receivers, version))
            if delivered is None:
                await concurrently(self._loading.stand_down(receiver) for receiver in receivers)
                return Delivery(), ()
            return delivered, await self._loading.load_all(delivered.receivers, version, probe)

    async def _send(self, receivers: Sequence[ReceiverClient], version: int) -> Delivery | None:
        """Send ``version``. Returns None where a newer one came while ``receivers`` finished what was in flight, or
        while the trainer was started again: its copy has the newest alone.
        """
        if self._are_overtaken(receivers, version):
            return None
        return await self._transfer.apart(self._trainer, version, receivers)

    def _are_overtaken(self, receivers: Sequence[ReceiverClient], version: int) -> bool:
        if version == self._newest:
            return False
        for receiver in receivers:
            self._state.emit(UpdateSuperseded(time=now(), version=version, replica=receiver.name))
        return True


def _known(loads: Iterable[LoadCost | None]) -> list[LoadCost]:
    return [load for load in loads if load is not None]


class ParamUpdate(Stage[PendingUpdate, Validation]):
    concurrency = None

    def __init__(
        self,
        config: Config,
        state: RunState,
        input: Channel[PendingUpdate],
        output: Channel[Validation],
        validators: Validators,
        lease: TrainerLease,
        actor: Actor,
        restarts: RankRestarts,
    ) -> None:
        """Build the stage. ``restarts``: of the trainer's ranks.

        Raises `TypeError` when the trainer cannot follow ``param_update.schedule``."""
        super().__init__(state.emit, input, output)
        self._state = state
        self._pool = pool = validators.pool
        self._validators = validators
        self._lease = lease
        self._actor, trainer = actor, actor.trainer
        self._restarts = restarts
        transfer = VersionTransfer(state, pool, self._waiting_within)
        loading = WeightLoading(state, pool, self._waiting_within, self._order_validation)
        self._schedule: Schedule
        if config.param_update.schedule == "overlapped":
            if not isinstance(trainer, OverlappingTrainEngine):
                raise TypeError(f"{type(trainer).__name__} cannot send weights while it trains on")
            self._schedule = Overlapped(state, trainer, transfer, loading, restarts)
        else:
            self._schedule = Synchronous(trainer, transfer, loading, restarts)

    async def process_data(self, update: PendingUpdate) -> AsyncGenerator[Validation, None]:
        oldest = self._state.staleness.oldest_trainable(update.version)
        if oldest is not None and self._state.trains_more:  # what is queued is dropped when it would be taken
            await self._pool.abort_older_than(oldest)
        started = now()
        published = await self._schedule.publish(update, lambda: self._pool.receivers)
        released = update.released_at if update.released_at is not None else now()
        loads, stall_s = published.loads, released - started - published.gather_s
        self._emit(
            UpdateFinished(
                time=now(),
                version=update.version,
                trainer_stall_s=stall_s,
                rollout_stall_s=sum(load.stall_s for load in loads) / max(1, len(loads)),
                validation_stall_s=min(stall_s, max((load.validation_s for load in loads), default=0.0)),
                interrupted=sum(load.interrupted for load in loads),
                full_nbytes=published.full_nbytes,
                changed=published.changed,
            )
        )
        if self._validators.everywhere and loads and self._validators.is_due(update.version):
            yield self._validators.order(update.version)

    async def serve_again(self) -> None:
        """Bring the trainer's version to replicas that joined, whenever no other one serves, and to other receivers
        that were started again, when they are waited for. Runs until cancelled.

        No group is made meanwhile, so that the next version might never come. Without a copy of the weights, they are
        the trainer's of this moment: between two steps of a version they count as that version's. Log-probs under that
        version need it as it was: a trainer that has gone on is brought back to it, and redoes its steps.
        """
        state, pool = self._state, self._pool
        while True:
            await state.changed.until(lambda: pool.needs_version)
            async with self._lease.turn:
                version = state.version
                if not pool.others_need(version):
                    if pool.needs_version:
                        await self._schedule.publish(PendingUpdate(version), lambda: pool.joining)
                elif self._schedule.keeps_version or self._actor.stands_at(version):
                    await self._schedule.publish(PendingUpdate(version), lambda: pool.others)
                else:
                    await self._restarts.again(RunError(f"the ranks of logp need version {version} again"))

    async def restored(self, version: int) -> None:
        """Note that a trainer that was started again holds ``version``, as `Schedule.restored` does."""
        await self._schedule.restored(version, self._pool.others if self._pool.others_need(version) else ())

    def close_output(self) -> None:
        super().close_output()
        self._validators.order_no_more()  # Validate orders the last version's

    async def _order_validation(self, replica: Replica, version: int) -> None:
        """Order the validation of ``version`` if it is due, before that version lets further groups in."""
        if not self._validators.is_due(version):
            return
        if self._validators.everywhere:
            self._validators.keep(replica)  # the others have to load before it is ordered
        elif replica is self._pool.validator:
            self._validators.newest = version
            # Else one that another replica was lost over waits behind this halt already, and will be this version's.
            if replica.name not in self._state.validating:
                await self.send_output_data(self._validators.order(version))
