"""How a user's reward function is called. The rule is its signature:

- It is called with keyword arguments: whichever it names of ``prompt`` (the text the model read), ``response``,
  ``answer``, ``source``, ``extra`` (a dictionary of the row's other columns), and those columns by their names.
  With ``**kwargs`` it gets them all.
- With a parameter ``responses`` it scores a whole group in one call: it gets a list of n texts and returns n numbers.
  Otherwise it has a parameter ``response`` and is called once for each response.
- ``async def`` works for both; one-response calls of a group are then awaited together.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from headway.errors import ScoringFailed, UserCodeError
from headway.rewards.request import ScoreRequest

ALWAYS_GIVEN = frozenset({"prompt", "response", "responses", "answer", "source", "extra"})


class UserFunction:
    """A function of the user's own, called by the rule above. ``spec`` is how the user named it."""

    def __init__(self, function: Callable[..., Any], spec: str) -> None:
        """Raises `UserCodeError` where the signature does not fit the rule."""
        self._function = function
        self._name = spec.rpartition(":")[2]
        self._parameters = _keyword_parameters(function, spec)
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())
        self._is_batch = "responses" in self._parameters
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object whose __call__ is asynchronous
        )
        # One loop for the worker's life: a user's client sessions belong to the loop that they were made on.
        self._runner = asyncio.Runner() if self._is_async else None

    @property
    def whole_group(self) -> bool:
        """Whether one call scores the group: `score_all` rather than `score_one`."""
        return self._is_batch or self._is_async

    def check_columns(self, columns: Collection[str]) -> None:
        """Raises `UserCodeError` where a parameter without a default is neither always given nor one of ``columns``."""
        for name, parameter in self._parameters.items():
            optional = parameter.kind is parameter.VAR_KEYWORD or parameter.default is not parameter.empty
            if not optional and name not in ALWAYS_GIVEN | set(columns):
                raise UserCodeError(
                    f"reward.function: {self._name} needs {name!r}, but the rows have {_listed(columns)} beside prompt "
                    "and answer; give the parameter a default, or the rows that column"
                )

    def score_one(self, request: ScoreRequest, response: str) -> Any:
        return self._call(request, response=response)

    def score_all(self, request: ScoreRequest) -> Any:
        if self._runner is None:
            return self._call(request, responses=list(request.responses))
        return self._runner.run(self._score_all_async(request))

    async def _score_all_async(self, request: ScoreRequest) -> Any:
        if self._is_batch:
            return await self._call(request, responses=list(request.responses))
        calls: list[Coroutine[Any, Any, Any]] = [self._call(request, response=text) for text in request.responses]
        tasks = [asyncio.create_task(call) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # the loop lives on: nothing of a group that failed may run in it
                task.cancel()

    def _call(self, request: ScoreRequest, **responses: Any) -> Any:
        available = {
            **request.extra,
            "prompt": request.prompt,
            "answer": request.answer,
            "source": request.source,
            "extra": dict(request.extra),
            **responses,
        }
        if self._takes_all:
            return self._function(**available)
        for name, parameter in self._parameters.items():
            if name not in available and parameter.default is parameter.empty:
                raise ScoringFailed(
                    f"{self._name} needs {name!r}, and the row has {', '.join(sorted(available))}; "
                    "give the parameter a default or the row that column"
                )
        return self._function(**{name: available[name] for name in self._parameters if name in available})


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _keyword_parameters(function: Callable[..., Any], spec: str) -> dict[str, inspect.Parameter]:
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError) as cause:
        raise UserCodeError(
            f"{spec}: its parameters cannot be read ({cause}); wrap it in a function with def"
        ) from cause
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise UserCodeError(f"{spec}: parameter {name!r} is positional; rewards are called with keyword arguments")
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if len({"response", "responses"} & set(parameters)) != 1 and not (takes_all and "responses" not in parameters):
        raise UserCodeError(
            f"{spec}: takes ({', '.join(parameters)}); a reward has a parameter response (one text) or responses "
            "(all texts of a group), for example score(response, answer)"
        )
    return parameters
