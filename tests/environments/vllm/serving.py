"""A tiny model served by vLLM, a source of new weights for it, and references."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headway.data.interfaces.rollout import GenerateRequest, OnUpdate, Paused
from headway.engines.rollout.vllm.engine import VllmEngine
from headway.models.logprobs import PROBE_PREFILL, probe_sequences
from headway.models.made_model import character_tokenizer
from tests.engines.contract import harness
from tests.engines.contract.harness import CHARACTERS, CONTEXT, VOCABULARY, Answer, in_order
from tests.engines.contract.reference import assert_logprobs
from tests.engines.rollout.serving import Source
from tests.engines.rollout.support import make_model

SLOTS = 8
TOLERANCE = 5e-5
"""Of log-probs in float32."""
WAIT_S = 120.0
"""No wait of these tests comes near it."""


def tiny(
    seed: int = 0, *, family: str = "qwen3", tied: bool = True, head_dim: int = 32, **sizes: int
) -> PreTrainedModel:
    """Two layers, by default with heads of a size that vLLM's attention on CPUs takes."""
    return make_model(family, tied=tied, seed=seed, head_dim=head_dim, max_position_embeddings=CONTEXT, **sizes)


class Served:
    """An engine, and the model of each version that it has served."""

    def __init__(self, folder: Path, *, shape: Mapping[str, Any] | None = None, **changes: Any) -> None:
        """``shape``: of the model, for `tiny`."""
        self._shape = shape or {}
        self.models = {0: tiny(**self._shape)}
        self.models[0].save_pretrained(folder)
        self.tokenizer = character_tokenizer(CHARACTERS, CONTEXT)
        self.tokenizer.save_pretrained(folder)
        self.source = Source(self.models[0])
        self.version = 0
        settings: dict[str, Any] = {
            "name": "replica-0",
            "seed": 7,
            "slots": SLOTS,
            "max_context": CONTEXT,
            "dtype": "float32",
            "receive": self.source.receive,
            "manifest": self.source.manifest,
            "max_batched_tokens": 64,
            "kv_cache_gib": 0.1,
        }
        self.engine = VllmEngine(folder, **{**settings, **changes})

    def model(self, version: int) -> PreTrainedModel:
        """Whose weights are ``version``."""
        return self.models[version]

    async def stage(self) -> int:
        """Bring another model's weights; their version."""
        version = self.version + 1
        self.models[version] = self.source.model = tiny(seed=version, **self._shape)
        await self.engine.stage_weights(version)
        return version

    async def update(self, policy: OnUpdate) -> Paused:
        """What an update does to a replica, start to end."""
        version = await self.stage()
        paused = await self.engine.pause(policy)
        await self.engine.activate(version)
        self.version = version
        np.testing.assert_allclose(await self.engine.probe(), self.probe_reference(), atol=TOLERANCE, rtol=0)
        await self.engine.resume()
        return paused

    async def submit(self, *parts: Sequence[GenerateRequest], client: str | None = None) -> asyncio.Task[list[Answer]]:
        """The answers to come, in order of their episodes."""
        task = await harness.submit(self, *parts, client=client)

        async def answers() -> list[Answer]:
            async with asyncio.timeout(WAIT_S):
                return in_order(await task)

        return asyncio.create_task(answers())

    async def collect(self, *parts: Sequence[GenerateRequest]) -> list[Answer]:
        return await (await self.submit(*parts))

    async def sampled(self, tokens: int) -> None:
        """Wait until so many more tokens were sampled."""
        async with asyncio.timeout(WAIT_S):
            while tokens > 0:
                await asyncio.sleep(0.002)
                tokens -= (await self.engine.stats()).generated_tokens

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Ask again and again: what the engine does is told by nobody."""
        async with asyncio.timeout(WAIT_S):
            while not await condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def at_rest(self) -> None:
        """Wait until nothing runs or waits."""

        async def idle() -> bool:
            stats = await self.engine.stats()
            return stats.running + stats.waiting == 0

        await self.until(idle)

    def probe_reference(self, temperature: float = 1.0) -> NDArray[np.float32]:
        ids = torch.from_numpy(probe_sequences(VOCABULARY))
        with torch.no_grad():
            logprobs = torch.log_softmax(self.models[self.version](input_ids=ids).logits.float() / temperature, -1)
        scored = ids[:, PROBE_PREFILL:, None]
        return logprobs[:, PROBE_PREFILL - 1 : -1].gather(2, scored).reshape(-1).numpy()

    def assert_logprobs(self, answers: Iterable[Answer]) -> None:
        """Every token's log-prob is that of its version's model, over the whole sequence."""
        assert_logprobs(self, answers, TOLERANCE)


async def drains(served: Served) -> bool:
    """It finishes what it has, and starts nothing that comes later."""
    core = served.engine._core
    assert core is not None
    return core._scheduler.mode.value == "draining"
