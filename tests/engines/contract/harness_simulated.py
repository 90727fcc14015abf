"""The simulated engine, for the contract: answers as long as they are asked to be, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from transformers import PreTrainedModel

from headway.data.interfaces.weights import ReceiveReport
from headway.errors import UpdateFailed
from headway.planner.profiles.job_profile import RolloutProfile
from headway.planner.simulation.simulated_rollout import SimulatedRollout
from headway.planner.simulation.virtual_clock import run_virtual
from tests.engines.contract.harness import CONTEXT, Feature, features_of

STEP_S = 0.125
"""A binary fraction: sums of steps have no rounding, and a token is whole when the clock says so."""
RECEIVE_S = 4 * STEP_S
WAIT_S = 1e6


class SimulatedReplica:
    def __init__(self, slots: int) -> None:
        self.version = 0
        self._broken = False
        self.engine = SimulatedRollout(
            "replica",
            profile=RolloutProfile(slots=slots, decode=[(1, STEP_S)], prefill_s=0.0, prefill_token_s=0.0),
            lengths=lambda id_: CONTEXT,
            receive=self._receive,
            load_s=2 * STEP_S,
        )

    def model(self, version: int) -> PreTrainedModel:
        raise NotImplementedError("there are no weights; tests that need some ask for Feature.TOKENS")

    async def stage(self) -> int:
        await self.engine.stage_weights(self.version + 1)
        return self.version + 1

    def break_transfers(self, broken: bool) -> None:
        self._broken = broken

    async def tick(self) -> None:
        await asyncio.sleep(STEP_S)

    def holds(self) -> str:
        replica = self.engine._replica
        left = {
            "slots": replica._sharing.active,
            "waiting": len(replica._training) + len(replica._validation) + len(replica._held) + len(replica._cut),
            "calls": len(replica._runs),
            "contexts": len(replica._prefixes._contexts) + len(replica._prefixes._kept),
            "clients": len(self.engine._outboxes),
            "futures": len(self.engine._waiting),
        }
        return ", ".join(f"{count} {what}" for what, count in left.items() if count)

    async def _receive(self, name: str, version: int) -> ReceiveReport:
        await asyncio.sleep(RECEIVE_S)
        if self._broken:
            raise UpdateFailed(f"{name} receiving version {version}: the sender is gone")
        return ReceiveReport(RECEIVE_S, 0.0, nbytes=1, checksum=version)


class SimulatedHarness:
    name = "simulated"
    seed = 0
    slots = 8
    crowd = 256
    tolerance = 0.0
    samples = 0
    many = 2_000
    arrival_s = 2 * STEP_S / crowd
    step_s = STEP_S

    def __init__(self) -> None:
        self.features = features_of(SimulatedRollout.capabilities) | {
            Feature.SEVERAL,
            Feature.TOGETHER,
            Feature.JOINING,
        }

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(WAIT_S):
                await test

        run_virtual(bounded())

    @asynccontextmanager
    async def serve(
        self, *, slots: int | None = None, fresh: bool = False, short_memory: bool = False
    ) -> AsyncIterator[SimulatedReplica]:
        if short_memory:
            raise NotImplementedError("there are no keys and values; tests that need some ask for Feature.SHORT_MEMORY")
        replica = SimulatedReplica(slots or self.slots)
        yield replica
        await replica.engine.close()
