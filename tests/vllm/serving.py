"""A tiny model served by vLLM, a source of new weights for it, and references."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headway.engines.rollout.vllm import VllmEngine
from headway.interfaces import FinishedGroup, GenerateRequest, OnUpdate, Paused
from headway.models.make import character_tokenizer
from headway.models.probe import PROBE_PREFILL, probe_sequences
from tests.engines.rollout.serving import Source
from tests.engines.rollout.support import VOCABULARY, make_model, make_request, reference_logprobs

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789+="
"""One token each, with two before them: all that the model knows."""
CONTEXT = 192
SLOTS = 8
TOLERANCE = 5e-5
"""Of log-probs in float32."""
WAIT_S = 120.0
"""No wait of these tests comes near it."""


def tiny(seed: int = 0, *, tied: bool = True, head_dim: int = 32) -> PreTrainedModel:
    """Two layers, by default with heads of a size that vLLM's attention on CPUs takes."""
    return make_model("qwen3", tied=tied, seed=seed, head_dim=head_dim, max_position_embeddings=CONTEXT)


class Served:
    """An engine, and the model of each version that it has served."""

    def __init__(self, folder: Path, *, tied: bool = True, head_dim: int = 32, **changes: Any) -> None:
        self.models = {0: tiny(tied=tied, head_dim=head_dim)}
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
            "decode": partial(self.tokenizer.decode, skip_special_tokens=True),
            "receive": self.source.receive,
            "manifest": self.source.manifest,
            "max_batched_tokens": 64,
            "kv_cache_gib": 0.1,
        }
        self.engine = VllmEngine(folder, **{**settings, **changes})

    @property
    def model(self) -> PreTrainedModel:
        """That is served now."""
        return self.models[self.version]

    async def stage(self) -> int:
        """Bring another model's weights; their version."""
        version = self.version + 1
        tied = bool(self.models[0].config.tie_word_embeddings)
        self.models[version] = self.source.model = tiny(seed=version, tied=tied)
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

    async def collect(self, requests: Sequence[GenerateRequest]) -> list[FinishedGroup]:
        """Their groups, in the order of the requests."""
        async with asyncio.timeout(WAIT_S):
            groups = {group.number: group async for group in self.engine.generate(requests)}
        return [groups[request.number] for request in requests]

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

    async def until_in_flight(self, numbers: list[int]) -> None:
        async def there() -> bool:
            return await self.engine.in_flight() == numbers

        await self.until(there)

    def probe_reference(self, temperature: float = 1.0) -> NDArray[np.float32]:
        ids = torch.from_numpy(probe_sequences(VOCABULARY))
        with torch.no_grad():
            logprobs = torch.log_softmax(self.model(input_ids=ids).logits.float() / temperature, -1)
        scored = ids[:, PROBE_PREFILL:, None]
        return logprobs[:, PROBE_PREFILL - 1 : -1].gather(2, scored).reshape(-1).numpy()

    def assert_logprobs(self, groups: Sequence[FinishedGroup]) -> None:
        """Every token's log-prob is that of its version's model, over the whole sequence."""
        for group in groups:
            for k, response in enumerate(group.tokens.responses):
                for version in np.unique(response.versions):
                    mine = response.versions == version
                    expected = reference_logprobs(self.models[int(version)], group, k)
                    np.testing.assert_allclose(response.logprobs[mine], expected[mine], atol=TOLERANCE, rtol=0)


def endless(number: int, **changes: Any) -> GenerateRequest:
    """As long as the context allows."""
    return make_request(number, **{"max_tokens": CONTEXT, "stop_token_ids": (), **changes})


async def drains(served: Served) -> bool:
    """It finishes what it has, and starts nothing that comes later."""
    core = served.engine._core
    assert core is not None
    return core._scheduler.mode.value == "draining"
