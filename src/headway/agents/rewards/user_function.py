"""A user's reward function, called by its signature. Arguments are passed by keyword: a function gets those that it
names, and with ``**kwargs`` all.

| a parameter | makes it | which is given |
|---|---|---|
| ``response`` | Headway's, called per response | ``prompt``, ``response``, ``answer``, ``source``, ``extra``, columns |
| ``responses`` | Headway's, called per group | the same, with ``responses``, a list of n texts |
| ``completions`` or ``prompts`` | TRL's, called per group | ``prompts``, ``completions``, columns: each a list of n |
| ``solution_str`` | verl's, called per response | ``data_source``, ``solution_str``, ``ground_truth``, ``extra_info`` |
| ``solution_strs`` | verl's, called per group | the same four in the plural, each a list of n |
| ``**kwargs`` alone | as ``response`` | |

- The row's columns go by their own names; the one that is the ground truth is there as ``answer``, too.
  ``prompt`` is the text that the model read, ``extra`` a dictionary of the columns but prompt and ground truth.
- It returns a number per response, or a dictionary with ``score`` or ``reward`` whose other numbers become metrics: a
  list of n if it is called per group. A function in TRL's form may give None: it does not apply to the response.
- TRL's get ``log_metric`` and ``log_extra``, too (`FurtherNumbers`).
- ``reward.params`` are further arguments (verl's ``reward_kwargs``); they stand before columns of the same name.
- If prompts are chat messages, TRL's functions get messages: each prompt a list of them, each completion a list of
  one. If a program makes the episodes, a completion is all of the episode's last conversation behind the prompt, and
  the prompt is what that conversation began with; functions that are not TRL's get the last answer. verl's
  ``extra_info`` is the row's column of that name, else a dictionary of all other columns.
- ``async def`` works for all; one-response calls of a group are then awaited together, each with its own time limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import fmean
from typing import Any

from headway.agents.interface.user_calls import are_coroutines, finite_number, is_cancelled
from headway.agents.rewards.score_request import ScoreRequest
from headway.errors import ScoringFailed, ScoringTimedOut, UserCodeError, raised_by
from headway.runtime.task_groups import concurrently
from headway.runtime.user_code import Parameters
from headway.runtime.workers.user_code_boundary import killed_after

SCORES = ("score", "reward")
"""Keys of the score in a dictionary that a function returns; the first one that it has counts."""


class FurtherNumbers:
    """Further numbers of one group, by name. Only finite numbers with a text as name are kept.

    Example:
        >>> further = FurtherNumbers(2)
        >>> further.take_from({"score": 1.0, "acc": 1}, 0), further.take_from(0.5, 1)
        (1.0, 0.5)
        >>> further.values
        {'acc': [1.0, None]}
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._values: dict[str, list[float | None]] = {}
        self._logged: dict[str, list[float]] = {}

    def take_from(self, value: Any, k: int) -> Any:
        """Return the score in a function's result for response ``k``; keep the other numbers of a dictionary."""
        key = next((key for key in SCORES if key in value), None) if isinstance(value, Mapping) else None
        if key is None:
            return value
        for name, one in value.items():
            if name != key and isinstance(name, str) and (number := finite_number(one)) is not None:
                self._values.setdefault(name, [None] * self.n)[k] = number
        return value[key]

    def log_metric(self, name: str, value: Any) -> None:
        """Keep a number of the whole group, as TRL's trainer does; numbers with the same name are averaged."""
        if isinstance(name, str) and (number := finite_number(value)) is not None:
            self._logged.setdefault(name, []).append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Ignore the column: TRL's trainer shows it beside its completions."""

    @property
    def values(self) -> dict[str, list[float | None]]:
        """Values [n] by name; None for a response without one."""
        return self._values | {name: [fmean(given)] * self.n for name, given in self._logged.items()}


NEVER_GIVEN = ("completion_ids", "completions_ids", "environments", "trainer_state")
"""Arguments that TRL's trainer gives and Headway does not: rewards read text, in separate processes."""
INSTEAD = {
    "environments": "; for an environment's own reward, leave reward.function out and have get_reward() return it"
}
"""Missing argument → what to do instead, as the end of a message."""
LOOKS = 10
"""Number of sleeps that make up the time limit of an asynchronous call, so that one that ends late counts once."""
LOGGERS = ("log_metric", "log_extra")
"""Functions that TRL's trainer gives to rewards."""


class CallingConvention(Enum):
    """Calling convention of a reward function: parameters that mark it, arguments always given, whether per group."""

    RESPONSE = (("response",), ("prompt", "response", "answer", "source", "extra"), False)
    RESPONSES = (("responses",), ("prompt", "responses", "answer", "source", "extra"), True)
    TRL = (
        ("completions", "prompts", "completion_ids", "completions_ids"),
        ("prompts", "completions", "answer", *LOGGERS),
        True,
    )
    VERL = (("solution_str",), ("data_source", "solution_str", "ground_truth", "extra_info"), False)
    VERL_BATCH = (("solution_strs",), ("data_sources", "solution_strs", "ground_truths", "extra_infos"), True)

    def __init__(self, markers: tuple[str, ...], given: tuple[str, ...], per_group: bool) -> None:
        self.markers = markers
        self.given = given
        self.per_group = per_group


@dataclass(eq=False, repr=False)
class UserFunction:
    """A reward function of the user's own, called by its signature.

    Raises:
        UserCodeError: the signature does not fit the rule, or does not take ``params``.
    """

    function: Callable[..., Any]
    spec: str
    """The function as the user named it."""
    params: Mapping[str, Any] = field(default_factory=dict)
    answer_keys: Collection[str] = ()
    """Further names of the ground truth."""

    def __post_init__(self) -> None:
        spec, function = self.spec, self.function
        self._name = spec.rpartition(":")[2]
        self._takes = takes = Parameters.of(function)
        if not takes.readable:
            raise UserCodeError(f"{spec}: its parameters cannot be read; wrap it in a function with def")
        if by_place := [name for name in takes.order if name not in takes.named]:
            raise UserCodeError(
                f"{spec}: parameter {by_place[0]!r} is positional; rewards are called with keyword arguments"
            )
        self.dialect = _dialect_of(takes, spec)
        self._check_params()
        self.is_async = are_coroutines(function)

    def check_columns(self, columns: Collection[str], lacked: Mapping[str, str] | None = None) -> None:
        """Check that every required parameter is always given or one of ``columns``. Raises `UserCodeError` otherwise.

        ``lacked``: columns that some rows lack → the first row that lacks each, for the message.
        """
        of_verl = self.dialect in (CallingConvention.VERL, CallingConvention.VERL_BATCH)
        others = set() if of_verl else {*columns, *self.answer_keys}
        for name in self._takes.lacking({*self.dialect.given, *self.params, *others}):
            have = ", ".join(sorted(others)) or "nothing"
            lacks = f" ({lacked[name]} lacks it)" if lacked and name in lacked else ""
            raise UserCodeError(
                f"reward.function: {self._name} needs {name!r}, but the rows have {have} beside prompt and answer"
                f"{lacks}; give the parameter a default, or the rows that column{INSTEAD.get(name, '')}"
            )

    def score(self, request: ScoreRequest, further: FurtherNumbers, timeout_s: float) -> Any:
        """Score the group, with further numbers in ``further``. A call that takes longer than ``timeout_s`` ends the
        process.
        """
        returned = []
        for arguments in self._calls(request, further):
            with killed_after(timeout_s):
                returned.append(self._call(arguments))
        return self._scores_of(returned, further)

    async def score_async(self, request: ScoreRequest, further: FurtherNumbers, timeout_s: float) -> Any:
        """Score the group by an asynchronous function, with all calls concurrently.

        Raises `ScoringTimedOut` if a call takes longer than ``timeout_s`` seconds.
        """
        calls = [
            self._call_async(arguments, timeout_s, "" if self.dialect.per_group else f" for response {k}")
            for k, arguments in enumerate(self._calls(request, further))
        ]
        # It waits for calls that it cancels: the loop lives on, and no call of a failed group may still run on it.
        return self._scores_of(await concurrently(calls), further)

    async def _call_async(self, arguments: Mapping[str, Any], timeout_s: float, of: str) -> Any:
        # Without its own deadline: `_expire` sets it, which leaves out the time for which others held the loop.
        limit = asyncio.timeout(None)
        looking = asyncio.create_task(_expire(limit, timeout_s))
        try:
            async with limit:
                return await self._call(arguments)
        except (SystemExit, KeyboardInterrupt) as end:  # out of a task these stop the loop, with all others left in it
            raise ScoringFailed(f"exception: {raised_by(end)}") from end
        except asyncio.CancelledError as end:
            if is_cancelled():
                raise
            # The function raised it itself: the group takes a task that ends so for no failure, and would wait for the
            # others.
            raise ScoringFailed(f"exception: {raised_by(end)}") from end
        except Exception as error:
            if not limit.expired():  # a time limit of the function's own, among others
                raise
            raise ScoringTimedOut(f"timeout after {timeout_s:g} s{of}") from error
        finally:
            looking.cancel()

    def _scores_of(self, returned: Sequence[Any], further: FurtherNumbers) -> Any:
        """Return the scores in the calls' results, and keep their further numbers."""
        values = returned[0] if self.dialect.per_group else returned
        if not isinstance(values, list | tuple) or len(values) != further.n:
            return values
        return [further.take_from(value, k) for k, value in enumerate(values)]

    def _calls(self, request: ScoreRequest, further: FurtherNumbers) -> list[dict[str, Any]]:
        """Return all arguments of each call: one call of the group, or one for each response."""
        texts = request.responses
        match self.dialect:
            case CallingConvention.RESPONSE:
                return [self._headways_arguments(request) | {"response": text} for text in texts]
            case CallingConvention.RESPONSES:
                return [self._headways_arguments(request) | {"responses": [*texts]}]
            case CallingConvention.TRL:
                loggers = {name: getattr(further, name) for name in LOGGERS}
                return [self._trls_arguments(request) | loggers]
            case CallingConvention.VERL:
                return [{**self.params, **_verls_arguments(request), "solution_str": text} for text in texts]
            case CallingConvention.VERL_BATCH:
                lists = {f"{name}s": [value] * len(texts) for name, value in _verls_arguments(request).items()}
                return [{**self.params, **lists, "solution_strs": [*texts]}]

    def _headways_arguments(self, request: ScoreRequest) -> dict[str, Any]:
        return {
            # Later ones win: no column or parameter may replace Headway's own arguments.
            **dict.fromkeys(self.answer_keys, request.answer),
            **request.extra,
            **self.params,
            "prompt": request.prompt,
            "answer": request.answer,
            "source": request.source,
            "extra": dict(request.extra),
        }

    def _trls_arguments(self, request: ScoreRequest) -> dict[str, Any]:
        responses = request.responses
        columns = {**dict.fromkeys(("answer", *self.answer_keys), request.answer), **request.extra}
        chat = request.messages
        prompts: list[Any] = [request.prompt if chat is None else list(chat) for _ in responses]
        completions: list[Any] = [
            text if chat is None else [{"role": "assistant", "content": text}] for text in responses
        ]
        if request.conversations is not None:
            prompts = [list(conversation.prompt) for conversation in request.conversations]
            completions = [list(conversation.completion) for conversation in request.conversations]
        return {
            **{name: [value] * len(responses) for name, value in columns.items()},
            **self.params,
            "prompts": prompts,
            "completions": completions,
        }

    def _call(self, available: Mapping[str, Any]) -> Any:
        if lacking := self._takes.lacking(available):
            raise ScoringFailed(
                f"{self._name} needs {lacking[0]!r}, and the row has {', '.join(sorted(available))}; "
                "give the parameter a default or the row that column"
            )
        return self.function(**self._takes.given(available))

    def _check_params(self) -> None:
        for name in self.params:
            if name in self.dialect.given:
                raise UserCodeError(f"reward.params: {name!r} is given to {self._name} anyway; drop it")
            if not self._takes.given({name: None}):
                raise UserCodeError(
                    f"reward.params: {self._name} takes ({', '.join(self._takes.order)}), not {name!r}; drop it"
                )
        if self.dialect is CallingConvention.TRL:
            for name in set(NEVER_GIVEN).intersection(self._takes.lacking(self.params)):
                raise UserCodeError(
                    f"reward.function: {self._name} needs {name!r}, which Headway does not give; give it a default"
                    f"{INSTEAD.get(name, '')}"
                )


async def _expire(limit: asyncio.Timeout, timeout_s: float) -> None:
    """Let ``limit`` expire after ``timeout_s``, without the time for which other calls held the event loop."""
    for _ in range(LOOKS):
        await asyncio.sleep(timeout_s / LOOKS)
    limit.reschedule(asyncio.get_running_loop().time())


def _verls_arguments(request: ScoreRequest) -> dict[str, Any]:
    info = request.extra.get("extra_info")
    return {
        "data_source": request.source,
        "ground_truth": request.answer,
        "extra_info": dict(info if isinstance(info, Mapping) else request.extra),
    }


def _dialect_of(takes: Parameters, spec: str) -> CallingConvention:
    parameters = takes.named
    matching = [dialect for dialect in CallingConvention if set(dialect.markers) & set(parameters)]
    if CallingConvention.RESPONSE in matching or CallingConvention.RESPONSES in matching:
        matching = [
            dialect for dialect in matching if dialect is not CallingConvention.TRL or "completions" in parameters
        ]
    if not matching and takes.takes_all:
        return CallingConvention.RESPONSE
    if len(matching) != 1:
        raise UserCodeError(
            f"{spec}: takes ({', '.join(parameters)}); a reward has a parameter response (one text) or responses "
            "(all texts of a group), for example score(response, answer); or completions, as for TRL; or solution_str, "
            "as for verl"
        )
    return matching[0]
