"""Several rewards at once: their weighted sum, what does not apply, and whose fault a failure was."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from headway.agents.rewards.score_request import ScoreRequest
from headway.agents.rewards.scorers import MOST_NAMES, RewardPart, RewardSpec, Scorer
from headway.config.doctor import diagnose
from headway.config.loading import dump, load
from headway.config.schema import Config
from headway.data.interfaces.episode_groups import Scores, means_of_parts
from headway.errors import ConfigError, ScoringFailed, UserCodeError
from headway.pipeline.admission.ledger import cannot_be_scored
from tests.agents.rewards.parts import part_of
from tests.tiers import searched

REQUEST = ScoreRequest("2+2=", ["4", "<think></think><answer>4</answer>", "five"], "4", "sums", {"kind": "math"})

USER_FILE = """
import asyncio

def math_only(completions, kind, **kwargs):
    return [float("4" in text) if k == "math" else None for text, k in zip(completions, kind)]

def code_only(completions, kind, **kwargs):
    return [1.0 if k == "code" else None for k in kind]

def unlike_five(completions, **kwargs):
    return [None if text == "five" else 1.0 for text in completions]

def length(solution_str, scale=1.0, **kwargs):
    return {"score": len(solution_str) * scale}

def huge(responses):
    return [3e38] * len(responses)

def numbers(response, answer):
    told = {"score": float(answer in response), "acc": answer in response, "pred": response, "nan": float("nan")}
    return told | ({"words": 1} if response == "five" else {})

async def rewards(responses):
    return [{"reward": 1.0, "length": len(text)} for text in responses]

loops = set()

async def in_a_loop(responses):
    loops.add(asyncio.get_running_loop())
    return [float(len(loops) == 1)] * len(responses)

def logs(completions, log_metric, log_extra, **kwargs):
    log_extra("text", completions)
    log_metric("share", 0.25)
    log_metric("share", 0.75)
    log_metric("not one", None)
    log_metric(3, 0.5)
    return [1.0] * len(completions)

def many(response):
    return {"score": 1.0} | {f"n{number}": number for number in range(99)}

def raises(response):
    raise ValueError("no verdict")

def leaves(response):
    raise SystemExit(3)

def nan(response):
    return float("nan")

def nothing(response):
    pass
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(USER_FILE)
    return str(file)


def scorer(*parts: RewardPart) -> Callable[[ScoreRequest], Scores]:
    """Score as a process without an event loop does."""
    loaded = Scorer(RewardSpec(parts, timeout_s=10))

    def score(request: ScoreRequest) -> Scores:
        with pytest.raises(StopIteration) as end:
            loaded.serve(request).send(None)
        scores: Scores = end.value.value
        return scores

    return score


def part(function: str, weight: float = 1.0, **params: Any) -> RewardPart:
    return RewardPart(function, function.rpartition(":")[2], weight, params)


def test_the_reward_is_the_weighted_sum_and_the_parts_are_known(mine: str) -> None:
    score = scorer(part("math_verify"), part("format", 0.5), part(f"{mine}:length", -0.01, scale=2.0))(REQUEST)
    lengths = [2.0 * len(text) for text in REQUEST.responses]
    assert score.parts == {"math_verify": [1.0, 1.0, 0.0], "format": [0.0, 1.0, 0.0], "length": lengths}
    assert score.rewards.dtype == np.float32
    assert score.rewards == pytest.approx([1.0 - 0.02, 1.5 - 0.01 * lengths[1], -0.08], rel=1e-7)


def test_a_single_reward_is_its_own_sum(mine: str) -> None:
    score = scorer(part(f"{mine}:length"))(REQUEST)
    assert score.rewards.tolist() == score.parts["length"] == [1.0, 33.0, 4.0]


def test_failures_that_quote_long_answers_are_counted_as_one(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def score(response):\n    return float(response)\n")
    score, reasons = scorer(part(f"{tmp_path}/own.py:score")), []
    for letter in "abcdefgh":
        with pytest.raises(ScoringFailed) as failed:
            score(ScoreRequest("?", [letter * 400], "4", "sums", {}))
        reasons.append(str(failed.value))
    text = cannot_be_scored("8 problems", reasons)
    assert "(8× " in text and "(own.py:2, in score) and alike)" in text and "a" * 150 in text
    assert len(text) < 600


def test_what_does_not_apply_is_left_out_of_the_sum(mine: str) -> None:
    score = scorer(part(f"{mine}:math_only"), part(f"{mine}:code_only", 2.0))(REQUEST)
    assert score.rewards.tolist() == [1.0, 1.0, 0.0]
    assert score.parts["code_only"] == [None, None, None]


def test_a_response_that_no_reward_applies_to_cannot_be_scored(mine: str) -> None:
    with pytest.raises(ScoringFailed, match="response 2: None"):
        scorer(part(f"{mine}:code_only"), part(f"{mine}:unlike_five"))(REQUEST)


@searched(100, st.lists(st.tuples(st.floats(-1e3, 1e3), st.booleans(), st.booleans()), min_size=1, max_size=5))
def test_sums_are_those_of_a_scalar_loop(parts: list[tuple[float, bool, bool]]) -> None:
    """Patterns that match the first response, the second, both or none, with any weights. The sum is rounded once."""
    responses = ["a", "b"]
    spec = [
        RewardPart("regex", f"part {i}", weight, {"pattern": f"[{'a' * first}{'b' * second}z]", "group": 0})
        for i, (weight, first, second) in enumerate(parts)
    ]
    rewards = []
    for k, response in enumerate(responses):
        got = scorer(*spec)(ScoreRequest("", responses, response, "", {}))
        rewards.append(got.rewards[k])
    for k in range(2):
        assert rewards[k] == pytest.approx(math.fsum(one[0] for one in parts if one[1 + k]), rel=1e-7, abs=1e-9)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("raises", "raises: exception: ValueError: no verdict (mine.py:…, in raises)"),
        ("leaves", "leaves: exception: SystemExit: 3 (mine.py:…, in leaves)"),
        ("nan", "nan: returned nan for response 0, expected a finite number"),
        ("nothing", "nothing: returned None for response 0, expected a finite number"),
    ],
)
def test_of_several_rewards_the_one_that_failed_is_named(mine: str, function: str, reason: str) -> None:
    with pytest.raises(ScoringFailed) as error:
        scorer(part("exact_match"), part(f"{mine}:{function}"))(REQUEST)
    assert re.sub(r":\d+, in", ":…, in", str(error.value)) == reason


def test_a_sum_that_float32_cannot_hold_is_refused(mine: str) -> None:
    with pytest.raises(ScoringFailed, match="sum for response 0 is 6e"):
        scorer(part(f"{mine}:huge", 2.0))(REQUEST)


def test_what_a_part_does_not_take_is_found_when_it_is_made(mine: str) -> None:
    with pytest.raises(ConfigError, match="exact_match has no parameter 'case'"):
        scorer(part("exact_match", case=True))
    with pytest.raises(UserCodeError, match="'scales'"):
        scorer(part(f"{mine}:nan", scales=2))
    with pytest.raises(ConfigError, match="task takes none"):
        Scorer(RewardSpec((part("task", x=1),), timeout_s=1, task_name="sort"))


# ---------------------------------------------------------------------------------------------- configuration

FILE = ("model.path=/m", "data.train=train.jsonl", "rollout.total_rollout_steps=128")
TWO = "reward.functions=[{function: math_verify}, {function: format, weight: 0.2, params: {tags: [a]}}]"


def configured(*overrides: str) -> Config:
    loaded = load(None, [*FILE, *overrides])
    diagnose(loaded)
    return loaded.config


def test_one_function_has_weight_one_and_its_own_name() -> None:
    spec = RewardSpec.of(configured("reward.function=regex", "reward.params={pattern: a}"))
    assert spec.parts == (RewardPart("regex", "regex", 1.0, {"pattern": "a"}),)


def test_several_functions_have_weights_names_and_parameters_of_their_own() -> None:
    spec = RewardSpec.of(configured(TWO))
    assert spec.parts == (
        RewardPart("math_verify", "math_verify"),
        RewardPart("format", "format", 0.2, {"tags": ["a"]}),
    )
    assert spec.shown == "math_verify, format"


def test_functions_of_files_are_found_from_elsewhere_and_keep_their_names(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    two = "[{function: a.py:score}, {function: a.py:score, name: again}]"
    spec = RewardSpec.of(configured(f"reward.functions={two}"))
    assert [(one.function, one.name) for one in spec.parts] == [
        (f"{tmp_path}/a.py:score", "score"),
        (f"{tmp_path}/a.py:score", "again"),
    ]


@pytest.mark.parametrize("own", ["/a.py:score", "package.module:score"])
@pytest.mark.parametrize("order", [1, -1])
def test_a_sum_with_a_users_function_is_known_to_have_one(own: str, order: int) -> None:
    parts = (part("math_verify"), part(own), part("exact_match"))[::order]
    assert RewardSpec(parts, timeout_s=1).has_user_code
    assert not RewardSpec(parts[::2], timeout_s=1).has_user_code


def test_the_answers_column_is_handed_to_functions_by_name() -> None:
    assert RewardSpec.of(configured("data.answer_key=solution")).answer_keys == ("solution",)
    assert RewardSpec.of(configured("data.answer_key=reward_model.ground_truth")).answer_keys == ()
    assert RewardSpec.of(configured("data.answer_key=auto")).answer_keys == ()


def test_a_configuration_with_several_functions_loads_back(tmp_path: Path) -> None:
    config = configured(TWO)
    text = dump(config)
    (tmp_path / "dumped.yaml").write_text(text)
    assert load(tmp_path / "dumped.yaml").config == config
    assert "exact_match" not in text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("reward.functions=[{function: format}, {function: format}]",), "format is the name of more than one"),
        (("reward.functions=[{function: task}]",), "reward.function=task is data.task's verifier"),
        (("reward.functions=[]",), "reward.functions: got [] (on the command line), expected at least 1 value"),
        (("reward.functions=[{weight: 2}]",), "reward.functions[0].function: got nothing"),
        (("reward.functions=[{function: format, wieght: 2}]",), "reward.functions[0].wieght: unknown key"),
        (("reward.functions=[{function: format, weight: .nan}]",), "reward.functions[0].weight: got nan"),
    ],
)
def test_functions_that_contradict_each_other_are_told(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        configured(*overrides)
    assert message in str(error.value)


def test_further_numbers_that_functions_return_or_log_stand_beside_the_parts(mine: str) -> None:
    scores = scorer(part_of(f"{mine}:numbers"))(REQUEST)
    assert scores.rewards.tolist() == [1, 1, 0]
    assert scores.parts == {"numbers": [1, 1, 0], "acc": [1, 1, 0], "words": [None, None, 1]}
    scores = scorer(*(part_of(f"{mine}:{name}") for name in ["rewards", "logs"]))(REQUEST)
    assert scores.rewards.tolist() == [2, 2, 2]
    assert scores.parts["rewards/length"] == [len(text) for text in REQUEST.responses]
    assert scores.parts["logs/share"] == [0.5] * 3
    assert set(scores.parts) == {"rewards", "logs", "rewards/length", "logs/share"}


def test_asynchronous_functions_of_a_sum_keep_their_loop_from_group_to_group(mine: str) -> None:
    score = scorer(part("exact_match"), part(f"{mine}:in_a_loop"), RewardPart(f"{mine}:in_a_loop", "again"))
    assert [score(REQUEST).rewards.tolist() for _ in range(2)] == [[3, 2, 2]] * 2


def test_a_function_with_ever_new_names_makes_no_more_metrics_than_some(mine: str) -> None:
    assert len(scorer(part_of(f"{mine}:many"))(REQUEST).parts) == MOST_NAMES + 1


def test_means_are_over_the_answers_that_a_part_applies_to() -> None:
    assert means_of_parts([{"a": [1.0, None], "b": [None, None]}, {"a": [0.0, 0.5]}]) == {"a": 0.5}
    assert means_of_parts([{"a": [1.0]}]) == {}
