"""Columns and rewards are found by names and values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.agents.rewards.built_in import make_rule
from headway.agents.rewards.score_request import ScoreRequest
from headway.api.init.data_summary import (
    CHARACTERS_OF_A_TOKEN,
    MOST_MADE,
    MOST_MEASURED,
    answer_column,
    look_at_data,
    prompt_column,
    reward_for,
)
from headway.errors import DataError
from tests.api.starter.facts import model

CHAT = [{"role": "user", "content": "1+1?"}]
ANSWERED = [*CHAT, {"role": "assistant", "content": "2"}]
SHARED = [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]
TESTS = '{"inputs": ["1\\n"], "outputs": ["2\\n"]}'


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"question": "1+1?", "answer": "2"}, "question", "auto"),
        ({"prompt": CHAT, "reward_model": {"ground_truth": "2"}}, "prompt", "auto"),
        ({"problem": "1+1?", "solution": "It is 2", "answer": "2", "messages": ANSWERED}, "problem", "auto"),
        ({"Problem": "1+1?", "Solution": "It is 2", "Answer": "2"}, "Problem", "Answer"),
        ({"task_id": 3, "text": "Write f", "code": "def f", "test_list": ["assert f"]}, "text", "test_list"),
        ({"prompt": "def f", "canonical_solution": "…", "test": "check(f)", "entry_point": "f"}, "prompt", "test"),
        ({"messages": ANSWERED}, "messages", "auto"),
        (
            {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]},
            "conversations",
            "auto",
        ),
        ({"anything": "1+1?"}, "anything", None),
        ({"instruction": "Add 1 to 1.", "input": "", "output": "2"}, "instruction", "output"),
    ],
)
def test_columns_are_found_by_their_names_and_values(row: dict[str, Any], prompt: str, answer: str | None) -> None:
    assert prompt_column([row, row], "data") == prompt
    assert answer_column([row, row], prompt, "data") == answer


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "there are no rows"),
        ([{"first": "a", "second": "b"}], "first, second could be it. Say which: data.prompt_key=COLUMN"),
        ([{"image": 3}], "there are image, and none holds text or chat messages"),
        ([{"messages": ANSWERED, "solution": "3"}], "chats in 'messages' end with an assistant's message, '2'"),
        ([{"messages": ANSWERED}, {"messages": CHAT}], "and it is not the ground truth of each row"),
        (["text"], "expected rows with columns"),
        ([{"question": "1+1?"}] * 3 + [{"question": ""}], "row 4 has no text in 'question', the prompt's column"),
        ([{"question": "1+1?"}] * 3 + [{"prompt": "2+2?"}], "row 4 has no text in 'question', the prompt's column"),
        ([{"question": "1+1?", "choices": ["1", "2"]}], "'choices' belongs to the question, and only 'question' is"),
        ([{"instruction": "Add.", "input": i} for i in ("", "1+1")], "say that it is enough: data.prompt_key=instru"),
    ],
)
def test_data_without_a_prompt_says_what_there_is(rows: list[Any], said: str) -> None:
    with pytest.raises(DataError) as refused:
        prompt_column(rows, "data")
    assert said in str(refused.value)


def test_the_longest_prompt_is_that_of_all_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(2 * MOST_MEASURED)]
    rows[1]["prompt"] = "1+" * 300 + "1="
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert look_at_data(str(file), model(), None, {}).prompts.longest == -(-602 // CHARACTERS_OF_A_TOKEN)


def test_the_first_problems_of_a_task_are_looked_at() -> None:
    read = look_at_data("sort", model(), None, {"data.task.size": 300})
    assert (read.rows, len(read.tokens), read.reward.function) == (300, MOST_MADE, "task")


@pytest.mark.parametrize(
    ("answers", "function"),
    [
        ([1, 2, 3], "math_verify"),
        (["1,024", "-3.5", "$12"], "math_verify"),
        (["1,2,3", "-1, 2", "4"], "math_verify"),
        (["1,2,3", "0,1"], "math_verify"),
        (["1,1,3", "0,1", "2,2"], "math_verify"),
        (["Four and two.\n#### 6", "#### -1"], "math_verify"),
        ([r"\frac{1}{2}", "x^2 + 1", "(3, 4)", "12"], "math_verify"),
        ([r"So the answer is \boxed{7}.", r"\boxed{x}"], "math_verify"),
        (["A", "C", "B"], "regex"),
        (["(A)", "(B)"], "regex"),
        ([True, False] * 4, "regex"),
        (["yes", "no"] * 4, "regex"),
        (["0042", "1234"], "exact_match"),
        (["Paris", "New York", "Rome"], "exact_match"),
        ([TESTS, TESTS], "code"),
        ([["assert f(1) == 2"], ["assert f(2) == 3"]], "code"),
        (["def check(candidate):\n    assert candidate(1)"], None),
        (["They raise prices.\nAnd then they fall."], None),
        ([["Paris", "paris"]], None),
        ([None, None], None),
        (["word " * 40], None),
    ],
)
def test_the_reward_is_the_one_that_fits_the_answers(answers: list[Any], function: str | None) -> None:
    reward = reward_for([(answer, {}) for answer in answers])
    assert (None if reward is None else reward.function) == function


@pytest.mark.parametrize(
    ("answers", "response", "value"),
    [
        (["A", "E"], "It is B. No, the answer is E", 1.0),
        (["(A)", "(B)"], "A, or rather (B)", 1.0),
        (["yes", "no"] * 4, "yes and yes, so no", 1.0),
        (["yes", "no"] * 4, "no, so yes", 0.0),
    ],
)
def test_the_pattern_of_choices_takes_the_last_one(answers: list[Any], response: str, value: float) -> None:
    reward = reward_for([(answer, {}) for answer in answers])
    assert reward is not None
    rule = make_rule(reward.function, reward.params)
    request = ScoreRequest("", [response], answers[-1], "", {})
    assert rule(request, request.response(0)) == value
