"""How a user's reward function is called, and which values it may return."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from headway.agents.rewards.score_request import ScoreRequest
from headway.agents.rewards.scorers import checked
from headway.agents.rewards.user_function import FurtherNumbers, UserFunction
from headway.data.types import Conversation
from headway.errors import ScoringFailed, ScoringTimedOut, UserCodeError

REQUEST = ScoreRequest(
    prompt="2+2=", responses=["4", "5"], answer="4", source="sums", extra={"level": 3, "answer": "shadowed"}
)


CHAT = replace(REQUEST, messages=[{"role": "user", "content": "2+2="}])
VERLS = ScoreRequest(
    prompt="2+2=",
    responses=["4", "5"],
    answer="4",
    source="openai/gsm8k",
    extra={"ability": "math", "extra_info": {"index": 3, "split": "train"}},
)


def user(function: Callable[..., Any], answer_keys: tuple[str, ...] = (), **params: Any) -> UserFunction:
    return UserFunction(function, "mine.py:score", params, answer_keys)


def one(function: UserFunction, request: ScoreRequest, response: str) -> Any:
    return function.score(replace(request, responses=[response]), FurtherNumbers(1), timeout_s=60)[0]


def group(function: UserFunction, request: ScoreRequest) -> Any:
    further = FurtherNumbers(len(request.responses))
    return (
        asyncio.run(function.score_async(request, further, timeout_s=60))
        if function.is_async
        else function.score(request, further, timeout_s=60)
    )


def test_a_function_gets_the_arguments_that_it_names() -> None:
    def score(response, answer, level, extra, source, prompt):
        return (response, answer, level, extra, source, prompt)

    got = one(user(score), REQUEST, "5")
    assert got == ("5", "4", 3, {"level": 3, "answer": "shadowed"}, "sums", "2+2=")


def test_a_parameter_with_a_default_may_be_missing_from_the_row() -> None:
    def score(response, difficulty=7):
        return difficulty

    assert one(user(score), REQUEST, "5") == 7


def test_a_parameter_that_the_row_lacks_is_named() -> None:
    def score(response, solution):
        return 1.0

    with pytest.raises(ScoringFailed, match=r"score needs 'solution', .*answer, extra, level"):
        one(user(score), REQUEST, "5")


def test_keyword_arguments_collect_every_column() -> None:
    def score(**everything):
        return sorted(everything)

    names = ["answer", "extra", "level", "prompt", "response", "source"]
    assert one(user(score), REQUEST, "5") == names


def test_a_parameter_named_responses_makes_it_a_batch_function() -> None:
    def score(responses, answer):
        return [float(r == answer) for r in responses]

    function = user(score)
    assert function.dialect.per_group
    assert group(function, REQUEST) == [1.0, 0.0]


def test_asynchronous_calls_of_a_group_are_awaited_together() -> None:
    """The first call can only end once the second has begun."""
    second_began: list[asyncio.Event] = []

    async def score(response):
        if not second_began:
            second_began.append(asyncio.Event())
            await asyncio.wait_for(second_began[0].wait(), timeout=60)
        second_began[0].set()
        return len(response)

    assert group(user(score), REQUEST) == [1, 1]


def test_an_asynchronous_call_that_takes_too_long_is_cancelled_and_named() -> None:
    cancelled = []

    async def score(response):
        if response == "late":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(response)
                raise
        return 1.0

    request = replace(REQUEST, responses=["4", "late", "5"])
    with pytest.raises(ScoringTimedOut, match=r"^timeout after 0.01 s for response 1$"):
        asyncio.run(user(score).score_async(request, FurtherNumbers(3), timeout_s=0.01))
    assert cancelled == ["late"]


def test_a_time_limit_of_an_asynchronous_functions_own_is_an_exception_of_it() -> None:
    async def score(responses):
        async with asyncio.timeout(0):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(user(score).score_async(REQUEST, FurtherNumbers(2), timeout_s=60))


def test_a_failed_asynchronous_group_has_cleaned_up_when_its_failure_is_told() -> None:
    cleaned_up = []

    async def score(response):
        if response == "no":
            raise ValueError(response)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned_up.append(response)

    with pytest.raises(ValueError, match="no"):
        group(user(score), replace(REQUEST, responses=["left", "no"]))
    assert cleaned_up == ["left"]


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_an_asynchronous_call_that_leaves_the_process_fails_its_own_group_alone(end: type[BaseException]) -> None:
    cleaned_up = []

    async def score(response):
        if response == "leave":
            raise end(3)
        if response == "left":
            try:
                await asyncio.Event().wait()
            finally:
                cleaned_up.append(response)
        return 1.0

    function = user(score)
    with pytest.raises(ScoringFailed, match=rf"^exception: {end.__name__}: 3 \(test_user_function.py:\d+, in score\)$"):
        group(function, replace(REQUEST, responses=["left", "leave"]))
    assert cleaned_up == ["left"]
    assert group(function, REQUEST) == [1.0, 1.0]


def test_an_object_with_an_asynchronous_call_is_awaited() -> None:
    class Judge:
        async def __call__(self, response: str) -> float:
            return float(response)

    assert group(user(Judge()), REQUEST) == [4.0, 5.0]
    assert group(user(functools.partial(Judge())), REQUEST) == [4.0, 5.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda text: 0,
            r"takes \(text\); .*\bresponse\b.*\bcompletions\b.*TRL",
        ),
        (lambda completions, solution_str: 0, "parameter response"),
        (lambda completions, responses: 0, "parameter response"),
        (lambda solution_str, solution_strs: 0, "parameter response"),
        (lambda response, responses: 0, "response"),
        (lambda response, /: 0, "'response' is positional"),
        (lambda *response: 0, "'response' is positional"),
        (dict, "parameters cannot be read|parameter"),
    ],
)
def test_a_signature_that_does_not_fit_is_the_users_error(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(UserCodeError, match=message):
        user(function)


def test_the_answers_own_column_is_a_name_of_it() -> None:
    def score(response, solution, answer):
        return (solution, answer)

    assert one(user(score, ("solution",)), REQUEST, "5") == ("4", "4")


# ---------------------------------------------------------------------------------------------- parameters


def test_parameters_are_further_arguments_and_stand_before_columns() -> None:
    def score(response, level, scale=1.0):
        return (level, scale)

    assert one(user(score, scale=2.0), REQUEST, "5") == (3, 2.0)
    assert one(user(score, level=7), REQUEST, "5") == (7, 1.0)


@pytest.mark.parametrize(
    ("function", "params", "message"),
    [
        (lambda response: 0, {"scale": 2}, r"score takes \(response\), not 'scale'"),
        (lambda response, **kwargs: 0, {"answer": 2}, "'answer' is given to score anyway"),
        (lambda completions, **kwargs: [], {"prompts": 2}, "'prompts' is given to score anyway"),
        (lambda solution_str, **kwargs: 0, {"extra_info": {}}, "'extra_info' is given to score anyway"),
    ],
)
def test_a_parameter_that_the_function_does_not_take_is_the_users_error(
    function: Callable[..., Any], params: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserCodeError, match=f"reward.params: {message}"):
        user(function, **params)


# ---------------------------------------------------------------------------------------------- TRL


def test_a_function_for_trl_gets_lists_of_prompts_completions_and_columns() -> None:
    def score(prompts, completions, solution, level, **kwargs):
        assert sorted(kwargs) == ["answer", "log_extra", "log_metric", "scale"]
        return [
            (p, c, s, lv, kwargs["scale"]) for p, c, s, lv in zip(prompts, completions, solution, level, strict=True)
        ]

    request = replace(REQUEST, extra={"level": 3})
    function = user(score, ("solution",), scale=0.5)
    assert function.dialect.per_group
    assert group(function, request) == [("2+2=", "4", "4", 3, 0.5), ("2+2=", "5", "4", 3, 0.5)]


def test_a_function_for_trl_gets_messages_where_prompts_are_a_chat() -> None:
    def score(prompts, completions):
        return [(prompt[-1]["content"], completion[0]) for prompt, completion in zip(prompts, completions, strict=True)]

    assert group(user(score), CHAT) == [
        ("2+2=", {"role": "assistant", "content": "4"}),
        ("2+2=", {"role": "assistant", "content": "5"}),
    ]


def test_a_function_for_trl_gets_the_conversations_that_a_program_had() -> None:
    def message(role: str, content: str) -> dict[str, Any]:
        return {"role": role, "content": content}

    conversations = [
        Conversation([message("user", "2+2=? From 1 to 9.")], [message("assistant", "3"), message("user", "no"), last])
        for last in (message("assistant", "4"), message("assistant", "5"))
    ]
    for asked in (REQUEST, CHAT):
        request = replace(asked, conversations=conversations)
        given = group(user(lambda prompts, completions: [*zip(prompts, completions, strict=True)]), request)
        assert given == [(one.prompt, one.completion) for one in conversations]
        assert group(user(lambda responses: responses), request) == ["4", "5"]


def test_a_column_of_the_data_sets_own_stands_before_the_answer_for_trl() -> None:
    def score(completions, answer):
        return answer

    assert group(user(score), REQUEST) == ["shadowed", "shadowed"]


def test_an_asynchronous_function_for_trl_is_awaited() -> None:
    async def score(completions, **kwargs):
        return [float(len(text)) for text in completions]

    assert group(user(score), REQUEST) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completion_ids, **kwargs: [], "needs 'completion_ids', which Headway"),
        (lambda completions_ids, **kwargs: [], "needs 'completions_ids', which Headway"),
        (lambda completions, environments: [], "needs 'environments', which Headway"),
        (lambda completions, trainer_state: [], "needs 'trainer_state', which Headway"),
    ],
)
def test_what_trl_gives_and_headway_does_not_is_told_at_the_start(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(UserCodeError, match=message):
        user(function)


def test_a_function_that_needs_environments_is_pointed_to_what_gives_their_reward() -> None:
    with pytest.raises(UserCodeError, match=r"get_reward\(\)"):
        user(lambda completions, environments: [])
    with pytest.raises(UserCodeError, match=r"needs 'environments', .*get_reward\(\)"):
        user(lambda environments, **kwargs: []).check_columns([])
    with pytest.raises(UserCodeError) as other:
        user(lambda completions, trainer_state: [])
    assert "get_reward" not in str(other.value)


def test_what_headway_does_not_give_may_have_a_default() -> None:
    def score(completions, completion_ids=None, trainer_state=None, environments=None):
        return [(completion_ids, trainer_state, environments)] * len(completions)

    assert group(user(score), REQUEST) == [(None, None, None)] * 2


def test_a_column_that_a_function_for_trl_needs_is_looked_for_before_the_run() -> None:
    function = user(lambda completions, solution, **kwargs: [])
    with pytest.raises(UserCodeError, match=r"score needs 'solution', .*\blevel\b"):
        function.check_columns(["level"])
    function.check_columns(["solution"])
    with pytest.raises(UserCodeError, match=r"val\.jsonl, line 1 lacks it"):
        function.check_columns(["level"], {"solution": "val.jsonl, line 1"})
    user(lambda completions, solution: [], ("solution",)).check_columns([])
    user(lambda completions, solution: [], solution="x").check_columns([])


# ---------------------------------------------------------------------------------------------- verl


def test_a_function_for_verl_gets_its_four_arguments_and_its_reward_kwargs() -> None:
    def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
        return (data_source, solution_str, ground_truth, extra_info, scale)

    expected = ("openai/gsm8k", "5", "4", {"index": 3, "split": "train"}, 2.0)
    assert one(user(compute_score, scale=2.0), VERLS, "5") == expected


def test_without_a_column_extra_info_the_other_columns_are_verls_extra_info() -> None:
    def compute_score(solution_str, extra_info):
        return extra_info

    assert one(user(compute_score), REQUEST, "5") == {"level": 3, "answer": "shadowed"}


def test_with_keyword_arguments_a_function_for_verl_gets_no_columns() -> None:
    def compute_score(solution_str, **kwargs):
        return sorted(kwargs)

    assert one(user(compute_score), VERLS, "5") == ["data_source", "extra_info", "ground_truth"]


@pytest.mark.parametrize("value", [0.5, True, {"score": 0.5, "acc": True, "pred": "4"}])
def test_a_function_for_verl_returns_a_number_or_a_dictionary_with_score(value: Any) -> None:
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return value

    function = user(compute_score)
    assert not function.dialect.per_group
    assert one(function, VERLS, "5") == (0.5 if value is not True else True)


def test_a_batch_function_for_verl_scores_the_group() -> None:
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
        rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
        return [{"score": float(text == truth), "index": info["index"]} for _, text, truth, info in rows]

    assert group(user(compute_score), VERLS) == [1.0, 0.0]


def test_asynchronous_calls_for_verl_are_awaited_together() -> None:
    async def compute_score(solution_str, ground_truth, **kwargs):
        await asyncio.sleep(0)
        return {"score": float(solution_str == ground_truth)}

    assert group(user(compute_score), VERLS) == [1.0, 0.0]


def test_what_a_function_for_verl_needs_beyond_that_is_told_before_the_run() -> None:
    function = user(lambda solution_str, reward_model_tokenizer: 0)
    with pytest.raises(
        UserCodeError,
        match="needs 'reward_model_tokenizer', but the rows",
    ):
        function.check_columns(["reward_model_tokenizer"])
    with pytest.raises(UserCodeError, match="needs 'solution', but the rows"):
        user(lambda solution_str, solution: 0, ("solution",)).check_columns([])


# ---------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    "value", [1, 0.5, True, np.float32(0.5), np.int64(2), np.bool_(True), Fraction(1, 2), Decimal("0.5")]
)
def test_numbers_and_truth_values_are_rewards(value: Any) -> None:
    assert checked([value], 1) == [float(value)]


def test_what_may_not_apply_may_be_none() -> None:
    assert checked([None, 1], 2, optional=True) == [None, 1.0]
    with pytest.raises(ScoringFailed, match=r"returned None for 2 responses, .*list of 2\b"):
        checked(None, 2, optional=True)


def test_tensors_and_their_scalars_are_numbers() -> None:
    assert checked(torch.tensor([0.0, 1.5]), 2) == [0.0, 1.5]
    assert checked([torch.tensor(0.5), np.array(2.0)], 2) == [0.5, 2.0]
    assert checked([torch.tensor([0.5]), np.array([[2.0]])], 2) == [0.5, 2.0]
    with pytest.raises(ScoringFailed, match=r"for response 0, .*finite"):
        checked([np.zeros(2)], 1)


def test_an_array_of_numbers_is_a_list_of_rewards() -> None:
    assert checked(np.array([0.0, 1.5]), 2) == [0.0, 1.5]


@pytest.mark.parametrize("value", [None, "1.0", math.nan, math.inf, -math.inf, 1e39, [1.0], 1j, {"acc": 1.0}])
def test_anything_else_is_refused_with_what_it_was(value: Any) -> None:
    with pytest.raises(ScoringFailed) as error:
        checked([0.0, value], 2)
    assert f"returned {value!r} for response 1" in str(error.value)


@pytest.mark.parametrize("values", [None, 1.0, "11", {1.0: 2}, iter([1.0, 1.0])])
def test_a_batch_function_returns_a_list(values: Any) -> None:
    with pytest.raises(ScoringFailed, match=r"expected a list of 2\b"):
        checked(values, 2)


def test_a_list_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ScoringFailed, match="returned 1 values for 2 responses"):
        checked([1.0], 2)
