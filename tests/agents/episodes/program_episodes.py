"""Episodes of programs on the test's own loop, by a policy that answers after a while, and groups of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from headway.agents.episodes.episode_limits import EpisodeLimits
from headway.agents.episodes.episode_tokens import Chats
from headway.agents.episodes.episode_worker import EpisodeWorker, local_episode_worker
from headway.agents.episodes.program_episode import Hosting
from headway.agents.interface.program_chat import Ask
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, Message, TurnRequest, said
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import Completion, GenerateRequest, SamplingParams
from headway.data.types import FinishReason, Prompt, RowTokens, SampledTokens, TrajectoryId
from headway.errors import EpisodeOver, RunnerLost
from headway.planner.simulation.virtual_clock import run_virtual
from tests.agents.episodes.conftest import renderer_of

RENDERER = renderer_of("qwen2_5")
LIMITS = EpisodeLimits(max_length=400, max_turns=5, step_timeout_s=10, episode_timeout_s=100)
Program = Callable[[EpisodeStart, Ask], Awaitable[EpisodeEnd]]


class Policy:
    """An engine that answers each call, after ``seconds``, with a text of the call's number in its episode."""

    def __init__(self, name: str = "a", seconds: float = 1.0) -> None:
        self.name, self.slots, self.seconds, self.version = name, 8, seconds, 0
        self.calls: list[GenerateRequest] = []
        self.aborted: list[int] = []
        self.released: list[TrajectoryId] = []
        self.said: dict[int, SampledTokens] = {}
        """What each call was answered with."""
        self.dead = False
        self.says: Callable[[GenerateRequest], str] = lambda call: f"turn {len(call.input_ids)}"
        self._batches: asyncio.Queue[list[Completion]] = asyncio.Queue()

    async def submit(self, client: str, calls: Sequence[GenerateRequest]) -> None:
        for call in calls:
            self.calls.append(call)
            asyncio.get_running_loop().call_later(self.seconds, self._answer, call)

    async def finished(self, client: str) -> AsyncIterator[Sequence[Completion]]:
        while True:
            yield await self._batches.get()

    async def abort(self, client: str, numbers: Sequence[int]) -> None:
        self.aborted += numbers

    async def release(self, trajectories: Sequence[TrajectoryId]) -> None:
        self.released += trajectories

    def end(self, *calls: GenerateRequest, lengths: Sequence[int], version: int = 7) -> None:
        """End calls after so many tokens of ``version``, all at once."""
        self._batches.put_nowait(
            [
                Completion(call.number, n, [[0, version]], FinishReason.ABORTED, 0.0, 0.0)
                for call, n in zip(calls, lengths, strict=True)
            ]
        )

    def _answer(self, call: GenerateRequest) -> None:
        ids = np.append(RENDERER.encode(self.says(call)), min(RENDERER.end_ids)).astype(np.int32)
        reason = FinishReason.STOP if len(ids) <= call.sampling.max_tokens else FinishReason.LENGTH
        ids = ids[: call.sampling.max_tokens]
        n, version, now = len(ids), self.version, asyncio.get_running_loop().time()
        tokens = SampledTokens(ids, -np.arange(n, dtype=np.float32), np.full(n, version, np.int32))
        self.said[call.number] = tokens
        if not self.dead:
            self._batches.put_nowait([Completion(call.number, n, [[0, version]], reason, now, now, tokens)])

    def dies(self) -> None:
        """Answer nothing any more."""
        self.dead = True


class Slow(Policy):
    """A policy whose first call takes 5 seconds, and all others 1."""

    async def submit(self, client: str, calls: Sequence[GenerateRequest]) -> None:
        for call in calls:
            self.calls.append(call)
            seconds = 5.0 if len(self.calls) == 1 else 1.0
            asyncio.get_running_loop().call_later(seconds, self._answer, call)


class Here:
    """Runs programs on the test's own loop; ``lose`` names the tries whose worker dies, and after how many turns."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.starts: list[EpisodeStart] = []
        self.lost: dict[int, tuple[int, bool | None]] = {}
        """Number of the try → turns after which its worker dies, and whether it was this program's doing."""

    async def run(self, job: EpisodeStart, on_ask: Ask, *, on_begin: Callable[[], object] | None = None) -> EpisodeEnd:
        self.starts.append(job)
        turns, culprit = self.lost.get(len(self.starts), (10**9, None))
        asked = 0
        if on_begin is not None:
            on_begin()

        async def ask(request: TurnRequest) -> Any:
            nonlocal asked
            if asked == turns:
                raise RunnerLost("its worker was killed by SIGKILL", culprit=culprit)
            asked += 1
            return await on_ask(request)

        return await self.program(job, ask)

    async def close(self) -> None: ...


async def talk(start: EpisodeStart, ask: Ask, turns: int = 3) -> EpisodeEnd:
    """Go on for ``turns`` turns, or until a limit; the reward is the number of answers."""
    chat: list[Message] = list(start.messages)
    answers = 0
    try:
        for _ in range(turns):
            answer = await ask(TurnRequest(list(chat)))
            answers += 1
            chat += [answer.message, said("user", "go on")]
    except EpisodeOver:
        pass
    return EpisodeEnd(reward=float(answers))


async def slow(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
    """A step of 8 seconds between two turns."""
    answer = await ask(TurnRequest(start.messages))
    await asyncio.sleep(8)
    await ask(TurnRequest([*start.messages, answer.message, said("user", "go on")]))
    return EpisodeEnd(1.0)


def request(n: int = 1, number: int = 0) -> Group:
    prompt = Prompt(0, 7, 0, "test", "begin", np.zeros(1, np.int32), answer=5, messages=[said("user", "begin")])
    return Group(number, prompt, n, SamplingParams(50))


def hosting(programs: Here, limits: EpisodeLimits = LIMITS) -> Hosting:
    stop_ids = tuple(RENDERER.end_ids)
    return Hosting(programs, Chats(RENDERER).new_episode, limits, stop_ids=stop_ids)


def made(
    program: Program | Here,
    policies: Sequence[Policy] | None = None,
    *,
    limits: EpisodeLimits = LIMITS,
    n: int = 1,
    meanwhile: Callable[[EpisodeWorker], Awaitable[None]] | None = None,
) -> Group:
    """One group of ``n`` episodes, on the virtual clock."""
    programs = program if isinstance(program, Here) else Here(program)

    async def main() -> Group:
        async with local_episode_worker(*(policies or [Policy()]), hosting=hosting(programs, limits)) as worker:
            beside = None if meanwhile is None else asyncio.ensure_future(meanwhile(worker))
            (group,) = [group async for group in worker.generate([request(n)])]
            if beside is not None:
                await beside
            check_trained_tokens(group)
            return group

    return run_virtual(main())


def check_trained_tokens(group: Group) -> None:
    """Check that metadata tells how many tokens an episode trains: estimators that see no tokens rely on it.

    Groups with an episode that was aborted are not trained.
    """
    if group.tokens is None or any(one.finish_reason is FinishReason.ABORTED for one in group.trajectories):
        return
    for episode in group.trajectories:
        if episode.failure is None:
            rows = [group.tokens[at.index] for at in episode.rows]
            assert sum(row.loss_mask.sum() for row in rows) == episode.length


def trained(row: RowTokens) -> list[int]:
    return row.ids[row.loss_mask].tolist()
