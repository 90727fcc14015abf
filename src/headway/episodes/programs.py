"""One episode that a program makes: turns, limits, and the log by which it can be made again.

    program ──TurnRequest──▶ limits ▶ record.prompt ▶ known in the log? ─no─▶ a call of the policy
       ▲                                                   │ yes                     │
       └────────────── TurnAnswer ◀── record.answered ◀────┴─────────────────────────┘

A runner that dies has its programs run again from the beginning. The log answers the calls that it knows, by key and
context; whatever a program asks otherwise than before is sampled anew, and what it does not ask again is not trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import xxhash
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_exponential

from headway.concurrently import failure_ignored
from headway.data.types import Conversation, FinishReason, RowAt, RowTokens, Trajectory, TrajectoryId
from headway.episodes.calls import Asked, Calls, Home
from headway.episodes.deadlines import Clock, Deadline
from headway.episodes.record import Prompted, Record, spans_of
from headway.episodes.step_times import StepTimes
from headway.errors import (
    EpisodeOver,
    HeadwayError,
    ProgramAway,
    RunError,
    RunnerLost,
    UserCodeError,
    WorkerDied,
    boundary,
)
from headway.interfaces import FinishedCall, GroupRequest, SamplingParams
from headway.programs.messages import EpisodeEnd, EpisodeStart, Message, TurnAnswer, TurnRequest

Turn = Callable[[TurnRequest], Awaitable[TurnAnswer]]

AWAY = wait_exponential(multiplier=0.5, max=30.0)
"""Seconds before a program is run again for something that was away."""
LOST = wait_exponential(multiplier=0.05, max=1.0)
"""Seconds before a program is run again whose runner was lost."""
MOST_LOSSES = 200
"""Number of runners that an episode may lose to other episodes' doing."""


class Programs(Protocol):
    """Host of programs: `headway.episodes.runners.ProgramRunners`, or a simulation."""

    async def run(self, job: EpisodeStart, on_ask: Turn, *, on_begin: Callable[[], object] | None = None) -> EpisodeEnd:
        """Run a program to its end; its turns are ``on_ask``'s. ``on_begin`` is called when it begins.

        Raises:
            RunnerLost: its process ended.
            ProgramAway: something that it needs is away for a time.
            HeadwayError: it failed.
        """

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an episode, as ``rollout``'s keys describe them."""

    max_length: int
    """Most tokens of a conversation, its prompt included."""
    max_turns: int
    max_turn_tokens: int | None = None
    step_timeout_s: float = 60.0
    episode_timeout_s: float = 600.0
    train_on: tuple[str, ...] = ("turns", "tokens")
    """Limits that leave an episode trained on."""
    retries: int = 2
    """Number of times that a program is run again for what is away for a time."""


@dataclass(frozen=True, slots=True)
class Hosting:
    """What a keeper needs in order to have programs make its episodes."""

    programs: Programs
    record: Callable[[], Record]
    """Makes the record of an episode."""
    limits: Limits
    seed: int = 0
    """Seed of the run."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a turn, beside those of the sampling."""
    gives_reward: bool = False
    """Programs have to give rewards: no reward function does."""
    keeps_conversations: bool = False
    """Episodes come with their last conversation, for a reward function."""


@dataclass(frozen=True, slots=True)
class MadeEpisode:
    """An episode that is over."""

    trajectory: Trajectory
    """Metadata, with rows numbered from 0."""
    rows: list[RowTokens]
    """Tokens of the rows; none where they are only simulated."""


@dataclass(slots=True, eq=False)
class _Logged:
    """A call that was made, at whatever try."""

    context: bytes
    """Digest of the context."""
    result: asyncio.Future[FinishedCall]
    asked: Asked | None
    """The call while it is not finished; afterwards None, since it holds the whole context."""


@dataclass(slots=True, eq=False)
class _Try:
    """One run of the program."""

    record: Record
    turns: int = 0
    asked: int = 0
    """Turns that the program asked for, refused ones and those that it gave up included."""
    calls: list[FinishedCall] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Numbers of the answered turns, among all that were asked for."""
    text: str = ""
    """Text of the last answer."""
    prompt: list[Message] = field(default_factory=list)
    """The messages that the first turn of the last conversation was asked with; empty without conversations."""
    said: list[Message] = field(default_factory=list)
    """The messages of the last conversation, up to its last answer."""
    limit: str | None = None
    rewards: tuple[float, ...] = ()
    """Rewards of turns, as the program told them with its last request."""
    waiting: int = 0
    """Turns that the program waits for."""
    step: Deadline | None = None
    left_s: float | None = None
    """Seconds that the program has to end, once a turn was refused; None before."""
    refused: int = 0
    """Turns that were refused."""
    stepping: asyncio.Task[EpisodeEnd] | None = None
    over: bool = False

    def answered(self, messages: list[Message], answer: Message) -> None:
        """Note a turn. It goes on with the last conversation if it begins with what that began with."""
        if not self.prompt or messages[: len(self.prompt)] != self.prompt:
            self.prompt = list(messages)
        self.said = [*messages, answer]


class ProgramEpisode:
    """An episode on its way. `make` makes it; `oldest_version` says how old its tokens are meanwhile."""

    def __init__(
        self,
        request: GroupRequest,
        k: int,
        sampling: SamplingParams,
        hosting: Hosting,
        calls: Calls,
        clock: Clock,
        home: Home,
        on_aborted: Callable[[], object],
        on_failed: Callable[[HeadwayError], None],
    ) -> None:
        """
        Args:
            home: of the group, for the first call.
            on_aborted: called when an engine has ended a call of this episode.
            on_failed: called when no engine takes a call of this episode, with the reason.
        """
        self.id: TrajectoryId = request.prompt.trajectory_id(k)
        self._request = request
        self._sampling = replace(
            sampling, stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *hosting.stop_ids)))
        )
        self._hosting = hosting
        self._limits = hosting.limits
        self._calls = calls
        self._clock = clock
        self._home = home
        self._on_aborted = on_aborted
        self._on_failed = on_failed
        self._log: dict[int, _Logged] = {}
        self._replicas: dict[str, None] = {}
        """Replicas that may keep a prefix of this episode."""
        self._losses = 0
        self._tries = 0
        self._environment_s = 0.0
        self._times = StepTimes()
        self._left = 0.0
        """Time on the clock at which the program had nothing more to wait for."""
        self._over_time = False

    @property
    def oldest_version(self) -> int | None:
        """The oldest version in a finished call; None before the first token."""
        versions = [version for one in self._log.values() for version in _versions(one.result)]
        return min(versions, default=None)

    async def make(self) -> MadeEpisode:
        """Run the program to its end. A failure is the episode's, and never raised."""
        started = self._times.until = asyncio.get_running_loop().time()
        whole: list[Deadline] = []
        one = _Try(self._hosting.record())
        end, failure = EpisodeEnd(), None
        retrying = AsyncRetrying(
            retry=retry_if_exception(_may_pass),
            stop=self._given_up,
            wait=lambda state: (LOST if isinstance(_error(state), RunnerLost) else AWAY)(state),
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    if self._tries:
                        one = _Try(self._hosting.record())
                    self._tries += 1
                    end = await self._run(one, whole)
        except HeadwayError as error:
            failure = str(error)
        finally:
            for deadline in whole:
                deadline.cancel()
            for logged in self._log.values():
                self._drop(logged)
            self._calls.release(self.id, self._replicas)
        return self._made(one, end, failure or self._failure_of(one, end), started)

    def _failure_of(self, one: _Try, end: EpisodeEnd) -> str | None:
        """Why an episode has failed whose program ended; None if it has not."""
        if one.limit is not None and (one.limit not in self._limits.train_on or not one.calls):
            return _limit_text(one.limit, self._limits)
        if not one.calls:
            return "the program ended without a turn of the policy; call chat.turn(messages) at least once"
        if self._hosting.gives_reward and end.reward is None and not end.turn_rewards and one.limit is None:
            return "the program gave no reward; return one from it, or name a reward.function that scores answers"
        return None

    def aborted(self) -> MadeEpisode:
        """The episode as it is where its group was aborted: without rows."""
        calls = [one.result.result() for one in self._log.values() if _versions(one.result)]
        now = asyncio.get_running_loop().time()
        trajectory = Trajectory(
            id=self.id,
            replica=next(reversed(self._replicas), ""),
            text="",
            prompt_length=len(self._request.prompt.token_ids),
            length=sum(call.length for call in calls),
            finish_reason=FinishReason.ABORTED,
            version_spans=spans_of(calls),
            started=calls[0].started if calls else now,
            finished=now,
            rows=(),
            turns=len(calls),
        )
        return MadeEpisode(trajectory, [])

    # ------------------------------------------------------------------------------------- the program

    async def _run(self, one: _Try, whole: list[Deadline]) -> EpisodeEnd:
        """Run the program once."""

        def begin() -> None:
            self._times.began(asyncio.get_running_loop().time())
            if not whole:
                whole.append(self._clock.deadline(self._limits.episode_timeout_s, lambda: self._time_is_over(one)))
            self._program_goes_on(one)

        start = EpisodeStart(
            name=f"episode {tuple(self.id)}",
            messages=self._messages(),
            row=self._row(),
            seed=_seed(self._hosting.seed, self.id),
        )
        one.stepping = asyncio.get_running_loop().create_task(
            self._hosting.programs.run(start, lambda request: self._turn(one, request), on_begin=begin)
        )
        try:
            end = await one.stepping
        except asyncio.CancelledError:
            if one.limit is None or (task := asyncio.current_task()) is None or task.cancelling():
                raise
            return EpisodeEnd(turn_rewards=one.rewards)  # it was ended by a limit, not from outside
        except EpisodeOver:
            return EpisodeEnd(turn_rewards=one.rewards)
        finally:
            one.over = True
            one.stepping.cancel()
            self._program_waits(one)
        if not isinstance(end, EpisodeEnd):
            raise RunError(f"a program ended with {end!r} in place of its end")
        return end

    def _messages(self) -> list[dict[str, Any]]:
        prompt = self._request.prompt
        return prompt.messages if prompt.messages is not None else [{"role": "user", "content": prompt.text}]

    def _row(self) -> Mapping[str, Any]:
        prompt = self._request.prompt
        return {**prompt.extra, "answer": prompt.answer, "source": prompt.source}

    def _given_up(self, state: RetryCallState) -> bool:
        """Tell whether the last failure was one too many. Those that other episodes caused are hardly counted."""
        error = _error(state)
        if isinstance(error, RunnerLost) and error.culprit is False:
            self._losses += 1
            return self._over_time or self._losses > MOST_LOSSES
        return self._tries - self._losses > self._limits.retries

    # ------------------------------------------------------------------------------------- turns

    async def _turn(self, one: _Try, request: TurnRequest) -> TurnAnswer:
        """Answer the program's request for a turn. Raises `EpisodeOver` at a limit."""
        self._program_waits(one)
        one.waiting += 1
        one.rewards = request.rewards
        number, one.asked = one.asked, one.asked + 1
        try:
            return await self._answer(one, request, number)
        finally:
            one.waiting -= 1
            if one.waiting == 0 and not one.over:
                self._program_goes_on(one)

    async def _answer(self, one: _Try, request: TurnRequest, number: int) -> TurnAnswer:
        if self._over_time:
            one.limit = one.limit or "time"
        if one.limit is None and one.turns >= self._limits.max_turns:
            one.limit = "turns"
        if one.limit is not None:
            raise self._over(one, one.limit)
        with boundary("the messages of a turn cannot be used", UserCodeError):
            prompted = one.record.prompt(request)
        room = self._limits.max_length - len(prompted.ids)
        if room < 1:
            raise self._over(one, "tokens")
        one.turns += 1
        finished = await self._call(prompted, min(room, *self._most_tokens(request)))
        one.calls.append(finished)
        one.numbers.append(number)
        with boundary("the answer of a turn cannot be read", UserCodeError):
            answer = one.record.answered(prompted, request, finished, number)
        one.text = answer.text
        if self._hosting.keeps_conversations:
            one.answered(request.messages, answer.message)
        return answer

    def _over(self, one: _Try, limit: str) -> EpisodeOver:
        """Refuse a turn. From the first refusal on the program has the time of one step in all, in order to end."""
        one.limit = limit
        one.refused += 1
        if one.left_s is None:
            one.left_s = self._limits.step_timeout_s
        return EpisodeOver(limit)

    def _most_tokens(self, request: TurnRequest) -> list[int]:
        wanted = (self._sampling.max_tokens, self._limits.max_turn_tokens, request.max_tokens)
        return [most for most in wanted if most is not None]

    async def _call(self, prompted: Prompted, max_tokens: int) -> FinishedCall:
        """Call the policy, unless the log knows the call."""
        logged, context = self._log.get(prompted.key), xxhash.xxh3_128_digest(prompted.ids.tobytes())
        if logged is None or logged.context != context:
            if logged is not None:
                self._drop(logged)
            logged = _Logged(context, failure_ignored(asyncio.get_running_loop().create_future()), None)
            self._log[prompted.key] = logged
            self._ask(logged, prompted, max_tokens)
        return await asyncio.shield(logged.result)

    def _ask(self, logged: _Logged, prompted: Prompted, max_tokens: int) -> None:
        logged.asked = Asked(
            self.id,
            prompted.ids,
            replace(self._sampling, max_tokens=max_tokens, min_tokens=min(self._sampling.min_tokens, max_tokens)),
            self._home,
            done=lambda asked, finished: self._finished(logged, asked, finished),
            failed=lambda asked, error: self._refused(logged, error),
            priority=self._request.priority,
            key=prompted.key,
            goes_on=True,
        )
        self._calls.ask(logged.asked)

    def _refused(self, logged: _Logged, error: HeadwayError) -> None:
        """End a call that no engine takes: that is its episode's failure, unless the one replica for it is gone."""
        logged.asked = None
        if isinstance(error, WorkerDied):
            self._on_failed(error)
        elif not logged.result.done():
            logged.result.set_exception(error)

    def _drop(self, logged: _Logged) -> None:
        """Forget a call that is not finished, whose replica may keep a prefix for it."""
        if logged.asked is not None:
            self._calls.drop([logged.asked])
            if logged.asked.replica:
                self._replicas[logged.asked.replica] = None
            logged.asked = None

    def _finished(self, logged: _Logged, asked: Asked, finished: FinishedCall) -> None:
        logged.asked = None
        self._replicas[asked.replica] = None
        if self._home.on is None:
            self._home = Home(replica=asked.replica)
        if finished.finish_reason is FinishReason.ABORTED:
            self._on_aborted()
        elif not logged.result.done():
            logged.result.set_result(finished)

    # ------------------------------------------------------------------------------------- time

    def _program_goes_on(self, one: _Try) -> None:
        """Begin a step: the program has all that it asked for."""
        self._left = self._clock.time()
        self._times.begin(asyncio.get_running_loop().time())
        seconds = self._limits.step_timeout_s if one.left_s is None else one.left_s
        one.step = self._clock.deadline(seconds, lambda: self._end(one))

    def _program_waits(self, one: _Try) -> None:
        """End the step, if one is under way."""
        if one.step is not None:
            one.step.cancel()
            one.step = None
            spent = self._clock.time() - self._left
            self._environment_s += spent
            if one.left_s is not None:
                one.left_s = max(0.0, one.left_s - spent)
            self._times.end(asyncio.get_running_loop().time())

    def _time_is_over(self, one: _Try) -> None:
        """Let the program end at its next turn; the turn that it waits for is its last."""
        self._over_time = True

    def _end(self, one: _Try) -> None:
        """End the program where it is. One that was refused a turn and only asked again has that turn's limit."""
        if one.refused < 2:
            one.limit = "step"
        if one.stepping is not None:
            one.stepping.cancel()

    # ------------------------------------------------------------------------------------- the end

    def _made(self, one: _Try, end: EpisodeEnd, failure: str | None, started: float) -> MadeEpisode:
        rows = one.record.rows() if failure is None else []
        turn_rewards = end.turn_rewards
        if one.numbers != list(range(len(one.numbers))):  # a turn that was given up has no tokens, and no number
            rows, turn_rewards = _renumbered(rows, turn_rewards, sorted(one.numbers))
        places = tuple(_place(index, row) for index, row in enumerate(rows))
        calls = one.calls
        now = asyncio.get_running_loop().time()
        last = calls[-1] if calls else None
        sampled = sum(call.length for call in calls)
        trajectory = Trajectory(
            id=self.id,
            replica=next(reversed(self._replicas), ""),
            text=one.text,
            prompt_length=places[0].prompt_length if places else len(self._request.prompt.token_ids),
            length=sampled,
            finish_reason=last.finish_reason if last is not None else FinishReason.STOP,
            version_spans=spans_of(calls),
            started=calls[0].started if calls else started,
            finished=last.finished if last is not None else now,
            rows=places,
            turns=len(calls),
            conversation=Conversation(one.prompt, one.said[len(one.prompt) :]) if one.prompt else None,
            reward=end.reward,
            turn_rewards=turn_rewards,
            failure=failure,
            limit=one.limit,
            steps=tuple(self._times.steps),
            waits=tuple(self._times.waits),
            metrics={
                **end.metrics,
                "environment_s": self._environment_s,
                "step_tokens": max(0, sum(at.length for at in places) - sampled),
                "tool_errors": end.tool_errors,
                "tries": self._tries,
                "cached_tokens": sum(call.cached for call in calls),
                **one.record.metrics,
            },
        )
        return MadeEpisode(trajectory, [row for row in rows if isinstance(row, RowTokens)])


def _renumbered(
    rows: Sequence[RowTokens | RowAt], turn_rewards: tuple[float, ...], numbers: Sequence[int]
) -> tuple[list[RowTokens | RowAt], tuple[float, ...]]:
    """Count turns anew, in the order in which they were asked for: those with ``numbers`` are all that there are."""
    order = {number: new for new, number in enumerate(numbers)}
    renumbered: list[RowTokens | RowAt] = []
    for row in rows:
        if isinstance(row, RowTokens):
            turns = tuple(span._replace(number=order[span.number]) for span in row.turns)
            renumbered.append(replace(row, turns=turns))
        else:
            renumbered.append(row)
    given = [turn_rewards[number] if number < len(turn_rewards) else 0.0 for number in numbers]
    return renumbered, tuple(given) if turn_rewards else ()


def _place(index: int, row: RowTokens | RowAt) -> RowAt:
    return row if isinstance(row, RowAt) else RowAt(index, len(row.prompt_ids), len(row.ids))


def _error(state: RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome is not None else None


def _may_pass(error: BaseException) -> bool:
    """Tell whether a failure may not come again. A program that held its runner's event loop would do so again."""
    if isinstance(error, RunnerLost):
        return not (error.culprit and error.timed_out)
    return isinstance(error, ProgramAway)


def _versions(result: asyncio.Future[FinishedCall]) -> list[int]:
    if not result.done() or result.cancelled() or result.exception() is not None:
        return []
    return [version for _, version in result.result().version_spans]


def _seed(seed: int, id: TrajectoryId) -> int:
    """Seed below 2^32 of one episode."""
    parts = [part % 2**32 for part in id]  # held-out prompts may have a negative epoch, which numpy refuses
    return int(np.random.SeedSequence([seed, *parts]).generate_state(1)[0])


def _limit_text(limit: str, limits: Limits) -> str:
    match limit:
        case "turns":
            return f"rollout.max_turns={limits.max_turns} was reached"
        case "tokens":
            return f"its conversation has the {limits.max_length} tokens that there may be"
        case "step":
            return f"a step took longer than rollout.step_timeout_s={limits.step_timeout_s:g}"
        case _:
            return f"it took longer than rollout.episode_timeout_s={limits.episode_timeout_s:g}"
