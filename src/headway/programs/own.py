"""Programs of the user's own: ``async def run(row, chat)``, or a class that has it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.errors import ProgramFailed, UserCodeError, shown
from headway.programs.chat import Chat
from headway.programs.failures import number
from headway.programs.messages import EpisodeEnd, EpisodeStart
from headway.programs.program import ProgramDescription

RETURNS = "expected a number, a list with a number for each turn, both as (number, list), or None"
EXPECTED = "a program is async def run(row, chat), or a class or an object that has it"


class OwnProgram:
    """A function of the user's own. Each episode of a class has an object of its own."""

    is_async = True

    def __init__(self, found: Any, who: str, params: Mapping[str, Any]) -> None:
        self._who, self._params = who, dict(params)
        self._make: Callable[..., Any] | None = found if inspect.isclass(found) else None
        self._run = found if callable(found) and not inspect.isclass(found) else getattr(found, "run", None)
        if self._run is None:
            raise UserCodeError(f"{who}: it is {_kind(found)} without run; {EXPECTED}")
        if inspect.isasyncgenfunction(self._run):
            raise UserCodeError(f"{who}: {_name(self._run)} yields; return the episode's reward from it instead")
        if not _is_coroutine_function(self._run):
            raise UserCodeError(
                f"{who}: {_name(self._run)} is a plain function, and would hold all other episodes while it waits for "
                "the model; write async def, and await chat.turn(…); code that blocks goes into asyncio.to_thread(…)"
            )
        if self._make is None:
            check_arguments(who, self._run, ("row", "chat"), self._params)
        else:
            check_arguments(who, self._run, ("self", "row", "chat"), {})
            check_arguments(who, self._make, (), self._params)

    def describe(self) -> ProgramDescription:
        return ProgramDescription("program", self.is_async)

    async def run(self, start: EpisodeStart, chat: Chat) -> EpisodeEnd:
        row = {"prompt": [dict(message) for message in start.messages], **start.row}
        if self._make is None:
            return end_of(await self._run(row, chat, **self._params), self._who)  # type: ignore[misc]  # checked above
        return end_of(await self._make(**self._params).run(row, chat), self._who)


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


def _is_coroutine_function(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def check_arguments(
    who: str, function: Callable[..., Any], positional: Sequence[str], params: Mapping[str, Any]
) -> None:
    """Check that user code can be called with arguments named ``positional``, and with ``rollout.params``.

    Raises:
        UserCodeError: it cannot; says what it takes and what it is given.
    """
    try:
        takes = inspect.signature(function)
    except (TypeError, ValueError):  # what is built in tells only by being called
        return
    try:
        takes.bind(*positional, **params)
    except TypeError as cause:
        given = ", ".join([*positional, *(f"{name}={shown(value)}" for name, value in params.items())])
        raise UserCodeError(
            f"{who}: takes {takes}, but is called with ({given}), where values are those of rollout.params: {cause}"
        ) from None


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _kind(found: Any) -> str:
    return f"a class {found.__name__}" if inspect.isclass(found) else f"an object of {type(found).__name__}"
