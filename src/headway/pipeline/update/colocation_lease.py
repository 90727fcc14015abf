"""Lease of devices that training and generation share: who computes there.

    generate ──trainer asks, a whole fetch in hand──▶ validations end ▶ halt(policy) ▶ sleep ──▶ train
        ▲                                                                                         │
        └────────────────────────── wake ▶ resume ◀── after each fetch, update or not ────────────┘
                                                        update: stage ▶ load, while they sleep

A replica gives its copy of the weights up where new ones will come before it wakes, and keeps it otherwise.

With devices of their own (``cluster.placement: split``) nobody asks and nothing changes hands.
"""

from __future__ import annotations

from typing import Protocol

from headway.events import LeaseChanged
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.stage import WaitingFor
from headway.pipeline.update.pause_controller import PauseController
from headway.pipeline.update.replica_pool import ReplicaPool
from headway.pipeline.weight_receiver import Replica, WorkerUnavailable
from headway.runtime.task_groups import concurrently


class ColocationLease(Protocol):
    async def to_train(self, waiting_for: WaitingFor, *, new_weights: bool) -> None:
        """Wait until nothing else computes on the trainer's devices. Call it only with complete input in hand.

        ``new_weights``: every replica will have loaded a new version before `to_generate` is called.
        """

    async def to_generate(self, waiting_for: WaitingFor) -> None:
        """Give the devices back to generation."""


class OwnDevices:
    """Lease where training has separate devices: nothing changes hands."""

    async def to_train(self, waiting_for: WaitingFor, *, new_weights: bool) -> None: ...

    async def to_generate(self, waiting_for: WaitingFor) -> None: ...


class SharedDevices:
    """Lease of one group of devices, which generation has unless training asks for it."""

    def __init__(self, state: RunState, fleet: ReplicaPool, halts: PauseController) -> None:
        self._state = state
        self._fleet = fleet
        self._halts = halts

    async def to_train(self, waiting_for: WaitingFor, *, new_weights: bool) -> None:
        asked = now()
        keep = not new_weights
        waited = await concurrently(self._take_from(replica, waiting_for, keep) for replica in self._fleet.serving)
        self._state.emit(LeaseChanged(time=now(), holder="train", asked=asked, validation_s=max(waited, default=0.0)))

    async def to_generate(self, waiting_for: WaitingFor) -> None:
        returned = now()
        await concurrently(self._give_back(replica, waiting_for) for replica in self._fleet.serving)
        self._state.emit(LeaseChanged(time=now(), holder="generate", asked=returned))

    async def _take_from(self, replica: Replica, waiting_for: WaitingFor, keep_weights: bool) -> float:
        """Halt ``replica`` and take its devices. Returns the seconds spent waiting for its validation."""
        try:
            with waiting_for(f"{replica.name} to {self._halts.policy} and give the devices back"):
                halt = await self._halts.halt(replica, "lease")
                await replica.sleep(keep_weights=keep_weights)
        except WorkerUnavailable as gone:
            await self._fleet.lose(gone)
            return 0.0
        return halt.validation_s

    async def _give_back(self, replica: Replica, waiting_for: WaitingFor) -> None:
        try:
            with waiting_for(f"{replica.name} to wake up"):
                await replica.wake()
                await self._halts.release(replica, "lease")
        except WorkerUnavailable as gone:
            await self._fleet.lose(gone)
