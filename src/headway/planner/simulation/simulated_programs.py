"""Programs that only take time: turns and steps are drawn, and there is no user code.

    run ─▶ waits for an environment ─▶ turn, step, turn, step … ─▶ EpisodeEnd

Every draw is a hash of the episode's seed, which is one of (run's seed, trajectory), and of what is drawn: the same
seed gives the same events.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress

import numpy as np

from headway.agents.episodes.program_episode import Turn
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, TurnRequest
from headway.data.interfaces.episode_groups import Scores
from headway.data.types import Conversation, Prompt
from headway.errors import EpisodeOver
from headway.planner.profiles.job_profile import NumberProfile, ProgramProfile, RewardProfile, draw
from headway.planner.profiles.lengths import uniform_of
from headway.planner.simulation.simulated_prompts import said_in_tokens


class SimulatedPrograms:
    """`headway.agents.episodes.program_episode.Programs` on the clock of the running loop.

    Messages are those of `headway.planner.simulation.simulated_prompts`.
    """

    def __init__(self, profile: ProgramProfile) -> None:
        self._profile = profile
        self._room: AbstractAsyncContextManager[object] = nullcontext()
        if profile.environments is not None:
            self._room = asyncio.Semaphore(profile.environments)

    async def start(self) -> None:
        """Start nothing: there is no user code."""

    async def run(self, job: EpisodeStart, on_ask: Turn, *, on_begin: Callable[[], object] | None = None) -> EpisodeEnd:
        """See `headway.agents.episodes.program_episode.Programs.run`."""
        async with self._room:
            if on_begin is not None:
                on_begin()
            with suppress(EpisodeOver):
                await self._play(job, on_ask)
            return EpisodeEnd()

    async def close(self) -> None:
        """Do nothing: programs are their callers' tasks."""

    async def _play(self, job: EpisodeStart, ask: Turn) -> None:
        """Ask for all turns, each followed by a step."""

        def uniform(what: str, *key: int) -> float:
            return uniform_of(job.seed, zlib.crc32(what.encode()), *key)

        def drawn(number: NumberProfile, what: str, turn: int) -> float:
            return draw(number, episode=episode, own=uniform(what, turn, 0))

        profile, episode, messages = self._profile, uniform("episode"), list(job.messages)
        for turn in range(1, (round(drawn(profile.turns, "turns", 0)) or 1) + 1):
            answer = await ask(TurnRequest(messages))
            if (seconds := drawn(profile.step_s, "step_s", turn)) > 0:
                await asyncio.sleep(seconds)
            said = said_in_tokens("tool", str(turn), round(drawn(profile.step_tokens, "tokens", turn)))
            begins_again = uniform("forks", turn, 0) < profile.forks
            messages = [*job.messages, said] if begins_again else [*messages, answer.message, said]


class SimulatedReward:
    """A `RewardFn`: ``workers`` servers, first come, first served.

    Groups to be filtered get rewards that are all 0, all others 0 and 1 in turn. A prompt's ``answer`` says which ones
    these are; where it is None, the share ``filtered`` of them, by seed, epoch, row and attempt alone.
    """

    def __init__(self, profile: RewardProfile, seed: int) -> None:
        self._seconds = profile.seconds
        self._filtered = profile.filtered
        self._seed = seed
        self._workers = asyncio.Semaphore(profile.workers)
        self._scores: dict[tuple[int, bool], Scores] = {}

    async def score(
        self, prompt: Prompt, responses: Sequence[str], conversations: Sequence[Conversation] | None = None
    ) -> Scores:
        if self._seconds > 0:
            async with self._workers:
                await asyncio.sleep(self._seconds)
        filtered = bool(prompt.answer)
        if prompt.answer is None:
            key = self._seed, zlib.crc32(b"reward"), prompt.epoch, prompt.row, prompt.attempt
            filtered = uniform_of(*key) < self._filtered
        return self._shared(len(responses), varied=not filtered)

    async def close(self) -> None: ...

    def _shared(self, n: int, *, varied: bool) -> Scores:
        """The scores of n answers, as one array [n] for all groups: it cannot be written to."""
        if (scores := self._scores.get((n, varied))) is None:
            rewards = np.arange(n, dtype=np.float32) % 2 if varied else np.zeros(n, np.float32)
            rewards.setflags(write=False)
            scores = self._scores[n, varied] = Scores(rewards)
        return scores
