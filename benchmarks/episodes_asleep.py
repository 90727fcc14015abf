"""Episodes whose engine and environments only sleep: what is left is what a turn costs Headway.

    Workload ─▶ a thousand chains of episodes ─▶ EpisodeWorker ─▶ SleepingEngine
                                                     └─▶ Runners (processes), or the same program on the virtual clock

The same episodes run twice: in real time with runner processes, and on the virtual clock, where nothing costs anything.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import exp
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks import episodes_program
from headway.agents.adapters.program_loader import ProgramSpec
from headway.agents.chat.chat_template import ChatRenderer
from headway.agents.episodes.episode_limits import EpisodeLimits
from headway.agents.episodes.episode_tokens import Chats, Prompted
from headway.agents.episodes.episode_worker import local_episode_worker
from headway.agents.episodes.program_episode import Hosting, Programs, Turn
from headway.agents.interface.program_chat import Chat, Tally
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, TurnAnswer, TurnRequest, said
from headway.data.interfaces.episode_groups import GroupRequest
from headway.data.interfaces.rollout import FinishedCall, GenerateRequest, SamplingParams
from headway.data.types import FinishReason, Prompt, SampledTokens, TrajectoryId
from headway.errors import RunError
from headway.planner.simulation.virtual_clock import run_virtual
from headway.runtime.workers.worker_pool import Runners

T = TypeVar("T")

LEAST_S, MOST_S = 0.01, 10.0
SIGMA = 1.5
"""Standard deviation of the logarithm of a step's seconds: heavy-tailed."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAID = "the hidden number may be 42"
"""Text of every answer."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be done: chains of episodes, one behind the other, all chains at once."""

    chains: int = 1000
    episodes: int = 2
    """Number of episodes of each chain."""
    turns: int = 6
    median_s: float = 1.0
    """Median of a step's seconds."""
    call_s: float = 1.0
    """Mean seconds of a call of the policy."""

    def steps(self, row: int) -> list[float]:
        """Seconds of the steps of episode ``row``."""
        draws = random.Random(f"steps {row}")
        drawn = (self.median_s * exp(draws.gauss(0, SIGMA)) for _ in range(self.turns))
        return [min(max(seconds, LEAST_S), MOST_S) for seconds in drawn]

    def seconds(self, call: GenerateRequest) -> float:
        """Seconds that ``call`` takes."""
        return self.call_s * random.Random(f"{call.trajectory} {len(call.input_ids)}").uniform(0.5, 1.5)


class SleepingEngine:
    """Answers each call after a while, in batches of what is due in the same turn of the loop."""

    name, slots = "asleep", 1 << 20

    def __init__(self, seconds: Callable[[GenerateRequest], float], answer: Sequence[int]) -> None:
        self._seconds = seconds
        n = len(answer)
        self._tokens = SampledTokens(np.array(answer, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32))
        self._done: list[FinishedCall] = []
        self._any = asyncio.Event()

    async def submit(self, client: str, calls: Sequence[GenerateRequest]) -> None:
        loop = asyncio.get_running_loop()
        for call in calls:
            loop.call_later(self._seconds(call), self._finish, call.number)

    def _finish(self, number: int) -> None:
        now, tokens = asyncio.get_running_loop().time(), self._tokens
        reason = FinishReason.STOP
        self._done.append(FinishedCall(number, len(tokens.ids), [[0, 0]], reason, now, now, tokens))
        self._any.set()

    async def finished(self, client: str) -> AsyncIterator[Sequence[FinishedCall]]:
        while True:
            await self._any.wait()
            self._any.clear()
            done, self._done = self._done, []
            yield done

    async def abort(self, client: str, numbers: Sequence[int]) -> None: ...

    async def release(self, trajectories: Sequence[TrajectoryId]) -> None: ...


class TimedRecord:
    """A record of chats that adds up the CPU seconds of rendering, tokenising and reading."""

    spent_s = 0.0
    """Of all records of the process."""

    def __init__(self, chats: Chats) -> None:
        self._record = chats.record()

    async def prompt(self, request: TurnRequest, taken: Container[int] = ()) -> Prompted:
        start = time.thread_time()
        try:
            return await self._record.prompt(request, taken)  # its texts are short, so that nothing else runs meanwhile
        finally:
            TimedRecord.spent_s += time.thread_time() - start

    def answered(self, prompted: Prompted, request: TurnRequest, finished: FinishedCall, number: int) -> TurnAnswer:
        return self._timed(partial(self._record.answered, prompted, request, finished, number))

    def rows(self) -> Any:
        return self._timed(self._record.rows)

    @property
    def metrics(self) -> Mapping[str, float]:
        return self._record.metrics

    @staticmethod
    def _timed(work: Callable[[], T]) -> T:
        start = time.thread_time()
        try:
            return work()
        finally:
            TimedRecord.spent_s += time.thread_time() - start


class Here:
    """The program on the episode worker's own loop: for the virtual clock, which does not see other processes."""

    async def run(self, job: EpisodeStart, on_ask: Turn, *, on_begin: Callable[[], object] | None = None) -> EpisodeEnd:
        if on_begin is not None:
            on_begin()
        row = {"prompt": job.messages, **job.row}
        return EpisodeEnd(await episodes_program.run(row, Chat(on_ask, job, Tally(), "the program")))

    async def close(self) -> None: ...


@dataclass(slots=True)
class Measured:
    """What one way of running the workload took."""

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
    ends: list[float] = field(default_factory=list)


def chats() -> Chats:
    """Chats of a tokenizer of bytes, in the format of ChatML."""
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE)
    return Chats(ChatRenderer(fast, {}))


async def play(workload: Workload, programs: Programs, measured: Measured) -> Measured:
    """Run all episodes of ``workload`` by ``programs``, and measure."""
    made = chats()
    answer = [*made.renderer.encode(SAID).tolist(), min(made.renderer.end_ids)]
    limits = EpisodeLimits(max_length=100_000, max_turns=workload.turns)
    hosting = Hosting(programs, lambda: TimedRecord(made), limits, stop_ids=tuple(made.renderer.end_ids))
    engine = SleepingEngine(workload.seconds, answer)
    loop = asyncio.get_running_loop()
    async with local_episode_worker(engine, hosting=hosting) as worker:
        start, cpu, TimedRecord.spent_s = loop.time(), time.process_time(), 0.0

        async def chain(first: int) -> None:
            for row in range(first, first + workload.episodes):
                extra = {"steps": workload.steps(row)}
                messages = [said("user", "guess a number")]
                prompt = Prompt(0, row, 0, "bench", "", np.zeros(1, np.int32), extra=extra, messages=messages)
                async for group in worker.generate([GroupRequest(row, prompt, 1, SamplingParams(1000))]):
                    (episode,) = group.trajectories
                    measured.turns += episode.turns
                    if episode.failure is not None:
                        raise RunError(f"an episode has failed, which none should: {episode.failure}")
                    measured.ends.append(loop.time() - start)

        async with asyncio.TaskGroup() as chains:
            for number in range(workload.chains):
                chains.create_task(chain(number * workload.episodes))
        measured.cpu_s, measured.rendering_s = time.process_time() - cpu, TimedRecord.spent_s
        measured.wall_s = loop.time() - start
    measured.ends.sort()
    measured.most_s = measured.ends[int(0.95 * len(measured.ends)) - 1]
    return measured


async def _with_runners(workload: Workload, processes: int) -> Measured:
    spec = ProgramSpec(program=f"{Path(episodes_program.__file__)}:run").resolved()
    runners = Runners("runner", spec, processes=processes, at_once=None, stall_s=60.0, log_path=None)
    measured = Measured()
    try:
        await runners.start()
        before = _children_s()
        await play(workload, _Open(runners, measured, before), measured)
    finally:
        await runners.close()
    return measured


class _Open:
    """Runners that outlive the episode worker, so that what they spent can be asked for."""

    def __init__(self, runners: Runners, measured: Measured, before: float) -> None:
        self._runners, self._measured, self._before = runners, measured, before

    async def run(self, job: EpisodeStart, on_ask: Turn, *, on_begin: Callable[[], object] | None = None) -> EpisodeEnd:
        end: EpisodeEnd = await self._runners.run(job, on_ask, on_begin=on_begin)
        return end

    async def close(self) -> None:
        self._measured.runners_s = _children_s() - self._before


def _children_s() -> float:
    """CPU seconds of this process's children so far."""
    ticks = 0
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            with suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def really(workload: Workload, processes: int = 2) -> Measured:
    """Run ``workload`` in real time, its program in ``processes`` runners."""
    return asyncio.run(_with_runners(workload, processes))


def virtually(workload: Workload) -> Measured:
    """Run ``workload`` on the virtual clock."""
    return run_virtual(play(workload, Here(), Measured()))
