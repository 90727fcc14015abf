"""``python -m benchmarks.episodes``: what episodes of several turns cost, without a model and with one.

    asleep      a thousand episodes at once, whose engine and steps sleep: throughput against the virtual clock's for
                the same seconds; CPU seconds of a turn
    prefixes    ten turns of a growing context on the native engine: prefilled tokens with its cache and without
    endpoint    calls of agents over HTTP, 500 episodes open, 100 calls a second: what the endpoint adds to a call

Figures of the first part are of a busy machine where others compute: throughput suffers from them, CPU seconds less so.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.episodes_asleep import Workload, really, virtually
from benchmarks.episodes_endpoint import Load, measure, measure_bare
from benchmarks.rollout_workload import SIZES
from benchmarks.runner import parser
from benchmarks.table import report
from headway.data.interfaces.rollout import FinishedCall, GenerateRequest, SamplingParams
from headway.data.types import TrajectoryId
from headway.engines.rollout.native.prefix_cache import BLOCK

TURNS, EPISODES = 10, 8
PROMPT, SAMPLED, ADDED = 48, 40, 40
"""Tokens of a prompt, of a turn, and of what the environment says to it."""


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parser(
        "episodes",
        "What episodes cost.",
        only={"choices": ("asleep", "prefixes", "endpoint"), "help": "one part; default: all"},
        quick={"action": "store_true", "help": "200 episodes of 4 turns, in half a minute"},
        chains={"type": int, "default": Workload().chains, "help": "episodes at once; default: %(default)s"},
        runners={"type": int, "default": 2, "help": "processes of the program; default: %(default)s"},
    ).parse_args(arguments)
    if chosen.only in (None, "asleep"):
        quick = Workload(chains=200, episodes=1, turns=4)
        asleep(quick if chosen.quick else Workload(chains=chosen.chains), chosen.runners)
    if chosen.only in (None, "prefixes"):
        prefixes()
    if chosen.only in (None, "endpoint"):
        endpoint(Load(seconds=10.0) if chosen.quick else Load())


def asleep(workload: Workload, runners: int) -> None:
    """Measure and report episodes that sleep."""
    busy = os.getloadavg()[0]
    virtual, real = virtually(workload), really(workload, runners)
    rows = [virtual.row("virtual clock", virtual), real.row(f"{runners} runners", virtual)]
    notes = [
        f"{workload.chains} at once, {workload.chains * workload.episodes} in all, {workload.turns} turns each; "
        f"load of the machine before: {busy:.1f}",
        "throughput: episodes per second until 95% of them are over, over the virtual clock's; aim: 0.95",
        "CPU of a turn: episode worker, driver and the sleeping engine share a process; aim beside rendering: 1 ms + "
        "0.2 ms",
    ]
    report("episodes-asleep", {"Episodes whose engine and steps sleep": rows}, notes)


def prefixes() -> None:
    """Measure and report ten turns of a growing context."""
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        SIZES["1m"].make(Path(folder))
        ways = {"cache": True, "no cache": False}
        rows = [{"run": name, **asyncio.run(_turns(Path(folder), cached))} for name, cached in ways.items()]
    notes = [f"a block: {BLOCK} tokens; aim: 1.1"]
    report("episodes-prefixes", {"Ten turns on the native engine (1m)": rows}, notes)


async def _turns(folder: Path, cached: bool) -> dict[str, Any]:
    """Figures of ten turns. Without ``cached`` no turn says that its episode goes on."""
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
        return generator.integers(1, SIZES["1m"].vocabulary, tokens, dtype=np.int32)

    contexts, read, sampling = {k: said(PROMPT) for k in range(EPISODES)}, 0, SamplingParams(SAMPLED)
    try:
        batches = aiter(engine.finished("bench"))
        await engine.stats()
        start = time.perf_counter()
        for turn in range(TURNS):
            read += sum(map(len, contexts.values()))
            calls = [
                GenerateRequest(turn * EPISODES + k, TrajectoryId(0, k, 0, 0), ids, sampling, turn, goes_on=cached)
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
        wall_s, prefilled = time.perf_counter() - start, (await engine.stats()).prefilled_tokens
    finally:
        await engine.close()
    new = EPISODES * (PROMPT + (TURNS - 1) * ADDED)
    over = prefilled / (new + BLOCK * TURNS * EPISODES)
    return {"prefilled": prefilled, "new": new, "contexts": read, "over new + a block a turn": over, "wall s": wall_s}


def endpoint(load: Load) -> None:
    """Measure and report calls over HTTP."""
    busy = os.getloadavg()[0]
    found = {"a server that only answers": measure_bare(load), "the endpoint": measure(load)}
    rows = [{"run": name, **figures} for name, figures in found.items()]
    notes = [
        f"{load.episodes} episodes open, {load.calls_per_s:g} calls/s, an engine that takes no time; load of the "
        f"machine before: {busy:.1f}",
        "from when a call's time had come until its answer was read; aims: 3 ms added at the median, 20 ms at 99%",
    ]
    report("episodes-endpoint", {"Calls of agents over HTTP": rows}, notes)


if __name__ == "__main__":
    main()
