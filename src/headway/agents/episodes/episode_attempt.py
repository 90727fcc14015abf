"""Attempt at an episode: one run of its program, the turns that it asks for by chat or HTTP, and the log of calls.

    TurnRequest ─▶ limits ▶ tokens.prompt: context, key ▶ CallLog: the call with that key ▶ tokens.answered ─▶ MadeTurn
                                                             └─ its key is unknown: a call of the policy ─▶ a replica

A context has a series of keys, and another series for another limit or stop of the turn itself. A turn takes the first
key that no other turn of its attempt has, and frees it when given up: the same request later is the same call.

A program that is run again is another attempt, with its own turns, rows and steps. The log of calls stays, and the
attempt takes the same keys again. Requests that differ from before are sampled anew.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import xxhash

from headway.agents.episodes.episode_limits import EpisodeLimits, EpisodeTime
from headway.agents.episodes.episode_tokens import EpisodeTokens, TurnContext
from headway.agents.episodes.request_dispatcher import Affinity, PendingRequest, RequestDispatcher
from headway.agents.interface.program_messages import EpisodeEnd, MadeTurn, Message, TurnNote, TurnRequest
from headway.data.interfaces.rollout import Completion, GenerateRequest, Priority, SamplingParams
from headway.data.types import Conversation, FinishReason, SampledTokens, TrajectoryId
from headway.errors import EpisodeOver, HeadwayError, ProgramFailed, UserCodeError, WorkerDied, boundary
from headway.runtime.task_groups import failure_ignored


@dataclass(slots=True, eq=False)
class _LoggedCall:
    """A call made by some attempt of the program."""

    result: asyncio.Future[Completion]
    asked: PendingRequest | None = None
    """Request of an unfinished call; None once it is finished, since it holds the whole context."""
    known: bool = False
    """True if an earlier attempt or process had the result, and may have acted on it."""


@dataclass(eq=False, repr=False)
class CallLog:
    """The calls of one episode."""

    id: TrajectoryId
    sampling: SamplingParams
    priority: Priority
    group: int
    """Number of the episode's group."""
    calls: RequestDispatcher
    affinity: Affinity
    """Affinity of the group, for the first call."""
    on_aborted: Callable[[], object]
    """Called when an engine has ended a call of this episode."""
    on_failed: Callable[[HeadwayError], None]
    """Called with the reason when no engine takes a call of this episode."""
    cut: list[Completion] = field(default_factory=list)
    """Results of calls that engines ended themselves."""
    _log: dict[int, _LoggedCall] = field(default_factory=dict)
    """Key → call."""
    _salt: int = 0
    """Part of the keys that replicas get; it changes when the episode is begun anew."""
    _replicas: dict[str, None] = field(default_factory=dict)
    """Replicas that may keep a prefix of this episode."""

    @property
    def replica(self) -> str:
        """Replica of the last result; empty before the first."""
        return next(reversed(self._replicas), "")

    def call(
        self, prompted: TurnContext, max_tokens: int, stop: tuple[str, ...] = (), stop_token_ids: tuple[int, ...] = ()
    ) -> asyncio.Future[Completion]:
        """Call the policy, or return the logged call. Cancelling the wait does not cancel the call.

        ``stop``, ``stop_token_ids``: strings and tokens that end it, beside those of the sampling.
        """
        logged = self._log.get(prompted.key)
        if logged is None:
            logged = _LoggedCall(failure_ignored(asyncio.get_running_loop().create_future()))
            sampling = self._ended_by(max_tokens, stop, stop_token_ids)
            # The first call has key 0: an episode of one turn samples the same tokens as a single answer.
            key = (prompted.key if self._log else 0) ^ self._salt
            logged.asked = PendingRequest(
                GenerateRequest(0, self.id, prompted.ids, sampling, key, self.priority, goes_on=True),
                self.affinity,
                done=partial(self._finished, logged),
                failed=partial(self._refused, logged),
                group=self.group,
            )
            self._log[prompted.key] = logged
            self.calls.ask(logged.asked)
        # Shielded: a turn that is given up leaves the call to a later request for it.
        return asyncio.shield(logged.result)

    def known(self, prompted: TurnContext) -> bool:
        """Tell whether an earlier attempt, or an earlier process, had the result of this call."""
        return self._log[prompted.key].known

    def run_again(self) -> None:
        """Note that the program is run again: it may know the results of all finished calls."""
        for logged in self._log.values():
            logged.known |= logged.result.done()

    def begin_anew(self) -> None:
        """Forget all calls. Calls from now on are sampled anew, even with the same contexts."""
        self._drop()
        self._log.clear()
        # Other keys sample other answers. With the old ones the same tools would be called a second time.
        self._salt = xxhash.xxh3_64_intdigest(self._salt.to_bytes(8, "little"))

    def close(self) -> None:
        """End all calls under way: the episode is over."""
        self._drop()
        self.calls.release(self.id, self._replicas)

    def _drop(self) -> None:
        open_calls = [logged.asked for logged in self._log.values() if logged.asked is not None]
        self.calls.drop(open_calls)
        self._replicas.update({asked.replica: None for asked in open_calls if asked.replica})

    def _ended_by(self, max_tokens: int, stop: tuple[str, ...], stop_token_ids: tuple[int, ...]) -> SamplingParams:
        own = self.sampling
        if own.min_tokens:  # the engine would not sample these before so many tokens, which training does not know
            stop_token_ids = ()
        return replace(
            own,
            max_tokens=max_tokens,
            min_tokens=min(own.min_tokens, max_tokens),
            stop=tuple(dict.fromkeys((*own.stop, *stop))),
            stop_token_ids=tuple(dict.fromkeys((*own.stop_token_ids, *stop_token_ids))),
        )

    def _refused(self, logged: _LoggedCall, asked: PendingRequest, error: HeadwayError) -> None:
        """End a call that no engine takes: its episode fails, unless the only replica for it is gone."""
        logged.asked = None
        if isinstance(error, WorkerDied):
            self.on_failed(error)
        elif not logged.result.done():
            logged.result.set_exception(error)

    def _finished(self, logged: _LoggedCall, asked: PendingRequest, finished: Completion) -> None:
        # The call holds the whole context: kept for each turn they would grow with its square.
        logged.asked, logged.known = None, asked.number == 0  # no replica had it: it came from the journal
        self._replicas[asked.replica] = None
        if self.affinity.on is None:
            self.affinity = Affinity(replica=asked.replica)
        if finished.finish_reason is FinishReason.ABORTED:
            self.cut.append(finished)
            # Once all results of this batch are read: an engine ends the calls of a group together.
            asyncio.get_running_loop().call_soon(self.on_aborted)
        elif not logged.result.done():
            logged.result.set_result(finished)


@dataclass(eq=False, repr=False)
class EpisodeAttempt:
    """One run of the program of an episode (`headway.agents.endpoint.dialect.Turns`)."""

    tokens: EpisodeTokens
    log: CallLog
    limits: EpisodeLimits
    time: EpisodeTime
    trains: bool
    keeps_conversation: bool
    """True if the end of the episode needs its last conversation."""
    name: str = field(init=False)
    sampling: SamplingParams = field(init=False)
    asked: int = 0
    """Number of turns that the program asked for, including refused and given-up ones."""
    calls: list[Completion] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Numbers of the answered turns, counted among all requested turns."""
    text: str = ""
    """Text of the last answer."""
    cut_off: bool = False
    """True if the run's limit cut off the last answer, and not a limit of the turn itself."""
    limit: str | None = None
    """Limit that has ended the episode; None before."""
    repeats: str | None = None
    """Name of a tool whose call would be a forbidden repetition; None if there is none."""
    rewards: tuple[float, ...] = ()
    """Rewards of turns, as the program gave them with its last request."""
    noted: Counter[TurnNote] = field(default_factory=Counter)
    """Number of irregular requests of the program, by kind."""
    notes: dict[TurnNote, str] = field(default_factory=dict)
    """Kind of irregular request → the first reason given."""
    running: asyncio.Task[EpisodeEnd] | None = None
    over: bool = False
    conversation: Conversation | None = None
    """The last conversation; None if it is not wanted, or there is none."""
    _turns: set[int] = field(default_factory=set)
    """Keys of all turns, given-up ones included."""
    _taken: set[int] = field(default_factory=set)
    """Keys of the turns that are answered or awaited."""
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that keeps calls in the order of their turns, whatever time their texts take to encode."""
    _waiting: int = 0
    """Number of turns that the program waits for."""

    def __post_init__(self) -> None:
        self.name, self.sampling = f"episode {tuple(self.log.id)}", self.log.sampling
        self.time.forgive()

    async def turn(self, request: TurnRequest) -> MadeTurn:
        """See `headway.agents.endpoint.dialect.Turns.turn`."""
        self.time.end_step()
        self._waiting += 1
        self.rewards = request.rewards
        # Before any wait: numbers follow the order in which turns were asked for, not in which they end.
        number, self.asked = self.asked, self.asked + 1
        try:
            return await self._made(request, number)
        finally:
            self._waiting -= 1
            if self._waiting == 0 and not self.over:
                self.begin_step()

    def begin_step(self) -> None:
        """Begin a step of the program, which now waits for no turn."""
        self.time.begin_step(self._end_step)

    async def count(self, request: TurnRequest) -> int:
        """See `headway.agents.endpoint.dialect.Turns.count`."""
        with boundary("the messages of a turn cannot be used", UserCodeError):
            return len((await self.tokens.prompt(request)).ids)

    def note(self, kind: TurnNote, reason: str) -> None:
        """See `headway.agents.endpoint.dialect.Turns.note`."""
        self.noted[kind] += 1
        if reason:
            self.notes.setdefault(kind, reason)

    # ------------------------------------------------------------------------------------- the end

    def rewarded(self, end: EpisodeEnd) -> EpisodeEnd:
        """Assign an agent's rewards for its answers to turns.

        Raises:
            ProgramFailed: there are more or fewer than answers, or one is for an answer that does not exist.
        """
        rewards, numbers = end.answer_rewards, sorted(self.numbers)
        if rewards is None:
            return end
        if not isinstance(rewards, Mapping):
            if len(rewards) != len(numbers):
                raise ProgramFailed(
                    f"the agent returned a list of {len(rewards)} rewards for {len(numbers)} turns; return one for each"
                )
            rewards = dict(zip(numbers, rewards, strict=True))
        if unknown := sorted(set(rewards) - set(numbers)):
            raise ProgramFailed(
                f"the agent returned a reward for the answer of turn {unknown[0]}, and it had answers of the turns "
                f"{', '.join(map(str, numbers)) or '(none)'}; give rewards by the ids of answers that it has got"
            )
        given = tuple(rewards.get(number, 0.0) for number in range(max(rewards, default=-1) + 1))
        return replace(end, turn_rewards=given)

    def rewards_of_answers(self, turn_rewards: tuple[float, ...]) -> tuple[float, ...]:
        """Return the rewards of turns under numbers that count only answered turns."""
        return tuple(turn_rewards[number] for number in sorted(self.numbers) if number < len(turn_rewards))

    # ------------------------------------------------------------------------------------- turns

    async def _made(self, request: TurnRequest, number: int) -> MadeTurn:
        async with self._asking:
            prompted, call, own = await self._asked(request)
        try:
            finished = await call
        except asyncio.CancelledError:  # the turn is given up
            self._taken.remove(prompted.key)
            raise
        # An earlier conversation was too long, and a shorter one was answered: that limit did not end the episode.
        if self.limit == "tokens":
            self.limit = None
            self.time.forgive()
        self.calls.append(finished)
        self.numbers.append(number)
        self.cut_off = finished.finish_reason is FinishReason.LENGTH and finished.length != own
        with boundary("the answer of a turn cannot be read", UserCodeError):
            stops = (*request.stop_token_ids, *self.sampling.stop_token_ids)
            answer = self.tokens.answered(prompted, replace(request, stop_token_ids=stops), finished, number)
        if self.log.known(prompted) and (tool := self.limits.repeated(call.name for call in answer.calls)):
            self.repeats = tool
            if self.running is not None:
                self.running.cancel()
            raise EpisodeOver("repeated")  # before the program has the answer
        self.text = answer.text
        if self.keeps_conversation:
            self._answered(request.messages, answer.message, prompted.opened)
        return MadeTurn(number, answer, len(prompted.ids), finished.tokens or SampledTokens.nothing())

    async def _asked(self, request: TurnRequest) -> tuple[TurnContext, asyncio.Future[Completion], int | None]:
        """Return the context of a turn, the result of its call, and the turn's own limit if the run has room for more.

        Raises `EpisodeOver` if a limit refuses the turn.
        """
        if self.time.is_over:
            self.limit = self.limit or "time"
        if self.limit is None and len(self._taken) >= self.limits.max_turns:
            self.limit = "turns"
        if self.limit not in (None, "tokens"):  # a conversation that is too long may go on as a shorter one
            raise self._refused(self.limit)
        with boundary("the messages of a turn cannot be used", UserCodeError):
            prompted = await self.tokens.prompt(request, self._taken)
        room = self.limits.max_length - len(prompted.ids)
        if room < 1:
            raise self._refused("tokens")
        # Turns that were given up count: a client that hangs up each time would sample without end.
        if prompted.key not in self._turns and len(self._turns) >= self.limits.max_turns:
            raise self._refused("turns")
        self._turns.add(prompted.key)
        self._taken.add(prompted.key)
        room = min(room, self.sampling.max_tokens)
        own = (self.limits.max_turn_tokens, request.max_tokens)
        most = min([room, *(tokens for tokens in own if tokens is not None)])
        return (
            prompted,
            self.log.call(prompted, most, request.stop, request.stop_token_ids),
            most if most < room else None,
        )

    def _refused(self, limit: str) -> EpisodeOver:
        self.limit = limit
        self.time.refuse()
        return EpisodeOver(limit)

    def _end_step(self) -> None:
        """Cancel the program. ``step`` is the limit, unless the program was refused turns and only asked again."""
        if self.time.refused < 2:
            self.limit = "step"
        if self.running is not None:
            self.running.cancel()

    def _answered(self, messages: list[Message], answer: Message, opened: str) -> None:
        """Note a turn. It continues the last conversation if it begins with the same prompt."""
        prompt = [] if self.conversation is None else self.conversation.prompt
        if not prompt or messages[: len(prompt)] != prompt:
            prompt = list(messages)
        # A turn by token ids belongs to no conversation.
        self.conversation = Conversation(prompt, [*messages, answer][len(prompt) :], opened) if prompt else None
