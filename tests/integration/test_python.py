"""Training from Python, with functions that no file has, in a process of its own each time."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headway
from headway.algorithms.losses import LossInputs, PolicyLossParams, log_ratio
from headway.config.sections.model_section import MakeModelConfig
from headway.errors import ConfigError, NothingToTrain, UserCodeError, UserError
from headway.models.made_model import make_model
from tests.integration.support import events, finish, make_job, run_here, start, wait_for
from tests.integration.test_programs import RECIPE, TEMPLATE

INLINE = {"cluster.backend": "inline", "reports.trackers": []}

Reward = Callable[[str, str], float]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("job"))


def near(scale: float) -> Reward:
    def score(response: str, answer: str) -> float:
        return scale * sum(c in answer for c in response) / (1 + len(response))

    return score


@pytest.mark.slow
def test_a_run_with_a_function_of_the_caller_is_one_that_every_command_goes_on_with(
    recipe: Path, tmp_path: Path
) -> None:
    """Several processes, one after another, that import torch."""
    directory = tmp_path / "run"

    async def in_an_event_loop() -> headway.Run:
        return headway.train(recipe, INLINE, run={"dir": directory}, reward=near(1.0))

    run = asyncio.run(in_an_event_loop())
    assert (run.status, run.path, len(run.rows)) == ("completed", directory, 5)
    assert run.config.reward.function == f"{directory}/code/score.py:score"
    samples = run.samples()
    assert len(samples) == len(list(samples["reward"])) > 0
    assert list(run.samples(validation=True)["problem"])
    found = headway.evaluate(run, n=2, temperature=1.0, limit=3)
    assert (found.figures.problems, len(found.answers)) == (3, 6)
    doubled = headway.evaluate(run, n=2, temperature=1.0, limit=3, reward=near(2.0))
    assert doubled.accuracy == pytest.approx(2 * found.accuracy)

    with pytest.raises(UserError, match="run is complete, at version 4"):
        headway.train(resume=run, reward=near(3.0))
    code = sorted(file.name for file in (directory / "code").iterdir() if file.is_file())  # not its bytecode
    assert code == ["score.pkl", "score.py"]
    assert run.config.reward.function.endswith("/score.py:score")

    done = run_here("train", "--resume", str(directory), "rollout.total_rollout_steps=32")
    assert (done.exit_code, run.summary["version"]) == (0, 8), done.output
    longer = headway.train(resume=run, rollout={"total_rollout_steps": 48}, reward=near(3.0))
    assert longer.config.reward.function.endswith("/code/score_2.py:score_2")
    assert [longer.summary["version"], len(longer.rows)] == [12, 13]


@pytest.mark.slow
def test_what_is_wrong_is_raised_and_leaves_nothing_and_the_next_run_trains(recipe: Path, tmp_path: Path) -> None:
    """Several processes, one after another, that import torch."""
    directory = tmp_path / "run"
    settings = {**INLINE, "run.dir": directory}

    def other(inputs: LossInputs) -> None: ...

    with pytest.raises(UserCodeError, match=r"other: takes \(inputs.*\(inputs, params\)"):
        headway.train(recipe, settings, loss=other)
    with pytest.raises(UserError, match=r"reward\.function: reward needs 'solution', but the rows"):
        headway.train(recipe, settings, reward=lambda response, solution: 1.0)
    with pytest.raises(ConfigError, match=r"run\.name: got"):
        headway.train(recipe, settings, run={"name": other})
    assert not directory.exists()
    with pytest.raises(NothingToTrain):
        headway.train(recipe, settings, reward=lambda response: 1.0, algorithm={"filter_groups": {"enable": True}})
    assert headway.load(directory).status == "failed"
    with pytest.raises(UserError, match="already holds a run"):
        headway.train(recipe, settings)
    again = headway.train(recipe, settings, run={"dir": tmp_path / "again"}, reward=near(1.0))
    assert again.status == "completed"


SCRIPT = """
import headway
def score(response, answer):
    return sum(c in answer for c in response) / (1 + len(response))
run = headway.train("RECIPE", {"run.dir": "RUN", "cluster.backend": "inline", "rollout.total_rollout_steps": 65536,
                    "rollout.test_freq": -1}, reward=score)
print("returned", run.status)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ended", [signal.SIGINT, signal.SIGKILL])
def test_a_run_ends_in_order_with_ctrl_c_and_with_its_caller(
    recipe: Path, tmp_path: Path, ended: signal.Signals
) -> None:
    """Two processes that import torch, and a run that saves."""
    directory = tmp_path / "run"
    script = SCRIPT.replace("RECIPE", str(recipe)).replace("RUN", str(directory))
    caller = start("-c", script)
    wait_for("optimizer.stepped", caller, directory)
    os.kill(caller.pid, ended)
    code, output = finish(caller)
    if ended is signal.SIGINT:
        assert (code, "returned interrupted" in output) == (0, True), output
    assert "stopping after this version" in output, output
    assert headway.load(directory).status == "interrupted"
    assert headway.load(directory).model is not None


@pytest.mark.slow
def test_an_environment_and_a_loss_of_the_caller_reach_the_processes_of_ray(tmp_path: Path) -> None:
    """A run on Ray, whose processes start first."""
    special = ("<|user|>", "<|assistant|>")
    vocabulary = "0123456789abcdefghijklmnopqrstuvwxyz:=,|+-*() \n"
    small = MakeModelConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=16, intermediate_size=64,
        special_tokens=special, chat_template=TEMPLATE, vocabulary=vocabulary,
    )  # fmt: skip
    make_model(small, 0, tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("FOLDER", str(tmp_path)))
    strength = 0.5

    class Count:
        """Environment in the form of Gymnasium: one digit after another."""

        def __init__(self) -> None:
            self.turns = 0

        def reset(self, seed: int | None = None, **row: Any) -> tuple[str, dict[str, Any]]:
            self.turns = 0
            return "go", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            self.turns += 1
            return "on", float(len(set(action))), self.turns >= 2, False, {}

    def pulled(inputs: LossInputs, params: PolicyLossParams) -> tuple[Any, dict[str, Any]]:
        log_u = log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask)
        penalty = strength * log_u.square()
        return penalty - log_u.exp() * inputs.advantages.masked_fill(~inputs.mask, 0.0), {"pull": penalty.detach()}

    run = headway.train(
        tmp_path / "recipe.yaml",
        {"run.dir": tmp_path / "run", "rollout.total_rollout_steps": 16},
        reward="program",
        environment=Count,
        loss=pulled,
    )
    assert run.status == "completed"
    assert all("pull" in step["metrics"] for step in events(run.path, "optimizer.stepped"))
