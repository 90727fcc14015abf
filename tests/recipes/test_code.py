"""Functions from an example: the player that warm-up imitates, the rows, their tests."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from headway.agents.rewards.code_reward import code_of
from headway.agents.rewards.code_tests import CallTest, unit_tests_of
from headway.agents.rewards.score_request import ScoreRequest
from headway.agents.rewards.scorers import RewardSpec, Scorer
from headway.config.loading import load
from headway.data.files import Columns, Record, read_records
from headway.runtime.user_code import load_object
from tests.integration.support import ONE_CORE, train

FOLDER = Path(__file__).parents[2] / "recipes" / "agents"
FILE, RECIPE = FOLDER / "expressions.py", FOLDER / "code.yaml"
demonstrate, example, FUNCTIONS = (load_object(f"{FILE}:{name}") for name in ("demonstrate", "example", "FUNCTIONS"))
BEFORE = "f=lambda x,y:"
needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="there is no bwrap here: apt install bubblewrap")


def rows(name: str) -> list[Record]:
    return read_records(str(FOLDER / f"code-{name}.jsonl"), Columns())


def pair(prompt: object) -> tuple[int, ...]:
    return tuple(map(int, str(prompt)[2 : str(prompt).index(")")].split(",")))


@pytest.mark.parametrize("name", ["train", "val"])
def test_only_one_function_fits_an_example_and_only_that_one_passes_both_tests(name: str) -> None:
    counts: Counter[str] = Counter()
    for record in rows(name):
        x, y = pair(record.prompt)
        fitting = [body for body in FUNCTIONS if example(body, (x, y)) == record.prompt]
        tests = unit_tests_of(record.answer, {})
        assert len(tests) == 2
        for test in tests:
            assert isinstance(test, CallTest) and test.function == "f" and tuple(test.given) != (x, y)
            passing = [body for body, function in FUNCTIONS.items() if function(*test.given) == test.expected]
            assert passing == fitting
        counts[fitting[0]] += 1
    assert len(counts) == len(FUNCTIONS) and len(set(counts.values())) == 1


def test_numbers_are_either_trained_on_or_held_out_and_only_the_former_are_demonstrated() -> None:
    rng = random.Random(0)
    train, val = ({pair(record.prompt) for record in rows(name)} for name in ("train", "val"))
    shown = {pair(demonstrate(rng)[0]["content"]) for _ in range(2500)}
    assert train.isdisjoint(val)
    assert shown == train


def test_the_demonstrated_player_writes_its_habit_in_most_answers_and_is_right_in_the_others() -> None:
    rng, habit, right = random.Random(0), 0, 0
    for _ in range(1500):
        asked, answer = demonstrate(rng)
        body = answer["content"].removeprefix(BEFORE)
        fits = example(body, pair(asked["content"])) == asked["content"]
        assert fits or body == "x+y"
        habit += body == "x+y"
        right += fits
    assert habit / 1500 == pytest.approx(0.7 + 0.3 / 6, abs=0.03)
    assert right / 1500 == pytest.approx(0.3 + 0.7 / 6, abs=0.03)


def test_every_answer_and_example_can_be_written_within_the_recipes_lengths() -> None:
    config = load(RECIPE).config
    assert config.model.make is not None
    assert max(len(f"{BEFORE}{body}") for body in FUNCTIONS) < config.data.max_response_length
    for record in [*rows("train"), *rows("val")]:
        assert len(str(record.prompt)) <= config.data.max_prompt_length
        assert set(str(record.prompt)) <= set(config.model.make.vocabulary)
    assert set(f"{BEFORE}{''.join(FUNCTIONS)}") <= set(config.model.make.vocabulary)


@needs_bwrap
def test_the_sandbox_tells_the_right_function_from_the_others() -> None:
    scorer = Scorer(RewardSpec.of(load(RECIPE).config))
    record = rows("val")[0]
    right = next(body for body in FUNCTIONS if example(body, pair(record.prompt)) == record.prompt)
    responses = [f"{BEFORE}{body}" for body in FUNCTIONS] + ["f=lambda x,y:", ""]
    assert [code_of(response) for response in responses] == responses
    request = ScoreRequest("?", responses, record.answer, record.source, record.extra)
    rewards = asyncio.run(scorer.serve(request)).rewards
    assert list(rewards) == [float(body == right) for body in FUNCTIONS] + [0.0, 0.0]


@needs_bwrap
@pytest.mark.timeout(1800)
@pytest.mark.slow
def test_the_model_learns_to_write_the_function_that_fits(tmp_path: Path) -> None:
    """Half of the recipe's run, in one process: minutes of one core, half of them the warm-up."""
    settings = [*ONE_CORE, "model.warmup.max_steps=1000", "rollout.total_rollout_steps=192"]
    result = train(RECIPE, tmp_path / "run", *settings, "rollout.test_freq=-1")
    before, after = result["eval"][0], result["eval"][-1]
    assert (before["version"], after["version"], result["balanced"]) == (0, 3, True)
    assert before["accuracy"] == pytest.approx(1 / 6, abs=0.05)
    assert after["accuracy"] > 0.4
