"""Episodes whose engine and environments only sleep: what is left is what a turn costs Headway.

    Workload ─▶ a thousand chains of episodes ─▶ EpisodeWorker ─▶ SleepingEngine
                                                     └─▶ WorkerPool, or the same program on the virtual clock

The same episodes run twice: in real time with runner processes, and on the virtual clock, where nothing costs anything.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks import user_code
from benchmarks.runner import cpu_seconds
from headway.agents.adapters.program_loader import ProgramSpec
from headway.agents.chat.chat_template import ChatRenderer
from headway.agents.episodes.episode_limits import EpisodeLimits
from headway.agents.episodes.episode_tokens import Chats
from headway.agents.episodes.episode_worker import local_episode_worker
from headway.agents.episodes.program_episode import Hosting, Turn
from headway.agents.interface.program_chat import Chat, Tally
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, said
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import Completion, GenerateRequest, SamplingParams
from headway.data.types import FinishReason, Prompt, SampledTokens, TrajectoryId
from headway.errors import RunError
from headway.planner.simulation.virtual_clock import run_virtual
from headway.runtime.process_tree import descendants
from headway.runtime.workers.worker_pool import WorkerPool

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAID = "the hidden number may be 42"
"""Text of every answer."""


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


@dataclass(slots=True)
class Measured:
    """Costs of one way of running the workload."""

    wall_s: float = 0.0
    most_s: float = 0.0
    """Seconds until 95% of all episodes were over: without the last ones, for which all others' places are empty."""
    turns: int = 0
    cpu_s: float = 0.0
    """CPU seconds of the process with episode worker, engine and driver."""
    rendering_s: float = 0.0
    """Part of them that rendered, tokenised and read."""
    runners_s: float = 0.0
    """CPU seconds of the processes with the program."""

    def row(self, name: str, virtual: Measured) -> dict[str, Any]:
        """A line of the table; ``virtual``: what the virtual clock says."""
        return {
            "run": name,
            "turns": self.turns,
            "95% over s": self.most_s,
            "all over s": self.wall_s,
            "throughput": virtual.most_s / self.most_s,
            "CPU of a turn ms": (self.cpu_s - self.rendering_s) / self.turns * 1e3,
            "rendering ms": self.rendering_s / self.turns * 1e3,
            "runners ms": self.runners_s / self.turns * 1e3,
        }


class TimedRecord:
    """A record of chats whose CPU seconds are added up. Its texts are short: nothing else runs in ``prompt``."""

    def __init__(self, chats: Chats, measured: Measured) -> None:
        self._record, self._measured = chats.record(), measured

    @contextmanager
    def _rendering(self) -> Iterator[None]:
        start = time.thread_time()
        try:
            yield
        finally:
            self._measured.rendering_s += time.thread_time() - start

    async def prompt(self, *args: Any) -> Any:
        with self._rendering():
            return await self._record.prompt(*args)

    def answered(self, *args: Any) -> Any:
        with self._rendering():
            return self._record.answered(*args)

    def rows(self) -> Any:
        with self._rendering():
            return self._record.rows()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._record, name)


async def play_here(job: EpisodeStart, on_ask: Turn, *, on_begin: Callable[[], object] | None = None) -> EpisodeEnd:
    """Run the program on the episode worker's own loop: for the virtual clock, which does not see other processes."""
    if on_begin is not None:
        on_begin()
    row = {"prompt": job.messages, **job.row}
    return EpisodeEnd(await user_code.play(row, Chat(on_ask, job, Tally(), "the program")))


async def nothing() -> None:
    """Close nothing: processes of the program outlive the episode worker, so that their CPU seconds can be read."""


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


async def play(workload: Workload, run: Callable[..., Any]) -> Measured:
    """Run all episodes of ``workload`` by ``run``, and measure."""
    (made, answer), measured = chats(), Measured()
    programs: Any = SimpleNamespace(run=run, close=nothing)
    limits = EpisodeLimits(max_length=100_000, max_turns=workload.turns)
    stop_ids = tuple(made.renderer.end_ids)
    hosting = Hosting(programs, lambda: TimedRecord(made, measured), limits, stop_ids=stop_ids)  # type: ignore[arg-type]
    loop, ends = asyncio.get_running_loop(), list[float]()
    async with local_episode_worker(SleepingEngine(seconds_of, answer), hosting=hosting) as worker:
        start, cpu = loop.time(), time.process_time()

        async def chain(first: int) -> None:
            for row in range(first, first + workload.episodes):
                extra, messages = {"steps": workload.steps(row)}, [said("user", "guess a number")]
                prompt = Prompt(0, row, 0, "bench", "", np.zeros(1, np.int32), extra=extra, messages=messages)
                async for group in worker.generate([Group(row, prompt, 1, SamplingParams(1000))]):
                    (episode,) = group.trajectories
                    measured.turns += episode.turns
                    if episode.failure is not None:
                        raise RunError(f"an episode has failed, which none should: {episode.failure}")
                    ends.append(loop.time() - start)

        async with asyncio.TaskGroup() as chains:
            for number in range(workload.chains):
                chains.create_task(chain(number * workload.episodes))
        measured.cpu_s, measured.wall_s = time.process_time() - cpu, loop.time() - start
    measured.most_s = sorted(ends)[int(0.95 * len(ends)) - 1]
    return measured


def really(workload: Workload, processes: int = 2) -> Measured:
    """Run ``workload`` in real time, its program in ``processes`` runners."""

    async def run() -> Measured:
        spec = ProgramSpec(program=f"{Path(user_code.__file__)}:play").resolved()
        runners = WorkerPool("runner", spec, processes=processes, at_once=None, stall_s=60.0, log_path=None)
        try:
            await runners.start()
            before = sum(map(cpu_seconds, descendants(os.getpid())))
            measured = await play(workload, runners.run)
            measured.runners_s = sum(map(cpu_seconds, descendants(os.getpid()))) - before
        finally:
            await runners.close()
        return measured

    return asyncio.run(run())


def virtually(workload: Workload) -> Measured:
    """Run ``workload`` on the virtual clock."""
    return run_virtual(play(workload, play_here))
