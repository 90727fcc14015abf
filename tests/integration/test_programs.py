"""Whole runs whose episodes a program makes, as a user starts them."""

import contextlib
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from headway.config.sections.model_section import MakeModelConfig
from headway.models.made_model import make_model
from headway.reports.samples.samples_file import read_samples
from tests.integration.support import events, finish, start, summary, train, wait_for
from tests.tiers import mostly_slow

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROGRAMS = """
import asyncio

class Count:
    '''Text in Gymnasium's form: three steps, a reward for each 1 that was said.'''
    def reset(self, seed=None):
        self.steps = 0
        return "begin", {}

    def step(self, action):
        self.steps += 1
        return "on", float("1" in action), self.steps == 3, False, {}

async def talk(row, chat):
    messages, score = list(row["messages"]), 0.0
    for _ in range(3):
        answer = await chat.turn(messages)
        await asyncio.sleep(0.01)
        score += "1" in answer.text
        messages += [answer.message, {"role": "user", "content": "on"}]
    return score

async def asks(row, base_url, api_key):
    import aiohttp

    messages, score = list(row["messages"]), 0.0
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as session:
        for _ in range(3):
            async with session.post(f"{base_url}/chat/completions", json={"messages": messages}) as response:
                answer = (await response.json())["choices"][0]["message"]
            score += "1" in answer["content"]
            messages += [answer, {"role": "user", "content": "on"}]
    return score

def blocks(row, base_url, api_key):
    import json, urllib.request

    messages, score = list(row["messages"]), 0.0
    for _ in range(3):
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        body = json.dumps({"messages": messages}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as response:
            answer = json.load(response)["choices"][0]["message"]
        score += "1" in answer["content"]
        messages += [answer, {"role": "user", "content": "on"}]
    return score

class Loop:
    def __init__(self, server_manager, tokenizer, **kwargs):
        self.server_manager, self.tokenizer = server_manager, tokenizer

    async def run(self, sampling_params, **row):
        ids = self.tokenizer.apply_chat_template(row["raw_prompt"], add_generation_prompt=True, return_dict=False)
        said, mask, on = [], [], self.tokenizer.encode("on", add_special_tokens=False)
        for _ in range(3):
            turn = await self.server_manager.generate("0", prompt_ids=ids + said, sampling_params=sampling_params)
            said += [*turn.token_ids, *on]
            mask += [1] * len(turn.token_ids) + [0] * len(on)
        return {"prompt_ids": ids, "response_ids": said, "response_mask": mask, "reward_score": float(len(set(said)))}

async def some_fail(row, chat):
    if chat.seed % 4 == 0:
        raise RuntimeError("the sandbox has burnt down")
    return await talk(row, chat)
"""
RECIPE = """
mode: async_partial
model: {path: FOLDER/model}
data:
  task: {name: sort, size: 256, val_size: 8, params: {mean_length: 3, max_length: 6}}
  max_prompt_length: 24
  max_response_length: 64
rollout: {n: 4, total_rollout_steps: 32, max_concurrent: 16, threads: 1}
agent: {max_turn_tokens: 8}
actor: {ppo_mini_batch_size: 4, ppo_max_token_len_per_gpu: 512, optim: {lr: 1.0e-3}}
trainer: {threads: 1, save_freq: -1}
"""


ALTERNATING = ["assistant", "user", "assistant", "user", "assistant"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    model = MakeModelConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
        intermediate_size=64,
        special_tokens=("<|user|>", "<|assistant|>"),
        chat_template=TEMPLATE,
        vocabulary="0123456789abcdefghijklmnopqrstuvwxyz:=,|+-*() \n",
    )
    make_model(model, 0, folder / "model")
    (folder / "programs.py").write_text(PROGRAMS)
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.replace("FOLDER", str(folder)))
    return path


def program(recipe: Path, name: str) -> str:
    key = {"Count": "environment", "asks": "agent", "blocks": "agent"}.get(name, "program")
    return f"rollout.{key}={recipe.parent}/programs.py:{name}"


def episodes(run: Path) -> list[dict[str, Any]]:
    return events(run, "trajectory.finished")


@mostly_slow("name", ["Count", "talk", "asks", "blocks", "Loop"], quick=["asks"])
def test_an_agent_trains_in_a_run_like_any_other(recipe: Path, tmp_path: Path, name: str) -> None:
    """Takes a while: processes are started for the program, once to look at it and once for the run."""
    result = train(recipe, tmp_path / "run", program(recipe, name), "cluster.backend=inline")
    assert (result["groups"]["trained"], result["balanced"]) == (32, True)
    assert {episode["turns"] for episode in episodes(tmp_path / "run")} == {3}
    shown = list(read_samples(tmp_path / "run" / "samples.jsonl", what="group"))
    told = [episode["conversation"] for group in shown for episode in group["episodes"]]
    if name == "Loop":  # it works on token ids, without messages
        assert set(map(type, told)) == {type(None)}
    else:
        assert told and all([message["role"] for message in one["completion"]] == ALTERNATING for one in told)
    rows = [row for group in shown for episode in group["episodes"] for row in episode["rows"]]
    assert any(0 in row["mask"] for row in rows)
    for row in rows:
        assert [version < 0 for version in row["versions"]] == [not counts for counts in row["mask"]]
    assert not psutil.Process().children(recursive=True) or all(
        "headway.runtime.workers" not in " ".join(child.cmdline())
        for child in psutil.Process().children(recursive=True)
    )


@pytest.mark.slow
def test_a_group_goes_on_with_the_episodes_that_did_not_fail(recipe: Path, tmp_path: Path) -> None:
    """Takes a while: processes are started for the program, once to look at it and once for the run."""
    result = train(recipe, tmp_path / "run", program(recipe, "some_fail"), "cluster.backend=inline")
    assert (result["groups"]["trained"], result["balanced"]) == (32, True)
    failures = {episode["failure"] for episode in episodes(tmp_path / "run")}
    said = {failure and failure.partition(" (programs.py:")[0] for failure in failures}
    assert said == {None, "program programs.py:some_fail raised RuntimeError: the sandbox has burnt down"}


@pytest.mark.slow
def test_on_policy_episodes_are_the_same_in_every_run(recipe: Path, tmp_path: Path) -> None:
    """Two runs, each of which starts processes for the program."""

    def steps(name: str) -> list[tuple[Any, Any]]:
        settings = ["mode=on_policy", "cluster.backend=inline", "rollout.total_rollout_steps=8"]
        train(recipe, tmp_path / name, program(recipe, "talk"), *settings)
        return [
            (step["metrics"]["loss"], step["metrics"]["grad_norm"])
            for step in events(tmp_path / name, "optimizer.stepped")
        ]

    assert steps("one") == steps("other")


@pytest.mark.slow
def test_runners_that_are_killed_cost_no_episode(recipe: Path, tmp_path: Path) -> None:
    """Starts a Ray of its own, and a runner takes a second to start again after each kill."""
    run = tmp_path / "run"
    settings = ["rollout.total_rollout_steps=400", "rollout.test_freq=-1", f"run.dir={run}"]
    process = start("-m", "headway", "train", str(recipe), program(recipe, "talk"), *settings)
    wait_for("trajectory.finished", process, run, times=50)
    for kills in range(12):
        if kills >= 3 and any(episode["metrics"]["tries"] > 1 for episode in episodes(run)):
            break  # a program was under way when its runner was killed
        settled = len(events(run, "group.settled"))
        for pid in runners_of(process.pid):
            os.kill(pid, signal.SIGKILL)
        wait_for("group.settled", process, run, times=settled + 16)
    code, output = finish(process)
    assert code == 0, output
    result = summary(run)
    assert (result["groups"]["trained"], result["groups"]["failed"], result["balanced"]) == (400, 0, True)
    assert max(episode["metrics"]["tries"] for episode in episodes(run)) > 1


def runners_of(parent: int) -> list[int]:
    """The processes that run programs: between a kill and its new start there is none for a moment."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        children = psutil.Process(parent).children(recursive=True)
        with contextlib.suppress(psutil.NoSuchProcess):
            if found := [one.pid for one in children if "headway.runtime.workers" in " ".join(one.cmdline())]:
                return found
        time.sleep(0.1)
    raise AssertionError("no process that runs programs within 60 s")


@pytest.mark.slow
def test_a_run_by_gigpo_compares_the_turns_that_were_told_the_same(recipe: Path, tmp_path: Path) -> None:
    """Takes a while: processes are started for the program, once to look at it and once for the run.

    All but an episode's first turn are told ``on``: they are one state of their group.
    """
    settings = ["algorithm.adv_estimator=gigpo", "algorithm.turn_discount=0.5", "algorithm.step_weight=2"]
    train(recipe, tmp_path / "run", program(recipe, "Count"), "cluster.backend=inline", "mode=on_policy", *settings)
    checked = 0
    for group in read_samples(tmp_path / "run" / "samples.jsonl", what="group"):
        given = [episode["turn_rewards"] for episode in group["episodes"]]
        ahead = [[rewards[0] + 0.5 * (rewards[1] + 0.5 * rewards[2])] for rewards in given]
        for returns, rewards in zip(ahead, given, strict=True):
            returns += [rewards[1] + 0.5 * rewards[2], rewards[2]]
        firsts, laters = [one[0] for one in ahead], [number for one in ahead for number in one[1:]]
        for k, episode in enumerate(group["episodes"]):
            of_episode = above_mean(sum(given[k]), [sum(rewards) for rewards in given])
            of_turns = [above_mean(number, laters if turn else firsts) for turn, number in enumerate(ahead[k])]
            expected = [of_episode + 2 * of_turn for of_turn in of_turns]
            (row,) = episode["rows"]
            found = [a for a, counts in zip(row["columns"]["advantages"], row["mask"], strict=True) if counts]
            turns = [one for n, one in enumerate(found) if n == 0 or one != found[n - 1]]
            distinct = [one for n, one in enumerate(expected) if n == 0 or abs(one - expected[n - 1]) > 1e-9]
            assert turns == pytest.approx(distinct, rel=1e-3, abs=1e-3)
            checked += len(distinct) > 1
    assert checked


def above_mean(one: float, numbers: list[float]) -> float:
    if len(set(numbers)) == 1:
        return 0.0
    return (one - statistics.fmean(numbers)) / (statistics.stdev(numbers) + 1e-6)
