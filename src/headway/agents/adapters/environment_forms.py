"""Forms of environments that are made in this process.

| form | has |
|---|---|
| Gymnasium and GEM | ``reset(seed)``, ``step(action)`` in text |
| SkyRL-gym | ``init(prompt)``, ``step(action)`` with messages |
| TRL | ``reset(**row)``, methods that are tools, ``get_reward()`` |

TRL's form follows TRL 1.16 (``GRPOTrainer._generate_and_score_completions``). An environment is made once and reset for
each episode. The result of ``reset`` is appended to the prompt's last message. Every public method except ``reset`` and
``get_reward`` is a tool; the model gets its result as ``str()`` writes it.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from headway.agents.adapters.environment_loop import EnvironmentPool, EnvironmentProgram, Step, close
from headway.agents.interface.program_chat import Chat
from headway.agents.interface.program_messages import (
    EpisodeEnd,
    EpisodeStart,
    Message,
    ProgramDescription,
    TurnAnswer,
    said,
    with_text,
)
from headway.agents.interface.tool import OpenToolbox, Tool, Toolbox, make_tool
from headway.agents.interface.user_calls import are_coroutines, beforehand, failing, number
from headway.errors import ProgramFailed, UserCodeError, shown
from headway.runtime.user_code import Parameters

FIVE = "(observation, reward, terminated, truncated, info), as Gymnasium has it since gym 0.26"


class GymProgram(EnvironmentProgram[Any]):
    """An environment in the form of Gymnasium or GEM. Observations are the user's messages, actions the model's text.

    The reward of a step goes to the turn before it.
    """

    def __init__(self, instances: EnvironmentPool, who: str, kind: Any) -> None:
        """``kind``: a class or an environment.

        Raises:
            UserCodeError: its ``reset`` takes no seed, so its episodes could not be repeated.
        """
        self._instances, self.who = instances, who
        parameters = Parameters.of(kind.reset)
        if parameters.readable and "seed" not in parameters.named and not parameters.takes_all:
            raise UserCodeError(
                f"{who}: its reset({', '.join(parameters.named)}) takes no seed, and episodes have to be reproducible; "
                "write def reset(self, seed=None, options=None), and return (observation, info)"
            )
        self.is_async = are_coroutines(kind.reset, kind.step)

    def describe(self) -> ProgramDescription:
        with beforehand(), self._instances.one() as environment:
            refuse_numbers(environment, self.who)
            return super().describe()

    async def close(self) -> None:
        """Close the environments that no episode uses."""
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
                f"{self.who}: reset() returned {shown(value)}, expected (observation, info), of which info is a dict"
            )
        return Step(with_text(start.messages, self._text(value[0], "reset"), between="\n\n"))

    async def step(self, environment: Any, answer: TurnAnswer, chat: Chat) -> Step:
        value = await self.call(environment, "step", answer.text)
        if not isinstance(value, tuple | list) or len(value) != 5:
            raise ProgramFailed(f"{self.who}: step() returned {shown(value)}, expected {FIVE}")
        observation, reward, terminated, truncated, _ = value
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            # numpy's booleans are not bool. A float here is most often a misplaced reward.
            if not (isinstance(flag, bool | int) or hasattr(flag, "dtype")):
                raise ProgramFailed(f"{self.who}: step() returned {shown(flag)} for {name}, expected True or False")
        worth, done = number(reward, f"{self.who}: the reward of step()"), bool(terminated or truncated)
        return Step([] if done else [said("user", self._text(observation, "step"))], done, worth)

    def _text(self, observation: Any, method: str) -> str:
        if isinstance(observation, str):
            return observation
        raise ProgramFailed(
            f"{self.who}: {method}() returned the observation {shown(observation)}, and the model reads text; wrap "
            "the environment so that observations are text (gymnasium.ObservationWrapper)"
        )


def refuse_numbers(environment: Any, who: str) -> None:
    """Refuse an environment whose spaces say that its observations or actions are numbers.

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


class SkyrlProgram(EnvironmentProgram[Any]):
    """An environment in the form of SkyRL-gym. Each episode makes one, from the row's columns (``extras``).

    The reward of a step goes to the turn before it. If a step gives a ``postprocessed_action``, it replaces the model's
    text in the conversation; training uses the text as it was sampled.
    """

    def __init__(self, make: Callable[..., Any], who: str, params: Mapping[str, Any], max_turns: int | None) -> None:
        self._make, self.who, self._params = make, who, params
        self._turns = {} if max_turns is None else {"max_turns": max_turns}
        self._takes = Parameters.of(make)
        self._as_config: Callable[[Any], Any] = dict
        if self._takes.given({"env_config": None}):
            from omegaconf import OmegaConf  # as SkyRL gives it; imported before processes are forked

            self._as_config = OmegaConf.create
        methods = [getattr(make, name, None) for name in ("init", "step")]
        self.is_async = inspect.isclass(make) and are_coroutines(*methods)

    @asynccontextmanager
    async def episode(self, start: EpisodeStart) -> AsyncIterator[Any]:
        """Make an environment with ``agent.params``, and with ``env_config`` and ``extras`` if it takes them."""
        config = self._params.get("env_config") or {}
        own = {
            "env_config": self._as_config(dict(config)) if isinstance(config, Mapping) else config,
            "extras": {**start.row, **self._turns, **dict(self._params.get("extras") or {})},
        }
        with failing(f"{self.who}: making it"):
            environment = self._make(**{**self._params, **self._takes.given(own)})
        try:
            yield environment
        finally:
            await close(environment)

    async def begin(self, environment: Any, start: EpisodeStart) -> Step:
        value = await self.call(environment, "init", list(start.messages))
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise ProgramFailed(f"{self.who}: init() returned {shown(value)}, expected (messages, info)")
        return Step(self._messages(value[0], "init"))

    async def step(self, environment: Any, answer: TurnAnswer, chat: Chat) -> Step:
        value = await self.call(environment, "step", answer.text)
        if not isinstance(value, Mapping) or not {"observations", "reward", "done"} <= set(value):
            raise ProgramFailed(
                f"{self.who}: step() returned {shown(value)}, expected a dict with observations, reward and done"
            )
        reward = number(value["reward"], f"{self.who}: the reward of step()")
        if value["done"]:
            return Step(done=True, reward=reward)
        instead = value.get("postprocessed_action")
        if instead is not None and not isinstance(instead, str):
            raise ProgramFailed(
                f"{self.who}: step() returned postprocessed_action={shown(instead)}, expected text or None"
            )
        answered = None if instead in (None, answer.text) else said("assistant", instead)
        return Step(self._messages(value["observations"], "step"), reward=reward, answered=answered)

    async def end(self, environment: Any) -> EpisodeEnd:
        if getattr(environment, "get_metrics", None) is None:
            return EpisodeEnd()
        metrics = await self.call(environment, "get_metrics")
        if not isinstance(metrics, Mapping):
            raise ProgramFailed(
                f"{self.who}: get_metrics() returned {shown(metrics)}, expected a dict of numbers by name"
            )
        found: dict[str, float] = {}
        for name, value in metrics.items():
            with suppress(ProgramFailed):  # SkyRL's own aggregation also leaves out non-numbers
                found[str(name)] = number(value, str(name))
        return EpisodeEnd(metrics=found)

    def _messages(self, value: Any, method: str) -> list[Message]:
        fits = isinstance(value, tuple | list) and all(isinstance(one, Mapping) and "role" in one for one in value)
        if not fits or (method == "init" and not value):
            raise ProgramFailed(
                f"{self.who}: {method}() returned the messages {shown(value)}, expected a list of dicts like "
                '{"role": "user", "content": "…"}'
            )
        return [dict(one) for one in value]


@dataclass(frozen=True, slots=True)
class _TrlEpisode:
    """An environment and the tools beside it, for one episode."""

    environment: Any
    beside: OpenToolbox
    tools: Sequence[Tool]


class TrlProgram(EnvironmentProgram[_TrlEpisode]):
    """An environment in the form of TRL. Its reward is ``get_reward()``, else its attribute ``reward`` if any."""

    def __init__(self, instances: EnvironmentPool, who: str, kind: type, tools: Toolbox) -> None:
        self._instances, self.who, self._tools = instances, who, tools
        self._schemas: dict[str, dict[str, Any]] = {}
        own = [getattr(kind, name) for name in (*tool_names(kind), "reset", "get_reward") if hasattr(kind, name)]
        self.is_async = are_coroutines(*own) and tools.is_async

    def describe(self) -> ProgramDescription:
        with beforehand(), self._instances.one() as environment:
            tools = Toolbox([*self._tools.tools, *self._own_tools(environment)]).tools
            schemas = tuple(tool.schema for tool in tools)
            needed = Parameters.of(environment.reset).lacking(["prompt"])
        gives_reward = True if hasattr(type(environment), "get_reward") else None
        return ProgramDescription(self.is_async, schemas, gives_reward, columns=tuple(needed))

    @asynccontextmanager
    async def episode(self, start: EpisodeStart) -> AsyncIterator[_TrlEpisode]:
        with self._instances.one() as environment:
            async with self._tools.episode(start) as beside:
                # Joined as they are: `describe` has checked their names and schemas.
                yield _TrlEpisode(environment, beside, [*beside.tools, *self._own_tools(environment)])

    def tools(self, environment: _TrlEpisode) -> Sequence[Tool]:
        return environment.tools

    async def begin(self, environment: _TrlEpisode, start: EpisodeStart) -> Step:
        row: dict[str, Any] = {"prompt": start.with_prompt()["prompt"], **start.row}
        takes = Parameters.of(environment.environment.reset)
        if lacking := takes.lacking(row):
            raise ProgramFailed(
                f"{self.who}: reset() needs {', '.join(map(repr, lacking))}, and the row has {', '.join(sorted(row))}"
                "; give the parameter a default, or the row that column"
            )
        value = await self.call(environment.environment, "reset", **takes.given(row))
        if value is None:
            return Step(start.messages)
        text = value if isinstance(value, str) else _text_of_blocks(value)
        if text is None:
            raise ProgramFailed(
                f"{self.who}: reset() returned {shown(value)}, expected text, which is appended to the prompt, or None"
            )
        return Step(with_text(start.messages, text))

    async def end(self, environment: _TrlEpisode) -> EpisodeEnd:
        of, what = environment.environment, "its attribute reward"
        if hasattr(type(of), "get_reward"):
            what, value = "what get_reward() returned", await self.call(of, "get_reward")
        else:
            with failing(f"{self.who}: {what}"):  # may be a property, which computes it
                value = getattr(of, "reward", None)
            value = None if callable(value) else value
            if value is None:
                return await environment.beside.end()
        return await environment.beside.end(EpisodeEnd(reward=number(value, f"{self.who}: {what}")))

    def _own_tools(self, environment: Any) -> list[Tool]:
        return [self._tool(name, getattr(environment, name)) for name in tool_names(type(environment))]

    def _tool(self, name: str, method: Callable[..., Any]) -> Tool:
        if name not in self._schemas:
            try:
                self._schemas[name] = make_tool(method, f"{self.who}.{name}").schema
            except UserCodeError as cause:
                raise UserCodeError(f"{cause}; a method that is no tool has a name that begins with _") from cause
        return Tool(name, self._schemas[name], method, show=_as_trl_shows, origin=self.who)


def tool_names(kind: type) -> list[str]:
    """Return the names of the methods that TRL takes as tools, sorted: public functions, inherited ones included."""
    functions = inspect.getmembers(kind, predicate=inspect.isfunction)
    return [name for name, _ in functions if name not in ("reset", "get_reward") and not name.startswith("_")]


def _as_trl_shows(value: Any) -> str:
    """Return the text of a tool's result as TRL shows it to the model."""
    text = _text_of_blocks(value)
    return str(value) if text is None else text


def _text_of_blocks(value: Any) -> str | None:
    """Return the text of a list of content blocks; None if the value is not such a list.

    Raises:
        ProgramFailed: one of the blocks is an image.
    """
    if not isinstance(value, list) or not value or not all(isinstance(one, Mapping) and "type" in one for one in value):
        return None
    if any(one["type"] != "text" for one in value):
        raise ProgramFailed(f"{shown(value)} has blocks that are no text, and Headway trains models of text alone")
    return "".join(str(one.get("text", "")) for one in value)
