"""What ``--dry-run`` tries of the user's code: each fault ends it, with file and line and what was expected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from tempfile import gettempdir

import pytest

from tests.cli.test_commands import run
from tests.tiers import mostly_slow

OWN = """
import torch

def loss_raises(inputs, params): return inputs.nothing
def loss_of_another_shape(inputs, params): return inputs.logprobs.sum(), {}
def loss_detached(inputs, params): return -inputs.advantages * inputs.logprobs.detach(), {}
def loss(inputs, params): return -inputs.advantages * inputs.logprobs, {"ones": torch.ones_like(inputs.logprobs)}
def correction_raises(inputs, params): raise ValueError("no weights")
def advantages_raise(inputs): return inputs.rewards / inputs.nothing
def advantages_of_nan(inputs): return inputs.rewards * float("nan")
def advantages_of_one(inputs): return inputs.rewards[:1]
def advantages(inputs): return inputs.rewards - inputs.rewards.mean()
def reward_of_numbers_alone(response, answer): return int(response)
def reward_of_one(response, answer): return 1.0
def reward_of_text(response, answer): return "good"
class Reset:
    def reset(self, seed=None): raise KeyError("board")
    def step(self, action): return "", 0.0, True, False, {}
class Game:
    def reset(self, seed=None): return "9", {}
    def step(self, action): return "", 0.0, True, False, {}
async def program_raises(row, chat): return row["nothing"]
def task_raises(params, seed, problems): raise ValueError("no letters")
async def program_without_a_turn(row, chat): return 1.0
async def agent_without_a_turn(row, base_url, api_key): return 1.0
async def agent(row, base_url, api_key):
    import aiohttp
    asked = {"model": "policy", "messages": [{"role": "user", "content": row["prompt"]}]}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:
        async with client.post(f"{base_url}/chat/completions", json=asked) as answer:
            return float((await answer.json())["choices"][0]["message"]["content"] == row["answer"])
def loss_with_a_reference(inputs, params): return inputs.logprobs - inputs.ref_logprobs, {}
def advantages_with_values(inputs): return inputs.rewards - inputs.values[:, 0]
"""
RECIPE = """
mode: on_policy
model:
  make:
    vocabulary: "0123456789+= \\n"
    special_tokens: [<user>, <assistant>]
    chat_template: "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}
      {%- if add_generation_prompt %}<assistant>{% endif %}"
data: {train: data.jsonl, val_size: 1, max_prompt_length: 40, max_response_length: 16}
rollout: {n: 2, total_rollout_steps: 8}
actor: {ppo_mini_batch_size: 4}
cluster: {backend: inline, device: cpu}
reward: {function: exact_match}
"""
LOSS, ESTIMATOR = "algorithm.policy_loss.loss_mode=own.py:", "algorithm.adv_estimator=own.py:"
FAULTS = {
    "a loss that raises": (f"{LOSS}loss_raises", "raised AttributeError: .* (own.py:4, in loss_raises); expected the"),
    "a loss of another shape": (
        f"{LOSS}loss_of_another_shape",
        "returned (Tensor [], dict); expected the loss of each",
    ),
    "a loss without a gradient": (f"{LOSS}loss_detached", "its loss has no gradient with respect to inputs.logprobs"),
    "a loss with a reference that the run has not": (
        f"{LOSS}loss_with_a_reference",
        "raised TypeError: .* in loss_with_a_reference); expected the loss of each token",
    ),
    "advantages with values that the run has not": (
        f"{ESTIMATOR}advantages_with_values",
        "raised TypeError: .* in advantages_with_values); expected a tensor",
    ),
    "a correction that raises": (
        "algorithm.rollout_correction.name=own.py:correction_raises async_training.use_rollout_log_probs=false",
        "raised ValueError: no weights (own.py:8, in correction_raises); expected the weight of each token",
    ),
    "advantages that raise": (f"{ESTIMATOR}advantages_raise", "(own.py:9, in advantages_raise); expected a tensor"),
    "advantages of another length": (f"{ESTIMATOR}advantages_of_one", "returned Tensor [1]; expected a tensor"),
    "advantages that are no numbers": (f"{ESTIMATOR}advantages_of_nan", "advantages of trajectory .* are not finite"),
    "a reward that an empty answer breaks": (
        "reward.function=own.py:reward_of_numbers_alone",
        "(own.py:13, in reward_of_numbers_alone); expected a number for each answer, also for an empty one",
    ),
    "a reward that is text": ("reward.function=own.py:reward_of_text", "returned 'good' for response 0"),
    "an environment that raises": (
        "agent.environment=own.py:Reset",
        "KeyError: 'board' (own.py:17, in reset)",
    ),
    "a program that raises": ("agent.program=own.py:program_raises", "(own.py:22, in program_raises)"),
    "a program without a turn": (
        "agent.program=own.py:program_without_a_turn",
        "(data.jsonl, line .*): the program made no turn: it ended without an answer",
    ),
    "an agent without a turn": (
        "agent.client=own.py:agent_without_a_turn",
        "(data.jsonl, line .*): the agent made no turn: it ended without an answer",
    ),
}
QUICK = [
    "a loss that raises",
    "a loss with a reference that the run has not",
    "advantages that are no numbers",
    "a reward that an empty answer breaks",
]


@pytest.fixture
def dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)

    def typed(*overrides: str, how: str = "--dry-run") -> str:
        done = run("train", "recipe.yaml", *overrides, how)
        return f"{done.exit_code}\n{done.stdout}{done.stderr}"

    return typed


@mostly_slow("fault", FAULTS, quick=QUICK)
def test_a_fault_in_the_users_code_ends_it_with_file_and_line(dry_run: Callable[..., str], fault: str) -> None:
    """Up to 3 s, for a program: two processes, one after the other, import own.py and torch with it, a second each;
    its chat template needs transformers in this process, 0.7 s without torch.
    """
    settings, told = FAULTS[fault]
    output = dry_run(*settings.split())
    assert output.startswith(("2\n", "1\n"))
    first, _, second = told.partition(".*")
    error, *notes = output[output.index("error: ") :].splitlines()
    assert first in error and second in error
    assert "Traceback" not in output
    for note in notes:
        logs = Path(note.removeprefix("Its traceback, and what user code printed, are in "))
        assert any("own.py" in file.read_text() for file in logs.iterdir())
        rmtree(logs)
    if not notes:
        assert not list(Path(gettempdir()).glob("headway-dry-run-*")), "nothing was printed: nothing is left"
    assert dry_run(*settings.split(), how="--dry-run=static").startswith("0\n"), "it runs no user code"


def test_what_was_tried_is_told_and_what_was_not(dry_run: Callable[..., str]) -> None:
    output = dry_run(f"{LOSS}loss", f"{ESTIMATOR}advantages")
    assert "tried: the reward exact_match gives 1 for ground truths and 0 for empty answers (3 rows)" in output
    assert "tried: own.py:loss, own.py:advantages, forward and backward" in output
    assert "not tried: weights, devices" in output


def test_a_loss_is_tried_with_the_reference_that_the_run_has(dry_run: Callable[..., str]) -> None:
    output = dry_run(f"{LOSS}loss_with_a_reference", "actor.use_kl_loss=true")
    assert "tried: own.py:loss_with_a_reference, forward and backward" in output


def test_of_a_task_the_tried_problems_alone_are_made(dry_run: Callable[..., str]) -> None:
    """The dry run made all problems of the task once, which took minutes for a large one."""
    task = "task: {name: sort, size: 1000000000, val_size: 1, params: {max_length: 4, mean_length: 3.5}}"
    Path("recipe.yaml").write_text(RECIPE.replace("train: data.jsonl, val_size: 1", task))
    assert "(4 rows)" in dry_run("model.make.vocabulary='0123456789:=sort'")


@pytest.mark.slow
def test_a_reward_that_gives_everything_the_same_is_noted(dry_run: Callable[..., str]) -> None:
    assert "It does not tell them apart" in dry_run("reward.function=own.py:reward_of_one")


def test_a_task_of_the_users_is_not_run_by_a_static_dry_run(dry_run: Callable[..., str]) -> None:
    Path("recipe.yaml").write_text(RECIPE.replace("train: data.jsonl, val_size: 1", "task: {name: own.py:task_raises}"))
    assert "ValueError: no letters (own.py:" in dry_run()
    output = dry_run(how="--dry-run=static")
    assert output.startswith("0\n") and "not checked: data and reward, for own.py:task_raises makes" in output


@pytest.mark.slow
@pytest.mark.parametrize("given", ["environment=own.py:Game", "agent=own.py:agent"])
def test_the_first_turn_of_an_environment_or_an_agent_is_rendered(dry_run: Callable[..., str], given: str) -> None:
    """Starts a process, which loads the program."""
    output = dry_run(f"rollout.{given}")
    assert f"{given.replace('=', ' ')} begins an episode, and its first turn has " in output
    assert "step() and tools, was not tried" in output
