"""``python -m benchmarks.episodes``: what episodes of several turns, and calls over HTTP, cost without a model.

    asleep      a thousand episodes at once, whose engine and steps sleep: throughput against the virtual clock's for
                the same seconds; CPU seconds of a turn
    endpoint    500 episodes open, whose agents make 100 calls a second over HTTP: what the endpoint adds to a call

        Poisson arrivals ─▶ agent, in another process ──HTTP──▶ Endpoint ▶ EpisodeWorker ▶ SleepingEngine

An agent goes on with its conversation for some turns, then begins it anew. Of a call everything is counted from when
its time has come until its answer is read: the client, HTTP, rendering, the episode worker, and waiting for any of
them. The same calls of a server that answers them all alike, in the same process, are what client and HTTP take of
that. Throughput suffers from others that compute on the machine, CPU seconds less so.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median, quantiles
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from benchmarks.episodes_asleep import SAID, SleepingEngine, Workload, chats, really, virtually
from benchmarks.runner import parser
from benchmarks.table import report
from headway.agents.endpoint.dialect import TextCodec
from headway.agents.endpoint.endpoint_server import DIALECTS, Endpoint
from headway.agents.episodes.episode_limits import EpisodeLimits
from headway.agents.episodes.episode_worker import local_episode_worker
from headway.agents.episodes.program_episode import Hosting
from headway.agents.interface.program_messages import EpisodeEnd
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import SamplingParams
from headway.data.types import Prompt

TURNS = 10
"""Turns of a conversation."""
WARM_UP_S = 3.0
QUESTION = "guess again: the last number was too high, and there are few left, so be careful now " * 2


@dataclass(frozen=True, slots=True)
class Load:
    """Open episodes, and what their agents do."""

    episodes: int = 500
    calls_per_s: float = 100.0
    seconds: float = 30.0


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parser(
        "episodes",
        "What episodes cost.",
        only={"choices": ("asleep", "endpoint"), "help": "one part; default: both"},
        quick={"action": "store_true", "help": "200 episodes of 4 turns, in half a minute"},
        chains={"type": int, "default": Workload().chains, "help": "episodes at once; default: %(default)s"},
        runners={"type": int, "default": 2, "help": "processes of the program; default: %(default)s"},
    ).parse_args(arguments)
    load = f"load of the machine before: {os.getloadavg()[0]:.1f}"
    if chosen.only in (None, "asleep"):
        workload = Workload(chains=200, episodes=1, turns=4) if chosen.quick else Workload(chains=chosen.chains)
        virtual, real = virtually(workload), really(workload, chosen.runners)
        rows = [virtual.row("virtual clock", virtual), real.row(f"{chosen.runners} runners", virtual)]
        at_once = (
            f"{workload.chains} at once, {workload.chains * workload.episodes} in all, {workload.turns} turns each"
        )
        notes = [
            f"{at_once}; {load}",
            "throughput: episodes per second until 95% of them are over, over the virtual clock's; aim: 0.95",
            "CPU of a turn: episode worker, driver and the sleeping engine share a process; aim beside rendering: 1 ms",
        ]
        report("episodes-asleep", {"Episodes whose engine and steps sleep": rows}, notes)
    if chosen.only in (None, "endpoint"):
        asked = Load(seconds=10.0) if chosen.quick else Load()
        found = {"a server that only answers": asyncio.run(bare(asked)), "the endpoint": asyncio.run(served(asked))}
        notes = [
            f"{asked.episodes} episodes open, {asked.calls_per_s:g} calls/s, an engine that takes no time; {load}",
            "from when a call's time had come until its answer was read; aims: 3 ms added at the median, 20 ms at 99%",
        ]
        rows = [{"run": name, **figures} for name, figures in found.items()]
        report("episodes-endpoint", {"Calls of agents over HTTP": rows}, notes)


class _Agents:
    """Programs whose agents are in another process: they begin, and end when all is over."""

    def __init__(self, episodes: int) -> None:
        self.open: list[Any] = []
        self.all_open, self.over = asyncio.Event(), asyncio.Event()
        self._episodes = episodes

    async def start(self) -> None: ...

    async def run(self, job: Any, on_ask: object, *, on_begin: Callable[[], object] | None = None) -> EpisodeEnd:
        self.open.append(job.access)
        if len(self.open) == self._episodes:
            self.all_open.set()
        await self.over.wait()
        return EpisodeEnd(1.0)

    async def close(self) -> None: ...


async def served(load: Load) -> dict[str, Any]:
    """Open the episodes, and have their agents call the endpoint."""
    (made, answer), agents = chats(), _Agents(load.episodes)
    renderer = made.renderer
    texts = TextCodec(lambda text: renderer.encode(text).tolist(), lambda ids: str(renderer.tokenizer.decode(ids)))
    limits = EpisodeLimits(max_length=10**9, max_turns=10**9, step_timeout_s=3600, episode_timeout_s=3600)
    stop_ids, endpoint = tuple(renderer.end_ids), Endpoint(DIALECTS, texts)
    hosting = Hosting(agents, made.record, limits, stop_ids=stop_ids, endpoint=endpoint)
    await hosting.start()
    async with local_episode_worker(SleepingEngine(lambda call: 0.0, answer), hosting=hosting) as worker:
        prompts = [Prompt(0, row, 0, "bench", "", np.zeros(1, np.int32), messages=[]) for row in range(load.episodes)]
        requests = [Group(prompt.row, prompt, 1, SamplingParams(1000)) for prompt in prompts]

        async def drained() -> None:
            async for _ in worker.generate(requests):
                pass

        groups = asyncio.create_task(drained())
        await agents.all_open.wait()
        try:
            return await called(agents.open[0].base_url, [access.api_key for access in agents.open], load)
        finally:
            agents.over.set()
            await groups


async def bare(load: Load) -> dict[str, Any]:
    """Have the same agents call a server that does nothing but answer."""
    said = {"choices": [{"index": 0, "message": {"role": "assistant", "content": SAID}, "finish_reason": "stop"}]}

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response(said)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    try:
        return await called(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", ["none"] * load.episodes, load)
    finally:
        await runner.cleanup()


async def called(url: str, keys: list[str], load: Load) -> dict[str, Any]:
    """Have a process of agents with ``keys`` call; returns the table's columns."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        ms, failed = await asyncio.get_running_loop().run_in_executor(process, agents, url, keys, load)
    return {
        "calls": len(ms),
        "failed": failed,
        "median ms": median(ms),
        "99% ms": quantiles(ms, n=100)[98],
        "longest ms": max(ms),
    }


def agents(url: str, keys: list[str], load: Load) -> tuple[list[float], int]:
    """Call as agents do; returns the milliseconds of each call after warm-up, and how many failed."""
    return asyncio.run(_calling(url, keys, load))


async def _calling(url: str, keys: list[str], load: Load) -> tuple[list[float], int]:
    draws, talks = random.Random(0), [list[dict[str, str]]() for _ in keys]
    free, ms, failed = list(range(len(keys))), list[float](), 0

    async def one(session: aiohttp.ClientSession, n: int, due: float, counts: bool) -> None:
        nonlocal failed
        talks[n].append({"role": "user", "content": QUESTION})
        body = json.dumps({"model": "policy", "messages": talks[n]})
        headers = {"Authorization": f"Bearer {keys[n]}", "Content-Type": "application/json"}
        async with session.post(f"{url}/chat/completions", data=body, headers=headers) as response:
            answer = await response.json()
            failed += response.status != 200
        if counts:
            ms.append((time.perf_counter() - due) * 1e3)
        talks[n].append(answer["choices"][0]["message"])
        if len(talks[n]) >= 2 * TURNS:
            talks[n].clear()
        free.append(n)

    due = time.perf_counter()
    begin, end = due + WARM_UP_S, due + WARM_UP_S + load.seconds
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as tasks:
        while (due := due + draws.expovariate(load.calls_per_s)) < end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.create_task(one(session, free.pop(draws.randrange(len(free))), due, due > begin))
    return ms, failed


if __name__ == "__main__":
    main()
