"""Environments of the real `verifiers`, at a real endpoint: of a policy that is written, and of a run."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headway.agents.adapters.program_loader import ProgramSpec
from headway.agents.episodes.episode_limits import EpisodeLimits
from headway.agents.interface.program_messages import Access, EpisodeStart, TurnAnswer, TurnRequest
from headway.reports.samples.samples_file import read_samples
from headway.runtime.user_code import load_object
from tests.agents.endpoint.scripted import calling, made
from tests.agents.endpoint.served import Agent
from tests.agents.episodes.conftest import tokenizer_of
from tests.integration.support import train

ROOT = Path(__file__).parents[3]
ADAPTER = ROOT / "recipes/agents/verifiers_agent.py"
RENDERER = {"name": "default", "tool_parser": "qwen3"}
LETTERS = {"taskset": {"id": "letters"}}

tasks = load_object(f"{ADAPTER}:tasks")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the policy's tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_of("qwen2_5").save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """verifiers finds environments by the name of their module."""
    theirs = str(Path(__file__).parent / "theirs")
    monkeypatch.syspath_prepend(theirs)
    monkeypatch.setenv("PYTHONPATH", theirs)  # for its tool servers, which are processes of their own


def task(env: Mapping[str, Any], number: int = 0) -> dict[str, Any]:
    """One row of ``env``, as it is once it has been in a file."""
    row: dict[str, Any] = json.loads(json.dumps(list(tasks(env))[number]))
    return row


def agent(env: Mapping[str, Any], number: int = 0, **params: Any) -> Agent:
    """An agent that plays a task of ``env``, in the way of a run."""
    row = task(env, number)
    loaded = ProgramSpec(agent=f"{ADAPTER}:run", params={"env": env, "renderer": RENDERER, **params}).load()

    async def play(access: Access) -> float | None:
        ended = await loaded.serve(EpisodeStart("episode", row["prompt"], row, 7, access), unasked)
        return ended.reward

    return play


async def unasked(request: TurnRequest) -> TurnAnswer:
    """What an agent asks for comes over HTTP."""
    raise AssertionError(f"a turn was asked for past the endpoint: {request}")


async def test_verifiers_plays_and_scores_its_task_and_what_is_trained_is_the_engines_own_record(tokenizer):
    """Ids, log-probs and versions of what its client got, each of them once."""
    letters = json.loads(task(LETTERS)["task"])["following"]
    one = await made(agent(LETTERS), [letters[0], "?", letters[2]], tokenizer=tokenizer)
    assert one.returned == [pytest.approx(2 / 3)], "the rubric's: two of three answers were right"
    one.check(rows=1)
    assert [len(row.turns) for row in one.rows] == [3], "each turn goes on with the ids that were there"


async def test_an_answer_that_verifiers_renders_otherwise_begins_a_fork_and_is_trained_as_it_was_sampled(tokenizer):
    """Its messages are without the thinking, and each turn is rendered from the messages."""
    one = await made(agent(LETTERS), ["<think>a number</think>the answer", "12", "12"], tokenizer=tokenizer)
    one.check(rows=2)
    assert [len(row.turns) for row in one.rows] == [1, 2]


async def test_verifiers_sampling_may_shorten_answers(tokenizer):
    one = await made(agent(LETTERS, sampling={"max_tokens": 2}), ["the answer is 12"] * 3, tokenizer=tokenizer)
    one.check(rows=1)
    assert [len(tokens.ids) for _, tokens in one.record] == [2, 2, 2]


async def test_episodes_that_are_played_at_once_have_each_their_own_turns(tokenizer):
    """They share a process, and what verifiers keeps in it."""
    before = set(os.environ)
    said = {number: [f"{number}{n}" for n in range(3)] for number in range(6)}
    episodes = [made(agent(LETTERS, number), turns, tokenizer=tokenizer) for number, turns in said.items()]
    for number, one in enumerate(await asyncio.gather(*episodes)):
        one.check(rows=1)
        trained = tokenizer_of("qwen2_5").decode(one.rows[0].ids[one.rows[0].loss_mask])
        assert trained.replace("<|im_end|>", "") == "".join(said[number])
    assert not {name for name in set(os.environ) - before if name.startswith("HEADWAY_")}, (
        "keys are gone with their episodes"
    )


async def test_several_rollouts_of_one_episode_are_all_trained_and_their_rewards_averaged(tokenizer):
    letters = json.loads(task(LETTERS)["task"])["following"]
    env = {**LETTERS, "id": "best-of-n", "n": 2}
    one = await made(agent(env), [*letters, "x", "x", "x"], tokenizer=tokenizer)
    assert one.returned == [pytest.approx(0.5)]
    one.check(rows=None)
    assert one.episode.turns == 6


async def test_an_agent_that_is_not_to_be_trained_has_to_ask_another_model(tokenizer):
    one = await made(agent({"taskset": {"id": "judged"}}), ["x"] * 6, tokenizer=tokenizer)
    told = "RuntimeError: judge: not to be trained, and asks the policy; give it a client of its own"
    assert one.episode.failure is not None and told in one.episode.failure


async def test_what_fails_in_an_environment_fails_the_episode_in_verifiers_own_words(tokenizer):
    env = {"taskset": {"id": "letters", "task": {"rewards": {"broken": {"fn": "failing:broken"}}}}}
    one = await made(agent(env), ["x"] * 3, tokenizer=tokenizer)
    assert one.episode.failure is not None and "ZeroDivisionError: division by zero" in one.episode.failure
    assert one.rows == []


async def test_the_packages_own_chat_program_calls_tools_over_mcp(tokenizer):
    """It takes long: uv makes an environment for verifiers' harness, and that and the tools' server are processes."""
    env = {"taskset": {"id": "sums"}, "agent": {"harness": {"id": "null"}}}
    limits = EpisodeLimits(max_length=4000, max_turns=20, step_timeout_s=90, episode_timeout_s=180)
    said = [calling(12, 34).replace("add", "calculator_add"), "it is 46"]
    one = await made(agent(env), said, tokenizer=tokenizer, limits=limits)
    one.check(rows=None)
    assert (one.returned, one.episode.turns) == ([1.0], 2)
    second = tokenizer_of("qwen2_5").decode(one.record[1][0].input_ids)
    assert "<tool_response>" in second and "46" in second, "the tool has added them"


async def test_a_limit_of_the_run_ends_an_episode_of_verifiers_and_what_was_said_is_trained(tokenizer):
    limits = EpisodeLimits(max_length=4000, max_turns=2, step_timeout_s=20, episode_timeout_s=60)
    one = await made(agent(LETTERS), ["x"] * 3, tokenizer=tokenizer, limits=limits)
    assert (one.episode.limit, one.episode.turns) == ("turns", 2)


def test_a_run_trains_in_an_environment_of_verifiers(tmp_path, monkeypatch):
    """Takes a minute: two runners import verifiers and transformers, at the run's start and once before it.

    What was trained gives the reward that verifiers gave: a third for each letter that follows the one before it.
    """
    monkeypatch.chdir(ROOT)
    settings = ["cluster.backend=inline", "rollout.total_rollout_steps=32", "actor.ppo_mini_batch_size=4"]
    result = train(ROOT / "recipes/agents/verifiers.yaml", tmp_path / "run", *settings, "rollout.test_freq=-1")
    assert (result["groups"]["trained"], result["balanced"]) == (32, True)
    alphabet, seen = "ABCDEFGH", set()
    for group in read_samples(tmp_path / "run" / "samples.jsonl", what="group"):
        for episode in (one for one in group["episodes"] if one["failure"] is None):
            right = 0
            for row in episode["rows"]:
                said = [(row["context"] or group["prompt"])[-1], *row["pieces"]]
                trained = [n for n, counts in enumerate(row["mask"]) if counts]
                right += sum(said[n + 1] == alphabet[(alphabet.index(said[n]) + 1) % 8] for n in trained)
            assert episode["reward"] == pytest.approx(right / 3, abs=1e-4)
            seen.add(right)
    assert len(seen) > 1, "some letters were right, and others were not"
