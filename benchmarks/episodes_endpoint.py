"""What the endpoint adds to a call: open episodes whose agents call at random times, and an engine that takes no time.

    Poisson arrivals ─▶ agent of an open episode, in another process ──HTTP──▶ Endpoint ▶ EpisodeWorker ▶ SleepingEngine

An agent goes on with its conversation for some turns, then begins it anew. Of a call everything is counted from when
its time has come until its answer is read: the client, HTTP, rendering, the episode worker, and waiting for any of
them. The same calls of a server that answers them all alike, in the same process, are what client and HTTP take of
that.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median, quantiles
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from benchmarks.episodes_asleep import SAID, SleepingEngine, chats
from headway.agents.endpoint.dialect import TextCodec
from headway.agents.endpoint.endpoint_server import DIALECTS, Endpoint
from headway.agents.episodes.episode_limits import EpisodeLimits
from headway.agents.episodes.episode_worker import local_episode_worker
from headway.agents.episodes.program_episode import Hosting, Turn
from headway.agents.interface.program_messages import Access, EpisodeEnd, EpisodeStart
from headway.data.interfaces.episode_groups import GroupRequest
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


@dataclass(slots=True)
class Latencies:
    """Milliseconds from when a call's time had come until its answer was read."""

    ms: list[float]
    failed: int
    server_cpu_s: float = 0.0
    wall_s: float = 0.0

    @property
    def median(self) -> float:
        return median(self.ms)

    @property
    def p99(self) -> float:
        return quantiles(self.ms, n=100)[98]


def measure(load: Load) -> Latencies:
    """Open the episodes, and have a process of their agents call."""
    return asyncio.run(_serve(load))


def measure_bare(load: Load) -> Latencies:
    """Have the same process call a server that does nothing but answer."""
    return asyncio.run(_serve_bare(load))


class _Agents:
    """Programs whose agents are in another process: they begin, and end when all is over."""

    def __init__(self, episodes: int) -> None:
        self.open: list[Access] = []
        self.all_open = asyncio.Event()
        self.over = asyncio.Event()
        self._episodes = episodes

    async def start(self) -> None: ...

    async def run(self, job: EpisodeStart, on_ask: Turn, *, on_begin: Callable[[], object] | None = None) -> EpisodeEnd:
        assert job.access is not None
        self.open.append(job.access)
        if len(self.open) == self._episodes:
            self.all_open.set()
        await self.over.wait()
        return EpisodeEnd(1.0)

    async def close(self) -> None: ...


async def _serve(load: Load) -> Latencies:
    made = chats()
    answer = [*made.renderer.encode(SAID).tolist(), min(made.renderer.end_ids)]
    texts = TextCodec(
        lambda text: made.renderer.encode(text).tolist(), lambda ids: str(made.renderer.tokenizer.decode(ids))
    )
    agents = _Agents(load.episodes)
    hosting = Hosting(
        agents,
        made.record,
        EpisodeLimits(max_length=10**9, max_turns=10**9, step_timeout_s=3600, episode_timeout_s=3600),
        stop_ids=tuple(made.renderer.end_ids),
        endpoint=Endpoint(DIALECTS, texts),
    )
    await hosting.start()
    async with local_episode_worker(SleepingEngine(lambda call: 0.0, answer), hosting=hosting) as worker:
        prompts = [Prompt(0, row, 0, "bench", "", np.zeros(1, np.int32), messages=[]) for row in range(load.episodes)]
        requests = [GroupRequest(prompt.row, prompt, 1, SamplingParams(1000)) for prompt in prompts]
        groups = asyncio.create_task(_drained(worker.generate(requests)))
        await agents.all_open.wait()
        try:
            return await _called(agents.open, load)
        finally:
            agents.over.set()
            await groups


async def _serve_bare(load: Load) -> Latencies:
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
        port = runner.addresses[0][1]
        return await _called([Access(f"http://127.0.0.1:{port}/v1", "none")] * load.episodes, load)
    finally:
        await runner.cleanup()


async def _called(agents: list[Access], load: Load) -> Latencies:
    """Have a process of ``agents`` call."""
    here, there = multiprocessing.Pipe()
    client = multiprocessing.get_context("spawn").Process(target=_call, args=(there, agents, load))
    client.start()
    try:
        await asyncio.to_thread(here.recv)  # warm
        cpu, wall = time.process_time(), time.perf_counter()
        ms, failed = await asyncio.to_thread(here.recv)
        return Latencies(ms, failed, time.process_time() - cpu, time.perf_counter() - wall)
    finally:
        client.terminate()
        await asyncio.to_thread(client.join)


async def _drained(groups: Any) -> None:
    async for _ in groups:
        pass


def _call(told: Connection, agents: list[Access], load: Load) -> None:
    asyncio.run(_calls(told, agents, load))


async def _calls(told: Connection, agents: list[Access], load: Load) -> None:
    draws = random.Random(0)
    free = list(range(len(agents)))
    messages: list[list[dict[str, str]]] = [[] for _ in agents]
    ms: list[float] = []
    failed = 0
    url = f"{agents[0].base_url}/chat/completions"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(n: int, due: float, counts: bool) -> None:
            nonlocal failed
            chat = messages[n]
            chat.append({"role": "user", "content": QUESTION})
            body = json.dumps({"model": "policy", "messages": chat})
            headers = {"Authorization": f"Bearer {agents[n].api_key}", "Content-Type": "application/json"}
            async with session.post(url, data=body, headers=headers) as response:
                answer = await response.json()
                failed += response.status != 200
            if counts:
                ms.append((time.perf_counter() - due) * 1e3)
            chat.append(answer["choices"][0]["message"])
            if len(chat) >= 2 * TURNS:
                chat.clear()
            free.append(n)

        async def during(seconds: float, counts: bool) -> None:
            due = time.perf_counter()
            end = due + seconds
            async with asyncio.TaskGroup() as tasks:
                while (due := due + draws.expovariate(load.calls_per_s)) < end:
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                    tasks.create_task(one(free.pop(draws.randrange(len(free))), due, counts))

        await during(WARM_UP_S, False)
        told.send(None)
        await during(load.seconds, True)
    told.send((ms, failed))
