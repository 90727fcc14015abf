"""Programs of episodes, and the chat that a program has with the policy.

async def run(row, chat):
    messages = [*row["messages"]]
    answer = await chat.turn(messages, tools=[look_up])         # a function, or a schema
    while answer.calls:
        messages += [answer.message, *await chat.call_tools(answer)]
        answer = await chat.turn(messages, tools=[look_up])
    return float(answer.content == row["answer"])
"""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.agents.interface.program_messages import (
    EpisodeEnd,
    EpisodeStart,
    Message,
    ProgramDescription,
    ToolCall,
    ToolSchema,
    TurnAnswer,
    TurnRequest,
    message_problem,
    too_much_ends,
)
from headway.agents.interface.tool import Tool, ToolResult, make_tool
from headway.agents.interface.user_calls import (
    AskedTooOften,
    awaited,
    failing,
    is_in_a_loop,
    number,
    seed_generators,
)
from headway.errors import EpisodeOver, HeadwayError, ProgramFailed, shown
from headway.runtime.task_groups import concurrently

Ask = Callable[[TurnRequest], Awaitable[TurnAnswer]]
"""Function that asks the episode worker for a turn. Raises `EpisodeOver` if a limit has ended the episode."""
MOST_REFUSALS = 100
"""Maximum number of turns that a program may ask for after its episode is over. A program that catches `EpisodeOver`
for ever, as ``while True`` around ``except Exception`` does, would hold its process."""


@dataclass(frozen=True, slots=True)
class _PendingTurn:
    number: int
    """Place among the turns that were asked for, from 0."""
    answer: TurnAnswer
    tools: Mapping[str, Tool]


class Program(ABC):
    """One form of user code, in the process that runs it: its episodes, each with one end or one error."""

    who = ""
    """Name of the program in messages, from `ProgramSpec.shown`."""
    is_async: bool = True
    """True if the program shares an event loop with others; else it blocks, and needs a separate process."""
    gives_reward: bool | None = None
    """True if the program gives rewards; None if this is unknown before its episodes end."""

    def describe(self) -> ProgramDescription:
        """Return the facts known before the first episode. May make an environment for that.

        Raises:
            UserCodeError: the user's code cannot be used; says why.
            ProgramAway: something that it needs is temporarily away.
        """
        return ProgramDescription(self.is_async, gives_reward=self.gives_reward)

    @abstractmethod
    async def run(self, start: EpisodeStart, chat: Chat) -> EpisodeEnd:
        """Make one episode. Its end also gets the failed tools and the rewards of turns that the chat recorded.

        The end's own rewards of turns are one for each turn, in the order in which turns were asked for.

        Raises:
            EpisodeOver: a limit has ended the episode, and only the rewards already given to turns count.
            ProgramFailed: the user's code raised, or returned an invalid value.
        """

    async def serve(self, start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        """Make the episode ``start``, with turns of the policy from ``ask``.

        If the program has its process for itself, the global generators are first seeded with the episode's seed. If a
        limit ends the episode, its end has the rewards that were given before.

        Raises:
            ProgramAway: something that the program needs is away for a time; it may be run again.
            ProgramFailed: the program failed; the message names the user's code, and standard error has the traceback.
        """
        chat = Chat(ask, start, self.who)
        if not self.is_async:  # where episodes share a process, each would reset the generators of the others
            seed_generators(start.seed)
        end = EpisodeEnd()
        try:
            with failing(self.who):
                end = await self.run(start, chat)
        except EpisodeOver:
            pass
        except AskedTooOften as insisted:
            print(f"{start.name}: {insisted}; it was left there", file=sys.stderr)
        except ProgramFailed:  # also a `HeadwayError`, which is raised as it is
            raise
        except HeadwayError as cause:
            raise ProgramFailed(str(cause)) from cause
        finally:
            # Also after an error: a task that the program left behind must not ask for turns any more.
            end = chat.close(end)
        return end

    async def close(self) -> None:  # noqa: B027 - most programs keep nothing
        """Close what outlives an episode."""


class Chat:
    """Chat of a program with the policy, from which it gets turns.

    An episode may have several conversations, and several turns at once: only a turn's messages tell what it continues.
    If they extend an earlier conversation, its tokens are kept as they were sampled.
    """

    def __init__(self, ask: Ask, start: EpisodeStart, who: str) -> None:
        self._ask, self._who = ask, who
        self._made: dict[Any, Tool] = {}
        self._asked = 0
        self._refusals = 0
        self._tool_errors = 0
        self._answered: list[_PendingTurn] = []
        self._rewards: dict[int, float] = {}
        self._over: EpisodeOver | None = None
        self._closed = False
        self.seed = start.seed
        """Seed of the episode, below 2^32: equal when it is run again. Seed your own generators with it."""

    @property
    def turns(self) -> int:
        """Number of turns that the policy has made in this episode."""
        return len(self._answered)

    async def turn(
        self,
        messages: Sequence[Message],
        tools: Sequence[Callable[..., Any] | ToolSchema] | None = None,
        *,
        max_tokens: int | None = None,
        state: str | None = None,
    ) -> TurnAnswer:
        """Let the policy answer ``messages``.

        Args:
            messages: the conversation so far, as chat messages; begin with ``row["messages"]`` or with your own. Go on
                with ``[*messages, answer.message, …]``, the answer unchanged.
            tools: functions with types and a docstring, or their schemas, that the model may call in this turn.
            max_tokens: maximum number of tokens to sample; the run's own limits hold in any case.
            state: name of the state in which this turn is taken, by which ``gigpo`` compares turns. Default: the
                messages since the last answer.

        Raises:
            EpisodeOver: a limit has ended the episode; there will be no further turn.
            ProgramFailed: the arguments cannot be used; says which, and what is expected.
        """
        by_name = self._tools(tools or ())
        request = TurnRequest(
            self._plain(messages),
            [tool.schema for tool in by_name.values()] or None,
            self._most(max_tokens),
            state=None if state is None else str(state),
        )
        return await self._answer(request, by_name)

    async def _answer(self, request: TurnRequest, tools: Mapping[str, Tool]) -> TurnAnswer:
        if self._closed:
            raise ProgramFailed(f"{self._who} asked for a turn after it had ended; await every turn before you return")
        if self._over is not None:
            await self._refuse(self._over)
        # Numbered before the wait: rewards go by the order in which turns were asked for, not in which they ended.
        place = self._asked
        self._asked += 1
        try:
            # Rewards so far go with each request: they survive the death of the process.
            answer = await self._ask(replace(request, rewards=self._turn_rewards))
        except EpisodeOver as over:
            self._over = over  # later turns are refused at once, without asking
            raise
        self._answered.append(_PendingTurn(place, answer, tools))
        return answer

    async def continued(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
    ) -> TurnAnswer:
        """Let the policy continue ``token_ids`` [P]: a turn without chat messages.

        Args:
            max_tokens: maximum number of tokens to sample; the run's own limits hold in any case.
            stop: strings that end the turn.
            stop_token_ids: tokens that end it.

        Raises:
            EpisodeOver: a limit has ended the episode; there will be no further turn.
            ProgramFailed: ``stop`` or ``stop_token_ids`` has too many items, or one that is too long.
        """
        if (problem := too_much_ends(stop, stop_token_ids)) is not None:
            raise ProgramFailed(f"{self._who}: {problem}")
        request = TurnRequest(
            [],
            max_tokens=self._most(max_tokens),
            token_ids=tuple(token_ids),
            stop=tuple(stop),
            stop_token_ids=tuple(stop_token_ids),
        )
        return await self._answer(request, {})

    def reward(self, value: float, answer: TurnAnswer | None = None) -> None:
        """Give a reward to the turn that made ``answer``, by default the last one. Several rewards of a turn add up.

        The program's return value is the episode's reward, in addition to those of turns.

        Raises:
            ProgramFailed: the value is not a finite number, or there was no such turn.
        """
        self._add(self._turn(answer, "reward"), number(value, f"{self._who}: the reward of a turn"))

    async def call_tools(self, answer: TurnAnswer) -> list[Message]:
        """Make the tool calls of ``answer``, and return the messages with their results.

        The turn must have been given the tools as functions. If a call cannot be made or a tool raises, the message
        says so. Calls run concurrently if all of the tools are asynchronous, else one after the other.

        Raises:
            ProgramFailed: the turn was given the schema of a tool instead of the function.
            Unavailable: a tool raised it.
        """
        turn = self._turn(answer, "call_tools")
        tools = turn.tools
        makeable = [call for call in answer.calls if call.problem is None]
        for call in makeable:
            if tools[call.name].function is None:
                raise ProgramFailed(
                    f"{self._who}: call_tools() cannot call {call.name!r}, whose schema was given to chat.turn(tools=…)"
                    "; give the function, or call it yourself and make the messages with answer.results([text, …])"
                )
        if makeable and all(tools[call.name].is_async for call in makeable):
            results = await awaited(concurrently([self._result(call, tools) for call in answer.calls]))
        else:
            results = [await self._result(call, tools) for call in answer.calls]
        self._tool_errors += sum(result.failed for result in results)
        for result in results:
            if result.reward is not None:
                self._add(turn, result.reward)
        return answer.results([result.text for result in results])

    def close(self, end: EpisodeEnd) -> EpisodeEnd:
        """Allow no further turns. Return ``end`` with what is recorded here: failed tools, rewards of turns.

        Raises:
            ProgramFailed: ``end`` has more or fewer rewards than there are turns, or turns already have rewards.
        """
        self._closed = True
        if end.turn_rewards:
            self._give(end.turn_rewards)
        return replace(end, turn_rewards=self._turn_rewards, tool_errors=self._tool_errors)

    async def _result(self, call: ToolCall, tools: Mapping[str, Tool]) -> ToolResult:
        return ToolResult(call.error) if call.problem is not None else await tools[call.name].call(call.arguments)

    def _add(self, turn: _PendingTurn, reward: float) -> None:
        self._rewards[turn.number] = self._rewards.get(turn.number, 0.0) + reward

    def _give(self, values: Sequence[float]) -> None:
        """Give each turn its reward, in the order in which turns were asked for. Raises `ProgramFailed`."""
        if self._rewards:
            raise ProgramFailed(
                f"{self._who} gave rewards of turns by chat.reward() and returned a list, too; do one of both"
            )
        if len(values) != len(self._answered):
            raise ProgramFailed(
                f"{self._who} returned a list of {len(values)} rewards for {len(self._answered)} turns; return one for "
                "each turn"
            )
        numbers = sorted(turn.number for turn in self._answered)
        self._rewards = dict(zip(numbers, values, strict=True))

    @property
    def _turn_rewards(self) -> tuple[float, ...]:
        """Return the rewards by turn number; empty if no turn was given one."""
        turns = max((turn.number for turn in self._answered), default=-1) + 1
        return tuple(self._rewards.get(n, 0.0) for n in range(turns)) if self._rewards else ()

    async def _refuse(self, over: EpisodeOver) -> None:
        self._refusals += 1
        if self._refusals > MOST_REFUSALS:
            raise AskedTooOften(f"{self._who} asked for {MOST_REFUSALS} turns after its episode was over")
        if is_in_a_loop():
            await asyncio.sleep(0)  # a program that asks again at once leaves others of its loop their turn
        raise EpisodeOver(over.limit)

    def _turn(self, answer: TurnAnswer | None, method: str) -> _PendingTurn:
        for turn in reversed(self._answered):
            if answer is None or turn.answer is answer:
                return turn
        what = f"{shown(answer)} is no answer of this chat" if self._answered else "there was no turn yet"
        raise ProgramFailed(f"{self._who}: chat.{method}(): {what}; give it what chat.turn() returned")

    def _plain(self, messages: Any) -> list[Message]:
        expected = 'expected a list of dicts like {"role": "user", "content": "…"}'
        if isinstance(messages, str):
            expected += '; the prompt as chat messages is row["messages"]'
        if not isinstance(messages, list | tuple) or not messages:
            raise ProgramFailed(f"{self._who}: chat.turn() was given {shown(messages)} for messages; {expected}")
        for message in messages:
            if (problem := message_problem(message)) is not None:
                raise ProgramFailed(f"{self._who}: chat.turn(): {problem}")
        return [dict(message) for message in messages]

    def _most(self, max_tokens: Any) -> int | None:
        if max_tokens is None or (isinstance(max_tokens, int) and max_tokens >= 1):
            return max_tokens
        raise ProgramFailed(f"{self._who}: max_tokens is {shown(max_tokens)}; expected a whole number from 1")

    def _tools(self, tools: Any) -> dict[str, Tool]:
        """Return the tools by name; a tool given as a schema has no function."""
        found: dict[str, Tool] = {}
        origin = f"{self._who}: chat.turn(tools=…)"
        for given in [tools] if callable(tools) or isinstance(tools, Mapping) else tools:
            if isinstance(given, Mapping):
                function = given.get("function")
                name = function.get("name") if isinstance(function, Mapping) else None
                tool = Tool(name, dict(given), None, origin=origin)  # type: ignore[arg-type]  # it checks the name
            elif isinstance(given, Tool):
                tool = given
            else:
                tool = self._made[given] = self._made.get(given) or make_tool(given, origin)
            if tool.name in found:
                raise ProgramFailed(f"{self._who}: chat.turn() was given two tools named {tool.name!r}; rename one")
            found[tool.name] = tool
        return found
