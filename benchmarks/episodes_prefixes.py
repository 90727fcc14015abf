"""Episodes of ten turns on the native engine: what is prefilled, with what turns leave in its cache and without."""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.rollout_workload import SIZES
from headway.data.interfaces.rollout import FinishedCall, GenerateRequest, SamplingParams
from headway.data.types import TrajectoryId

TURNS, EPISODES = 10, 8
PROMPT, SAMPLED, ADDED = 48, 40, 40
"""Tokens of a prompt, of a turn, and of what the environment says to it."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What one run of the episodes took."""

    tokens: int
    """Tokens that were prefilled."""
    fewest: int
    """Tokens that are new: prompts, and what environments said."""
    contexts: int
    """Tokens of all contexts."""
    turns: int
    wall_s: float


def measure(size: str = "1m", *, cached: bool) -> Prefilled:
    """Run the episodes on a model of ``size``. Without ``cached`` no turn says that its episode goes on."""
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        SIZES[size].make(Path(folder))
        return asyncio.run(_run(Path(folder), SIZES[size].vocabulary, cached=cached))


async def _run(folder: Path, vocabulary: int, *, cached: bool) -> Prefilled:
    import torch

    from headway.engines.rollout.native import NativeEngine
    from headway.models.pretrained import load_model

    torch.set_num_threads(1)
    engine = NativeEngine(
        load_model(folder, dtype=torch.float32),
        name="bench",
        seed=0,
        slots=EPISODES,
        max_context=PROMPT + TURNS * (SAMPLED + ADDED),
        max_batched_tokens=2048,
        kv_cache_bytes=1 << 30,
        decode=lambda ids: "",
    )
    generator = np.random.default_rng(0)

    def said(tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return generator.integers(1, vocabulary, tokens, dtype=np.int32)

    contexts = {k: said(PROMPT) for k in range(EPISODES)}
    read = 0
    try:
        batches = aiter(engine.finished("bench"))
        await engine.stats()
        start = time.perf_counter()
        for turn in range(TURNS):
            read += sum(map(len, contexts.values()))
            calls = [
                GenerateRequest(
                    turn * EPISODES + k, TrajectoryId(0, k, 0, 0), ids, SamplingParams(SAMPLED), turn, goes_on=cached
                )
                for k, ids in contexts.items()
            ]
            await engine.submit("bench", calls)
            done: list[FinishedCall] = []
            while len(done) < EPISODES:
                done += await anext(batches)
            for call in done:
                assert call.tokens is not None
                k = call.number % EPISODES
                contexts[k] = np.concatenate([contexts[k], call.tokens.ids, said(ADDED)])
        wall_s = time.perf_counter() - start
        stats = await engine.stats()
    finally:
        await engine.close()
    new = EPISODES * (PROMPT + (TURNS - 1) * ADDED)
    return Prefilled(stats.prefilled_tokens, new, read, TURNS * EPISODES, wall_s)
