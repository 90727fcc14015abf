"""Rewards that need no file: what they give, and what they say about parameters that do not fit."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.agents.rewards import scorers
from headway.agents.rewards.built_in import make_rule
from headway.agents.rewards.score_request import ScoreRequest
from headway.data.types import Conversation
from headway.errors import ConfigError, ScoringFailed
from headway.runtime.sandbox.sandbox_call import SandboxSpec
from tests.agents.rewards.parts import part_of

GSM8K_ANSWER = "She sold 48/2 = <<48/2=24>>24 clips in May.\n#### 1,072"
AFTER_HASHES = r"####\s*(\S+)"


def value(name: str, response: str, answer: object = "72", *, prompt: str = "?", **params: Any) -> float:
    request = ScoreRequest(prompt, [response], answer, "test", {})
    return make_rule(name, params)(request, request.response(0))


# ---------------------------------------------------------------------------------------------- exact match


@pytest.mark.parametrize(("response", "score"), [("4", 1.0), (" 4\n", 1.0), ("44", 0.0), ("", 0.0)])
def test_an_exact_match_ignores_surrounding_space(response: str, score: float) -> None:
    assert value("exact_match", response, "4 ") == score


def test_an_exact_match_compares_with_a_number_as_text() -> None:
    assert value("exact_match", "42", 42) == 1.0


@pytest.mark.parametrize(("name", "params"), [("exact_match", {}), ("regex", {"pattern": "None"})])
def test_a_row_without_an_answer_is_no_match_for_the_text_none(name: str, params: dict[str, Any]) -> None:
    with pytest.raises(ScoringFailed, match="the row has no answer"):
        value(name, "None", None, **params)


# ---------------------------------------------------------------------------------------------- regex


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("#### 72", 1.0),
        ("#### 71 no, #### 72", 1.0),
        ("#### 72 no, #### 71", 0.0),
        ("72", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_match_is_compared_with_the_answer(response: str, score: float) -> None:
    assert value("regex", response, pattern=AFTER_HASHES) == score


def test_a_pattern_without_groups_is_compared_as_a_whole() -> None:
    assert value("regex", "it is 72", pattern=r"\d+$") == 1.0


@pytest.mark.parametrize("group", [2, "unit"])
def test_a_group_may_be_chosen_by_number_or_name(group: int | str) -> None:
    assert value("regex", "72 km", "km", pattern=r"(\d+) (?P<unit>\w+)", group=group) == 1.0


def test_a_group_that_took_no_part_in_the_match_is_no_answer() -> None:
    assert value("regex", "b", "", pattern="(a)|b") == 0.0


def test_the_answer_pattern_finds_the_ground_truth_in_its_text() -> None:
    params = {"pattern": AFTER_HASHES, "answer_pattern": AFTER_HASHES}
    assert value("regex", "so #### 1,072", GSM8K_ANSWER, **params) == 1.0
    assert value("regex", "so #### 24", GSM8K_ANSWER, **params) == 0.0


def test_an_answer_in_which_the_answer_pattern_finds_nothing_cannot_be_scored() -> None:
    with pytest.raises(ScoringFailed, match=r"answer_pattern .*'72'"):
        value("regex", "#### 72", pattern=AFTER_HASHES, answer_pattern=AFTER_HASHES)


# ---------------------------------------------------------------------------------------------- format


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a\nb</think><answer>72</answer>", 1.0),
        (" <think></think>\n<answer>72</answer>\n", 1.0),
        ("<think>a < b</think> <answer>72</answer>", 1.0),
        ("<think>a</think> so <answer>72</answer>", 0.0),
        ("<answer>72</answer><think>a</think>", 0.0),
        ("<think>a</think>", 0.0),
        ("<think><answer>72</answer></think><answer>72</answer>", 0.0),
        ("<think>a</think><answer>7</answer><answer>2</answer>", 0.0),
        ("<think>a</think><think>b</think><answer>2</answer>", 0.0),
        ("<think>a</think><answer>72", 0.0),
        ("", 0.0),
    ],
)
def test_think_and_answer_each_stand_once_and_in_order(response: str, score: float) -> None:
    assert value("format", response) == score


def test_other_tags_and_other_forms_may_be_asked_for() -> None:
    assert value("format", "<plan>x</plan>", tags=["plan"]) == 1.0
    assert value("format", "reasons\nmore</think>72", pattern=r".*</think>\s*\d+") == 1.0
    assert value("format", "reasons</think>72!", pattern=r".*</think>\s*\d+") == 0.0


PIECES = ("<think>", "</think>", "<answer>", "</answer>", "x", " ")


@given(st.lists(st.sampled_from(PIECES), max_size=9))
def test_the_form_is_what_counting_tags_says_it_is(pieces: list[str]) -> None:
    """Against a reference without a regular expression: the tags in order, and only space outside of them."""
    tags = [piece for piece in pieces if piece.startswith("<")]
    outside, inside = "", False
    for piece in pieces:
        if piece.startswith("<"):
            inside = not piece.startswith("</")
        elif not inside:
            outside += piece
    expected = tags == list(PIECES[:4]) and not outside.strip()
    assert value("format", "".join(pieces)) == float(expected)


# ---------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("exact_match", {"case": True}, "exact_match has no parameter 'case'; it takes none"),
        (
            "regex",
            {"patern": "a"},
            "regex has no parameter 'patern' (did you mean 'pattern'?); it takes pattern,",
        ),
        ("regex", {}, "regex needs 'pattern'"),
        ("regex", {"pattern": "(a"}, "'(a' is no regular expression: missing )"),
        ("regex", {"pattern": 3}, "pattern: expected a regular expression, not 3"),
        ("regex", {"pattern": "(a)", "group": 2}, "'(a)' has no group 2"),
        ("regex", {"pattern": "(a)", "group": [1]}, "group: expected the number or the name of a group, not [1]"),
        ("regex", {"pattern": "(a)", "group": True}, "group: expected the number or the name of a group, not True"),
        ("regex", {"pattern": "(a)", "group": 1.0}, "group: expected the number or the name of a group, not 1.0"),
        ("regex", {"pattern": "(a)", "group": "b"}, "'(a)' has no group 'b'"),
        ("regex", {"pattern": "a{99999999999}"}, "'a{99999999999}' is no regular expression"),
        ("regex", {"pattern": ["a"]}, "pattern: expected a regular expression, not ['a']"),
        ("regex", {"pattern": "a", "answer_pattern": 3}, "answer_pattern: expected a regular expression, not 3"),
        ("regex", {"pattern": "a", "answer_pattern": "["}, "answer_pattern: '[' is no regular expression"),
        ("format", {"tags": "think"}, "tags: expected a list of names, such as [think, answer], not 'think'"),
        ("format", {"tags": []}, "tags: expected a list of names"),
        ("format", {"tags": 5}, "tags: expected a list of names, such as [think, answer], not 5"),
        ("format", {"tags": None}, "tags: expected a list of names, such as [think, answer], not None"),
        ("format", {"tags": {"think": 1}}, "tags: expected a list of names, such as [think, answer], not {'think': 1}"),
        ("format", {"tags": ["think", 5]}, "tags: expected a list of names, such as [think, answer], not ['think', 5]"),
        ("format", {"pattern": "*"}, "'*' is no regular expression"),
        ("math_verify", {"float_rounding": 1.5}, "float_rounding: expected int, not 1.5"),
        ("math_verify", {"strict": "no"}, "strict: expected bool, not 'no'"),
    ],
)
def test_a_parameter_that_does_not_fit_is_a_config_error(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_rule(name, params)


# ---------------------------------------------------------------------------------------------- thoughts

CODE = "```python\nprint(72)\n```"
PASSES = {"inputs": [""], "outputs": ["72"]}
TOLD: dict[str, tuple[str, object, dict[str, Any]]] = {
    "exact_match": ("72", "72", {}),
    "math_verify": (r"\boxed{72}", "72", {}),
    "regex": ("#### 72", "72", {"pattern": AFTER_HASHES}),
    "code": (CODE, PASSES, {}),
    "format": ("<answer>72</answer>", "72", {"pattern": ".*"}),
}
"""Built-in reward → a right answer, the ground truth, parameters."""


@pytest.mark.parametrize("name", [*TOLD])
@pytest.mark.parametrize("tag", ["<think>", "[THINK]"])
def test_a_thought_is_never_scored_and_one_that_never_ended_gets_nothing(name: str, tag: str) -> None:
    right, answer, params = TOLD[name]
    end = tag.replace("<", "</").replace("[", "[/")
    rule = make_rule(name, params, sandbox=SandboxSpec("process_limits"), within_s=20) if name == "code" else None

    def given_by(response: str, prompt: str) -> float:
        request = ScoreRequest(prompt, [response], answer, "test", {})
        return (rule or make_rule(name, params))(request, request.response(0))

    assert given_by(f"{tag}hm{end}\n{right}", "?") == 1.0
    assert given_by(f"hm{end}\n{right}", f"?\n{tag}\n") == 1.0, "the prompt opens the thought"
    assert given_by(f"{tag}hm\n{right}", "?") == 0.0
    assert given_by(f"hm\n{right}", f"?\n{tag}\n") == 0.0, "the thought that the prompt opens never ended"
    assert given_by(f"{tag}hm{end} so {tag}\n{right}", "?") == 0.0
    if name != "format":
        assert given_by(f"{tag}\n{right}\n{end}\nno", "?") == 0.0, "what the thought says is no answer"
    assert given_by(right, f"Think within {tag} and {end}.") == 1.0, "the prompt only speaks of thoughts"


def test_a_thought_that_the_prompt_of_an_episodes_last_turn_opens_counts_as_opened() -> None:
    request = ScoreRequest(
        "?", ["72", "no</think>72"], "72", "", {}, conversations=[Conversation([], [], "<think>")] * 2
    )
    rule = make_rule("math_verify", {})
    assert [rule(request, request.response(k)) for k in range(2)] == [0.0, 1.0]


def test_tags_count_the_thought_that_the_prompt_opens() -> None:
    response = "hm</think> <answer>72</answer>"
    assert value("format", response, prompt="?<think>\n") == 1.0
    assert value("format", response) == 0.0


@pytest.mark.parametrize(
    ("function", "params", "limit_s"),
    [("exact_match", {}, None), ("regex", {"pattern": "a"}, 10.0)],
)
def test_what_is_more_than_a_comparison_has_a_time_limit(
    function: str, params: dict[str, Any], limit_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float | None] = []
    monkeypatch.setattr(scorers, "_one_by_one", lambda rule, timeout_s: limits.append(timeout_s))
    part = part_of(function, **params)
    scorers._make_part(part, scorers.RewardSpec((part,), timeout_s=10.0))
    assert limits == [limit_s]
