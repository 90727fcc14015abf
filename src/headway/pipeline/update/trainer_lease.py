"""Lease of the devices that training and generation share: who computes there.

    generate ──trainer asks, a whole batch in hand──▶ validations end ▶ halt(policy) ▶ sleep ──▶ train
        ▲                                                                                         │
        └────────────────────────── wake ▶ resume ◀── after each batch, update or not ────────────┘
                                                        update: stage ▶ load, while they sleep

A replica gives its copy of the weights up where new ones will come before it wakes, and keeps it otherwise.

With devices of their own (``cluster.placement: split``) nothing changes hands.
"""

from __future__ import annotations

import asyncio

from headway.events import LeaseChanged
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.stage import WaitingFor
from headway.pipeline.update.replica_pool import ReplicaPool
from headway.pipeline.weight_receiver import Replica
from headway.runtime.task_groups import concurrently


class TrainerLease:
    """Turns of the trainer's ranks, and of their devices. With devices of their own nothing changes hands."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        """Lock for calls of the trainer, which ActorTrain and ParamUpdate make."""

    async def to_train(self, waiting_for: WaitingFor, *, new_weights: bool) -> None:
        """Wait until nothing else computes on the trainer's devices. Call it only with complete input in hand.

        ``new_weights``: every replica will have loaded a new version before `to_generate` is called.
        """

    async def to_generate(self, waiting_for: WaitingFor) -> None:
        """Give the devices back to generation."""


class ColocationLease(TrainerLease):
    """Lease of devices that training shares with generation, which has them unless training asks for them."""

    def __init__(self, state: RunState, pool: ReplicaPool) -> None:
        super().__init__()
        self._state = state
        self._pool = pool
        self._pauses = pool.pauses

    async def to_train(self, waiting_for: WaitingFor, *, new_weights: bool) -> None:
        asked = now()
        keep = not new_weights
        waited = await concurrently(self._take_from(replica, waiting_for, keep) for replica in self._pool.serving)
        self._state.emit(LeaseChanged(time=now(), holder="train", asked=asked, validation_s=max(waited, default=0.0)))

    async def to_generate(self, waiting_for: WaitingFor) -> None:
        returned = now()
        await concurrently(self._give_back(replica, waiting_for) for replica in self._pool.serving)
        self._state.emit(LeaseChanged(time=now(), holder="generate", asked=returned))

    async def _take_from(self, replica: Replica, waiting_for: WaitingFor, keep_weights: bool) -> float:
        """Halt ``replica`` and take its devices. Returns the seconds spent waiting for its validation."""
        async with self._pool.losing():
            with waiting_for(f"{replica.name} to {self._pauses.policy} and give the devices back"):
                halt = await self._pauses.halt(replica, "lease")
                await replica.sleep(keep_weights=keep_weights)
                return halt.validation_s
        return 0.0

    async def _give_back(self, replica: Replica, waiting_for: WaitingFor) -> None:
        async with self._pool.losing():
            with waiting_for(f"{replica.name} to wake up"):
                await replica.wake()
                await self._pauses.release(replica, "lease")
