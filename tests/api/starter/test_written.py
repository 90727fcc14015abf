"""What ``headway init`` writes for models of many architectures and data of many kinds passes a dry run, and runs."""

from __future__ import annotations

import subprocess
import sys
from itertools import cycle, islice
from pathlib import Path

import pytest
import yaml

from headway.api.checks.preflight import check_inputs, check_model
from headway.config.loading import load
from headway.models.model_folder import read_object
from tests.api.starter.examples import CONFIGS, DATA, make_model
from tests.cli.test_commands import run
from tests.tiers import mostly_slow

PAIRS = [
    (architecture, kind) for start, architecture in enumerate(CONFIGS) for kind in islice(cycle(DATA), start, start + 2)
]
"""Each architecture with two kinds of data, each kind with four architectures."""
MOST_LINES = 60


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")


def written(architecture: str, kind: str, *settings: str) -> Path:
    """Write a recipe by the command for a model and data of these kinds, both in the current folder."""
    make, chats, _ = DATA[kind]
    make_model(architecture, Path("model"), chats=chats)
    result = run("init", "model", make(Path("data.d").absolute().parent), "-o", "recipe.yaml", "--gpus", "0", *settings)
    assert result.exit_code == 0, result.output
    assert max(len(line) for line in result.output.splitlines()) <= 80 + len(str(Path.cwd()))
    return Path("recipe.yaml")


@mostly_slow(("architecture", "kind"), PAIRS, quick=[("llama", "sums"), ("gpt2", "saved")])
def test_a_recipe_is_short_and_passes_a_dry_run(architecture: str, kind: str) -> None:
    """Unit tests are tried in a sandbox, which takes seconds to start where other tests run beside this one."""
    recipe = written(architecture, kind)
    text = recipe.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    assert yaml.safe_load(text)["reward"]["function"] == DATA[kind][2]
    dry = run("train", str(recipe), "--dry-run")
    assert dry.exit_code == 0, dry.output
    config = load(recipe).config
    assert check_model(config, check_inputs(config)) is not None, "nor does what a run checks beyond that refuse it"


@pytest.mark.slow
def test_the_command_by_itself_builds_a_model_of_a_family_that_only_transformers_knows() -> None:
    """Loads torch in a process of its own, which here has it already."""
    make_model("qwen3-moe", Path("model"), chats=False)
    command = [sys.executable, "-m", "headway", "init", "model", "sort", "--gpus", "0", "-o", "recipe.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


RUNS = [("llama", "sums"), ("gemma2", "quiz"), ("qwen3-moe", "task"), ("gpt-neox", "saved")]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "kind"), RUNS)
def test_a_recipe_runs(architecture: str, kind: str) -> None:
    """It takes long for the two versions that are trained, by model code that is compiled by nobody."""
    recipe = written(architecture, kind, "rollout.n=2", "actor.ppo_mini_batch_size=2")
    result = run("train", str(recipe), "cluster.backend=inline", "rollout.total_rollout_steps=16", "run.dir=run")
    assert result.exit_code == 0, result.output
    assert read_object(Path("run/summary.json"))["version"] == 2


def test_settings_are_taken_and_the_others_follow_from_them() -> None:
    recipe = written("llama", "sums", "data.max_response_length=32", "rollout.n=4", "actor.grad_clip=0.5")
    text = recipe.read_text(encoding="utf-8")
    assert "max_response_length: 32         # as given" in text
    assert "groups of an optimizer step: 52 answers" in text, "4 to each of 13 prompts"
    actor = yaml.safe_load(text)["actor"]
    assert (actor["ppo_mini_batch_size"], actor["grad_clip"]) == (13, 0.5)
