"""Environments in the form of Gymnasium and GEM: ``reset(seed)`` and ``step(action)``, in text."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.agents.adapters.environment_loop import Instances
from headway.agents.interface.program_chat import Chat
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, ProgramDescription, said, with_text
from headway.agents.interface.user_calls import are_coroutines, called, failing, number, seed_generators
from headway.errors import ProgramFailed, UserCodeError, shown

FIVE = "(observation, reward, terminated, truncated, info)"
OLD_API = (
    "; four values with one done are the API of gym before 0.26: return terminated and truncated in its place, as "
    "Gymnasium does"
)


@dataclass(frozen=True, slots=True)
class _EnvironmentStep:
    observation: Any
    reward: float
    ended: bool


class GymProgram:
    """An environment in the form of Gymnasium or GEM. Observations are the user's messages, actions the model's text.

    The reward of a step is that of the turn before it.
    """

    def __init__(self, instances: Instances, who: str, kind: Any) -> None:
        self._instances, self._who = instances, who
        check_reset(kind, who)
        self.is_async = are_coroutines(kind.reset, kind.step)

    def describe(self) -> ProgramDescription:
        with self._instances.one() as environment:
            refuse_numbers(environment, self._who)
        return ProgramDescription("Gymnasium and GEM", self.is_async, gives_reward=True)

    async def close(self) -> None:
        """Close the environments that no episode has."""
        await self._instances.close()

    async def run(self, start: EpisodeStart, chat: Chat) -> EpisodeEnd:
        async with self._instances.lent() as environment:
            refuse_numbers(environment, self._who)
            observation = await self._reset(environment, start)
            messages = with_text(start.messages, observation, between="\n\n")
            while True:
                answer = await chat.turn(messages)
                with failing(f"{self._who}: step()"):
                    step = self._step(await called(environment.step, answer.text))
                chat.reward(step.reward, answer)
                if step.ended:
                    return EpisodeEnd()
                messages = [*messages, answer.message, said("user", self._text(step.observation, "step"))]

    async def _reset(self, environment: Any, start: EpisodeStart) -> str:
        if (
            not self.is_async
        ):  # once more, since making the environment may have drawn numbers, and lending one does not
            seed_generators(start.seed)
        given = start.row.get("seed")
        arguments: dict[str, Any] = {"seed": given if type(given) is int and given >= 0 else start.seed}
        if "options" in _parameters(environment.reset):
            arguments["options"] = dict(start.row)
        with failing(f"{self._who}: reset()"):
            value = await called(environment.reset, **arguments)
        if not isinstance(value, tuple | list) or len(value) != 2 or not isinstance(value[1], Mapping):
            raise ProgramFailed(
                f"{self._who}: reset() returned {_shape(value)}, expected (observation, info), of which info is a dict"
            )
        return self._text(value[0], "reset")

    def _step(self, value: Any) -> _EnvironmentStep:
        if not isinstance(value, tuple | list) or len(value) != 5:
            old = isinstance(value, tuple | list) and len(value) == 4
            raise ProgramFailed(
                f"{self._who}: step() returned {_shape(value)}, expected {FIVE}{OLD_API if old else ''}"
            )
        observation, reward, terminated, truncated, _ = value
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | int) and not hasattr(flag, "dtype"):
                raise ProgramFailed(
                    f"{self._who}: step() returned {shown(flag)} for {name}, expected True or False; it returns {FIVE}"
                )
        return _EnvironmentStep(
            observation, number(reward, f"{self._who}: the reward of step()"), bool(terminated or truncated)
        )

    def _text(self, observation: Any, method: str) -> str:
        if isinstance(observation, str):
            return observation
        raise ProgramFailed(
            f"{self._who}: {method}() returned the observation {shown(observation)}, and the model reads text; wrap "
            "the environment so that observations are text (gymnasium.ObservationWrapper)"
        )


def check_reset(kind: Any, who: str) -> None:
    """Check that ``kind``, a class or an environment, has a ``reset`` that takes a seed.

    Raises:
        UserCodeError: it takes none, so that its episodes could not be made again.
    """
    parameters = _parameters(kind.reset)
    if "seed" not in parameters and not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        raise UserCodeError(
            f"{who}: its reset({', '.join(parameters)}) takes no seed, and episodes have to be reproducible; write "
            "def reset(self, seed=None, options=None), and return (observation, info)"
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


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    try:
        return {name: one for name, one in inspect.signature(function).parameters.items() if name != "self"}
    except (TypeError, ValueError):  # a built-in method: taken for one that has Gymnasium's parameters
        return dict.fromkeys(("seed",), inspect.Parameter("seed", inspect.Parameter.KEYWORD_ONLY))


def _shape(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"{len(value)} values {shown(value)}"
    return f"{shown(value)} ({type(value).__name__})"
