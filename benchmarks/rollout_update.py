"""For how long an update in mid-flight holds 64 requests: ``python -m benchmarks.rollout --update``.

    64 requests decode ─▶ stage ─▶ pause(interrupt) ─▶ activate ─▶ resume ─▶ all contexts prefilled again

Weights are staged beside decoding, as a back buffer allows. The stall begins with the pause and ends when 64 tokens
were sampled under the new version: natively with the step that gives every request its next one; vLLM, which prefills
in several steps, may come to that number before the last request goes on. Both are behind the same protocol, each in a
process of its own (``python -m benchmarks.rollout_update ENGINE FOLDER THREADS``).
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.rollout_engines import BATCHED_TOKENS, IN_PROCESS, PROMPT, Request, group_requests, native_engine
from benchmarks.runner import Failed, Worker, say, serve
from benchmarks.shapes import SIZES
from benchmarks.table import medians, report

REQUESTS = 64
TOKENS = 256
WRITTEN = 32
"""Number of tokens that each answer has, at least, when the update comes."""
TIMEOUT_S = 600.0
Update = dict[str, float]
"""Seconds of one update, by phase."""


def measure_updates(
    models: Sequence[str], threads: Sequence[int], rounds: int, worker: Callable[..., Worker], engines: Iterable[str]
) -> None:
    """Measure each model, number of threads and engine, and report."""
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as scratch:
        for name in models:
            SIZES[name].make(folder := Path(scratch) / name)
            for count, engine in product(threads, (one for one in engines if one in ("native", "vllm"))):
                say(f"{name}, threads {count}, {engine}: {rounds} updates")
                one = worker(engine, count, "benchmarks.rollout_update", str(folder), str(count))
                try:
                    rows.append({"model": name, "threads": count, "engine": engine, **row(one.ask(rounds, TIMEOUT_S))})
                except Failed as error:
                    failures.append(f"{name}, threads {count}, {engine}: {error}")
                finally:
                    one.stop()
    title = f"Updates with {REQUESTS} requests in mid-flight, on_update interrupt; medians of {rounds}"
    report("rollout-update", {title: rows}, ["The prefill of all contexts is in resume.", *failures])


def row(updates: Sequence[Update]) -> dict[str, float]:
    """Return medians in milliseconds. Staging beside decoding is no part of the stall."""
    stalls = [{**update, "stall": sum(update.values()) - update["stage"]} for update in updates]
    return {f"{name} ms": 1e3 * seconds for name, seconds in medians(stalls).items()}


async def updates(kind: str, path: Path, rounds: int) -> list[Update]:
    """Measure updates in an engine's process."""
    import torch

    from benchmarks.gpu_checks.models import manifest_of, receive_from
    from headway.models.pretrained import load_model

    source = load_model(path, dtype=torch.float32)
    settings = {
        "slots": REQUESTS,
        "max_context": PROMPT + TOKENS,
        "receive": receive_from(dict(source.named_parameters())),
        "manifest": manifest_of(source),
    }
    engine: Any
    if kind == "vllm":
        from headway.engines.rollout.vllm import VllmEngine

        common = {"name": "bench", "seed": 0, "max_batched_tokens": BATCHED_TOKENS}
        engine = VllmEngine(path, dtype="float32", options={"skip_tokenizer_init": True}, **common, **settings)
        await engine.start()
    else:
        engine = native_engine(load_model(path, dtype=torch.float32), **settings)
    try:  # of the first, which touches memory for the first time, nothing counts
        return [await update(engine, version) for version in range(1, rounds + 2)][1:]
    finally:
        await engine.close()


async def update(engine: Any, version: int) -> Update:
    """Update ``engine`` while `REQUESTS` decode on it."""
    from headway.data.interfaces.rollout import OnUpdate

    took: Update = {}

    async def phase(name: str, doing: Awaitable[Any]) -> Any:
        start = time.perf_counter()
        result = await doing
        took[name] = time.perf_counter() - start
        return result

    async def go_on() -> None:
        await engine.resume()
        await sampled(engine, REQUESTS)

    flight = asyncio.create_task(generate(engine))
    try:
        await sampled(engine, WRITTEN * REQUESTS)
        await phase("stage", engine.stage_weights(version))
        paused = await phase("pause", engine.pause(OnUpdate.INTERRUPT))
        await phase("activate", engine.activate(version))
        await engine.stats()  # forget what came before
        await phase("resume", go_on())
    finally:
        flight.cancel()
        with suppress(asyncio.CancelledError):
            await flight
    if paused.interrupted != REQUESTS:
        raise RuntimeError(f"{paused.interrupted} requests were interrupted, of {REQUESTS}")
    return took


async def sampled(engine: Any, tokens: int) -> None:
    """Return when so many tokens were sampled, or more."""
    while tokens > 0:
        await asyncio.sleep(0.001)
        tokens -= (await engine.stats()).generated_tokens


async def generate(engine: Any) -> None:
    from headway.agents.episodes.episode_worker import local_episode_worker

    asked = group_requests([Request(tuple(range(1, PROMPT + 1)), TOKENS)] * REQUESTS)
    async with local_episode_worker(engine) as worker:
        async for _ in worker.generate(asked):
            raise RuntimeError("a request ended in mid-flight")


def load(kind: str, path: Path, threads: int) -> Callable[[int], list[Update]]:
    import torch

    os.environ.pop(IN_PROCESS, None)  # vLLM's asynchronous engine has processes of its own
    torch.set_num_threads(threads)
    return lambda rounds: asyncio.run(updates(kind, path, rounds))


if __name__ == "__main__":
    serve(lambda say: load(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
