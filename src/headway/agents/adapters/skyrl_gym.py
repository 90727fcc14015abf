"""Environments in the form of SkyRL-gym: ``init(prompt)`` and ``step(action)``, which gives messages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from headway.agents.adapters.environment_loop import close
from headway.agents.interface.program_chat import Chat
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, Message, ProgramDescription, TurnAnswer
from headway.agents.interface.user_calls import are_coroutines, called, failing, number, seed_generators
from headway.errors import EpisodeOver, ProgramFailed, shown


class SkyrlProgram:
    """An environment in the form of SkyRL-gym. Each episode makes one, from the row's columns (``extras``).

    The reward of a step is that of the turn before it. Where a step gives a ``postprocessed_action`` the conversation
    goes on with that in place of what the model wrote, which is trained on as it was sampled.
    """

    def __init__(self, make: Callable[..., Any], who: str, params: Mapping[str, Any], max_turns: int | None) -> None:
        self._make, self._who, self._params, self._max_turns = make, who, params, max_turns
        parameters = inspect.signature(make).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        self._takes_extras = "extras" in parameters or takes_all
        self._as_config: Callable[[Any], Any] | None = None
        if "env_config" in parameters or takes_all:
            from omegaconf import OmegaConf  # as SkyRL gives it; imported before processes are forked

            self._as_config = OmegaConf.create
        methods = [getattr(make, name, None) for name in ("init", "step")]
        self.is_async = inspect.isclass(make) and are_coroutines(*methods)

    def describe(self) -> ProgramDescription:
        return ProgramDescription("SkyRL-gym", self.is_async, gives_reward=True)

    async def run(self, start: EpisodeStart, chat: Chat) -> EpisodeEnd:
        with failing(f"{self._who}: making it"):
            environment = self._make(**self._arguments(start))
        try:
            with suppress(EpisodeOver):
                await self._play(environment, start, chat)
            return EpisodeEnd(metrics=await self._metrics(environment))
        finally:
            await close(environment)

    async def _play(self, environment: Any, start: EpisodeStart, chat: Chat) -> None:
        if not self.is_async:
            seed_generators(start.seed)
        with failing(f"{self._who}: init()"):
            value = await called(environment.init, list(start.messages))
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise ProgramFailed(f"{self._who}: init() returned {shown(value)}, expected (messages, info)")
        messages = self._messages(value[0], "init")
        while True:
            answer = await chat.turn(messages)
            with failing(f"{self._who}: step()"):
                step = await called(environment.step, answer.text)
            if not isinstance(step, Mapping) or not {"observations", "reward", "done"} <= set(step):
                raise ProgramFailed(
                    f"{self._who}: step() returned {shown(step)}, expected a dict with observations, reward and done"
                )
            chat.reward(number(step["reward"], f"{self._who}: the reward of step()"), answer)
            if step["done"]:
                return
            messages = [*messages, self._said(answer, step), *self._messages(step["observations"], "step")]

    def _arguments(self, start: EpisodeStart) -> dict[str, Any]:
        """The constructor's arguments: ``env_config`` and ``extras``, where it has them, and ``rollout.params``."""
        arguments = dict(self._params)
        if self._as_config is not None:
            config = arguments.get("env_config") or {}
            arguments["env_config"] = self._as_config(dict(config)) if isinstance(config, Mapping) else config
        if self._takes_extras:
            turns = {} if self._max_turns is None else {"max_turns": self._max_turns}
            arguments["extras"] = {**start.row, **turns, **dict(arguments.get("extras") or {})}
        return arguments

    def _messages(self, value: Any, method: str) -> list[Message]:
        fits = isinstance(value, tuple | list) and all(isinstance(one, Mapping) and "role" in one for one in value)
        if not fits or (method == "init" and not value):
            raise ProgramFailed(
                f"{self._who}: {method}() returned the messages {shown(value)}, expected a list of dicts like "
                '{"role": "user", "content": "…"}'
            )
        return [dict(one) for one in value]

    def _said(self, answer: TurnAnswer, step: Mapping[str, Any]) -> Message:
        instead = step.get("postprocessed_action")
        if instead is None or instead == answer.text:
            return answer.message
        if not isinstance(instead, str):
            raise ProgramFailed(
                f"{self._who}: step() returned postprocessed_action={shown(instead)}, expected text or None"
            )
        return {"role": "assistant", "content": instead}

    async def _metrics(self, environment: Any) -> dict[str, float]:
        get_metrics = getattr(environment, "get_metrics", None)
        if get_metrics is None:
            return {}
        with failing(f"{self._who}: get_metrics()"):
            metrics = await called(get_metrics)
        if not isinstance(metrics, Mapping):
            raise ProgramFailed(
                f"{self._who}: get_metrics() returned {shown(metrics)}, expected a dict of numbers by name"
            )
        found: dict[str, float] = {}
        for name, value in metrics.items():
            with suppress(ProgramFailed):  # SkyRL's own aggregation leaves out what is no number, too
                found[str(name)] = number(value, str(name))
        return found
