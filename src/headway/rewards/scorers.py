"""The kinds of reward, each as a scorer: one group in, one value per response out. Runs in a worker, without torch."""

from __future__ import annotations

import numbers
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from headway.data.tasks import make_task
from headway.errors import ConfigError, ScoringFailed
from headway.rewards.request import RewardSpec, ScoreRequest
from headway.rewards.user_function import UserFunction
from headway.user_code import load_function, names_a_file

Scorer = Callable[[ScoreRequest], list[float]]

BUILT_IN = ("exact_match", "task")
LARGEST = float(np.finfo(np.float32).max)
"""Rewards are float32; anything larger would become infinite there."""


def make_scorer(spec: RewardSpec) -> Scorer:
    """The scorer that ``spec`` names.

    Raises:
        ConfigError: unknown reward or task.
        UserCodeError: the user's file does not load, or its function needs what it is not given.
    """
    match spec.function:
        case "exact_match":
            return _one_by_one(exact_match, spec.timeout_s)
        case "task":
            if spec.task_name is None:
                raise ConfigError("reward.function=task needs data.task; for files: exact_match or file.py:function")
            task = make_task(spec.task_name, spec.task_params, seed=spec.seed)
            return _one_by_one(lambda r, text: task.score(text, r.answer, r.extra), spec.timeout_s)
        case name if names_a_file(name):
            function = UserFunction(load_function(name), name)
            if spec.columns is not None:
                function.check_columns(spec.columns)
            return _user_scorer(function, spec.timeout_s)
        case name:
            raise ConfigError(
                f"reward.function: unknown reward {name!r}; "
                f"known: {', '.join(BUILT_IN)}, or file.py:function for your own"
            )


def exact_match(request: ScoreRequest, response: str) -> float:
    """1 where response and answer are the same text, surrounding space aside."""
    return float(response.strip() == str(request.answer).strip())


def _one_by_one(score: Callable[[ScoreRequest, str], Any], timeout_s: float) -> Scorer:
    def scorer(request: ScoreRequest) -> list[float]:
        values = []
        for response in request.responses:
            with killed_after(timeout_s):
                values.append(score(request, response))
        return checked(values, len(request.responses))

    return scorer


def _user_scorer(function: UserFunction, timeout_s: float) -> Scorer:
    if not function.whole_group:
        return _one_by_one(function.score_one, timeout_s)

    def scorer(request: ScoreRequest) -> list[float]:
        with killed_after(timeout_s):
            values = function.score_all(request)
        return checked(values, len(request.responses))

    return scorer


@contextmanager
def killed_after(seconds: float) -> Iterator[None]:
    """Let the kernel end this process when the block takes longer.

    The alarm's default action needs no interpreter: it also ends a call that never gives it back (a regular expression
    that backtracks for ever). The pool reads the signal from the exit code.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # each time: user code may have set a handler of its own
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def checked(values: Any, n: int) -> list[float]:
    """``values`` as n finite floats. Raises `ScoringFailed` with what was returned instead."""
    if isinstance(values, str | bytes) or not isinstance(values, Sequence | np.ndarray):
        raise ScoringFailed(f"returned {_shown(values)} for {n} responses, expected a list of {n} numbers")
    if len(values) != n:
        raise ScoringFailed(f"returned {len(values)} values for {n} responses")
    return [_number(value, k) for k, value in enumerate(values)]


def _number(value: Any, k: int) -> float:
    is_number = isinstance(value, numbers.Real | np.bool_)  # NumPy's booleans are no numbers.Real
    if not is_number or not abs(float(value)) <= LARGEST:  # not >, so that NaN is refused too
        raise ScoringFailed(f"returned {_shown(value)} for response {k}, expected a finite number")
    return float(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
