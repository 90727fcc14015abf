"""For how long an update in mid-flight holds 64 requests: ``python -m benchmarks.rollout --update``.

    64 requests decode ─▶ [stage] ─▶ pause(interrupt) ─▶ [stage] ─▶ activate ─▶ resume ─▶ all contexts prefilled again

Once with everything behind the pause, and once staged beside decoding, as a back buffer allows. The stall ends when 64
tokens were sampled under the new version: natively with the step that gives every request its next one; vLLM, which
prefills in several steps, may come to that number before the last request goes on. Both are behind the same protocol,
each in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, TypeVar

from benchmarks.rollout_engines import IN_PROCESS
from benchmarks.rollout_process import environment
from benchmarks.rollout_tables import table
from benchmarks.rollout_workload import BATCHED_TOKENS, PROMPT, SIZES
from headway.cluster.hardware import available_cores, cpu_model

T = TypeVar("T")

REQUESTS = 64
TOKENS = 256
WRITTEN = 32
"""Tokens that each answer has, at least, when the first update comes."""
BETWEEN = 8
"""Tokens between two updates, at least."""
BUCKET = 64 * 2**20
TIMEOUT_S = 600.0
POLL_S = 0.001
"""Between two looks at what was sampled."""
BEHIND = "behind the pause"
PHASES = ("pause", "stage", "activate", "resume")


def measure_updates(
    folder: Path, pythons: Mapping[str, Path], models: Sequence[str], threads: Sequence[int], rounds: int
) -> str:
    """Measure, and write into ``folder``; what to show."""
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as scratch:
        for name in models:
            model = Path(scratch) / name
            SIZES[name].make(model)
            for count, engine in product(threads, (one for one in pythons if one in ENGINES)):
                what = f"{name}, threads {count}, {engine}"
                print(f"{what}: {rounds} updates of each kind", file=sys.stderr, flush=True)
                try:
                    found = _in_a_process(engine, pythons[engine], model, count, rounds, folder / "logs")
                except UpdatesFailed as error:
                    failures.append(f"- {what}: {error}")
                else:
                    rows += [{"model": name, "threads": count, "engine": engine, **row} for row in found]
    text = markdown(rows, rounds, failures)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "update.md").write_text(text)
    (folder / "update.json").write_text(json.dumps({"cores": available_cores(), "cpu": cpu_model(), "rows": rows}))
    return f"{text}\nwritten to {folder / 'update.md'} and {folder / 'update.json'}"


def markdown(rows: Sequence[dict[str, Any]], rounds: int, failures: Sequence[str] = ()) -> str:
    """``rows``: seconds of each update, by phase."""
    header = ["model", "threads", "engine", "staged", *(f"{phase} ms" for phase in PHASES), "stall ms"]
    cells = []
    for row in rows:
        held = [phase for phase in PHASES if phase != "stage" or row["staged"] == BEHIND]
        stall = median(sum(update[phase] for phase in held) for update in row["updates"])
        medians = [median(update[phase] for update in row["updates"]) for phase in PHASES]
        what = [row["model"], str(row["threads"]), row["engine"], row["staged"]]
        cells.append([*what, *(f"{1e3 * seconds:.1f}" for seconds in [*medians, stall])])
    parts = [
        f"{available_cores()} cores of {cpu_model()}.\n",
        f"Updates with {REQUESTS} requests in mid-flight, on_update interrupt; medians of {rounds}. The stall lasts "
        f"from the call of pause until {REQUESTS} tokens were sampled under the new version. The prefill of all "
        "contexts is in `resume`. Staging beside decoding is no part of the stall.\n",
        table(header, cells),
    ]
    parts += ["### Failed\n", *failures, ""] if failures else []
    return "\n".join(parts)


class UpdatesFailed(Exception):
    """Why there are no figures, in one line."""


def _in_a_process(
    engine: str, python: Path, model: Path, threads: int, rounds: int, logs: Path
) -> list[dict[str, Any]]:
    logs.mkdir(parents=True, exist_ok=True)
    command = [str(python), "-m", "benchmarks.rollout_update", engine, str(model), str(threads), str(rounds)]
    variables = environment(engine, threads)
    variables.pop(IN_PROCESS, None)  # vLLM's asynchronous engine has processes of its own
    log = logs / f"update-{engine}.log"
    with log.open("w") as errors, tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=errors, start_new_session=True)
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise UpdatesFailed(f"not over after {TIMEOUT_S:g} s") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    if code or not lines:
        last = log.read_text(errors="replace").strip().splitlines() or ["nothing"]
        raise UpdatesFailed(f"its process ended; the last that it printed: {last[-1][:200]}")
    found: list[dict[str, Any]] = json.loads(lines[-1])
    return found


async def _updates(kind: str, path: Path, rounds: int) -> list[dict[str, Any]]:
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

    engine = await ENGINES[kind](
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
        update = _Updater(engine)
        staged = {BEHIND: False, "beside decoding": True}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in staged}
        await update.measure(beside=False)  # memory is touched for the first time
        for _ in range(rounds):
            for name, beside in staged.items():
                found[name].append(await update.measure(beside=beside))
        await update.end()
    finally:
        await engine.close()
    return [{"staged": name, "updates": updates} for name, updates in found.items()]


async def _native(path: Path, **settings: Any) -> Any:
    import torch

    from headway.engines.rollout.native import NativeEngine
    from headway.models.pretrained import load_model

    return NativeEngine(load_model(path, dtype=torch.float32), decode=lambda ids: "", **settings)


async def _vllm(path: Path, **settings: Any) -> Any:
    from headway.engines.rollout.vllm import VllmEngine

    engine = VllmEngine(path, dtype="float32", options={"skip_tokenizer_init": True}, **settings)
    await engine.start()
    return engine


ENGINES: Mapping[str, Callable[..., Awaitable[Any]]] = MappingProxyType({"native": _native, "vllm": _vllm})


class _Updater:
    """Keeps `REQUESTS` in flight, and updates the engine that they run on."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._flight: asyncio.Task[None] | None = None
        self._left = 0
        self._version = 0

    async def measure(self, *, beside: bool) -> dict[str, float]:
        """Seconds by phase of one update."""
        from headway.data.interfaces.rollout import OnUpdate

        await self._take_off()
        engine, self._version = self._engine, self._version + 1
        took: dict[str, float] = {}

        async def phase(name: str, doing: Awaitable[T]) -> T:
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
        import numpy as np

        from headway.agents.episodes.episode_worker import local_episode_worker
        from headway.data.interfaces.episode_groups import GroupRequest
        from headway.data.interfaces.generation import SamplingParams
        from headway.data.types import Prompt

        asked = [
            GroupRequest(
                row, Prompt(0, row, 0, "bench", "", np.arange(1, PROMPT + 1, dtype=np.int32)), 1, SamplingParams(TOKENS)
            )
            for row in range(REQUESTS)
        ]
        async with local_episode_worker(self._engine) as worker:
            async for _ in worker.generate(asked):
                raise RuntimeError("a request ended in mid-flight")


def main(engine: str, path: str, threads: str, rounds: str) -> None:
    import torch

    torch.set_num_threads(int(threads))
    print(json.dumps(asyncio.run(_updates(engine, Path(path), int(rounds)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
