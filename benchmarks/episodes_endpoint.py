"""Calls of agents over HTTP: open episodes whose agents call at random times, and an engine that takes no time.

    Poisson arrivals ─▶ agent of an open episode, in another process ──HTTP──▶ Endpoint ▶ EpisodeWorker ▶ SleepingEngine

An agent goes on with its conversation for some turns, then begins it anew. Of a call everything is counted from when
its time has come until its answer is read: the client, HTTP, rendering, the episode worker, and waiting for any of
them. The same calls of a server that answers them all alike, in the same process, are what client and HTTP take of
that. The agents' process is ``python -m benchmarks.episodes_endpoint``.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import aiohttp

from benchmarks.runner import Worker, serve
from benchmarks.table import OUT

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


def measure(load: Load) -> dict[str, Any]:
    """Open the episodes, and have a process of their agents call."""
    return asyncio.run(_serve(load))


def measure_bare(load: Load) -> dict[str, Any]:
    """Have the same process call a server that does nothing but answer."""
    return asyncio.run(_serve_bare(load))


class _Agents:
    """Programs whose agents are in another process: they begin, and end when all is over."""

    def __init__(self, episodes: int) -> None:
        self.open: list[Any] = []
        self.all_open, self.over = asyncio.Event(), asyncio.Event()
        self._episodes = episodes

    async def start(self) -> None: ...

    async def run(self, job: Any, on_ask: object, *, on_begin: Callable[[], object] | None = None) -> Any:
        from headway.agents.interface.program_messages import EpisodeEnd

        self.open.append(job.access)
        if len(self.open) == self._episodes:
            self.all_open.set()
        await self.over.wait()
        return EpisodeEnd(1.0)

    async def close(self) -> None: ...


async def _serve(load: Load) -> dict[str, Any]:
    import numpy as np

    from benchmarks.episodes_asleep import SleepingEngine, chats
    from headway.agents.endpoint.dialect import TextCodec
    from headway.agents.endpoint.endpoint_server import DIALECTS, Endpoint
    from headway.agents.episodes.episode_limits import EpisodeLimits
    from headway.agents.episodes.episode_worker import local_episode_worker
    from headway.agents.episodes.program_episode import Hosting
    from headway.data.interfaces.episode_groups import Group
    from headway.data.interfaces.rollout import SamplingParams
    from headway.data.types import Prompt

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
        groups = asyncio.create_task(_drained(worker.generate(requests)))
        await agents.all_open.wait()
        try:
            return await _called(agents.open[0].base_url, [access.api_key for access in agents.open], load)
        finally:
            agents.over.set()
            await groups


async def _serve_bare(load: Load) -> dict[str, Any]:
    from aiohttp import web

    from benchmarks.episodes_asleep import SAID

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
        return await _called(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", ["none"] * load.episodes, load)
    finally:
        await runner.cleanup()


async def _called(url: str, keys: list[str], load: Load) -> dict[str, Any]:
    """Have a process of agents with ``keys`` call; returns the table's columns."""
    client = Worker([sys.executable, "-m", "benchmarks.episodes_endpoint"], OUT / "episodes-agents.log")
    question = {"url": url, "keys": keys, "calls_per_s": load.calls_per_s}
    try:
        await asyncio.to_thread(client.ask, {**question, "seconds": WARM_UP_S}, 60.0)
        cpu, wall = time.process_time(), time.perf_counter()
        ms, failed = await asyncio.to_thread(client.ask, {**question, "seconds": load.seconds}, load.seconds + 60.0)
        server = (time.process_time() - cpu) / (time.perf_counter() - wall)
    finally:
        await asyncio.to_thread(client.stop)
    times = {"median ms": median(ms), "99% ms": quantiles(ms, n=100)[98], "longest ms": max(ms)}
    return {"calls": len(ms), "failed": failed, **times, "CPU of the server's process": server}


async def _drained(groups: Any) -> None:
    async for _ in groups:
        pass


# ------------------------------------------------------------------------------------------ the agents' process


class _Caller:
    """Agents that call. Their conversations and connections last from one question to the next."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._draws = random.Random(0)
        self._chats: list[list[dict[str, str]]] = []
        self._session: aiohttp.ClientSession | None = None

    def __call__(self, question: dict[str, Any]) -> tuple[list[float], int]:
        return self._loop.run_until_complete(self._during(**question))

    async def _during(self, url: str, keys: list[str], calls_per_s: float, seconds: float) -> tuple[list[float], int]:
        """Milliseconds of each call, and how many failed."""
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
            self._chats = [[] for _ in keys]
        session, free, ms, failed = self._session, list(range(len(keys))), list[float](), 0

        async def one(n: int, due: float) -> None:
            nonlocal failed
            chat = self._chats[n]
            chat.append({"role": "user", "content": QUESTION})
            body = json.dumps({"model": "policy", "messages": chat})
            headers = {"Authorization": f"Bearer {keys[n]}", "Content-Type": "application/json"}
            async with session.post(f"{url}/chat/completions", data=body, headers=headers) as response:
                answer = await response.json()
                failed += response.status != 200
            ms.append((time.perf_counter() - due) * 1e3)
            chat.append(answer["choices"][0]["message"])
            if len(chat) >= 2 * TURNS:
                chat.clear()
            free.append(n)

        due = time.perf_counter()
        end = due + seconds
        async with asyncio.TaskGroup() as tasks:
            while (due := due + self._draws.expovariate(calls_per_s)) < end:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                tasks.create_task(one(free.pop(self._draws.randrange(len(free))), due))
        return ms, failed


if __name__ == "__main__":
    serve(_Caller)
