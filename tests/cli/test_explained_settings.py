"""Commands that tell what there is: headway config, headway recipes, and completion in the shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli import cli
from headway.cli.common import complete_config, complete_key, complete_setting
from headway.config.recipes import home, recipes
from headway.config.schema_keys import tables
from headway.errors import ConfigError


def said(*arguments: str) -> str:
    outcome = CliRunner().invoke(cli, list(arguments), env={"COLUMNS": "80"})
    assert outcome.exit_code == 0, outcome.output
    assert max(len(line) for line in outcome.stdout.splitlines() if str(home()) not in line) <= 80
    return outcome.stdout


def test_config_lists_all_sections() -> None:
    shown = said("config")
    assert all(part.name in shown for part in tables() if "." not in part.name)


def test_config_lists_the_keys_of_each_section() -> None:
    shown = said("config", "rollout")
    assert "total_rollout_steps" in shown
    assert "actor.optim" in said("config", "actor").rpartition("Sections in it:")[2]
    assert "with loss_mode: dual_clip" in said("config", "algorithm.policy_loss")
    nullable = said("config", "model.warmup")
    assert "section or null" in nullable
    assert "eval_every" in nullable


@pytest.mark.parametrize("key", ["async_training.window", "actor_rollout_ref.async_training.window"])
def test_config_tells_all_about_a_key(key: str) -> None:
    shown = " ".join(said("config", key).split())
    assert "value integer > 0 or B or null default null" in shown
    assert "B async_stale, async_partial, overlapped, colocate_async" in shown  # modes that set it
    assert "See also: run.dir" in said("config", "run.storage")


def test_config_explains_a_key_of_a_list() -> None:
    assert "data.train.weight" in said("config", "data.train[0].weight")


def test_an_unknown_key_gets_suggestions() -> None:
    outcome = CliRunner().invoke(cli, ["config", "rollout.temprature"])
    assert outcome.exit_code == ConfigError.exit_code
    assert outcome.stderr == "error: rollout.temprature: unknown key; did you mean rollout.temperature?\n"


def test_a_key_that_is_gone_is_answered_with_what_holds() -> None:
    outcome = CliRunner().invoke(cli, ["config", "reports.run_name"])
    assert outcome.exit_code == ConfigError.exit_code
    assert outcome.stderr.startswith("error: reports.run_name is no setting any more: trackers call the run as its")


def test_recipes_are_listed_with_what_they_are_about() -> None:
    shown = said("recipes")
    assert all(name in shown for name in recipes())
    assert "those of plan/ are profiles: headway plan NAME" in shown
    trained = CliRunner().invoke(cli, ["train", "plan/long-tail", "--dry-run"])
    assert trained.exit_code == ConfigError.exit_code
    assert trained.stderr == (
        "error: plan/long-tail is a profile, which says what a job costs, and no recipe; give it to headway plan "
        "plan/long-tail\n"
    )
    assert CliRunner().invoke(cli, ["recipes", "demo"]).stdout == recipes()["demo"].read_text()


def test_a_recipe_that_is_not_there_gets_one_that_is() -> None:
    outcome = CliRunner().invoke(cli, ["recipes", "gsm8k"])
    assert outcome.exit_code == ConfigError.exit_code
    assert "gsm8k: there is no such recipe; headway recipes lists all, such as gsm8k-grpo" in outcome.stderr


def test_a_file_of_the_users_is_no_recipe_that_comes_with_headway(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mode: on_policy\n")
    outcome = CliRunner().invoke(cli, ["recipes", str(file)])
    assert outcome.exit_code == ConfigError.exit_code
    assert "mine.yaml: there is no such recipe" in outcome.stderr


def test_demo_is_the_recipe_wherever_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(cli, ["demo", "run.seed=7", "--dry-run"])
    assert shown.exit_code == 0, shown.output
    assert "name: demo" in shown.stdout
    assert "seed: 7" in shown.stdout


def test_names_files_and_settings_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine.yaml", "notes.txt"):
        Path(name).touch()
    Path("more").mkdir()
    assert list(complete_config("de")) == ["demo"]
    assert list(complete_config("m")) == ["mine.yaml", "more/"]
    assert list(complete_config("nowhere/m")) == []
    assert list(complete_config("./m")) == ["./mine.yaml", "./more/"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(complete_config("~/mi")) == ["~/mine.yaml"]
    assert list(complete_setting("agent.train_on_limit")) == ["agent.train_on_limit="], "two words for a shell"
    assert list(complete_setting("rollout.n")) == [
        "rollout.name=native",
        "rollout.n=8",
        "rollout.nnodes=1",
        "rollout.n_gpus_per_node=1",
    ]
    assert list(complete_setting("model.path")) == ["model.path="]
    assert list(complete_key("param_update.s")) == ["param_update.schedule"]


@pytest.mark.parametrize(
    ("shell", "environment", "expected"),
    [
        ("bash", {"COMP_WORDS": "headway de", "COMP_CWORD": "1"}, "demo"),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "headway train algorithms/gs"}, "algorithms/gspo"),
        pytest.param(
            "fish",
            {"_TYPER_COMPLETE_ARGS": "headway train demo cluster.b", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
            "cluster.backend=ray",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "bash",
            {"COMP_WORDS": "headway init m d.jsonl agent.tr", "COMP_CWORD": "4"},
            "agent.train_on_limit=",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_each_shell_is_answered(shell: str, environment: dict[str, str], expected: str) -> None:
    asked = os.environ | environment | {"_HEADWAY_COMPLETE": f"complete_{shell}"}
    command = [sys.executable, "-c", "import sys; sys.argv = ['headway']; import headway.cli; headway.cli.main()"]
    answer = subprocess.run(command, env=asked, capture_output=True, text=True, timeout=240, check=False)
    assert expected in answer.stdout, answer.stderr
