"""ActorTrain: prepares each train batch and makes its steps; publishes a version after a fixed number of batches.

consumes        train batches: ``require_batches`` mini-batches of groups
waits for       enough groups, in the order of consumption, and for the stages that add columns to them on ranks of
                their own
is unblocked by the queue; by the lease, on shared devices; after a version, by ParamUpdate (all replicas loaded it, or
                a copy of the weights was made)
produces        one update per version; each batch, with its returns, for CriticTrain

A resumed run begins with an update: replicas have the initial model, the trainer that of the checkpoint.

The lease of devices that training and generation share (``cluster.placement: shared``):

    generate ──trainer asks, a whole batch in hand──▶ validations end ▶ halt(policy) ▶ sleep ──▶ train
        ▲                                                                                         │
        └────────────────────────── wake ▶ resume ◀── after each batch, update or not ────────────┘
                                                        update: stage ▶ load, while they sleep

A replica frees its weights if new ones will arrive before it wakes, and keeps them otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from headway.events import BatchTaken, LeaseChanged
from headway.pipeline.actor_critic import Actor
from headway.pipeline.admission.ledger import Fate
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.admission.train_batches import TrainBatch
from headway.pipeline.recovery.checkpoint_manager import CheckpointManager
from headway.pipeline.recovery.rank_restarts import RankRestarts
from headway.pipeline.remote_workers import Replica
from headway.pipeline.stage import Channel, Stage, StageSource, WaitingFor
from headway.pipeline.update.replica_pool import ReplicaPool
from headway.runtime.task_groups import concurrently


@dataclass(slots=True)
class PendingUpdate:
    """Update to ``version``, which the trainer has reached. Training waits until the update is released."""

    version: int
    released_at: float | None = None
    released: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that is set when the trainer may change its weights again."""

    def release(self) -> None:
        """Let the trainer change its weights again. Call it when every replica serves the version, or a copy exists."""
        self.released_at = now()
        self.released.set()


class TrainerLease:
    """Lease of the trainer's devices, which generation uses in between if they are shared."""

    def __init__(self, state: RunState, pool: ReplicaPool, restarts: RankRestarts, *, shared: bool) -> None:
        """Create the lease. ``shared``: False if the trainer has devices of its own: then none change hands."""
        self.restarts = restarts
        """Restarts of the trainer's ranks, which repeat interrupted calls."""
        self.turn = asyncio.Lock()
        """Lock for calls of the trainer: both ActorTrain and ParamUpdate make them."""
        self._state, self._pool, self._shared = state, pool, shared
        self._training = False
        """True from the end of `to_train` to the end of `to_generate`."""

    async def to_train(self, waiting_for: WaitingFor, *, new_weights: bool) -> None:
        """Wait until nothing else computes on the trainer's devices. Call it only with complete input in hand.

        ``new_weights``: True if every replica will load a new version before `to_generate` is called.
        """
        if self._shared:
            asked = now()
            taken = (self._take_from(replica, waiting_for, not new_weights) for replica in self._pool.replicas)
            validation_s = max(await concurrently(taken), default=0.0)
            self._state.emit(LeaseChanged(time=now(), holder="train", asked=asked, validation_s=validation_s))
        self._training = True

    async def to_generate(self, waiting_for: WaitingFor) -> None:
        """Give the devices back to generation."""
        if self._shared:
            returned = now()
            await concurrently(self._give_back(replica, waiting_for) for replica in self._pool.serving)
            self._state.emit(LeaseChanged(time=now(), holder="generate", asked=returned))
        self._training = False  # only now: replicas that came back with new ranks are given back as well

    @asynccontextmanager
    async def of_new_ranks(self) -> AsyncIterator[None]:
        """Put replicas that started with new ranks to sleep while the ranks are brought back. Afterwards wake them,
        unless `to_generate` is still to be called.
        """
        was_training = self._training
        await self.to_train(lambda _: nullcontext(), new_weights=True)
        try:
            yield
        finally:
            self._training = was_training
        if not was_training:
            await self.to_generate(lambda _: nullcontext())

    async def _take_from(self, replica: Replica, waiting_for: WaitingFor, keep_weights: bool) -> float:
        """Halt ``replica`` and take its devices. Returns the seconds spent waiting for its validation."""
        pauses = self._pool.pauses
        async with self._pool.losing():
            with waiting_for(f"{replica.name} to {pauses.policy} and give the devices back"):
                halt = await pauses.halt(replica, "lease")
                await replica.sleep(keep_weights=keep_weights)
                return halt.validation_s
        return 0.0  # reached if the replica was lost, which `losing` has handled

    async def _give_back(self, replica: Replica, waiting_for: WaitingFor) -> None:
        async with self._pool.losing():
            with waiting_for(f"{replica.name} to wake up"):
                await replica.wake()
                await self._pool.pauses.release(replica, "lease")


@dataclass(eq=False)
class ActorTrain(Stage[TrainBatch | PendingUpdate, PendingUpdate]):
    waits_for_output = "ParamUpdate"

    input: StageSource[TrainBatch]
    run_state: RunState
    to_critic: Channel[TrainBatch] | None
    """Channel to CriticTrain; None if no critic has ranks of its own."""
    actor: Actor
    lease: TrainerLease
    checkpoints: CheckpointManager
    resumed: PendingUpdate | None = field(default=None, init=False)
    """First input of a resumed run: the update to the checkpoint's version, which only the trainer has. None for
    version 0, the initial model, which every worker has."""

    async def get_input_data(self) -> TrainBatch | PendingUpdate | None:
        if (resumed := self.resumed) is not None:
            self.resumed = None
            return resumed
        started = now()
        batch = await self.input.get()
        if batch is not None and batch.groups:
            numbers, waited = [group.number for group in batch.groups], (started, now())
            taken = BatchTaken(time=now(), fetch=batch.index, version=batch.version, numbers=numbers, waited=waited)
            self.emit(taken)
        return batch

    async def process_data(self, item: TrainBatch | PendingUpdate) -> AsyncGenerator[PendingUpdate, None]:
        ends_version = isinstance(item, PendingUpdate) or item.is_last
        if not isinstance(item, PendingUpdate):
            consumed = self.run_state.consumed + len(item.groups)
            ends_version |= consumed % self.run_state.staleness.groups_per_version == 0
        # Held across the `yield`, until the update is released: `serve_again` must not send meanwhile.
        async with self.lease.turn:
            # Only with a complete batch: generation could not make the rest of it without the devices.
            take = partial(self.lease.to_train, self._waiting_within, new_weights=ends_version)
            await self.lease.restarts.surviving(take)
            if isinstance(item, PendingUpdate):
                yield item
            else:
                if item.groups:
                    await self._train(item)
                self.run_state.data_ended = item.is_last  # before `version` is read, which counts a short last version
                if self.run_state.at_boundary or item.is_last:
                    version = self.run_state.version
                    # Before the first await: nothing later belongs to this boundary.
                    self.checkpoints.reached(version)
                    yield PendingUpdate(version)
                    save = partial(self.checkpoints.save_if_due, version, self._waiting_within)
                    await self.lease.restarts.surviving(save)
            # Not in a `finally`: a failed trainer ends the run, and no engine must wake up on its devices.
            await self.lease.restarts.surviving(partial(self.lease.to_generate, self._waiting_within))

    async def _train(self, batch: TrainBatch) -> None:
        """Train on ``batch``, and settle its groups in the ledger."""
        check = self.run_state.staleness.check
        batch.lags = {one.number: check(one.number, one.oldest_version, batch.version) for one in batch.groups}
        to_critic = None if self.to_critic is None else self.to_critic.send
        trained = await self.lease.restarts.surviving(lambda: self.actor.learn(batch, self._waiting_within, to_critic))
        for group in batch.groups:
            if group.number in trained:
                self.run_state.consume(group.number, Fate.TRAINED, lag=batch.lags[group.number])
            else:
                self.run_state.consume(group.number, Fate.DROPPED, "nonfinite")

    async def send_output_data(self, update: PendingUpdate) -> None:
        await super().send_output_data(update)
        await update.released.wait()

    def close_output(self) -> None:
        super().close_output()
        if self.to_critic is not None:
            self.to_critic.close()
