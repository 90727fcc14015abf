"""Programs of the user's own: ``async def run(row, chat)``, or a class that has it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.agents.interface.program_chat import Chat
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, ProgramDescription
from headway.agents.interface.user_calls import are_coroutines, number
from headway.errors import ProgramFailed, UserCodeError, shown
from headway.runtime.user_code import Parameters, check_call

RETURNS = "expected a number, a list with a number for each turn, both as (number, list), or None"
EXPECTED = "a program is async def run(row, chat), or a class or an object that has it"


class UsersRun:
    """The user's ``run``: a function, or a method of an object or a class.

    Of a class each episode has a new object, made with ``agent.params``; a function is called with them.
    """

    def __init__(self, found: Any, who: str, params: Mapping[str, Any], expected: str) -> None:
        """``expected``: what is expected, for people.

        Raises:
            UserCodeError: ``found`` is nothing of the kind.
        """
        self._who, self._params = who, dict(params)
        self._make: Callable[..., Any] | None = found if inspect.isclass(found) else None
        run = found if callable(found) and self._make is None else getattr(found, "run", None)
        if run is None:
            raise UserCodeError(f"{who}: it is {_kind(found)} without run; {expected}")
        self._run: Callable[..., Any] = run
        self.given = self._params if self._make is None else {}
        """Arguments that it is called with in every episode."""
        self.parameters = Parameters.of(run)
        self.name = str(getattr(run, "__qualname__", type(run).__name__))
        inner = _innermost(run)
        if inspect.isasyncgenfunction(inner) or inspect.isgeneratorfunction(inner):
            raise UserCodeError(f"{who}: it yields, and so returns no reward; return the episode's reward instead")
        self.is_async = are_coroutines(inner)
        """It blocks no event loop."""

    def check(self, *positional: str, names: Sequence[str] = ()) -> None:
        """Check that it can be called with arguments ``positional``, and with those of ``names`` by their names.

        Raises:
            UserCodeError: it cannot; says what it takes and what it is given.
        """
        before = () if self._make is None else ("self",)
        check_call(self._who, self._run, (*before, *positional), params={**dict.fromkeys(names), **self.given})
        if self._make is not None:
            check_call(self._who, self._make, (), params=self._params)

    def of_an_episode(self) -> Callable[..., Any]:
        """The function of one episode."""
        if self._make is None:
            return functools.partial(self._run, **self.given)
        run: Callable[..., Any] = self._make(**self._params).run
        return run


class OwnProgram:
    """A program of the user's own, `UsersRun`."""

    is_async = True

    def __init__(self, found: Any, who: str, params: Mapping[str, Any]) -> None:
        self._who, self._run = who, UsersRun(found, who, params, EXPECTED)
        if not self._run.is_async:
            raise UserCodeError(
                f"{who}: {self._run.name} is a plain function, and would hold all other episodes while it waits for "
                "the model; write async def, and await chat.turn(…); code that blocks goes into asyncio.to_thread(…)"
            )
        self._run.check("row", "chat")

    def describe(self) -> ProgramDescription:
        return ProgramDescription("program", self.is_async)

    async def run(self, start: EpisodeStart, chat: Chat) -> EpisodeEnd:
        return end_of(await self._run.of_an_episode()(start.with_prompt(), chat), self._who)


def end_of(value: Any, who: str, expected: str = RETURNS) -> EpisodeEnd:
    """Return the end of an episode whose program returned ``value``.

    Raises:
        ProgramFailed: it is none of what is ``expected``.
    """
    plain = value.tolist() if hasattr(value, "tolist") else value
    episode, turns = plain, None
    if isinstance(plain, list):
        episode, turns = None, plain
    elif isinstance(plain, tuple) and len(plain) == 2 and isinstance(plain[1], list | tuple):
        episode, turns = plain
    if turns == [] or isinstance(episode, str | bytes) or not (episode is None or hasattr(episode, "__float__")):
        raise ProgramFailed(f"{who} returned {shown(value)}, {expected}")
    what = f"{who}: the reward that it returned"
    return EpisodeEnd(
        reward=None if episode is None else number(episode, what),
        turn_rewards=tuple(number(one, f"{what} for turn {n}") for n, one in enumerate(turns or ())),
    )


def _innermost(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isfunction(function) or inspect.ismethod(function) else type(function).__call__


def _kind(found: Any) -> str:
    return f"a class {found.__name__}" if inspect.isclass(found) else f"an object of {type(found).__name__}"
