"""The native engine, for the contract: a tiny model in this process."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

from transformers import PreTrainedModel

from headway.engines.rollout.native.engine import NativeEngine
from tests.engines.contract.harness import CONTEXT, VOCABULARY, Feature, features_of, text_of
from tests.engines.rollout.serving import Source
from tests.engines.rollout.support import make_model

SEED = 7
WAIT_S = 200.0
"""No test comes near it."""


@lru_cache
def model_of(version: int) -> PreTrainedModel:
    """Different weights for each version, tied; heads of a size that vLLM takes on CPUs, too."""
    return make_model(
        "qwen3", seed=version, head_dim=32, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, tied=True
    )


def kv_bytes_of_token() -> int:
    """Of one token's keys and values in all layers, in float32."""
    config = model_of(0).config
    return 4 * 2 * int(config.num_hidden_layers * config.num_key_value_heads * config.head_dim)


class NativeReplica:
    def __init__(self, *, slots: int, dual_buffer: bool, contexts: int | None = None) -> None:
        """``contexts``: for so many whole ones there is memory."""
        self.version = 0
        self._source = Source(model_of(0))
        self.engine = NativeEngine(
            copy.deepcopy(model_of(0)),
            name="replica",
            seed=SEED,
            slots=slots,
            max_context=CONTEXT,
            max_batched_tokens=256,
            kv_cache_bytes=contexts and contexts * CONTEXT * kv_bytes_of_token(),
            decode=text_of,
            receive=self._source.receive,
            manifest=self._source.manifest,
            dual_buffer=dual_buffer,
            consume_bucket_bytes=1024,
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
        await self.engine.abort("nobody", ())  # answered between two steps

    def holds(self) -> str:
        core = self.engine._core
        left = {
            "rows": core._batch.active,
            "waiting": core._scheduler.waiting,
            "calls": len(core._scheduler),
            "clients": len(self.engine._inboxes),
        }
        return ", ".join(f"{count} {what}" for what, count in left.items() if count)


class NativeHarness:
    """``dual_buffer=False``: weights arrive over those that are served."""

    name = "native"
    seed = SEED
    slots = 8
    crowd = 256
    tolerance = 2e-5
    samples = 3000
    many = 2_000
    arrival_s = 0.0002
    step_s = 0.0005

    def __init__(self, *, dual_buffer: bool = True) -> None:
        self._dual_buffer = dual_buffer
        in_place = {Feature.IN_PLACE} if not dual_buffer else {Feature.BESIDE}
        declared = features_of(NativeEngine.capabilities) - {Feature.BESIDE}
        self.features = declared | in_place | {Feature.TOKENS, Feature.SEVERAL, Feature.TOGETHER, Feature.SHORT_MEMORY}

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(WAIT_S):
                await test

        asyncio.run(bounded())

    @asynccontextmanager
    async def serve(
        self, *, slots: int | None = None, fresh: bool = False, short_memory: bool = False
    ) -> AsyncIterator[NativeReplica]:
        slots = slots or self.slots
        if short_memory:
            replica = NativeReplica(slots=3 * slots, dual_buffer=self._dual_buffer, contexts=slots)
        else:
            replica = NativeReplica(slots=slots, dual_buffer=self._dual_buffer)
        try:
            yield replica
        finally:
            await replica.engine.close()
