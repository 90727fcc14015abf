"""Simulated programs that meet troubles, by their seed: tries fail, are away or are lost, drift, ask in parallel."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from headway.agents.interface.program_chat import Ask
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, Message, TurnAnswer, TurnRequest
from headway.errors import EpisodeOver, HeadwayError, ProgramAway, ProgramFailed, RunnerLost
from headway.planner.profiles.job_profile import NumberProfile, ProgramProfile
from headway.planner.profiles.lengths import uniform_of
from headway.planner.simulation.simulated_prompts import SimulatedPrograms, said_in_tokens
from headway.runtime.task_groups import concurrently


@dataclass(frozen=True, slots=True)
class Troubles:
    """Shares of what goes wrong, and of what a plan leaves out."""

    failing: float = 0.0
    """Share of tries that fail for good, somewhere between two turns."""
    away: float = 0.0
    """Share of tries that meet something that is away for a time."""
    lost: float = 0.0
    """Share of tries whose worker ends; every second time it is the episode's own doing."""
    drifts: float = 0.0
    """Share of further tries that go on otherwise than the first one from some turn on."""
    parallel: float = 0.0
    """Share of turns that are asked for together with another one that goes on from the same context."""


NO_TROUBLES = Troubles()
NEVER = 1 << 62
"""Number of a turn that no episode reaches."""


class TroubledPrograms(SimulatedPrograms):
    """Programs that sit on ``workers`` workers, which `lose_worker` ends."""

    def __init__(self, profile: ProgramProfile, troubles: Troubles = NO_TROUBLES, *, workers: int = 1) -> None:
        super().__init__(profile)
        self._troubles = troubles
        self._workers = workers
        self._tries: Counter[str] = Counter()
        """Tries so far of the episodes that may be tried again, by name."""
        self._open: dict[asyncio.Task[object], int] = {}
        """Programs that have begun → their worker."""
        self._killed: dict[asyncio.Task[object], bool] = {}
        """Programs whose worker was ended, and whether it was their doing."""

    async def run(self, job: EpisodeStart, on_ask: Ask, *, on_begin: Callable[[], object] | None = None) -> EpisodeEnd:
        async with self._room:
            return await self._on_a_worker(job, on_ask, on_begin)

    def lose_worker(self, index: int) -> int:
        """End a worker, and with it the programs on it, one of which is to blame. Returns how many there were."""
        victims = [task for task, worker in self._open.items() if worker == index % self._workers]
        for place, task in enumerate(victims):
            if task not in self._killed:
                self._killed[task] = place == 0
                task.cancel()
        return len(victims)

    async def _on_a_worker(self, job: EpisodeStart, on_ask: Ask, on_begin: Callable[[], object] | None) -> EpisodeEnd:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = job.seed % self._workers
        attempt = self._tries[job.name]
        self._tries[job.name] += 1
        again = False
        if on_begin is not None:
            on_begin()
        try:
            return await _AttemptScript(self._profile, self._troubles, job, attempt).play(on_ask)
        except EpisodeOver:
            return EpisodeEnd()
        except (ProgramAway, RunnerLost):
            again = True
            raise
        except asyncio.CancelledError:
            if (culprit := self._killed.get(task)) is None or task.uncancel():
                raise
            again = True
            raise RunnerLost("its worker was ended by SIGKILL", end="SIGKILL", culprit=culprit) from None
        finally:
            del self._open[task]
            self._killed.pop(task, None)
            if not again:
                del self._tries[job.name]


class _AttemptScript:
    """One try of one program: everything that it will do."""

    def __init__(self, profile: ProgramProfile, troubles: Troubles, job: EpisodeStart, attempt: int) -> None:
        self._profile, self._troubles = profile, troubles
        self._job, self._attempt = job, attempt
        self._episode = self._uniform("episode")
        self._drifts_from = NEVER
        self._turns = self._count(profile.turns, "turns", 0) or 1
        if attempt and self._uniform("drifts", attempt) < troubles.drifts:
            self._drifts_from = int(self._uniform("drifts from", attempt) * self._turns)
        self._ends_at, self._trouble = self._turns, self._drawn_trouble()
        if self._trouble is not None:
            self._ends_at = int(self._uniform("ends at", attempt) * (self._turns + 1))

    async def play(self, ask: Ask) -> EpisodeEnd:
        """Ask for all turns, each followed by a step. Raises the trouble of this try."""
        messages: list[Message] = list(self._job.messages)
        turn = 0
        while turn < self._turns:
            if turn >= self._ends_at and self._trouble is not None:
                raise self._trouble
            beside = turn + 1 < self._turns and self._own("parallel", turn) < self._troubles.parallel
            answer = await (self._both(ask, messages, turn) if beside else ask(TurnRequest(messages)))
            turn += 2 if beside else 1
            await self._step(turn)
            said = said_in_tokens("tool", self._name(turn), self._count(self._profile.step_tokens, "tokens", turn))
            if self._own("forks", turn) < self._profile.forks:
                messages = [*self._job.messages, said]
            else:
                messages = [*messages, answer.message, said]
        if self._trouble is not None:
            raise self._trouble
        return EpisodeEnd()

    async def _both(self, ask: Ask, messages: list[Message], turn: int) -> TurnAnswer:
        """Ask for two turns at once; the episode continues from the first."""

        async def asked(messages: list[Message]) -> TurnAnswer:
            return await ask(TurnRequest(messages))

        other = said_in_tokens("user", f"beside {self._name(turn)}", 1)
        answer, _ = await concurrently([asked(messages), asked([*messages, other])])
        return answer

    async def _step(self, turn: int) -> None:
        seconds = self._profile.step_s.draw(episode=self._episode, own=self._own("step_s", turn))
        if seconds > 0:
            await asyncio.sleep(seconds)

    def _drawn_trouble(self) -> HeadwayError | None:
        troubles, luck = self._troubles, self._uniform("trouble", self._attempt)
        if luck < troubles.failing:
            return ProgramFailed("a simulated failure of the program")
        if (luck := luck - troubles.failing) < troubles.away:
            return ProgramAway("something is away for a time")
        if (luck := luck - troubles.away) < troubles.lost:
            culprit = self._uniform("whose", self._attempt) < 0.5
            return RunnerLost("its worker was ended by SIGKILL", end="SIGKILL", culprit=culprit)
        return None

    # ------------------------------------------------------------------------------------- draws

    def _count(self, number: NumberProfile, what: str, turn: int) -> int:
        return round(number.draw(episode=self._episode, own=self._own(what, turn)))

    def _own(self, what: str, turn: int) -> float:
        """A uniform number of one turn, which a further try that drifts draws anew."""
        return self._uniform(what, turn, self._attempt if turn >= self._drifts_from else 0)

    def _name(self, turn: int) -> str:
        return f"{turn} of try {self._attempt}" if turn >= self._drifts_from else f"{turn}"

    def _uniform(self, what: str, *key: int) -> float:
        return uniform_of(self._job.seed, zlib.crc32(what.encode()), *key)
