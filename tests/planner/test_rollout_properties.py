"""A simulated replica against a reference that samples token by token, and what holds under any commands."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import strategies as st

from headway.data.interfaces.rollout import Completion, EngineStats, GenerateRequest, OnUpdate, Priority
from headway.data.types import FinishReason
from headway.events import Span
from headway.planner.profiles.lengths import lengths_id
from headway.planner.simulation.simulated_rollout import SimulatedRollout
from headway.planner.simulation.virtual_clock import run_virtual
from tests.pipeline.cases import for_each
from tests.planner.replica import calls, generate, in_order, load, now, replica
from tests.tiers import a_share_and_all

PROMPT = 3


@dataclass(frozen=True)
class Job:
    """Answers that are all submitted at time 0; prefilling costs nothing."""

    lengths: list[int]
    slots: int
    decode: list[tuple[int, float]]
    kv_token_s: float
    kv_tokens: int | None
    pauses: list[tuple[float, float]]
    """(seconds of decoding before it, seconds that it takes); each ends with new weights."""


@dataclass
class Answer:
    index: int
    length: int
    tokens: int = 0
    spans: list[list[int]] = field(default_factory=list)
    started: float = 0.0
    finished: float = 0.0


# ---------------------------------------------------------------------------------------------- the reference


def token_by_token(job: Job) -> tuple[list[Answer], float]:
    """The same job as a loop over decode steps, and the slot-seconds that it took.

    A step that a pause falls into is lost. Before a step that the cache cannot hold the youngest gives way.
    """
    answers = [Answer(index, length) for index, length in enumerate(job.lengths)]
    waiting, active = deque(answers), list[Answer]()
    pauses = deque(job.pauses)
    time, resumed, version, slot_seconds = 0.0, 0.0, 0, 0.0

    def cached() -> int:
        return sum(PROMPT + answer.tokens for answer in active)

    while waiting or active:
        while job.kv_tokens is not None and len(active) > 1 and cached() + len(active) > job.kv_tokens:
            youngest = max(active, key=lambda answer: answer.index)
            active.remove(youngest)
            waiting.appendleft(youngest)
        while waiting and len(active) < job.slots:
            needed = cached() + PROMPT + waiting[0].tokens + len(active) + 1
            if job.kv_tokens is not None and active and needed > job.kv_tokens:
                break
            active.append(waiting.popleft())
        step = curve(job.decode, len(active)) + job.kv_token_s * cached()
        if pauses and resumed + pauses[0][0] < time + step * (1 - 1e-6):
            after, seconds = pauses.popleft()
            slot_seconds += len(active) * (resumed + after - time)
            time = resumed = resumed + after + seconds
            version += 1
            continue
        time += step
        slot_seconds += len(active) * step
        for answer in list(active):
            if not answer.tokens:
                answer.started = time
            if not answer.spans or answer.spans[-1][1] != version:
                answer.spans.append([answer.tokens, version])
            answer.tokens += 1
            if answer.tokens == answer.length:
                answer.finished = time
                active.remove(answer)
    return answers, slot_seconds


def curve(points: Sequence[tuple[int, float]], active: int) -> float:
    below = [point for point in points if point[0] <= active]
    above = [point for point in points if point[0] >= active]
    if not below or len(points) == 1:
        return points[0][1]
    (fewer, quicker), (more, slower) = (below[-1], above[0]) if above else points[-2:]
    return quicker if fewer == more else quicker + (slower - quicker) * (active - fewer) / (more - fewer)


async def on_the_engine(job: Job) -> tuple[list[Completion], EngineStats]:
    engine = replica(
        lambda row, k: job.lengths[row],
        slots=job.slots,
        decode=job.decode,
        kv_token_s=job.kv_token_s,
        kv_tokens=job.kv_tokens,
    )
    rows = [calls(row, prompt_tokens=PROMPT) for row in range(len(job.lengths))]
    generating = asyncio.ensure_future(generate(engine, *rows))
    for version, (after, seconds) in enumerate(job.pauses, start=1):
        await asyncio.sleep(after)
        await engine.pause(OnUpdate.INTERRUPT if version % 2 else OnUpdate.KEEP)
        await load(engine, version)
        await asyncio.sleep(seconds)
        await engine.resume()
    return in_order(await generating), await engine.stats()


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    seconds = st.floats(0.01, 2, allow_subnormal=False)
    actives = sorted(draw(st.sets(st.integers(1, 8), min_size=1, max_size=3)))
    steps = sorted(draw(st.lists(seconds, min_size=len(actives), max_size=len(actives))))
    return Job(
        lengths=draw(st.lists(st.integers(1, 40), min_size=1, max_size=20)),
        slots=draw(st.integers(1, 8)),
        decode=list(zip(actives, steps, strict=True)),
        kv_token_s=draw(st.sampled_from([0.0, 1e-5, 1e-2])),
        kv_tokens=draw(st.none() | st.integers(5, 120)),
        pauses=draw(st.lists(st.tuples(st.floats(0, 20), st.floats(0.1, 5)), max_size=4)),
    )


@a_share_and_all
def test_every_answer_goes_as_it_does_token_by_token(share: float):
    def check(job: Job) -> None:
        expected, slot_seconds = token_by_token(job)
        actual, stats = run_virtual(on_the_engine(job))
        for reference, done in zip(expected, actual, strict=True):
            assert done.length == reference.length
            assert done.finished == pytest.approx(reference.finished, rel=1e-6)
            assert done.started == pytest.approx(reference.started, rel=1e-6)
            assert done.version_spans == reference.spans
        assert stats.slot_seconds == pytest.approx(slot_seconds, rel=1e-6)
        assert stats.generated_tokens == sum(job.lengths)

    for_each(jobs(), share * 300, check)


# ---------------------------------------------------------------------------------------------- any commands


class Session:
    """Random commands to one replica, and everything that they brought about. One updater, as in a pipeline."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.limited = self.random.random() < 0.5
        self.patient = seed % 3 == 0
        """No iterator is left early."""
        self.engine: SimulatedRollout = replica(
            self.length,
            slots=self.random.randint(1, 6),
            decode=[(1, 0.2), (4, 0.5)],
            kv_token_s=self.random.choice([0.0, 1e-3]),
            kv_tokens=60 if self.limited else None,
            prefill_s=self.random.choice([0.0, 0.3]),
            prefill_token_s=self.random.choice([0.0, 0.05]),
            load_s=0.5,
        )
        self.loaded: list[tuple[float, int]] = [(0.0, 0)]
        """(time, version) of every load."""
        self.still: list[Span] = []
        """From the end of each pause to its `resume`."""
        self.asked: dict[str, set[int]] = {}
        """Numbers of all calls by client."""
        self.lengths: dict[int, int] = {}
        """Tokens that each call will have, by its number."""
        self.got: dict[str, list[Completion]] = {}
        self.left: set[str] = set()
        """Clients that left before they had everything."""
        self.stats: list[EngineStats] = []
        self._rows = iter(range(10_000))

    def length(self, row: int, k: int) -> int:
        return 1 + (row * 7 + k * 5) % 23

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            consuming = [tasks.create_task(self.consume()) for _ in range(8)]
            tasks.create_task(self.update())
            for _ in range(30):
                await self.a_while()
                match self.random.randrange(4):
                    case 0 if self.asked:
                        client = self.random.choice(list(self.asked))
                        await self.engine.abort(client, self.random.sample(sorted(self.asked[client]), 2))
                    case 1:
                        await self.engine.abort_older_than(self.engine.version)
                    case 2 if not self.patient:
                        self.random.choice(consuming).cancel()
                    case _:
                        self.stats.append(await self.engine.stats())
        self.stats.append(await self.engine.stats())
        self.ended = now()

    async def consume(self) -> None:
        for _ in range(6):
            await self.a_while()
            asked = [one for _ in range(self.random.randint(1, 3)) for one in self.some(next(self._rows))]
            client = f"client {asked[0].number}"
            self.asked[client] = {call.number for call in asked}
            for call in asked:
                id = lengths_id(call.trajectory, call.key)
                self.lengths[call.number] = self.length(id.row, id.k)
            self.got[client] = []
            self.left.add(client)
            await generate(self.engine, asked, client=client, into=self.got[client])
            self.left.remove(client)

    def some(self, row: int) -> list[GenerateRequest]:
        """Calls of one row, two at least, some of which have a context of their own and go on."""
        return calls(
            row,
            self.random.randint(2, 4),
            priority=self.random.choice(list(Priority)),
            key=self.random.randint(0, 1),
            goes_on=self.random.random() < 0.3,
        )

    async def update(self) -> None:
        for version in range(1, 8):
            await self.a_while()
            await self.engine.pause(self.random.choice(list(OnUpdate)))
            stopped = now()
            if asleep := self.random.random() < 0.5:
                await self.engine.sleep()
            await self.a_while()
            await load(self.engine, version)
            self.loaded.append((now(), version))
            if asleep:
                await self.engine.wake()
            await self.engine.resume()
            self.still.append((stopped, now()))

    async def a_while(self) -> None:
        await asyncio.sleep(self.random.choice([0.0, 0.1, self.random.expovariate(0.5)]))


@pytest.fixture(
    scope="module", params=[pytest.param(30, id="a fifth"), pytest.param(150, id="all", marks=pytest.mark.slow)]
)
def sessions(request: pytest.FixtureRequest) -> list[Session]:
    made = [Session(seed) for seed in range(request.param)]
    for session in made:
        run_virtual(session.run())
    return made


def all_of(session: Session) -> list[Completion]:
    return [done for got in session.got.values() for done in got]


def test_nothing_is_lost_and_nothing_comes_twice(sessions: list[Session]):
    for session in sessions:
        for client, asked in session.asked.items():
            came = [done.number for done in session.got[client]]
            assert len(came) == len(set(came))
            assert set(came) < asked if client in session.left else set(came) == asked
        for done in all_of(session):
            whole = session.lengths[done.number]
            assert done.length < whole if done.finish_reason is FinishReason.ABORTED else done.length == whole


def test_the_sessions_do_all_that_they_are_meant_to(sessions: list[Session]):
    everything = [done for session in sessions for done in all_of(session)]
    assert any(done.finish_reason is FinishReason.ABORTED and done.length for done in everything)
    assert any(len(done.version_spans) > 2 for done in everything)
    assert any(done.cached > 0 for done in everything)
    assert any(session.left for session in sessions)
    assert any(not session.left for session in sessions)
    assert {session.limited for session in sessions} == {True, False}


def test_no_token_belongs_to_a_version_that_was_not_loaded_when_it_was_sampled(sessions: list[Session]):
    for session in sessions:
        loaded = {version: time for time, version in session.loaded}
        for done in (done for done in all_of(session) if done.length):
            starts, versions = zip(*done.version_spans, strict=True)
            assert starts[0] == 0
            assert list(starts) == sorted(set(starts))
            assert starts[-1] < done.length
            assert list(versions) == sorted(set(versions))
            assert loaded[versions[0]] < done.started < loaded.get(versions[0] + 1, float("inf"))
            assert loaded[versions[-1]] < done.finished


def test_busy_spans_are_disjoint_and_outside_pauses(sessions: list[Session]):
    for session in sessions:
        busy = [span for stats in session.stats for span in stats.busy]
        assert all(start < end for start, end in busy)
        assert all(end <= start for (_, end), (start, _) in pairwise(busy))
        assert not busy or (busy[0][0] >= 0 and busy[-1][1] <= session.ended)
        for start, end in busy:
            assert not any(start < until and since < end for since, until in session.still)
        seconds = sum(end - start for start, end in busy)
        assert seconds <= sum(s.slot_seconds for s in session.stats) + 1e-6 <= session.engine.slots * seconds + 2e-6


def test_reported_tokens_are_those_of_the_trajectories(sessions: list[Session]):
    for session in sessions:
        reported = sum(stats.generated_tokens for stats in session.stats)
        delivered = sum(done.length for done in all_of(session))
        assert reported >= delivered
        if not session.left:
            assert reported == delivered


def test_the_same_commands_give_the_same_answers():
    def run() -> dict[str, list[Completion]]:
        session = Session(seed=42)
        run_virtual(session.run())
        return session.got

    assert run() == run()


def test_when_all_is_done_the_replica_remembers_nothing(sessions: list[Session]):
    for session in sessions:
        replica = session.engine._replica
        for part in (session.engine, replica, replica._sharing, replica._prefixes):
            kept = {name: value for name, value in vars(part).items() if isinstance(value, list | dict | deque)}
            assert not any(kept.values()), kept
