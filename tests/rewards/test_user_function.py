"""How a user's reward function is called, and which values it may return."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from headway.errors import ScoringFailed, UserCodeError
from headway.rewards.request import ScoreRequest
from headway.rewards.scorers import checked, exact_match
from headway.rewards.user_function import UserFunction

REQUEST = ScoreRequest(
    prompt="2+2=", responses=["4", "5"], answer="4", source="sums", extra={"level": 3, "answer": "shadowed"}
)


def user(function: Callable[..., Any]) -> UserFunction:
    return UserFunction(function, "mine.py:score")


def test_a_function_gets_the_arguments_that_it_names() -> None:
    def score(response, answer, level, extra, source, prompt):
        return (response, answer, level, extra, source, prompt)

    got = user(score).score_one(REQUEST, "5")
    assert got == ("5", "4", 3, {"level": 3, "answer": "shadowed"}, "sums", "2+2=")


def test_a_parameter_with_a_default_may_be_missing_from_the_row() -> None:
    def score(response, difficulty=7):
        return difficulty

    assert user(score).score_one(REQUEST, "5") == 7


def test_a_parameter_that_the_row_lacks_is_named() -> None:
    def score(response, solution):
        return 1.0

    with pytest.raises(ScoringFailed, match="score needs 'solution', and the row has answer, extra, level"):
        user(score).score_one(REQUEST, "5")


def test_keyword_arguments_collect_every_column() -> None:
    def score(**everything):
        return sorted(everything)

    names = ["answer", "extra", "level", "prompt", "response", "source"]
    assert user(score).score_one(REQUEST, "5") == names


def test_a_parameter_named_responses_makes_it_a_batch_function() -> None:
    def score(responses, answer):
        return [float(r == answer) for r in responses]

    function = user(score)
    assert function.whole_group
    assert function.score_all(REQUEST) == [1.0, 0.0]


def test_asynchronous_calls_of_a_group_are_awaited_together() -> None:
    """The first call can only end once the second has begun."""
    second_began: list[asyncio.Event] = []

    async def score(response):
        if not second_began:
            second_began.append(asyncio.Event())
            await asyncio.wait_for(second_began[0].wait(), timeout=5)
        second_began[0].set()
        return len(response)

    function = user(score)
    assert function.whole_group
    assert function.score_all(REQUEST) == [1, 1]


def test_an_asynchronous_function_keeps_its_loop_from_group_to_group() -> None:
    loops = []

    async def score(responses):
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(responses)

    function = user(score)
    function.score_all(REQUEST)
    function.score_all(REQUEST)
    assert loops[0] is loops[1]


def test_nothing_of_a_failed_asynchronous_group_runs_on() -> None:
    cancelled = []

    async def score(response):
        if response == "4":
            raise ValueError("no")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(response)
            raise

    function = user(score)
    with pytest.raises(ValueError, match="no"):
        function.score_all(REQUEST)

    async def nothing() -> None: ...

    function._runner.run(nothing())
    assert cancelled == ["5"]


def test_an_object_with_an_asynchronous_call_is_awaited() -> None:
    class Judge:
        async def __call__(self, response: str) -> float:
            return float(response)

    assert user(Judge()).score_all(REQUEST) == [4.0, 5.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda text: 0, r"takes \(text\); a reward has a parameter response"),
        (lambda response, responses: 0, "response"),
        (lambda response, /: 0, "'response' is positional"),
        (lambda *response: 0, "'response' is positional"),
        (dict, "parameters cannot be read|parameter"),
    ],
)
def test_a_signature_that_does_not_fit_is_the_users_error(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(UserCodeError, match=message):
        user(function)


@pytest.mark.parametrize("value", [1, 0.5, True, np.float32(0.5), np.int64(2), np.bool_(True), Fraction(1, 2)])
def test_numbers_and_truth_values_are_rewards(value: Any) -> None:
    assert checked([value], 1) == [float(value)]


def test_an_array_of_numbers_is_a_list_of_rewards() -> None:
    assert checked(np.array([0.0, 1.5]), 2) == [0.0, 1.5]


@pytest.mark.parametrize("value", [None, "1.0", math.nan, math.inf, -math.inf, 1e39, [1.0], 1j])
def test_anything_else_is_refused_with_what_it_was(value: Any) -> None:
    with pytest.raises(ScoringFailed) as error:
        checked([0.0, value], 2)
    assert f"returned {value!r} for response 1" in str(error.value)


@pytest.mark.parametrize("values", [None, 1.0, "11", {1.0: 2}, iter([1.0, 1.0])])
def test_a_batch_function_returns_a_list(values: Any) -> None:
    with pytest.raises(ScoringFailed, match="expected a list of 2 numbers"):
        checked(values, 2)


def test_a_list_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ScoringFailed, match="returned 1 values for 2 responses"):
        checked([1.0], 2)


@pytest.mark.parametrize(("response", "score"), [("4", 1.0), (" 4\n", 1.0), ("44", 0.0), ("", 0.0)])
def test_an_exact_match_ignores_surrounding_space(response: str, score: float) -> None:
    assert exact_match(REQUEST, response) == score
