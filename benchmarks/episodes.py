"""``python -m benchmarks.episodes``: what episodes of several turns, and calls over HTTP, cost without a model.

    asleep      a thousand episodes at once, whose engine and steps sleep: how long they take, and CPU seconds of a turn

        chains of episodes ─▶ EpisodeWorker ─▶ SleepingEngine
                                   └─▶ WorkerPool: the program, in processes

    endpoint    500 episodes open, whose agents make 100 calls a second over HTTP: what the endpoint adds to a call

        Poisson arrivals ─▶ agent, in another process ──HTTP──▶ Endpoint ▶ EpisodeWorker ▶ SleepingEngine

An agent goes on with its conversation for some turns, then begins it anew. Of a call everything is counted from when
its time has come until its answer is read: the client, HTTP, rendering, the episode worker, and waiting for any of
them. The same calls of a server that answers them all alike, in the same process, are what client and HTTP take of
that.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks import user_code
from benchmarks.runner import cpu_seconds, parser
from benchmarks.table import report
from headway.agents.adapters.program_loader import ProgramSpec
from headway.agents.chat.chat_template import ChatRenderer
from headway.agents.endpoint.dialect import TextCodec
from headway.agents.endpoint.endpoint_server import Endpoint
from headway.agents.episodes.episode_limits import EpisodeLimits
from headway.agents.episodes.episode_tokens import Chats
from headway.agents.episodes.episode_worker import local_episode_worker
from headway.agents.episodes.program_episode import Hosting
from headway.agents.interface.program_messages import EpisodeEnd, said
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import Completion, GenerateRequest, SamplingParams
from headway.data.types import FinishReason, Prompt, SampledTokens, TrajectoryId
from headway.errors import RunError
from headway.runtime.process_tree import descendants
from headway.runtime.workers.worker_pool import WorkerPool

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAID = "the hidden number may be 42"
"""Text of every answer."""
TURNS = 10
"""Turns of a conversation."""
WARM_UP_S = 3.0
QUESTION = "guess again: the last number was too high, and there are few left, so be careful now " * 2


@dataclass(frozen=True, slots=True)
class Workload:
    """Chains of episodes, one behind the other, all chains at once."""

    chains: int = 1000
    episodes: int = 2
    """Number of episodes of each chain."""
    turns: int = 6

    def steps(self, row: int) -> list[float]:
        """Seconds of the steps of episode ``row``: heavy-tailed, with a median of 1."""
        draws = random.Random(f"steps {row}")
        return [min(max(exp(draws.gauss(0, 1.5)), 0.01), 10.0) for _ in range(self.turns)]


def seconds_of(call: GenerateRequest) -> float:
    """Seconds that a call of the policy takes."""
    return random.Random(f"{call.trajectory} {len(call.input_ids)}").uniform(0.5, 1.5)


class SleepingEngine:
    """Answers each call after a while, in batches of what is due in the same turn of the loop."""

    name, slots = "asleep", 1 << 20

    def __init__(self, seconds: Callable[[GenerateRequest], float], answer: Sequence[int]) -> None:
        self._seconds, n = seconds, len(answer)
        self._tokens = SampledTokens(np.array(answer, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32))
        self._done: list[Completion] = []
        self._any = asyncio.Event()

    async def submit(self, client: str, calls: Sequence[GenerateRequest]) -> None:
        for call in calls:
            asyncio.get_running_loop().call_later(self._seconds(call), self._finish, call.number)

    def _finish(self, number: int) -> None:
        now, tokens = asyncio.get_running_loop().time(), self._tokens
        self._done.append(Completion(number, len(tokens.ids), [[0, 0]], FinishReason.STOP, now, now, tokens))
        self._any.set()

    async def finished(self, client: str) -> AsyncIterator[Sequence[Completion]]:
        while True:
            await self._any.wait()
            self._any.clear()
            done, self._done = self._done, []
            yield done

    async def abort(self, client: str, numbers: Sequence[int]) -> None: ...

    async def release(self, trajectories: Sequence[TrajectoryId]) -> None: ...


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
    ).parse_args(arguments)
    if chosen.only in (None, "asleep"):
        workload = Workload(chains=200, episodes=1, turns=4) if chosen.quick else Workload()
        notes = [
            f"{workload.chains} at once, {workload.episodes} behind each other, {workload.turns} turns each",
            "CPU of a turn: episode worker, driver and the sleeping engine share a process; aim beside rendering: 1 ms",
        ]
        report("episodes-asleep", {"Episodes whose engine and steps sleep": [asyncio.run(asleep(workload))]}, notes)
    if chosen.only in (None, "endpoint"):
        asked = Load(seconds=10.0) if chosen.quick else Load()
        found = {"a server that only answers": asyncio.run(bare(asked)), "the endpoint": asyncio.run(served(asked))}
        notes = [
            f"{asked.episodes} episodes open, {asked.calls_per_s:g} calls/s, an engine that takes no time",
            "from when a call's time had come until its answer was read; aims: 3 ms added at the median, 20 ms at 99%",
        ]
        rows = [{"run": name, **figures} for name, figures in found.items()]
        report("episodes-endpoint", {"Calls of agents over HTTP": rows}, notes)


# ------------------------------------------------------------------------------------------ asleep


class TimedTokens:
    """Tokens of an episode, with the CPU seconds added up. Texts are short: nothing else runs in ``prompt``."""

    def __init__(self, chats: Chats, seconds: list[float]) -> None:
        self._tokens, self._seconds = chats.new_episode(), seconds

    @contextmanager
    def _rendering(self) -> Iterator[None]:
        start = time.thread_time()
        try:
            yield
        finally:
            self._seconds.append(time.thread_time() - start)

    async def prompt(self, *args: Any) -> Any:
        with self._rendering():
            return await self._tokens.prompt(*args)

    def answered(self, *args: Any) -> Any:
        with self._rendering():
            return self._tokens.answered(*args)

    def rows(self) -> Any:
        with self._rendering():
            return self._tokens.rows()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokens, name)


def chats(template: str = TEMPLATE, said: str = SAID) -> tuple[Chats, list[int]]:
    """Chats of a tokenizer of bytes, in the format of ChatML, and the tokens of every answer."""
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=template)
    renderer = ChatRenderer(fast, {})
    return Chats(renderer), [*renderer.encode(said).tolist(), min(renderer.end_ids)]


async def nothing() -> None:
    """Close nothing: processes of the program outlive the episode worker, so that their CPU seconds can be read."""


async def asleep(workload: Workload) -> dict[str, Any]:
    """Run all episodes of ``workload``, their program in two processes; returns the table's columns."""
    (made, answer), rendering, turns = chats(), list[float](), 0
    spec = ProgramSpec(program=f"{Path(user_code.__file__)}:play").resolved()
    workers = WorkerPool("runner", spec, processes=2, at_once=None, stall_s=60.0, log_path=None)
    programs: Any = SimpleNamespace(run=workers.run, close=nothing)
    limits = EpisodeLimits(max_length=100_000, max_turns=workload.turns)
    stop_ids = tuple(made.renderer.end_ids)
    hosting = Hosting(programs, lambda: TimedTokens(made, rendering), limits, stop_ids=stop_ids)
    ends: list[float] = []

    async def chain(first: int) -> None:
        nonlocal turns
        for row in range(first, first + workload.episodes):
            extra, messages = {"steps": workload.steps(row)}, [said("user", "guess a number")]
            prompt = Prompt(0, row, 0, "bench", "", np.zeros(1, np.int32), extra=extra, messages=messages)
            async for group in worker.generate([Group(row, prompt, 1, SamplingParams(1000))]):
                (episode,) = group.trajectories
                turns += episode.turns
                if episode.failure is not None:
                    raise RunError(f"an episode has failed, which none should: {episode.failure}")
                ends.append(time.monotonic() - start)

    try:
        await workers.start()
        before = sum(map(cpu_seconds, descendants(os.getpid())))
        async with local_episode_worker(SleepingEngine(seconds_of, answer), hosting=hosting) as worker:
            start, cpu = time.monotonic(), time.process_time()
            async with asyncio.TaskGroup() as chains:
                for number in range(workload.chains):
                    chains.create_task(chain(number * workload.episodes))
            cpu_s = time.process_time() - cpu
        programs_s = sum(map(cpu_seconds, descendants(os.getpid()))) - before
    finally:
        await workers.close()
    return {
        "turns": turns,
        "95% over s": sorted(ends)[int(0.95 * len(ends)) - 1],  # without the last, beside which most places are empty
        "all over s": max(ends),
        "CPU of a turn ms": (cpu_s - sum(rendering)) / turns * 1e3,
        "rendering ms": sum(rendering) / turns * 1e3,
        "user-code workers ms": programs_s / turns * 1e3,
    }


# ------------------------------------------------------------------------------------------ endpoint


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
    stop_ids, endpoint = tuple(renderer.end_ids), Endpoint(texts)
    hosting = Hosting(agents, made.new_episode, limits, stop_ids=stop_ids, endpoint=endpoint)
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
