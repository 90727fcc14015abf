"""Environments in the form of Gymnasium and GEM: ``reset(seed)`` and ``step(action)``, in text."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from headway.agents.adapters.environment_loop import EnvironmentPool, EnvironmentProgram, Step
from headway.agents.interface.program_chat import Chat
from headway.agents.interface.program_messages import EpisodeStart, ProgramDescription, TurnAnswer, said, with_text
from headway.agents.interface.user_calls import are_coroutines, number
from headway.errors import ProgramFailed, UserCodeError, shown
from headway.runtime.user_code import Parameters

FIVE = "(observation, reward, terminated, truncated, info)"
OLD_API = (
    "; four values with one done are the API of gym before 0.26: return terminated and truncated in its place, as "
    "Gymnasium does"
)


class GymProgram(EnvironmentProgram[Any]):
    """An environment in the form of Gymnasium or GEM. Observations are the user's messages, actions the model's text.

    The reward of a step is that of the turn before it.
    """

    def __init__(self, instances: EnvironmentPool, who: str, kind: Any) -> None:
        self._instances, self.who = instances, who
        check_reset(kind, who)
        self.is_async = are_coroutines(kind.reset, kind.step)

    def describe(self) -> ProgramDescription:
        with self._instances.one() as environment:
            refuse_numbers(environment, self.who)
        return ProgramDescription("Gymnasium and GEM", self.is_async, gives_reward=True)

    async def close(self) -> None:
        """Close the environments that no episode has."""
        await self._instances.close()

    def episode(self, start: EpisodeStart) -> AbstractAsyncContextManager[Any]:
        return self._instances.lent()

    async def begin(self, environment: Any, start: EpisodeStart) -> Step:
        refuse_numbers(environment, self.who)
        arguments: dict[str, Any] = {"seed": start.row_seed}
        if "options" in Parameters.of(environment.reset).named:
            arguments["options"] = dict(start.row)
        value = await self.call(environment, "reset", **arguments)
        if not isinstance(value, tuple | list) or len(value) != 2 or not isinstance(value[1], Mapping):
            raise ProgramFailed(
                f"{self.who}: reset() returned {_shape(value)}, expected (observation, info), of which info is a dict"
            )
        return Step(with_text(start.messages, self._text(value[0], "reset"), between="\n\n"))

    async def step(self, environment: Any, answer: TurnAnswer, chat: Chat) -> Step:
        value = await self.call(environment, "step", answer.text)
        if not isinstance(value, tuple | list) or len(value) != 5:
            old = OLD_API if isinstance(value, tuple | list) and len(value) == 4 else ""
            raise ProgramFailed(f"{self.who}: step() returned {_shape(value)}, expected {FIVE}{old}")
        observation, reward, terminated, truncated, _ = value
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | int) and not hasattr(flag, "dtype"):
                raise ProgramFailed(
                    f"{self.who}: step() returned {shown(flag)} for {name}, expected True or False; it returns {FIVE}"
                )
        worth, done = number(reward, f"{self.who}: the reward of step()"), bool(terminated or truncated)
        return Step([] if done else [said("user", self._text(observation, "step"))], done, worth)

    def _text(self, observation: Any, method: str) -> str:
        if isinstance(observation, str):
            return observation
        raise ProgramFailed(
            f"{self.who}: {method}() returned the observation {shown(observation)}, and the model reads text; wrap "
            "the environment so that observations are text (gymnasium.ObservationWrapper)"
        )


def check_reset(kind: Any, who: str) -> None:
    """Check that ``kind``, a class or an environment, has a ``reset`` that takes a seed.

    Raises:
        UserCodeError: it takes none, so that its episodes could not be made again.
    """
    parameters = Parameters.of(kind.reset)
    if parameters.readable and "seed" not in parameters.named and not parameters.takes_all:
        raise UserCodeError(
            f"{who}: its reset({', '.join(parameters.named)}) takes no seed, and episodes have to be reproducible; "
            "write def reset(self, seed=None, options=None), and return (observation, info)"
        )


def refuse_numbers(environment: Any, who: str) -> None:
    """Refuse an environment whose observations or actions are numbers by its spaces.

    Raises:
        UserCodeError: names the space, and what to do.
    """
    for name, wrapper in (("action_space", "ActionWrapper"), ("observation_space", "ObservationWrapper")):
        space = getattr(environment, name, None)
        kinds = [kind for kind in type(space).__mro__ if kind.__name__ in ("Space", "Text")]
        if kinds and not any(kind.__name__ == "Text" for kind in kinds):
            raise UserCodeError(
                f"{who}: its {name} is {shown(space)}, and the model reads and writes text; wrap the environment so "
                f"that it is a gymnasium.spaces.Text (gymnasium.{wrapper})"
            )


def _shape(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"{len(value)} values {shown(value)}"
    return f"{shown(value)} ({type(value).__name__})"
