"""A group's scores: each reward of the sum by its kind, checked, then added up. Runs in a runner, without torch.

ScoreRequest ─▶ part: built-in | task | user's function ─▶ n values, None where it does not apply ─┐
             └▶ part: …                                                                           ─┴▶ Σ weight · value

What a user's function tells beside its scores is kept under names of its own, with the parts.
"""

from __future__ import annotations

import math
import numbers
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from typing import Any

import numpy as np

from headway.data.tasks import make_task
from headway.errors import ConfigError, HeadwayError, ScoringFailed, cut, raised_by, writable
from headway.interfaces.rewards import Scores
from headway.rewards.built_in import BUILT_IN, make_rule
from headway.rewards.further_numbers import FurtherNumbers, plain
from headway.rewards.request import RewardPart, RewardSpec, ScoreRequest
from headway.rewards.user_function import UserFunction
from headway.runners.alarm import killed_after
from headway.user_code import load_function, names_a_file

Scorer = Callable[[ScoreRequest], Scores]
Values = list[float | None]
"""Values of one part of the reward, [n]: finite, or None where the part does not apply."""

LARGEST = float(np.finfo(np.float32).max)
"""Largest reward, positive or negative: rewards are float32, and anything larger would become infinite there."""
REASON_LENGTH = 200
MOST_NAMES = 50
"""Most names of further numbers that a process keeps: each is a metric."""
PartScorer = Callable[[ScoreRequest, FurtherNumbers], Values]
"""One part of the reward. What it tells beside its values goes to the second argument."""


def make_scorer(spec: RewardSpec) -> Scorer:
    """The scorer that ``spec`` asks for.

    Raises:
        ConfigError: unknown reward or task, parameters that it does not take, or no sandbox for the model's code here.
        UserCodeError: the user's file does not load, or its function needs what it is not given.
    """
    parts = [(part, _make_part(part, spec)) for part in spec.parts]
    known: set[str] = set()

    def admitted(part: str, name: str) -> str | None:
        """Return under which name a part's further number is kept, None for one name too many."""
        full = writable(f"{part}/{name}" if len(parts) > 1 or name == part else name)
        if full not in known and len(known) >= MOST_NAMES:
            return None
        known.add(full)
        return full

    def scorer(request: ScoreRequest) -> Scores:
        values, others = {}, {}
        for part, score in parts:
            further = FurtherNumbers(len(request.responses))
            with _attributed(part.name if len(parts) > 1 else None):
                values[part.name] = score(request, further)
            for name, told in further.values.items():
                if (full := admitted(part.name, name)) is not None:
                    others[full] = told
        weighted = [(part.weight, values[part.name]) for part, _ in parts]
        rewards = [_sum(weighted, k) for k in range(len(request.responses))]
        return Scores(np.array(rewards, np.float32), others | values)

    return scorer


def _make_part(part: RewardPart, spec: RewardSpec) -> PartScorer:
    match part.function:
        case name if name in BUILT_IN:
            rule = make_rule(name, part.params, sandbox=spec.sandbox, within_s=spec.timeout_s)
            return _one_by_one(lambda request, k, _: rule(request, request.response(k)), spec.limit_s(part))
        case "task":
            if spec.task_name is None:
                raise ConfigError("reward.function=task needs data.task; for files: exact_match or file.py:function")
            if part.params:
                raise ConfigError("reward.params: task takes none; the task's own are data.task.params")
            task = make_task(spec.task_name, spec.task_params, seed=spec.seed)

            def verify(request: ScoreRequest, k: int, _: FurtherNumbers) -> float:
                response = request.response(k)
                return 0.0 if response.begin is None else task.score(response.answer, request.answer, request.extra)

            return _one_by_one(verify, spec.timeout_s)
        case name if names_a_file(name):
            function = UserFunction(load_function(name), name, part.params, spec.answer_keys)
            if spec.columns is not None:
                function.check_columns(spec.columns, spec.lacked)
            return _user_scorer(function, spec.timeout_s)
        case name:
            raise ConfigError(
                f"reward.function: unknown reward {name!r}; "
                f"known: {', '.join(sorted([*BUILT_IN, 'task']))}, or file.py:function for your own"
            )


def _one_by_one(score: Callable[[ScoreRequest, int, FurtherNumbers], Any], timeout_s: float) -> PartScorer:
    def scorer(request: ScoreRequest, further: FurtherNumbers) -> Values:
        values = []
        for k in range(len(request.responses)):
            with killed_after(timeout_s):
                values.append(score(request, k, further))
        return checked(values, len(request.responses))

    return scorer


def _user_scorer(function: UserFunction, timeout_s: float) -> PartScorer:
    if not function.whole_group:
        return _one_by_one(
            lambda request, k, further: function.score_one(request, request.responses[k], k, further), timeout_s
        )

    def scorer(request: ScoreRequest, further: FurtherNumbers) -> Values:
        with killed_after(timeout_s):
            values = function.score_all(request, further)
        return checked(values, len(request.responses), optional=function.may_not_apply)

    return scorer


@contextmanager
def _attributed(name: str | None) -> Iterator[None]:
    """Turn an exception in the block into `ScoringFailed` under the part's ``name``, and print the traceback."""
    where = f"{name}: " if name is not None else ""
    try:
        yield
    except ScoringFailed as error:
        raise ScoringFailed(writable(f"{where}{error}")) from error
    except HeadwayError:
        raise
    except BaseException as error:  # an interrupt, too: runners ignore Ctrl-C, so that the function itself raised it
        with suppress(OSError):  # it may also have closed what this process prints to
            traceback.print_exc()
        # As text: the user's exception may not survive pickling, or need modules that the driver lacks.
        raise ScoringFailed(cut(f"{where}exception: {raised_by(error)}", REASON_LENGTH)) from None


def checked(values: Any, n: int, *, optional: bool = False) -> Values:
    """``values`` as n finite floats, or None if ``optional``. Raises `ScoringFailed` with what was returned instead."""
    items = plain(values)
    if isinstance(items, str | bytes) or not isinstance(items, Sequence):
        raise ScoringFailed(f"returned {_shown(values)} for {n} responses, expected a list of {n} numbers")
    if len(items) != n:
        raise ScoringFailed(f"returned {len(items)} values for {n} responses")
    return [None if optional and value is None else _number(value, k) for k, value in enumerate(items)]


def _number(value: Any, k: int) -> float:
    number = plain(value)
    while number is not value and isinstance(number, list) and len(number) == 1:  # an array of one element
        number = number[0]
    if not isinstance(number, numbers.Real | Decimal) or not math.isfinite(float(number)):
        raise ScoringFailed(f"returned {_shown(value)} for response {k}, expected a finite number")
    if abs(float(number)) > LARGEST:
        raise ScoringFailed(f"returned {_shown(value)} for response {k}, expected at most {LARGEST:.2g} either way")
    return float(number)


def _sum(weighted: Sequence[tuple[float, Values]], k: int) -> float:
    """Weighted sum of the values of response ``k`` over the parts that apply to it."""
    terms = [weight * value for weight, values in weighted if (value := values[k]) is not None]
    if not terms:
        raise ScoringFailed(f"no reward applies to response {k}: None was returned for it")
    total = sum(terms)
    if not abs(total) <= LARGEST:
        raise ScoringFailed(f"the weighted sum for response {k} is {total:g}, which is no finite float32")
    return total


def _shown(value: Any) -> str:
    return cut(re.sub(r" at 0x[0-9a-f]+", "", repr(value)))  # an address would make each failure another one
