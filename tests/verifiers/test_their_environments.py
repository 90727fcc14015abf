"""Environments of the real `verifiers`, played at a real endpoint by a policy that is written, and one that is trained."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headway.episodes.limits import Limits
from headway.programs.messages import Access
from headway.user_code import load_object
from tests.endpoint.conftest import LIMITS, Agent, Made, calling, made
from tests.episodes.conftest import tokenizer_of

ROOT = Path(__file__).parents[2]
ADAPTER = ROOT / "recipes/agents/verifiers_agent.py"
RENDERER = {"name": "default", "tool_parser": "qwen3"}
LETTERS = {"taskset": {"id": "letters"}}

run = load_object(f"{ADAPTER}:run")
tasks = load_object(f"{ADAPTER}:tasks")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the policy's tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_of("qwen2_5").save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """verifiers finds environments by the name of their module, and leaves what it makes in the home."""
    theirs = str(Path(__file__).parent / "theirs")
    monkeypatch.syspath_prepend(theirs)
    monkeypatch.setenv("PYTHONPATH", theirs)  # for its tool servers, which are processes of their own


def task(env: Mapping[str, Any], number: int = 0) -> dict[str, Any]:
    """One row of ``env``, as it is once it has been in a file."""
    row: dict[str, Any] = json.loads(json.dumps(list(tasks(env))[number]))
    return row


def agent(env: Mapping[str, Any], number: int = 0, **options: Any) -> Agent:
    """An agent that plays a task of ``env``."""

    async def play(access: Access) -> float:
        row, way = task(env, number), (access.base_url, access.api_key, access.model, access.tokenizer)
        reward: float = await run(row, *way, env=env, renderer=RENDERER, **options)
        return reward

    return play


async def test_verifiers_plays_and_scores_its_task_and_what_is_trained_is_the_engines_own_record(tokenizer):
    """What its training client got by the token route: ids, log-probs, versions, and each of them trained once."""
    letters = json.loads(task(LETTERS)["task"])["letters"]
    one = await made(agent(LETTERS), [letters[0], "?", letters[2]], tokenizer=tokenizer)
    assert one.episode.reward == pytest.approx(2 / 3), "the rubric's: two of three letters were repeated"
    one.check(rows=1)
    assert [len(row.turns) for row in one.rows] == [3], "each turn goes on with the ids that were there"


async def test_an_answer_that_verifiers_renders_otherwise_begins_a_fork_and_is_trained_as_it_was_sampled(tokenizer):
    """Its messages are without special tokens, and each turn is rendered from the messages."""
    one = await made(agent(LETTERS), ["the<|im_start|> answer", "12", "12"], tokenizer=tokenizer)
    one.check(rows=2)
    assert [len(row.turns) for row in one.rows] == [1, 2]


async def test_verifiers_sampling_may_shorten_answers(tokenizer):
    one = await made(agent(LETTERS, sampling={"max_tokens": 2}), ["the answer is 12"] * 3, tokenizer=tokenizer)
    one.check(rows=1)
    assert [len(tokens.ids) for _, tokens in one.record] == [2, 2, 2]


async def test_episodes_that_are_played_at_once_have_each_their_own_turns(tokenizer):
    """They share a process, and what verifiers keeps in it."""
    episodes = [made(agent(LETTERS, number), [f"{number}{n}" for n in range(3)], tokenizer=tokenizer) for number in range(6)]
    for number, one in enumerate(await asyncio.gather(*episodes)):
        one.check(rows=1)
        said = tokenizer_of("qwen2_5").decode(one.rows[0].ids[one.rows[0].loss_mask])
        assert said.replace("<|im_end|>", "") == "".join(f"{number}{n}" for n in range(3))
    assert not [name for name in os.environ if name.startswith("HEADWAY_")], "keys are gone with their episodes"


async def test_several_rollouts_of_one_episode_are_all_trained_and_their_rewards_averaged(tokenizer):
    letters = json.loads(task(LETTERS)["task"])["letters"]
    env = {**LETTERS, "id": "best-of-n", "n": 2}
    one = await made(agent(env), [*letters, "x", "x", "x"], tokenizer=tokenizer)
    assert one.episode.reward == pytest.approx(0.5)
    one.check(rows=None)
    assert one.episode.turns == 6


async def test_an_agent_that_is_not_to_be_trained_has_to_ask_another_model(tokenizer):
    one = await made(agent({"taskset": {"id": "judged"}}), ["x"] * 6, tokenizer=tokenizer)
    assert one.episode.failure == "judge: not to be trained, and asks the policy; give it a client of its own"


async def test_what_fails_in_an_environment_fails_the_episode_in_verifiers_own_words(tokenizer):
    env = {"taskset": {"id": "letters", "task": {"rewards": {"broken": {"fn": "failing:broken"}}}}}
    one = await made(agent(env), ["x"] * 3, tokenizer=tokenizer)
    assert one.episode.failure is not None and "ZeroDivisionError: division by zero" in one.episode.failure
    assert one.rows == []


async def test_a_limit_of_the_run_ends_an_episode_of_verifiers_and_what_was_said_is_trained(tokenizer):
    limits = Limits(max_length=4000, max_turns=2, step_timeout_s=20, episode_timeout_s=60)
    one = await made(agent(LETTERS), ["x"] * 3, tokenizer=tokenizer, limits=limits)
    assert (one.episode.limit, one.episode.turns) == ("turns", 2)
