"""Random runs whose episodes have several turns: simulated programs, and engines whose tokens are told apart.

Every sampled token has an id of its own, so that it can be followed from the call that sampled it into the rows that
are trained. Contexts have other ids.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from headway.agents.episodes.episode_tokens import TokenRows, TurnContext, call_key
from headway.agents.episodes.program_episode import Hosting
from headway.agents.episodes.program_workers import limits_of
from headway.agents.interface.program_chat import Ask
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, Message, TurnAnswer, TurnRequest, said
from headway.config.schema import Config
from headway.data.interfaces.rollout import Completion, GenerateRequest
from headway.data.types import FinishReason, RowTokens, SampledTokens, TrajectoryId
from headway.planner.profiles.job_profile import ProgramProfile, RecordedNumber
from tests.pipeline.cases import Case, cases, faulty
from tests.pipeline.fakes import FakeRollout
from tests.pipeline.scenario import Scenario
from tests.planner.troubled_programs import NO_TROUBLES, TroubledPrograms, Troubles

FIRST_SAID = 1 << 30
"""Ids of tokens that nobody sampled begin here."""


class Token(NamedTuple):
    """Where a sampled token is from."""

    trajectory: TrajectoryId
    version: int


class TellingRollout(FakeRollout):
    """A replica that notes what it sampled in ``told``, which all replicas of a run share. A token's id is its place
    there."""

    def __init__(self, name: str, *, told: list[Token], **arguments: Any) -> None:
        super().__init__(name, **arguments)
        self.told = told
        self.answered: list[Completion] = []
        """Finished calls with at least one token."""
        self._calls: dict[tuple[str, int], GenerateRequest] = {}

    async def submit(self, client: str, calls: Sequence[GenerateRequest]) -> None:
        self._calls.update(((client, call.number), call) for call in calls)
        await super().submit(client, calls)

    async def finished(self, client: str) -> AsyncIterator[Sequence[Completion]]:
        async for batch in super().finished(client):
            yield [self._with_tokens(client, finished) for finished in batch]

    @property
    def open_calls(self) -> int:
        """Number of calls that it never finished."""
        return len(self._calls)

    def _with_tokens(self, client: str, finished: Completion) -> Completion:
        trajectory = self._calls.pop((client, finished.number)).trajectory
        versions = np.empty(finished.length, np.int32)
        for start, version in finished.version_spans:
            versions[start:] = version
        ids = np.arange(len(self.told), len(self.told) + finished.length, dtype=np.int32)
        self.told += [Token(trajectory, version) for version in versions.tolist()]
        if finished.length:
            self.answered.append(finished)
        return replace(finished, tokens=SampledTokens(ids, np.zeros(finished.length, np.float32), versions))


class IdRecord:
    """A record of real ids: a transcript, whose messages are turned into ids by what they say."""

    def __init__(self) -> None:
        self._rows = TokenRows()

    async def prompt(self, request: TurnRequest, taken: Container[int] = ()) -> TurnContext:
        ids = context_of(request)
        return TurnContext(ids, call_key(ids, taken))

    def answered(self, prompted: TurnContext, request: TurnRequest, finished: Completion, number: int) -> TurnAnswer:
        assert finished.tokens is not None
        self._rows.add(prompted.ids, finished.tokens, number)
        reason = "stop" if finished.finish_reason is FinishReason.STOP else "length"
        return TurnAnswer("", "", {**said("assistant", ""), "ids": finished.tokens.ids}, finish_reason=reason)

    def rows(self) -> list[RowTokens]:
        return self._rows.rows()

    @property
    def metrics(self) -> Mapping[str, float]:
        return {"forks": self._rows.forks}


def context_of(request: TurnRequest) -> np.ndarray[Any, Any]:
    return np.concatenate([_ids(message) for message in request.messages])


def _ids(message: Message) -> np.ndarray[Any, Any]:
    if "ids" in message:
        return np.asarray(message["ids"], np.int32)
    text = message["content"]
    first = FIRST_SAID + zlib.crc32(text.encode()) % (1 << 20) * 64
    return np.arange(first, first + message.get("tokens", 3), dtype=np.int32)


@dataclass(slots=True)
class Try:
    """One run of a program, as the program saw it."""

    answers: list[tuple[bytes, list[int]]] = field(default_factory=list)
    """(context, sampled ids) of each answered turn, in the order in which the answers came."""
    end: type[BaseException] | None = None
    """What the program raised, or was ended by; None where it ended by itself."""
    over: bool = False

    @property
    def ids(self) -> list[int]:
        return [id for _, ids in self.answers for id in ids]


class WatchedPrograms(TroubledPrograms):
    """Simulated programs that remember each try of each episode."""

    def __init__(self, told: list[Token], *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.told = told
        """What all replicas sampled."""
        self.tries: dict[str, list[Try]] = defaultdict(list)
        """By the episode's name."""
        self.lost = 0
        """Number of programs that were lost with their runners."""

    def lose_worker(self, index: int) -> int:
        victims = super().lose_worker(index)
        self.lost += victims
        return victims

    async def run(self, job: EpisodeStart, on_ask: Ask, *, on_begin: Callable[[], object] | None = None) -> EpisodeEnd:
        one = Try()

        async def ask(request: TurnRequest) -> TurnAnswer:
            answer = await on_ask(request)
            one.answers.append((context_of(request).tobytes(), answer.message["ids"].tolist()))
            return answer

        def begin() -> None:
            self.tries[job.name].append(one)
            if on_begin is not None:
                on_begin()

        try:
            return await super().run(job, ask, on_begin=begin)
        except BaseException as error:
            one.end = type(error)
            raise
        finally:
            one.over = True

    def last(self, episode: TrajectoryId) -> Try:
        """The last try of ``episode``; an empty one where it never began."""
        return self.tries.get(f"episode {tuple(episode)}", [Try()])[-1]


@dataclass(frozen=True, slots=True)
class EpisodeCase:
    """One small run with programs."""

    case: Case
    programs: ProgramProfile
    troubles: Troubles
    runners: int
    drain: str
    limits: Mapping[str, Any]
    """Values of the section ``agent``."""
    max_length: int
    """Most tokens of a conversation."""
    retries: int

    def scenario(self) -> Scenario:
        scenario, told = self.case.scenario(), list[Token]()
        scenario.sections["agent"] = {"program": "game.py:play", **self.limits}
        scenario.sections["reports"] = {"activity_interval_s": 100.0}
        scenario.sections["data"] = {"max_prompt_length": 8, "max_response_length": self.max_length - 8}
        if self.case.on_update == "drain":
            scenario.async_training["drain"] = self.drain
        scenario.rollout, scenario.engine["told"] = TellingRollout, told
        scenario.hosting = lambda config: self._hosting(config, told)
        return scenario

    def _hosting(self, config: Config, told: list[Token]) -> Hosting:
        programs = WatchedPrograms(told, self.programs, self.troubles, workers=self.runners)
        return Hosting(programs, IdRecord, replace(limits_of(config), retries=self.retries), seed=config.run.seed)


SOME = Troubles(failing=0.1, away=0.1, lost=0.1, drifts=0.5, parallel=0.2)
MANY = Troubles(failing=0.25, away=0.25, lost=0.25, drifts=0.5, parallel=0.5)


def recorded(*values: float) -> RecordedNumber:
    """One of these. Seconds are multiples of a tick, as all are in these runs."""
    return RecordedNumber(kind="recorded", values=list(values))


OWN = {"troubles", "drain", "turns", "step_s", "step_tokens", "forks", "environments", "max_turns", "step_timeout_s"}
OWN |= {"train_on_limit", "retries", "min_episodes", "max_length"}


@st.composite
def episode_cases(draw: st.DrawFn, /, *whats: str, most: int = 3, **fixed: Any) -> EpisodeCase:
    """Cases with programs, in which up to ``most`` things of the kinds in ``whats`` happen at random moments.

    ``fixed``: what is not drawn, of these cases or of the `Case` in them.
    """

    def pick(name: str, values: Sequence[Any]) -> Any:
        return fixed[name] if name in fixed else draw(st.sampled_from(values))

    defaults = {
        "shape": draw(st.sampled_from([(1, 1, 1), (1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 1, 2), (1, 1, 3)])),
        "versions": draw(st.integers(1, 4)),
        "longest": draw(st.sampled_from([1, 8, 20])),
        "stall_timeout_s": 1e6,  # steps of a program that is run again may take long, and move nothing
    }
    of_case = {**defaults, **{name: value for name, value in fixed.items() if name not in OWN}}
    case = draw(faulty(*whats, most=most, **of_case) if whats else cases(**of_case))
    programs = ProgramProfile(
        turns=pick("turns", [recorded(1), recorded(2), recorded(1, 2, 5), recorded(1, 3, 3, 6)]),
        step_s=pick("step_s", [recorded(0), recorded(0.25), recorded(0, 1, 1, 8), recorded(0.125, 0.5, 2, 20)]),
        step_tokens=pick("step_tokens", [recorded(0), recorded(1), recorded(0, 3, 12)]),
        forks=pick("forks", [0.0, 0.2, 0.6]),
        environments=pick("environments", [None, None, 2, 5]),
    )
    limits = {
        "max_turns": pick("max_turns", [20, 20, 2]),
        "step_timeout_s": pick("step_timeout_s", [60.0, 60.0, 4.0]),
        "train_on_limit": pick("train_on_limit", [("turns", "tokens"), ("turns", "tokens", "step", "time"), ()]),
        "min_episodes": pick("min_episodes", [None, 1]),
    }
    return EpisodeCase(
        case=case,
        programs=programs,
        troubles=pick("troubles", [NO_TROUBLES, SOME, MANY]),
        runners=draw(st.integers(1, 3)),
        drain=pick("drain", ["episode", "turn"]),
        limits=limits,
        max_length=pick("max_length", [10_000, 10_000, 40]),
        retries=pick("retries", [0, 2, 5]),
    )
