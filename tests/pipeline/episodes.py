"""Random runs whose episodes have several turns: simulated programs, and engines whose tokens are told apart.

Every sampled token has an id of its own, so that it can be followed from the call that sampled it into the rows that
are trained. Contexts have other ids.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, ClassVar, NamedTuple

import numpy as np
from hypothesis import strategies as st

from headway.config.schema import Config
from headway.data.types import FinishReason, RowTokens, SampledTokens, TrajectoryId
from headway.episodes.hosting import limits_of
from headway.episodes.programs import Hosting, Turn
from headway.episodes.record import Prompted, row_tokens
from headway.episodes.transcript import Transcript
from headway.interfaces import Call, FinishedCall
from headway.programs.messages import EpisodeEnd, EpisodeStart, Message, TurnAnswer, TurnRequest, said
from headway.simulate.numbers import RecordedNumber
from headway.simulate.program_profile import ProgramProfile
from headway.simulate.programs import SimulatedPrograms, Troubles
from tests.pipeline.cases import Case, Fault, cases, moments
from tests.pipeline.fakes import FakeRollout
from tests.pipeline.scenario import Scenario

FIRST_SAID = 1 << 30
"""Ids of tokens that nobody sampled begin here."""


class Token(NamedTuple):
    """Where a sampled token is from."""

    trajectory: TrajectoryId
    replica: str
    version: int


class TellingRollout(FakeRollout):
    """A replica that says what it sampled: ids that count up, over all replicas of a run."""

    ids = count(1)
    """Made anew for each run."""
    sampled: ClassVar[dict[int, Token]] = {}
    """By id. Made anew for each run."""

    def __init__(self, name: str, **arguments: Any) -> None:
        super().__init__(name, **arguments)
        self._calls: dict[int, Call] = {}

    async def submit(self, client: str, calls: Sequence[Call]) -> None:
        self._calls.update((call.number, call) for call in calls)
        await super().submit(client, calls)

    async def finished(self, client: str) -> AsyncIterator[Sequence[FinishedCall]]:
        async for batch in super().finished(client):
            yield [replace(finished, tokens=self._tokens(finished)) for finished in batch]

    def _tokens(self, finished: FinishedCall) -> SampledTokens:
        trajectory, ids = self._calls.pop(finished.number).trajectory, type(self).ids
        versions = np.empty(finished.length, np.int32)
        for start, version in finished.version_spans:
            versions[start:] = version
        sampled = [next(ids) for _ in range(finished.length)]
        for id, version in zip(sampled, versions.tolist(), strict=True):
            self.sampled[id] = Token(trajectory, self.name, version)
        return SampledTokens(np.array(sampled, np.int32), np.zeros(finished.length, np.float32), versions)


class IdRecord:
    """A record of real ids: a transcript, whose messages are turned into ids by what they say."""

    def __init__(self) -> None:
        self._transcript = Transcript()

    def prompt(self, request: TurnRequest) -> Prompted:
        ids = np.concatenate([_ids(message) for message in request.messages])
        return Prompted(ids, self._transcript.next_key(ids))

    def answered(self, prompted: Prompted, request: TurnRequest, finished: FinishedCall) -> TurnAnswer:
        assert finished.tokens is not None
        self._transcript.add(prompted.ids, finished.tokens)
        reason = "stop" if finished.finish_reason is FinishReason.STOP else "length"
        return TurnAnswer("", "", {**said("assistant", ""), "ids": finished.tokens.ids}, finish_reason=reason)

    def rows(self) -> list[RowTokens]:
        return [row_tokens(row) for row in self._transcript.rows()]

    @property
    def metrics(self) -> Mapping[str, float]:
        return {"forks": self._transcript.forks}


def _ids(message: Message) -> np.ndarray[Any, Any]:
    if "ids" in message:
        return np.asarray(message["ids"], np.int32)
    text = message["content"]
    first = FIRST_SAID + zlib.crc32(text.encode()) % (1 << 20) * 64
    return np.arange(first, first + message.get("tokens", 3), dtype=np.int32)


class WatchedPrograms(SimulatedPrograms):
    """Simulated programs that remember what each try of an episode was answered."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.answers: dict[str, list[list[int]]] = {}
        """Episode, by its name → the ids of all answers, for each try."""
        self.most_open = 0
        self.open = 0

    async def run(self, job: EpisodeStart, on_ask: Turn, *, on_begin: Callable[[], object] | None = None) -> EpisodeEnd:
        answers: list[int] = []

        async def ask(request: TurnRequest) -> TurnAnswer:
            answer = await on_ask(request)
            answers.extend(answer.message["ids"].tolist())
            return answer

        def begin() -> None:
            self.answers.setdefault(job.name, []).append(answers)
            self.open += 1
            self.most_open = max(self.open, self.most_open)
            if on_begin is not None:
                on_begin()

        before = len(self.answers.get(job.name, []))
        try:
            return await super().run(job, ask, on_begin=begin)
        finally:
            self.open -= len(self.answers.get(job.name, [])) - before


@dataclass(frozen=True, slots=True)
class EpisodeCase:
    """One small run with programs."""

    case: Case
    programs: ProgramProfile
    troubles: Troubles
    runners: int
    drain: str
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Values of the section ``rollout``."""

    def scenario(self) -> Scenario:
        scenario = self.case.scenario()
        scenario.sections["rollout"] = {"program": "game.py:play", **self.limits}
        if self.case.on_update == "drain":
            scenario.async_training["drain"] = self.drain
        TellingRollout.ids, TellingRollout.sampled = count(1), {}
        scenario.rollout, scenario.hosting = TellingRollout, self._hosting
        return scenario

    def _hosting(self, config: Config) -> Hosting:
        programs = WatchedPrograms(self.programs, self.troubles, runners=self.runners)
        return Hosting(programs, IdRecord, limits_of(config), seed=config.run.seed)


NO_TROUBLES = Troubles()
SOME = Troubles(failing=0.1, away=0.1, lost=0.1, drifts=0.5, parallel=0.2)
MANY = Troubles(failing=0.25, away=0.25, lost=0.25, drifts=0.5, parallel=0.5)


def recorded(*values: float) -> RecordedNumber:
    """One of these. Seconds are multiples of a tick, as all are in these runs."""
    return RecordedNumber(kind="recorded", values=list(values))


@st.composite
def episode_cases(draw: st.DrawFn, /, *, whats: Sequence[str] = (), most: int = 3, **fixed: Any) -> EpisodeCase:
    """Cases with programs, in which up to ``most`` things of the kinds in ``whats`` happen at random moments.

    ``fixed``: fields of `EpisodeCase`, or of its `Case`.
    """

    def pick(name: str, values: Sequence[Any]) -> Any:
        return fixed[name] if name in fixed else draw(st.sampled_from(values))

    faults: list[Fault] = []
    if whats:
        fault = st.builds(Fault, moments, st.sampled_from(whats), st.integers(0, 4))
        faults = draw(st.lists(fault, min_size=1, max_size=most))
    joins = any(fault.what == "joins" for fault in faults)
    machines = {"shared": False, "overlapped": False} if joins else {}
    own = {"troubles", "drain", "programs", "limits"}
    case_fields = {name: value for name, value in fixed.items() if name not in own}
    # Steps of a program that is run again may take long, and move nothing.
    defaults = {"nonfinite": 0.0, "longest": draw(st.sampled_from([1, 8, 20])), "stall_timeout_s": 1e6}
    case = draw(cases(**{**machines, **defaults, **case_fields, "faults": tuple(faults)}))
    programs = ProgramProfile(
        turns=pick("turns", [recorded(1), recorded(2), recorded(1, 2, 5), recorded(1, 3, 3, 8)]),
        step_s=pick("step_s", [recorded(0), recorded(0.25), recorded(0, 1, 1, 8), recorded(0.125, 0.5, 2, 40)]),
        step_tokens=pick("step_tokens", [recorded(0), recorded(1), recorded(0, 3, 12)]),
        forks=pick("forks", [0.0, 0.2, 0.6]),
        environments=pick("environments", [None, None, 2, 5]),
    )
    limits = {
        "max_turns": pick("max_turns", [20, 20, 2]),
        "step_timeout_s": pick("step_timeout_s", [60.0, 60.0, 4.0]),
        "train_on_limit": pick("train_on_limit", [("turns", "tokens"), ("turns", "tokens", "step", "time"), ()]),
        "episode_retries": pick("episode_retries", [0, 2, 5]),
        "min_episodes": pick("min_episodes", [None, 1]),
    }
    return EpisodeCase(
        case=case,
        programs=programs,
        troubles=pick("troubles", [NO_TROUBLES, SOME, MANY]),
        runners=draw(st.integers(1, 3)),
        drain=pick("drain", ["episode", "turn"]),
        limits=limits,
    )
