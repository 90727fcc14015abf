"""For how long an update in mid-flight holds 64 requests: ``python -m benchmarks.rollout --update``.

    64 requests decode ─▶ [stage] ─▶ pause(interrupt) ─▶ [stage] ─▶ activate ─▶ resume ─▶ all contexts prefilled again

Once with everything behind the pause, and once staged beside decoding, as a back buffer allows. The stall ends when 64
tokens were sampled under the new version: natively with the step that gives every request its next one; vLLM, which
prefills in several steps, may come to that number before the last request goes on. Both are behind the same protocol,
each in a process of its own (``python -m benchmarks.rollout_update ENGINE FOLDER THREADS``).
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.rollout_engines import IN_PROCESS, groups
from benchmarks.rollout_workload import BATCHED_TOKENS, PROMPT, SIZES, Request
from benchmarks.runner import Failed, Worker, say, serve
from benchmarks.table import Rows, report

REQUESTS = 64
TOKENS = 256
WRITTEN = 32
"""Number of tokens that each answer has, at least, when the first update comes."""
BETWEEN = 8
"""Number of tokens between two updates, at least."""
BUCKET = 64 * 2**20
TIMEOUT_S = 600.0
POLL_S = 0.001
"""Seconds between two looks at what was sampled."""
BEHIND = "behind the pause"
STAGED = {BEHIND: False, "beside decoding": True}
PHASES = ("pause", "stage", "activate", "resume")
Update = dict[str, float]
"""Seconds of one update, by phase."""


def measure_updates(
    models: Sequence[str], threads: Sequence[int], rounds: int, worker: Callable[..., Worker], engines: Sequence[str]
) -> None:
    """Measure each model, number of threads and engine, and report."""
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as scratch:
        for name in models:
            SIZES[name].make(folder := Path(scratch) / name)
            for count, engine in product(threads, (one for one in engines if one in ("native", "vllm"))):
                say(f"{name}, threads {count}, {engine}: {rounds} updates of each kind")
                one = worker(engine, count, "benchmarks.rollout_update", str(folder), str(count))
                try:
                    found = one.ask(rounds, TIMEOUT_S)
                    rows += table({"model": name, "threads": count, "engine": engine}, found)
                except Failed as error:
                    failures.append(f"{name}, threads {count}, {engine}: {error}")
                finally:
                    one.stop()
    explained = (
        f"The stall lasts from the call of pause until {REQUESTS} tokens were sampled under the new version. The "
        "prefill of all contexts is in resume. Staging beside decoding is no part of the stall."
    )
    title = f"Updates with {REQUESTS} requests in mid-flight, on_update interrupt; medians of {rounds}"
    report("rollout-update", {title: rows}, [explained, *failures])


def table(what: Mapping[str, Any], found: Mapping[str, Sequence[Update]]) -> Rows:
    """``found``: updates by the way in which weights were staged."""
    rows = []
    for staged, updates in found.items():
        held = [phase for phase in PHASES if phase != "stage" or staged == BEHIND]
        medians = {f"{phase} ms": 1e3 * median(update[phase] for update in updates) for phase in PHASES}
        stall = 1e3 * median(sum(update[phase] for phase in held) for update in updates)
        rows.append({**what, "staged": staged, **medians, "stall ms": stall})
    return rows


# ------------------------------------------------------------------------------------------ an engine's process


async def updates(kind: str, path: Path, rounds: int) -> dict[str, list[Update]]:
    """Measure updates, by the way in which weights are staged."""
    import torch

    from headway.engines.weights.buckets import pack, whole
    from headway.engines.weights.outgoing_version import Stream
    from headway.engines.weights.protocols import IncomingWeights
    from headway.engines.weights.weight_layout import buckets, build_manifest
    from headway.models.pretrained import load_model

    source = load_model(path, dtype=torch.float32)
    manifest = build_manifest((name, tuple(p.shape), p.dtype) for name, p in source.named_parameters())
    shards = whole(dict(source.named_parameters()))

    def receive(version: int, incoming: IncomingWeights) -> None:
        (sink,) = incoming.shares
        weights = Stream(manifest, pack(manifest, shards, buckets(manifest.nbytes, BUCKET)))
        for chunk in weights:
            sink.room(chunk.header).copy_(chunk.payload)
            sink.filled(chunk.header)
        sink.ended(weights.digests)

    engine = await _engine(
        kind,
        path,
        name="bench",
        seed=0,
        slots=REQUESTS,
        max_context=PROMPT + TOKENS,
        max_batched_tokens=BATCHED_TOKENS,
        receive=receive,
        manifest=manifest,
    )
    try:
        updater = _Updater(engine)
        found: dict[str, list[Update]] = {name: [] for name in STAGED}
        await updater.measure(beside=False)  # memory is touched for the first time
        for _ in range(rounds):
            for name, beside in STAGED.items():
                found[name].append(await updater.measure(beside=beside))
        await updater.end()
    finally:
        await engine.close()
    return found


async def _engine(kind: str, path: Path, **settings: Any) -> Any:
    if kind == "vllm":
        from headway.engines.rollout.vllm import VllmEngine

        served = VllmEngine(path, dtype="float32", options={"skip_tokenizer_init": True}, **settings)
        await served.start()
        return served
    import torch

    from headway.engines.rollout.native import NativeEngine
    from headway.models.pretrained import load_model

    return NativeEngine(load_model(path, dtype=torch.float32), decode=lambda ids: "", **settings)


class _Updater:
    """Keeps `REQUESTS` in flight, and updates the engine that they run on."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._flight: asyncio.Task[None] | None = None
        self._left = self._version = 0

    async def measure(self, *, beside: bool) -> Update:
        from headway.data.interfaces.rollout import OnUpdate

        await self._take_off()
        engine, self._version = self._engine, self._version + 1
        took: Update = {}

        async def phase(name: str, doing: Awaitable[Any]) -> Any:
            start = time.perf_counter()
            result = await doing
            took[name] = time.perf_counter() - start
            return result

        if beside:
            await phase("stage", engine.stage_weights(self._version))
        paused = await phase("pause", engine.pause(OnUpdate.INTERRUPT))
        if not beside:
            await phase("stage", engine.stage_weights(self._version))
        await phase("activate", engine.activate(self._version))
        await engine.stats()  # forget what came before
        await phase("resume", self._go_on())
        if paused.interrupted != REQUESTS:
            raise RuntimeError(f"{paused.interrupted} requests were interrupted, of {REQUESTS}")
        return took

    async def _go_on(self) -> None:
        await self._engine.resume()
        await self._sampled(REQUESTS)

    async def _sampled(self, tokens: int) -> int:
        """Return when so many tokens were sampled, or more: how many."""
        sampled = 0
        while sampled < tokens:
            await asyncio.sleep(POLL_S)
            sampled += (await self._engine.stats()).generated_tokens
        return sampled

    async def end(self) -> None:
        """Drop what is in flight."""
        if self._flight is not None:
            self._flight.cancel()
            with suppress(asyncio.CancelledError):
                await self._flight
            self._flight = None

    async def _take_off(self) -> None:
        """Return when `REQUESTS` decode, and will for a while; start them where they do not."""
        steps = BETWEEN
        if self._left < 4 * BETWEEN:
            await self.end()
            self._flight = asyncio.create_task(self._generate())
            self._left, steps = TOKENS, WRITTEN
        await self._engine.stats()
        self._left -= await self._sampled(steps * REQUESTS) // REQUESTS

    async def _generate(self) -> None:
        from headway.agents.episodes.episode_worker import local_episode_worker

        asked = groups([Request(tuple(range(1, PROMPT + 1)), TOKENS)] * REQUESTS)
        async with local_episode_worker(self._engine) as worker:
            async for _ in worker.generate(asked):
                raise RuntimeError("a request ended in mid-flight")


def load(kind: str, path: Path, threads: int) -> Callable[[int], dict[str, list[Update]]]:
    import torch

    os.environ.pop(IN_PROCESS, None)  # vLLM's asynchronous engine has processes of its own
    torch.set_num_threads(threads)
    return lambda rounds: asyncio.run(updates(kind, path, rounds))


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
