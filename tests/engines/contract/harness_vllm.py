"""vLLM behind its adapter, for the contract. Only used where vLLM is installed, and imported with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headway.engines.rollout.vllm.engine import VllmEngine
from headway.models.made_model import character_tokenizer
from tests.engines.contract.harness import BLOCK, CHARACTERS, CONTEXT, Feature, at_rest, features_of
from tests.engines.contract.harness_native import SEED, model_of
from tests.engines.rollout.serving import Source

WAIT_S = 280.0
"""No test comes near it."""
TICK_S = 0.002


class VllmReplica:
    def __init__(self, folder: Path, slots: int, contexts: int | None = None) -> None:
        """``contexts``: for so many whole ones there is memory."""
        model_of(0).save_pretrained(folder)
        character_tokenizer(CHARACTERS, CONTEXT).save_pretrained(folder)
        self.version = 0
        self._source = Source(model_of(0))
        self.engine = VllmEngine(
            folder,
            name="replica",
            seed=SEED,
            slots=slots,
            max_context=CONTEXT,
            dtype="float32",
            receive=self._source.receive,
            manifest=self._source.manifest,
            kv_cache_gib=0.1,
            options={"block_size": BLOCK} | ({} if contexts is None else _memory_for(contexts)),
        )

    def model(self, version: int) -> PreTrainedModel:
        return model_of(version)

    async def stage(self) -> int:
        version = self.version + 1
        self._source.model = model_of(version)
        await self.engine.stage_weights(version)
        return version

    def break_transfers(self, broken: bool) -> None:
        self._source.break_after = 2 if broken else None

    async def tick(self) -> None:
        await asyncio.sleep(TICK_S)  # what vLLM does is told by nobody

    def holds(self) -> str:
        core = self.engine._core
        assert core is not None
        left = {
            "running": len(core._running),
            "waiting": core._scheduler.waiting,
            "calls": len(core._scheduler),
            "clients": len(self.engine._inboxes),
        }
        return ", ".join(f"{count} {what}" for what, count in left.items() if count)


def _memory_for(contexts: int) -> dict[str, int]:
    """A setting of vLLM's; one block is never given away."""
    return {"num_gpu_blocks_override": 1 + contexts * CONTEXT // BLOCK}


class VllmHarness:
    """Three replicas, of `slots`, of `crowd` and with short memory, serve all tests that leave them as they found
    them: one takes half a minute to start.
    """

    name = "vLLM"
    seed = SEED
    slots = 8
    crowd = 256
    tolerance = 5e-5
    samples = 6000
    many = 10_000
    arrival_s = 0.002
    step_s = 0.01

    def __init__(self, folder: Path) -> None:
        self.features = features_of(VllmEngine.capabilities) | {Feature.TOKENS, Feature.SHORT_MEMORY, Feature.JOINING}
        self._folder = folder
        self._started = 0
        self._shared: dict[tuple[int, bool], VllmReplica] = {}
        """By slots, and whether memory is short."""

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(WAIT_S):
                await test

        asyncio.run(bounded())

    @asynccontextmanager
    async def serve(
        self, *, slots: int | None = None, fresh: bool = False, short_memory: bool = False
    ) -> AsyncIterator[VllmReplica]:
        kind = slots or self.slots, short_memory
        # Away from the others, should this test fail.
        replica = None if fresh else self._shared.pop(kind, None)
        if replica is None:
            replica = await self._start(*kind)
        try:
            await at_rest(replica)  # and counts of the test before are gone
            yield replica
        except BaseException:
            await replica.engine.close()
            raise
        if fresh:
            await replica.engine.close()
        else:
            self._shared[kind] = replica

    async def close(self) -> None:
        for replica in self._shared.values():
            await replica.engine.close()

    async def _start(self, slots: int, short_memory: bool) -> VllmReplica:
        self._started += 1
        folder = self._folder / str(self._started)
        replica = VllmReplica(folder, 3 * slots, contexts=slots) if short_memory else VllmReplica(folder, slots)
        await replica.engine.start()
        return replica
