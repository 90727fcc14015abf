"""ParamUpdate: brings a new version from the trainer to every receiver, in five phases.

    gather ▶ send (trainer)  ║  recv ▶ register (replica, decoding goes on)      then, replica by replica
    wait for its validation ▶ halt(policy) ▶ load ▶ release

    consumes        updates from ActorTrain
    waits for       the transfer; a validation that still runs; in ``drain``, what is in flight
    is unblocked by replicas that received and loaded, or are lost; by Validate, whose answers are there
    produces        validations that are due

*Synchronous*: the transfer is one collective, and the trainer goes on when every receiver has loaded. *Overlapped*: the
trainer goes on after gather; the receivers of each copy (of one machine, say) receive and load at their own pace, and
skip a version if a newer one came before its transfer began. A replica is halted last, so that it stops only for the
swap; a replica without a second buffer is halted first.

A validation is due every ``test_freq`` versions. A validation on one replica is sent as soon as this has loaded, one on
all replicas when the last of them has.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

from headway.config.schema import Config
from headway.data.interfaces.weights import GatherReport
from headway.errors import RunError
from headway.events import UpdateFinished, UpdateSuperseded
from headway.pipeline.actor_critic import Actor
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.recovery.rank_restarts import RankRestarts
from headway.pipeline.remote_workers import ReceiverClient, Replica, by_copy
from headway.pipeline.stage import Stage
from headway.pipeline.stages.actor_train import PendingUpdate, TrainerLease
from headway.pipeline.stages.validate import Validation, Validators
from headway.pipeline.update.pause_controller import ReplicaPause
from headway.pipeline.update.version_transfer import Delivery, VersionTransfer
from headway.pipeline.update.weight_loading import Probe, WeightLoading
from headway.runtime.task_groups import concurrently

Published = tuple[Delivery, Sequence[ReplicaPause]]
"""Result of publishing a version, which every receiver serves or skipped: the delivery and the replicas' pauses."""


@dataclass
class Schedule(ABC):
    """Schedule of an update: defines how a version reaches the receivers, and when training resumes."""

    state: RunState
    transfer: VersionTransfer
    loading: WeightLoading
    restarts: RankRestarts

    keeps_version: ClassVar[bool] = False
    """True if the last published version can be sent while the trainer goes on."""

    @abstractmethod
    async def publish(self, update: PendingUpdate, receivers: Callable[[], Sequence[ReceiverClient]]) -> Published:
        """Transfer ``update``, load it on all receivers that ``receivers()`` returns, and release it when training may
        resume.
        """

    @abstractmethod
    async def restored(self, version: int, late: Sequence[ReceiverClient]) -> None:
        """Send ``version`` to the receivers ``late``, or gather it into the copy again: a restarted trainer holds it
        only during this call.
        """

    def lacking(self, receivers: Sequence[ReceiverClient], version: int) -> list[ReceiverClient]:
        """Return the ``receivers`` that have not loaded ``version``. A joining replica has loaded none, not even 0."""
        loaded = self.state.staleness.loaded
        # Not for replicas: a joining replica has loaded nothing. Its client's version 0 made the run stall.
        others = {one.name: one.version for one in receivers if not isinstance(one, Replica)}
        return [one for one in receivers if (loaded | others).get(one.name) != version]


class Synchronous(Schedule):
    async def publish(self, update: PendingUpdate, receivers: Callable[[], Sequence[ReceiverClient]]) -> Published:
        # Before `lacking`: a trainer that comes back sends the version to some receivers (`restored`).
        await self.restarts.until_there()
        to = self.lacking(receivers(), update.version)
        await self.loading.make_ready(to)
        delivered = await self.restarts.surviving(partial(self.transfer.together, update.version, to))
        pauses = await self.loading.load_all(delivered.receivers, update.version, delivered.probe)
        update.release()
        return delivered, pauses

    async def restored(self, version: int, late: Sequence[ReceiverClient]) -> None:
        if late:
            delivered = await self.transfer.together(version, late)
            await self.loading.load_all(delivered.receivers, version, delivered.probe)


@dataclass
class Overlapped(Schedule):
    keeps_version = True

    _newest: int | None = field(default=None, init=False)
    _gathered: GatherReport = field(default=GatherReport(0.0, 0), init=False)
    """Report of gathering the newest version, which the trainer's copy holds."""
    _turns: dict[str, asyncio.Lock] = field(default_factory=dict, init=False)
    """Copy -> its lock, so that each copy gets one delivery at a time, in order of versions."""

    async def publish(self, update: PendingUpdate, receivers: Callable[[], Sequence[ReceiverClient]]) -> Published:
        if self._newest is not None and update.version <= self._newest:  # the copy has it, or a newer one
            gathered = replace(self._gathered, gather_s=0.0)
        else:
            self._newest = update.version  # before gather: an older version that is not being sent yet is skipped
            gather = partial(self.transfer.gather, update.version)
            self._gathered = gathered = await self.restarts.surviving(gather)
        update.release()
        deliveries = await concurrently(
            self._deliver(copy, of_copy, update.version, gathered.probe)
            for copy, of_copy in by_copy(receivers()).items()
        )
        full_nbytes = max((one.full_nbytes for one, _ in deliveries if one.full_nbytes is not None), default=None)
        delivered = Delivery(gather_s=gathered.gather_s, full_nbytes=full_nbytes, changed=gathered.changed)
        return delivered, [pause for _, pauses in deliveries for pause in pauses]

    async def restored(self, version: int, late: Sequence[ReceiverClient]) -> None:
        if version == self._newest:  # the copy was lost with the trainer
            self._gathered = await self.transfer.gather(version)

    async def _deliver(
        self, copy: str, receivers: Sequence[ReceiverClient], version: int, probe: Probe | None
    ) -> Published:
        async with self._turns.setdefault(copy, asyncio.Lock()):
            receivers = self.lacking(receivers, version)  # some may have loaded it meanwhile
            if not receivers or self._are_overtaken(receivers, version):
                return Delivery(), ()
            await self.loading.make_ready(receivers)
            delivered = await self.restarts.surviving(partial(self._send, receivers, version))
            if delivered is None:
                await concurrently(self.loading.stand_down(receiver) for receiver in receivers)
                return Delivery(), ()
            return delivered, await self.loading.load_all(delivered.receivers, version, probe)

    async def _send(self, receivers: Sequence[ReceiverClient], version: int) -> Delivery | None:
        """Send ``version``. Returns None if a newer one came while ``receivers`` finished calls in flight, or while the
        trainer was restarted: its copy holds only the newest version.
        """
        if self._are_overtaken(receivers, version):
            return None
        return await self.transfer.apart(version, receivers)

    def _are_overtaken(self, receivers: Sequence[ReceiverClient], version: int) -> bool:
        if version == self._newest:
            return False
        for receiver in receivers:
            self.state.emit(UpdateSuperseded(time=now(), version=version, replica=receiver.name))
        return True


@dataclass(eq=False)
class ParamUpdate(Stage[PendingUpdate, Validation]):
    concurrency = None

    config: Config
    run_state: RunState
    validators: Validators
    lease: TrainerLease
    actor: Actor

    def __post_init__(self) -> None:
        self._pool = pool = self.validators.pool
        transfer = VersionTransfer(self.run_state, pool, self.actor.trainer, self._waiting_within)
        loading = WeightLoading(self.run_state, pool, self._waiting_within, self._order_validation)
        schedule = Overlapped if self.config.param_update.schedule == "overlapped" else Synchronous
        self._schedule = schedule(self.run_state, transfer, loading, self.lease.restarts)

    async def process_data(self, update: PendingUpdate) -> AsyncGenerator[Validation, None]:
        oldest = self.run_state.staleness.oldest_trainable(update.version)
        if oldest is not None and self.run_state.trains_more:  # queued groups are dropped when they would be taken
            await self._pool.abort_older_than(oldest)
        started = now()
        delivered, pauses = await self._schedule.publish(update, lambda: self._pool.receivers)
        assert update.released_at is not None, "a schedule releases what it has published"
        stall_s = update.released_at - started - delivered.gather_s
        self.emit(
            UpdateFinished(
                time=now(),
                version=update.version,
                trainer_stall_s=stall_s,
                rollout_stall_s=sum(pause.stall_s for pause in pauses) / max(1, len(pauses)),
                validation_stall_s=min(stall_s, max((pause.validation_s for pause in pauses), default=0.0)),
                interrupted=sum(pause.interrupted for pause in pauses),
                full_nbytes=delivered.full_nbytes,
                changed=delivered.changed,
            )
        )
        served = update.version in self.run_state.staleness.loaded.values()  # otherwise a newer version overtook it
        if self.validators.everywhere and served and self.validators.is_due(update.version):
            yield self.validators.order(update.version)

    async def serve_again(self) -> None:
        """Send the trainer's version to joined replicas whenever no replica serves, and to restarted receivers that
        generate nothing when they are awaited. Runs until cancelled.

        Otherwise no group would be made, and the next version might never come. If no copy of the weights is kept,
        replicas get the trainer's current weights, which count as the version's even between two of its steps.
        Log-probs need the version as it was: a trainer that has gone on is restarted at it, and redoes its steps.
        """
        state, pool = self.run_state, self._pool
        while True:
            await state.changed.until(lambda: pool.needs_version)
            # ActorTrain makes no step meanwhile: the weights sent must all be of one moment.
            async with self.lease.turn:
                version = state.version
                if not pool.others_need(version):
                    if pool.needs_version:  # checked again: an update may have come before this turn
                        await self._schedule.publish(PendingUpdate(version), lambda: pool.joining)
                elif self._schedule.keeps_version or self.actor.stands_at(version):
                    await self._schedule.publish(PendingUpdate(version), lambda: pool.others)
                else:
                    await self.lease.restarts.again(RunError(f"the ranks of logp need version {version} again"))

    async def restored(self, version: int) -> None:
        """Send ``version``, which a restarted trainer holds, to the receivers that need it. See `Schedule.restored`."""
        late = self._pool.others if self._pool.others_need(version) else []
        # Replicas in the ranks' processes restarted with them, and have the initial model.
        if self._pool.lose_ranks is not None and version == self.run_state.version:
            late = [*late, *self._pool.joining]
        await self._schedule.restored(version, late)

    def close_output(self) -> None:
        super().close_output()
        self.validators.order_no_more()  # Validate orders the last version's validation

    async def _order_validation(self, replica: Replica, version: int) -> None:
        """Order the validation of ``version`` if it is due, before further groups are admitted under that version."""
        if not self.validators.is_due(version):
            # A validation whose replicas were lost begins again or goes on here: no wave may start beside it.
            if self.validators.under_way and (self.validators.everywhere or replica is self._pool.validator):
                self.validators.keep(replica)
            return
        if self.validators.everywhere:
            self.validators.keep(replica)  # ordered once the other replicas have loaded
        elif replica is self._pool.validator:
            self.validators.newest = version
            # Otherwise a validation interrupted by a lost replica already waits for this one, and will validate this
            # version.
            if replica.name not in self.run_state.validating:
                await self.send_output_data(self.validators.order(version))
